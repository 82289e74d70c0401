"""How trees of named and plain arrays are split over an axis, one layer at a time, and put together again."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from haliax import Axis, NamedArray
from haliax.axis import AxisSelector

from .marks import (
    IsScanned,
    LayerStack,
    Rule,
    has_axis,
    is_array,
    is_named,
    is_named_or_shaped_array,
    is_split,
    is_split_by,
    leaf_size,
    map_unsliced,
    take_marks_off,
)

T = TypeVar("T")

_NAMES_OF_KEYS = ("key", "keys", "prng", "rng", "rngs", "seed", "seeds", "subkey", "subkeys")

# Inside scan and vmap a NamedArray may have fewer dimensions than axes: JAX rebuilds trees without a check.


class Caller(NamedTuple):
    """Who splits arguments over an axis, for error messages.

    Attributes:
        what: the operation, as the user writes it.
        name_of: how to call the leaf at a tree path.
    """

    what: str
    name_of: Callable[[tuple[Any, ...]], str] = jtu.keystr


def check_axis(axis: Any, what: str) -> None:
    """Refuse what is not an `Axis`.

    Raises:
        TypeError: says how to write one.
    """
    if not isinstance(axis, Axis):
        name = repr(axis) if isinstance(axis, str) else "'layers'"
        size = axis if isinstance(axis, int) else "size"
        raise TypeError(
            f"{what} takes the axis of the layers; got {axis!r} ({type(axis).__name__}). "
            f"Write hax.Axis({name}, {size})."
        )


class _Leaf(NamedTuple):
    """How a leaf of a split tree is put together again.

    Attributes:
        kind: whether it is split over the layers, an array that all layers share, or no array.
        path: where it is in the tree.
        axes: all axes of a named array.
        value: the leaf without its array: what is left of a named array, or what is not an array.
        unsliced: whether a layer is given the whole stack.
    """

    kind: Literal["split", "shared", "static"]
    path: tuple[Any, ...]
    axes: tuple[Axis, ...] | None
    value: Any = None
    unsliced: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class TreeLayout:
    """The structure of a tree that is split over `axis`. Holds no arrays."""

    axis: Axis
    treedef: Any
    leaves: tuple[_Leaf, ...]

    def paths(self, kind: Literal["split", "shared"]) -> list[tuple[Any, ...]]:
        """Where the leaves of a kind are in the tree."""
        return [leaf.path for leaf in self.leaves if leaf.kind == kind]

    @property
    def unsliced(self) -> list[bool]:
        """Which of the split leaves a layer is given whole."""
        return [leaf.unsliced for leaf in self._of_kind("split")]

    def layer(self, slices: Sequence[Any], shared: Sequence[Any], *, cotangents: bool = False) -> Any:
        """The tree of one layer, from a slice of each split array and the shared arrays.

        As cotangents they may be None, and so is what is not an array.
        """
        return self._layer(slices, shared, None, cotangents)

    def arguments(self, x: Sequence[Any], shared: Sequence[Any]) -> Any:
        """What a layer is called with: as `layer`, with a `LayerStack` for each field that is unsliced.

        `x` has the whole stack for those, and, if there are any, the layer's index behind all others.
        """
        if not any(self.unsliced):
            return self.layer(x, shared)
        return _with_stacks(self._layer(x[:-1], shared, self.axis, False), x[-1])

    def arguments_of_one(self, slices: Sequence[Any], shared: Sequence[Any]) -> Any:
        """The same from slices alone, with stacks of a single layer."""
        stacks = [part[None] if whole else part for part, whole in zip(slices, self.unsliced, strict=True)]
        return _with_stacks(self._layer(stacks, shared, self.axis.resize(1), False), jnp.int32(0))

    def _layer(
        self, parts: Sequence[Any], shared: Sequence[Any], Stack: Axis | None, cotangents: bool
    ) -> Any:
        def name(leaf: _Leaf, part: Any) -> Any:
            if leaf.axes is None:
                return part
            own = tuple(own for own in leaf.axes if own.name != self.axis.name)
            return NamedArray(part, (Stack, *own) if leaf.unsliced and Stack is not None else own)

        return self._build(map(name, self._of_kind("split"), parts), shared, cotangents)

    def stacked(self, arrays: Sequence[Any], shared: Sequence[Any], *, cotangents: bool = False) -> Any:
        """The whole tree, from its split arrays, the axis first, and the shared ones; else as `layer`."""

        def name(leaf: _Leaf, array: Any) -> Any:
            if leaf.axes is None:
                return array
            position = [own.name for own in leaf.axes].index(self.axis.name)
            moved = jnp.moveaxis(array, 0, position) if position and array is not None else array
            return jtu.tree_unflatten(leaf.value, [moved])

        return self._build(map(name, self._of_kind("split"), arrays), shared, cotangents)

    def arrays(self, tree: Any) -> tuple[list[Any], list[Any]]:
        """The raw arrays of a tree of this structure, or None in their places: those split, those shared."""
        leaves = [*zip(self.leaves, self.treedef.flatten_up_to(tree), strict=True)]
        split, shared = (
            [_raw(leaf) for own, leaf in leaves if own.kind == kind] for kind in ("split", "shared")
        )
        return split, shared

    def _of_kind(self, kind: str) -> list[_Leaf]:
        return [leaf for leaf in self.leaves if leaf.kind == kind]

    def _build(self, split: Iterable[Any], shared: Sequence[Any], cotangents: bool) -> Any:
        split, unnamed = iter(split), iter(shared)

        def leaf(own: _Leaf) -> Any:
            if own.kind == "static":
                return None if cotangents else own.value
            if own.kind == "split":
                return next(split)
            # A named array is put together without a check: see above.
            return next(unnamed) if own.axes is None else jtu.tree_unflatten(own.value, [next(unnamed)])

        return jtu.tree_unflatten(self.treedef, [leaf(own) for own in self.leaves])


def _with_stacks(arguments: Any, layer_index: Any) -> Any:
    (first, *args), kwargs = arguments
    return (map_unsliced(lambda stack: LayerStack(stack, layer_index), first), *args), kwargs


@dataclasses.dataclass(frozen=True)
class SplitTree:
    """A tree cut in two: the arrays that are split over the axis of `layout`, and all the rest.

    Attributes:
        arrays: the split leaves as raw arrays, the axis first. Where some are unsliced, the layers' indices
            follow.
        shared: the other arrays, raw.
        layout: the structure of the tree.
    """

    arrays: list[Any]
    shared: list[Any]
    layout: TreeLayout

    @property
    def axis(self) -> Axis:
        """The axis, with its size."""
        return self.layout.axis

    @property
    def unsliced(self) -> list[bool]:
        """Which of `arrays` a layer is given whole."""
        mask = self.layout.unsliced
        return [*mask, False] if any(mask) else mask

    def rebuild(self, slices: Sequence[Any]) -> Any:
        """The tree of one layer, from its part of each of `arrays`."""
        return self.layout.arguments(slices, self.shared)

    def layer(self, index: int) -> Any:
        """The tree of one layer, nothing in it unsliced. The index is not checked."""
        slices = [array[index] for array in self.arrays[: len(self.layout.unsliced)]]
        return self.layout.layer(slices, self.shared)


def split_tree(
    tree: Any,
    axis: AxisSelector,
    *,
    is_scanned: IsScanned = is_named_or_shaped_array,
    name_of: Callable[[tuple[Any, ...]], str] = jtu.keystr,
    what: str = "scan",
) -> SplitTree:
    """Cut `tree` into the arrays that are split over `axis` and the rest.

    Args:
        tree: named arrays, plain arrays and anything else, parts of it marked or not.
        axis: an `Axis`, or its name: the size is then read off the arrays.
        is_scanned: which unmarked arrays may be split, as a bool or a predicate of a leaf.
        name_of: how error messages call the leaf at a tree path.
        what: the operation, for error messages.

    Raises:
        ValueError: where sizes differ, naming each path and size, where nothing tells the size of a named
            axis, and for a single random key that is not marked.
    """
    entries, tree = take_marks_off(tree)
    treedef = jtu.tree_structure(tree, is_leaf=is_named)
    split_leaves = [is_split_by(rule, leaf, axis, is_scanned) for _, leaf, rule in entries]
    split = [entry for entry, is_split_leaf in zip(entries, split_leaves, strict=True) if is_split_leaf]
    sized = [_Sized(name_of(path), leaf, rule) for path, leaf, rule in split]
    axis = _resolve_axis(axis, sized, what)
    if is_scanned is is_named_or_shaped_array:  # whoever says what is split has said that a key is not
        _check_keys([(name_of(path), leaf) for path, leaf, rule in entries if rule == "default"], axis)
    _check_sizes(axis, sized, what)
    leaves, shared = [], []
    for (path, leaf, rule), is_split_leaf in zip(entries, split_leaves, strict=True):
        if is_named(leaf):
            axes, raw, rest = leaf.axes, leaf.array, jtu.tree_structure(leaf)
        else:
            axes, raw, rest = None, leaf, None if is_array(leaf) else leaf
        kind = "split" if is_split_leaf else "shared" if axes is not None or is_array(leaf) else "static"
        leaves.append(_Leaf(kind, path, axes, rest, kind == "split" and rule == "unsliced"))
        shared += [raw] if kind == "shared" else []
    arrays = [_axis_first(leaf, axis) for _, leaf, _ in split]
    if any(leaf.unsliced for leaf in leaves):
        arrays.append(jnp.arange(axis.size))
    return SplitTree(arrays, shared, TreeLayout(axis, treedef, tuple(leaves)))


def check_stacked(tree: Any, axis: Axis, caller: Caller) -> None:
    """Refuse a tree whose split leaves have another size than `axis`.

    Raises:
        ValueError: names each path and size.
    """
    paths_and_leaves = jtu.tree_flatten_with_path(tree, is_leaf=is_named)[0]
    sized = [_Sized(caller.name_of(path), leaf) for path, leaf in paths_and_leaves if is_split(leaf, axis)]
    _check_sizes(axis, sized, caller.what)


def take_layers(tree: T, axis: Axis, rows: slice) -> tuple[T, Axis]:
    """Some of the layers of a stacked tree, and the axis that they have. What is shared stays as it is."""
    kept = axis.resize(len(range(*rows.indices(axis.size))))

    def take(leaf: Any) -> Any:
        if not is_split(leaf, axis):
            return leaf
        if not is_named(leaf):
            return leaf[rows]
        position = [own.name for own in leaf.axes].index(axis.name)
        axes = (*leaf.axes[:position], kept, *leaf.axes[position + 1 :])
        return NamedArray(leaf.array[(slice(None),) * position + (rows,)], axes)

    return jtu.tree_map(take, tree, is_leaf=is_named), kept


def stack_trees(trees: Sequence[T], axis: Axis) -> T:
    """One tree with the arrays stacked along a new leading `axis`, and the first tree's other leaves."""

    def stack(*leaves: Any) -> Any:
        if is_named(leaves[0]):
            first = leaves[0]
            return NamedArray(
                jnp.stack([leaf.rearrange(first.axes).array for leaf in leaves]), (axis, *first.axes)
            )
        return jnp.stack(leaves) if is_array(leaves[0]) else leaves[0]

    return jtu.tree_map(stack, *trees, is_leaf=is_named)


def stack_outputs(outputs: Sequence[Any], axis: Axis, what: str) -> Any:
    """What layers that may differ put out, stacked along a new leading `axis`; None for no layers.

    Raises:
        ValueError: where the layers' outputs differ in structure, axes or shape, or have the axis already.
    """
    if not outputs:
        return None
    (first, treedef), *rest = (jtu.tree_flatten_with_path(output, is_leaf=is_named) for output in outputs)
    for i, (leaves, other) in enumerate(rest, start=1):
        if other != treedef:
            raise ValueError(
                f"The outputs of {what} over `{axis.name}` cannot be stacked: layer 0 puts out {treedef}, "
                f"layer {i} {other}. Let all layers put out the same."
            )
        for (path, a), (_, b) in zip(first, leaves, strict=True):
            if _form(a) != _form(b):
                raise ValueError(
                    f"The output{jtu.keystr(path)} of {what} over `{axis.name}` cannot be stacked: it has "
                    f"{_form(a)} in layer 0 and {_form(b)} in layer {i}. Let all layers put out the same."
                )
    for path, leaf in first:
        _check_is_new(leaf, axis, path, what)
    return stack_trees([numbers_to_arrays(output) for output in outputs], axis)


def numbers_to_arrays(output: T) -> T:
    """What a layer puts out, with an array for each Python number, so that it can be stacked."""
    return jtu.tree_map(
        lambda leaf: jnp.asarray(leaf) if isinstance(leaf, bool | int | float | complex) else leaf,
        output,
        is_leaf=is_named,
    )


def _form(leaf: Any) -> str:
    """The axes or the shape of an output. Named axes may stand in any order."""
    if is_named(leaf):
        return f"axes {', '.join(sorted(f'{own.name}={own.size}' for own in leaf.axes)) or '()'}"
    return f"shape {jnp.shape(leaf)}" if is_array(leaf) or isinstance(leaf, int | float | complex) else ""


def name_stacked(tree: T, axis: Axis, what: str) -> T:
    """Give `axis` back to named arrays whose raw arrays have gained a leading dimension.

    Raises:
        ValueError: where a named array already has an axis of that name.
    """

    def prepend(path: tuple[Any, ...], leaf: Any) -> Any:
        _check_is_new(leaf, axis, path, what)
        return NamedArray(leaf.array, (axis, *leaf.axes)) if is_named(leaf) else leaf

    return jtu.tree_map_with_path(prepend, tree, is_leaf=is_named)


def _check_is_new(leaf: Any, axis: Axis, path: tuple[Any, ...], what: str) -> None:
    if is_named(leaf) and has_axis(leaf, axis):
        raise ValueError(
            f"The output{jtu.keystr(path)} of {what} over `{axis.name}` already has an axis of that "
            f"name: {[own.name for own in leaf.axes]}. Rename it: y.rename({{{axis.name!r}: ...}})."
        )


def argument_namer(fn: Callable, skip: int, first: tuple[str, ...] = ()) -> Callable[[tuple[Any, ...]], str]:
    """How to name a path into `(args, kwargs)` by the parameters of `fn`.

    Args:
        fn: what takes the arguments.
        skip: how many of its first parameters are not among them.
        first: names of the first of the arguments, which stand for no parameters of `fn`.
    """
    try:
        parameters = list(inspect.signature(fn).parameters.values())[skip:]
    except (TypeError, ValueError):  # builtins have no signature
        parameters = []
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    positional = [*first, *named]
    variadic = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")

    def name_of(path: tuple[Any, ...]) -> str:
        group, entry = path[0].idx, path[1]
        if group == 1:
            root = str(entry.key)
        elif entry.idx < len(positional):
            root = positional[entry.idx]
        else:
            root = f"{variadic}[{entry.idx - len(positional)}]"
        return root + jtu.keystr(path[2:])

    return name_of


def _check_keys(named_leaves: list[tuple[str, Any]], axis: Axis) -> None:
    """Refuse a single random key, which every layer would draw the same numbers from."""
    for name, leaf in named_leaves:
        if is_unsplit_key(name, leaf):
            given = f"{name}=" if name.isidentifier() else ""
            raise ValueError(
                f"{name} is a single random key, from which every layer of `{axis.name}` would draw the same "
                f"numbers. Give each its own, {given}jax.random.split({name}, {axis.size}), or say that they "
                f"share it, {given}stacked_remat.shared({name})."
            )


def is_unsplit_key(name: str, leaf: Any) -> bool:
    """Whether an argument is a single random key. A pair of integers is one where its name says so."""
    leaf = leaf.array if is_named(leaf) else leaf
    if _is_typed_key(leaf):
        return leaf.ndim == 0
    words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)}
    return _may_be_raw_key(leaf) and leaf.ndim == 1 and not words.isdisjoint(_NAMES_OF_KEYS)


def _axis_first(leaf: Any, axis: Axis) -> Any:
    if not is_named(leaf):
        return leaf
    position = [own.name for own in leaf.axes].index(axis.name)
    if position == 0:
        return leaf.array
    return jnp.moveaxis(leaf.array, position, 0)


def _raw(leaf: Any) -> Any:
    return leaf.array if is_named(leaf) else leaf


class _Sized(NamedTuple):
    """A leaf that is to be split, by the name that error messages give it."""

    name: str
    leaf: Any
    rule: Rule = "default"


def _resolve_axis(axis: AxisSelector, sized: list[_Sized], what: str) -> Axis:
    if isinstance(axis, Axis):
        return axis
    named = [entry.leaf for entry in sized if is_named(entry.leaf)]
    for leaf in [*named, *(entry.leaf for entry in sized)]:
        size = leaf_size(leaf, axis)
        if size is not None:
            return Axis(axis, size)
    raise ValueError(
        f"{what} over {axis!r} was given nothing to split over that axis, so its size is unknown. "
        f"Pass an axis instead of a name: hax.Axis({axis!r}, size)."
    )


def _check_sizes(axis: Axis, sized: list[_Sized], what: str) -> None:
    wrong = [entry for entry in sized if leaf_size(entry.leaf, axis) != axis.size]
    if not wrong:
        return
    agreeing = [entry.name for entry in sized if leaf_size(entry.leaf, axis) == axis.size]
    lines = [f"{what} over `{axis.name}` (size {axis.size}) was given inputs of different lengths:"]
    lines += [f"  {_describe_size(entry, axis)}" for entry in wrong]
    if agreeing:
        shown = ", ".join(agreeing[:4]) + (f" and {len(agreeing) - 4} more" if len(agreeing) > 4 else "")
        lines.append(f"  {shown} {'has' if len(agreeing) == 1 else 'have'} {axis.size}, as it should be")
    keys = [entry.name for entry in wrong if _is_typed_key(entry.leaf) or _may_be_raw_key(entry.leaf)]
    for name in keys:
        lines.append(
            f"If {name} is a random key, give each layer its own: jax.random.split({name}, {axis.size})."
        )
    plain = [entry.name for entry in wrong if entry.rule == "default" and not is_named(entry.leaf)]
    if to_share := [name for name in plain if name not in keys]:
        lines.append(
            "A plain array has no axis names, so it is split along its first dimension, one part for each of "
            f"the {axis.size} layers. To give every layer the whole array instead, mark it, "
            f"stacked_remat.shared({to_share[0]}), or pass it as a NamedArray without the axis `{axis.name}`."
        )
    raise ValueError("\n".join(lines))


def _describe_size(entry: _Sized, axis: Axis) -> str:
    name, leaf, rule = entry
    size = leaf_size(leaf, axis)
    which = f"{name}, marked per_layer," if rule == "per_layer" else name
    if is_named(leaf):
        axes = ", ".join(f"{own.name}={own.size}" for own in leaf.axes)
        held = f"no axis `{axis.name}`" if size is None else f"`{axis.name}` of size {size}"
        return f"{which} has {held} (axes {axes})"
    held = (
        "no dimension to split" if size is None else f"leading dimension {size} (shape {tuple(leaf.shape)})"
    )
    return f"{which} has {held}"


def _is_typed_key(leaf: Any) -> bool:
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _may_be_raw_key(leaf: Any) -> bool:
    """Whether `leaf` could be one of JAX's old-style keys, or a stack of them."""
    return is_array(leaf) and leaf.dtype == jnp.uint32 and leaf.ndim in (1, 2) and leaf.shape[-1] == 2
