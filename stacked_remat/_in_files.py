"""Frozen arrays that are in files, from which a program reads them while it runs.

It reads one again wherever its backward pass recomputes what used it. An `ArrayInFiles`
stands in the place of an array of a model. Of an array of stacked layers it has the
layers' numbers, which a loop over layers slices as it slices other arrays; so a layer
knows which entry it is to read, under every policy.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeAlias, TypeGuard, TypeVar

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from haliax.axis import axis_spec_to_tuple
from haliax.quantization import DefaultDotGeneralOp
from jax import lax
from jax.core import ShapedArray
from jax.custom_derivatives import linear_call
from jax.interpreters import ad, batching
from jaxtyping import Array, DTypeLike, Float, Int

from ._messages import axes_text
from ._python_calls import Caller, python_call
from ._static import PyTree, is_array, is_named, raw_array, with_axes

T = TypeVar("T")

# The number of an entry to the entry: a view of a mapped file, or an array that was
# read.
ReadEntry: TypeAlias = Callable[[int], np.ndarray]

_ROWS_AT_ONCE = 2
"""With a row of a mapped file Linux may map 2 MiB around it."""
_MOST_IN_BLOCK = 2**20
"""Elements of a weight that a product reads at once, 4 MiB in float32."""


class ArrayInFiles(eqx.Module):
    """An array in files, which is constant: it has no gradient.

    Attributes:
        numbers: int32, with the axes of the stacks; the numbers of entries.
        entry: the shape and dtype of an entry.
        entry_axes: its axes; None for an array without names.
        read: an entry by its number. Called while programs run, by their threads.
    """

    keeps_dtype: ClassVar[bool] = True  # numbers are not cast with a model

    numbers: NamedArray | Int[Array, "..."]
    entry: jax.ShapeDtypeStruct = eqx.field(static=True)
    entry_axes: tuple[Axis, ...] | None = eqx.field(static=True)
    read: ReadEntry = eqx.field(static=True)

    @property
    def dtype(self) -> Any:
        """The dtype of the array."""
        return self.entry.dtype

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of a named array, those of stacks in front."""
        assert isinstance(self.numbers, NamedArray) and self.entry_axes is not None
        return (*self.numbers.axes, *self.entry_axes)

    def cast_to(self, dtype: DTypeLike, *, after: Array | None = None) -> Any:
        """The array in this dtype, read when the program gets there, and when the
        elements of `after` are computed if that is given.

        Memory: the array; while it is read also the file's pages that it is in.
        """
        axes = None if self.entry_axes is None else self.axes
        return with_axes(self._read(after), axes).astype(dtype)

    def take(self, axis: Axis, index: NamedArray) -> NamedArray:
        """`NamedArray.take` along the first axis of an array that is not stacked; reads
        these rows alone.
        """
        self._check_is_entry()
        first, *others = self.axes
        if first != axis:
            raise ValueError(
                f"An array in files gives entries of its first axis, {first};"
                f" asked for some of {axis}. Read it whole: streaming.in_memory."
            )
        rows = self._read(None, index.array)
        return NamedArray(rows, (*index.axes, *others))

    def in_blocks(self, size: int, width: int) -> "ArrayInFiles":
        """One entry, as a matrix `[rows, width]`, as a stack of blocks of so many rows,
        without names.

        The last block has the last rows, of which the one before may have some too.
        """
        self._check_is_entry()
        blocks = _Blocks(self.read, self.entry, size, width)
        first = raw_array(self.numbers) * blocks.count
        numbers = first + jnp.arange(blocks.count, dtype=jnp.int32)
        block = jax.ShapeDtypeStruct((size, width), self.dtype)
        return ArrayInFiles(numbers, block, None, blocks)

    def _check_is_entry(self) -> None:
        if self.numbers.ndim:
            raise ValueError(
                "Rows are read of one entry of an array in files, and this one has"
                f" entries along {self.numbers.ndim} axes. Use it in a loop over its"
                " layers; an array without layers is made with stacked=0."
            )

    def _read(self, after: Array | None, *rows: Array) -> Array:
        numbers = raw_array(self.numbers)
        # One element: the operation is given it, and does not use it.
        order = numbers if after is None else after
        order = order.reshape(-1)[:1]
        options = {"read": self.read, "entry": self.entry}
        (array,) = _read_p.bind(numbers, order, *rows, **options)
        return array


# Not a wrapper: what is done with linear maps asks for `hnn.Linear`.
class LinearInFiles(hnn.Linear):
    """A named linear map whose weight is in files. Each product reads it, some rows at
    a time, and so does the product of the backward pass; it is never in memory as a
    whole.

    `jax.vmap` is refused: use an `hnn.Linear`, and `in_memory`, there.
    """

    @staticmethod
    def of(linear: hnn.Linear) -> "LinearInFiles":
        """The same linear map, whose weight is an `ArrayInFiles` with the axes of the
        outputs before those of the inputs.
        """
        last = (*axis_spec_to_tuple(linear.Out), *axis_spec_to_tuple(linear.In))
        is_default = isinstance(linear.dot_general, DefaultDotGeneralOp)
        weight = linear.weight
        if not (is_in_files(weight) and weight.entry_axes == last and is_default):
            raise ValueError(
                "LinearInFiles takes an hnn.Linear with Haliax's own dot_general, whose"
                f" weight is a streaming.from_files of {axes_text(last)}."
            )
        fields = {}
        for field in dataclasses.fields(linear):
            fields[field.name] = getattr(linear, field.name)
        return LinearInFiles(**fields)

    def cast_to(self, dtype: DTypeLike) -> "LinearInFiles":
        """The same, with its bias in this dtype; a weight gets that of the inputs."""
        bias = None if self.bias is None else self.bias.astype(dtype)
        return dataclasses.replace(self, bias=bias)

    def __call__(self, inputs: NamedArray, *, key: Any = None) -> NamedArray:
        """Apply it; `key` is ignored."""
        if not is_in_files(self.weight):  # read by `in_memory`
            return super().__call__(inputs)
        In = axis_spec_to_tuple(self.In)
        Out = axis_spec_to_tuple(self.Out)
        tokens = tuple(axis for axis in inputs.axes if axis not in In)
        width = hax.axis_size(In)
        rows = inputs.rearrange((*tokens, *In)).array.reshape(-1, width)
        size = _rows_of_block(hax.axis_size(Out), width)
        blocks = self.weight.in_blocks(size, width)
        # Linear in the inputs, and without a derivative for the weight: a gradient
        # keeps nothing of it, and the pullback reads it again.
        outputs = linear_call(_product, _transposed_product, blocks, rows)
        outputs = outputs * self.reparam.active_scale
        sizes = [axis.size for axis in (*tokens, *Out)]
        named = NamedArray(outputs.reshape(sizes), (*tokens, *Out))
        return named if self.bias is None else named + self.bias


def _rows_of_block(rows: int, width: int) -> int:
    """How many rows of a matrix are read at once, of which it has a multiple."""
    # Blocks of one size, so that a loop runs over them.
    least = -(-rows * width // _MOST_IN_BLOCK)
    count = next(count for count in range(least, rows + 1) if rows % count == 0)
    return rows // count


def _product(
    blocks: ArrayInFiles, x: Float[Array, "token in"]
) -> Float[Array, "token out"]:
    """The product with a matrix `[out, in]`, block by block of its rows."""

    def of_block(_: None, number: Array) -> tuple[None, Array]:
        matrix = dataclasses.replace(blocks, numbers=number)
        # After the inputs, or XLA's order might have it before they are needed.
        return None, x @ matrix.cast_to(x.dtype, after=x).T

    _, outputs = lax.scan(of_block, None, raw_array(blocks.numbers))
    return jnp.moveaxis(outputs, 0, 1).reshape(len(x), -1)


def _transposed_product(
    blocks: ArrayInFiles, y: Float[Array, "token out"]
) -> Float[Array, "token in"]:
    numbers = raw_array(blocks.numbers)
    size, width = blocks.entry.shape
    parts = jnp.moveaxis(y.reshape(len(y), numbers.size, size), 1, 0)

    def of_block(total: Array, at: tuple[Array, Array]) -> tuple[Array, None]:
        number, part = at
        matrix = dataclasses.replace(blocks, numbers=number)
        matrix = matrix.cast_to(y.dtype, after=part)
        # In float32: a sum over blocks
        product = jnp.matmul(part, matrix, preferred_element_type=jnp.float32)
        return total + product, None

    start = jnp.zeros((len(y), width), jnp.float32)
    total, _ = lax.scan(of_block, start, (numbers, parts))
    return total.astype(y.dtype)


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """Reads blocks of rows of entries as matrices, by their number among all blocks."""

    read: ReadEntry
    entry: jax.ShapeDtypeStruct
    # Of a block, and of the matrix.
    size: int
    width: int

    @property
    def rows(self) -> int:
        """Of an entry."""
        return math.prod(self.entry.shape) // self.width

    @property
    def count(self) -> int:
        """Blocks of an entry."""
        return -(-self.rows // self.size)

    def __call__(self, number: int) -> np.ndarray:
        of_entry, block = divmod(number, self.count)
        # The last block has as many rows as the others.
        first = min(block * self.size, self.rows - self.size)
        entry = _entry(self.read, self.entry, of_entry)
        return entry.reshape(self.rows, self.width)[first : first + self.size]


def from_files(like: Any, read: ReadEntry, *, stacked: int = 1) -> ArrayInFiles:
    """A frozen array in the place of one of a model, read from files as it is used.

    ```python
    shapes = eqx.filter_eval_shape(Stacked.init(12, Block), config, key=keys)
    files = [np.load(f"up_{layer}.npy", mmap_mode="r") for layer in range(12)]
    up = streaming.from_files(shapes.stacked.up, files.__getitem__)
    blocks = eqx.tree_at(lambda blocks: blocks.stacked.up, blocks, up)
    ```

    Whoever uses it reads it first, as a block does that begins with
    `layer = streaming.in_memory(self)`; an `hnn.Linear` with such a weight may be a
    `LinearInFiles`, which does so itself. It is read each time that the program gets
    there, and again where the backward pass recomputes that; a policy that keeps all
    intermediates of layers keeps what was read of all layers. It is constant for all
    derivatives.

    Args:
        like: an array of the shape, dtype and axes of all of it; a
            `jax.ShapeDtypeStruct`, or a `NamedArray` of one, is enough.
        read: an entry by its number, of exactly the shape and dtype. It is called
            while programs run, sometimes by several threads at once.
        stacked: how many of the first axes entries are stacked along. Entries are
            numbered along these, the last axis fastest; with 0 there is one entry, with
            the number 0.

    Returns:
        What takes the place of the array.

    Raises:
        ValueError: the first entry has another shape or dtype. An error of `read` ends
            the program that is running (`jax.errors.JaxRuntimeError`, with its text).

    Memory: a number for each entry. For programs on one device, a CPU or a GPU.
    """
    array = raw_array(like)
    if not is_array(array) or not 0 <= stacked <= len(array.shape):
        raise ValueError(
            f"streaming.from_files takes an array with at least {stacked} axes; got"
            f" {like}. Give its shape (jax.ShapeDtypeStruct), or change stacked=."
        )
    outer = array.shape[:stacked]
    inner = array.shape[stacked:]
    entry = jax.ShapeDtypeStruct(inner, array.dtype)
    count = math.prod(outer)
    # A file of another shape should be an error here, and not in a program.
    if count:
        _entry(read, entry, 0)
    numbers = jnp.arange(count, dtype=jnp.int32).reshape(outer)
    if not is_named(like):
        return ArrayInFiles(numbers, entry, None, read)
    named = NamedArray(numbers, like.axes[:stacked])
    return ArrayInFiles(named, entry, like.axes[stacked:], read)


def in_memory(model: T, dtype: DTypeLike | None = None) -> T:
    """The model with its arrays that are in files read, and cast to a dtype if one is
    given; the rest stays as it is.

    A block begins with it: `layer = streaming.in_memory(self)`.

    Memory: these arrays, in a loop over layers those of one layer at a time.
    """

    def read(node: Any) -> Any:
        if not is_in_files(node):
            return node
        return node.cast_to(node.dtype if dtype is None else dtype)

    return jax.tree.map(read, model, is_leaf=is_in_files)


def is_in_files(node: PyTree) -> TypeGuard[ArrayInFiles]:
    """Whether a node of a model is an array in files."""
    return isinstance(node, ArrayInFiles)


def _entry(read: ReadEntry, entry: jax.ShapeDtypeStruct, number: int) -> np.ndarray:
    found = read(number)
    if (found.shape, found.dtype) != (entry.shape, entry.dtype):
        raise ValueError(
            f"streaming.from_files: entry {number} is {found.dtype}{[*found.shape]} in"
            f" the files, and the array has entries {entry.dtype}{[*entry.shape]}."
        )
    return found


def _rows(
    read: ReadEntry, entry: jax.ShapeDtypeStruct, number: int, rows: np.ndarray
) -> np.ndarray:
    """Some rows of an entry."""
    found = np.empty((rows.size, *entry.shape[1:]), entry.dtype)
    flat = rows.ravel()
    for first in range(0, rows.size, _ROWS_AT_ONCE):
        some = slice(first, first + _ROWS_AT_ONCE)
        # Each time anew, since readers drop the pages of the time before.
        found[some] = _entry(read, entry, number)[flat[some]]
    return found.reshape(*rows.shape, *entry.shape[1:])


def _was_read(
    numbers: np.ndarray,
    order: np.ndarray,
    *rows: np.ndarray,
    read: ReadEntry,
    entry: jax.ShapeDtypeStruct,
) -> Sequence[np.ndarray]:
    if rows:
        return [_rows(read, entry, int(numbers), rows[0])]
    if not numbers.ndim:
        return [_entry(read, entry, int(numbers))]
    found = np.empty((*numbers.shape, *entry.shape), entry.dtype)
    for place in np.ndindex(numbers.shape):
        found[place] = _entry(read, entry, int(numbers[place]))
    return [found]


def _type_read(
    numbers: Any, order: Any, *rows: Any, read: ReadEntry, entry: jax.ShapeDtypeStruct
) -> list[ShapedArray]:
    shape = entry.shape
    if rows:
        shape = (*rows[0].shape, *shape[1:])
    return [ShapedArray((*numbers.shape, *shape), entry.dtype)]


_read_p = python_call(
    "read_in_files",
    _was_read,
    _type_read,
    Caller(
        "streaming.from_files",
        "Read the arrays to memory: streaming.in_memory(model).",
        "a model whose arrays are in memory",
    ),
)


def _constant(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    results = _read_p.bind(*primals, **params)
    zeros = [ad.Zero(jax.typeof(result).to_tangent_aval()) for result in results]
    return results, zeros


def _batched(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    numbers, order, *rows = args
    if rows and dims[0] is not None:
        raise NotImplementedError(
            "Rows of an array in files can't be taken under a jax.vmap over its"
            " entries. Read it whole: streaming.in_memory."
        )
    if dims[0] is not None:
        numbers = jnp.moveaxis(numbers, dims[0], 0)
    if dims[1] is not None:
        order = order.reshape(-1)[:1]
    if rows and dims[2] is not None:
        rows = [jnp.moveaxis(rows[0], dims[2], 0)]
    is_mapped = any(dim is not None for dim in (dims[0], *dims[2:]))
    return _read_p.bind(numbers, order, *rows, **params), [0 if is_mapped else None]


ad.primitive_jvps[_read_p] = _constant
batching.primitive_batchers[_read_p] = _batched
