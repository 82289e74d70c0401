"""`Stacked`: one copy of a block whose arrays have a leading `Layers` axis.

A *stack* of layers of one kind is a single module with the layers' arrays stacked, so
that applying it is a scan: the block is traced and compiled once, however deep the
stack. What a scan does is in `_scan/`.

`StackedKinds` has what stacks of one kind and of several share (`_stacked_pattern.py`):
a loop over the stacks of all kinds, the same with a visitor, and state dicts. What they
share with a `BlockSeq`, whose layers are not stacked, is in `_block_foldable.py`.
"""

import abc
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import equinox as eqx
import haliax.nn
import jax.tree_util as jtu
from equinox.nn import State
from haliax import Axis
from haliax.state_dict import StateDict
from jax.core import Tracer
from jax.tree_util import KeyPath

from ._block_foldable import B, BlockFoldable, M, call_of
from ._layer_checks import axis_of_modules, check_layer_index, check_module
from ._memory_spaces import on_device
from ._policy import ScanCheckpointPolicy, ScanCheckpointSpec, resolve_policy
from ._scan.arguments import Caller, check_stacked, warn_of_ambiguous
from ._scan.checks import axis_or_name, describe, layers_axis
from ._scan.layer_axis import Split, split_tree
from ._scan.layer_state import arrays_in_indices, marked_alike, part_of
from ._scan.layers import layers_at_once, map_layers, scan_layers
from ._scan.marks import (
    Marked,
    applied,
    changed,
    check_unmarked,
    is_array,
    is_named,
    is_split,
    per_kind,
)
from ._scan.stacking import name_stacked, stack_layers, take_rows
from ._scan.step import FoldCall, Verb
from ._scan.sweep_back import SweepBack, forward_for_visitor
from ._state_dict import layers_from_state_dict, stack_as
from ._static import PyTree
from ._sweep.store import at_least_one


class StackedKinds(BlockFoldable[M]):
    """Layers of one or several kinds, each kind stacked."""

    def fold_vjp(
        self,
        init: PyTree,
        /,
        *args: PyTree,
        remat: ScanCheckpointSpec | None = None,
        unroll: int | bool | None = None,
        reverse: bool | None = None,
        **kwargs: PyTree,
    ) -> tuple[PyTree, SweepBack]:
        """As `fold`; also returns a function that sweeps back over the layers: a
        `SweepBack`.

        ```python
        y, sweep_back = blocks.fold_vjp(x)
        # Calls visitor(visit, state) for every layer.
        result = sweep_back(y_cotangent, visitor, state)
        ```

        Arguments as in `fold`. A visitor is traced a few times for each kind of layers:
        `visit.layer` is a block of its kind, `visit.layer_index` counts all layers. The
        layers of the result are a stack of this class.

        Raises:
            ValueError: as `fold`; and for policies that drop carries (`"recompute"`).

        Cost: the forward pass keeps what the policy says. `sweep_back` replays as the
        policy says, and never holds the gradients of all layers.
        """
        return self._vjp(
            "fold", init, args, kwargs, remat=remat, unroll=unroll, reverse=reverse
        )

    def scan_vjp(
        self,
        init: PyTree,
        /,
        *args: PyTree,
        remat: ScanCheckpointSpec | None = None,
        unroll: int | bool | None = None,
        reverse: bool | None = None,
        **kwargs: PyTree,
    ) -> tuple[tuple[PyTree, PyTree], SweepBack]:
        """As `fold_vjp`, for blocks that return `(carry, output)`; gives `((carry,
        outputs), sweep_back)`.

        For layers of several kinds `outputs` and their cotangent are dicts with those
        of each kind.
        """
        return self._vjp(
            "scan", init, args, kwargs, remat=remat, unroll=unroll, reverse=reverse
        )

    def _vjp(
        self,
        verb: Verb,
        init: PyTree,
        args: tuple[PyTree, ...],
        kwargs: dict[str, Any],
        **options: Any,
    ) -> tuple[PyTree, SweepBack]:
        # As `_applied` of `_block_foldable.py`, without a state: a visitor has its own
        call = call_of(self, f"{verb}_vjp", verb, **options)
        check_unmarked(init)
        # None in the block's place: paths into arguments count it
        arguments = (None, *args), kwargs
        warn_of_ambiguous(init, arguments, self.Layers, call.caller)
        blocks = self._per_kind(lambda _, stack: stack._stored)
        template = eqx.filter(self, is_array, inverse=True)
        return forward_for_visitor(call, init, ((blocks, *args), kwargs), template)

    def from_state_dict(self, state_dict: StateDict, prefix: str | None = None) -> Self:
        """These layers with their arrays read from keys `prefix.0.key`, `prefix.1.key`,
        …, in the dtypes that they have there.

        Further entries of a layer are left out, such as a buffer of torch.

        Raises:
            ValueError: names every array that is missing or of another shape, layers
                that the stack does not have, and arrays that all layers of a stack
                share and that differ there.
        """
        pattern = self._pattern
        # The name of each layer's kind, which is empty where there is one kind
        names = [""] * self.Layers.size
        if pattern:
            names = [pattern.names[kind] for kind in pattern.kinds]
        types = {}
        for name in {*names}:
            types[name] = layer_types(self._stacks[name])
        # Haliax reads one layer at a time, from a template with its shapes
        templates = [types[name] for name in names]
        layers = layers_from_state_dict(templates, state_dict, prefix)

        def read(name: str, stack: "Stacked[M]") -> M:
            pairs = zip(layers, names, strict=True)
            of_kind = [layer for layer, other in pairs if other == name]
            if not of_kind:
                return stack.stacked
            return stack_as(stack.stacked, of_kind, stack.Layers)

        return self._with_blocks(self._per_kind(read))

    @property
    @abc.abstractmethod
    def _stacks(self) -> dict[str, "Stacked[M]"]:
        """A stack of each kind by its name, in alphabetical order; of one kind, the
        stack itself by an empty name.
        """

    @abc.abstractmethod
    def _with_blocks(self, blocks: PyTree) -> Self:
        """The same with other blocks, as `_per_kind` gives them."""

    def _per_kind(self, fn: "Callable[[str, Stacked[M]], Any]") -> PyTree:
        """`fn` of each kind, as an argument of a loop."""
        of_kinds = {}
        for name, stack in self._stacks.items():
            of_kinds[name] = fn(name, stack)
        return per_kind(of_kinds) if self._pattern else of_kinds[""]

    @property
    def _kinds(self) -> list[M]:
        return [stack.stacked for stack in self._stacks.values()]

    def _own_part(self, state: State, what: str) -> PyTree:
        return self._per_kind(lambda _, stack: part_of(state, stack.stacked, what))

    def _run(
        self, call: FoldCall, init: PyTree, args: PyTree, kwargs: PyTree
    ) -> tuple[PyTree, PyTree]:
        is_map = call.verb == "map"

        def blocks(_: str, stack: "Stacked[M]") -> Marked:
            # `jax.vmap` slices all, unsliced fields too
            if is_map:
                return stack._stored
            return applied(stack.stacked)

        # The block comes first: a `FoldCall` puts the carry after it
        run = layers_at_once if is_map else scan_layers
        arguments = (self._per_kind(blocks), *args), kwargs
        return run(call, init, arguments)


def layer_types(stack: "Stacked[M]") -> M:
    """One layer, of a stack that may have none, with the type of each array, on the
    device.
    """

    def first(stack: "Stacked") -> PyTree:
        layout, stacks, shared = stack._split
        at_least_one_layer = Split(layout, [*map(at_least_one, stacks)], shared)
        return on_device(at_least_one_layer.layer(0))

    return eqx.filter_eval_shape(first, stack)


def whole_stack_given(stack: Any, of: str) -> TypeError:
    """The error for a stack in the place of its layers; `of` takes these."""
    return TypeError(
        f"{of} was given {describe(stack)}, whose layers are in its field stacked:"
        f" write {of}(stack.stacked, Layers)."
    )


def name_in_stack(path: KeyPath) -> str:
    """How errors name an array of a stack."""
    return f"stacked{jtu.keystr(path)}"


class Stacked(StackedKinds[M]):
    """Layers of one kind, applied one after the other (`fold`, `scan`) or in parallel
    (`vmap`).

    ```python
    Layers = hax.Axis("layers", 48)
    keys = jax.random.split(key, Layers.size)
    blocks = Stacked.init(Layers, Block, remat="nested")(config, key=keys)
    y = blocks.fold(x)
    ```

    All layers have the same structure, shapes and Python control flow. Blocks with
    named axes and blocks of plain arrays both work. For layers of several kinds use
    `StackedPattern`, for others `BlockSeq`.

    Indexing, slicing and iterating copy the arrays of the layers that they take.

    Attributes:
        stacked: the block, its named arrays with the axis `Layers` in front, its plain
            arrays with it as first dimension.

    Raises:
        TypeError: if `Layers` is no axis, or a block is not an `eqx.Module`.
        ValueError: where the block's arrays do not have the layers in front.
    """

    _can_stop: ClassVar[bool] = True

    stacked: M
    # Static, as the policy is, so that `jax.jit` traces anew for other numbers of
    # layers
    Layers: Axis = eqx.field(static=True, converter=layers_axis)
    remat: ScanCheckpointPolicy = eqx.field(
        static=True, converter=resolve_policy, default=ScanCheckpointPolicy()
    )

    def __check_init__(self):
        what = self._caller.what
        check_module(self.stacked, f"The stack of {what}")
        stacked: Any = self.stacked
        # A stack of Haliax's stacks has another axis than these.
        if type(stacked) is haliax.nn.Stacked and stacked.Block == self.Layers:
            raise whole_stack_given(stacked, f"{what}.of")
        try:
            check_stacked(self.stacked, self.Layers, self._caller)
        except ValueError as error:
            raise ValueError(
                f"{error} Or build the stack by {what}.init(Layers, Block)(...)."
            ) from None

    @classmethod
    def of(
        cls,
        layers: Sequence[B] | B,
        Layers: Axis | int | str = "layers",
        *,
        remat: ScanCheckpointSpec = True,
    ) -> "Stacked[B]":
        """Stack layers that exist; the inverse of `unstacked`.

        ```python
        blocks = Stacked.of([Block(key) for key in keys], remat="nested")
        blocks = Stacked.of(eqx.filter_vmap(Block)(keys), len(keys))  # stacked already
        ```

        Args:
            layers: modules of one structure, in order, at least one; or one module
                whose arrays all have a first dimension for the layers.
            Layers: their axis, its name, or their number; of one module its axis or
                number.
            remat: the checkpoint policy. See `ScanCheckpointPolicy`.

        Returns:
            A stack of this class, with copies of the arrays of a list. Python numbers
            that differ between layers become an array with one for each, so a block can
            compute with them and not decide by them (`if self.rate > 0`), and what
            trains all floating-point arrays trains them.

        Raises:
            ValueError: for another number of layers than the axis has; for layers that
                differ otherwise than in numbers: names the path and both values.
            TypeError: for anything but a sequence of modules, or one with the number of
                layers.
        """
        what = f"{cls.__name__}.of"
        build: Any = cls
        if isinstance(layers, haliax.nn.Stacked):
            raise whole_stack_given(layers, what)
        if isinstance(layers, eqx.Module):
            axis = axis_or_name(Layers, what)
            # One module does not tell how many layers it has, as a list does
            if isinstance(axis, str):
                raise TypeError(
                    f"{what} was given one module, {describe(layers)}. If its arrays"
                    f" have n layers in front, write {what}(module, n). Layers that are"
                    f" apart are a list: {what}([layer0, layer1])."
                )
            named = name_stacked(layers, axis, what)
            return build(arrays_in_indices(named, (axis.size,)), axis, remat)
        modules: Any = layers
        axis = axis_of_modules(modules, Layers, what)
        if not modules:
            raise ValueError(
                f"{what} takes at least one layer. Build the stack by"
                f" {cls.__name__}.init."
            )
        return build(stack_layers(marked_alike(modules), axis, what), axis, remat)

    @classmethod
    def _build_all(
        cls,
        build: Callable[..., Any],
        Layers: Axis,
        caller: Caller,
        args: PyTree,
        kwargs: PyTree,
    ) -> PyTree:
        # `jax.vmap` stacks arrays alone, and a state may begin as a Python number
        def build_one(*args: PyTree, **kwargs: PyTree) -> PyTree:
            return arrays_in_indices(build(*args, **kwargs))

        split = split_tree((args, kwargs), Layers, caller)
        return name_stacked(map_layers(build_one, split), Layers, caller.what)

    def get_layer(self, index: Any) -> M:
        if not isinstance(index, Tracer):
            index = check_layer_index(index, self.Layers)
        return self._split.layer(index)

    def __iter__(self) -> Iterator[M]:
        return map(self._split.layer, range(self.Layers.size))

    def _layers(self, rows: slice) -> Self:
        return self._at(range(self.Layers.size)[rows])

    def _at(self, rows: Sequence[int]) -> Self:
        """A stack of the layers at these rows."""
        # `eqx.tree_at` and the like change arrays without a check
        check_stacked(self.stacked, self.Layers, self._caller)

        def take(leaf: Any) -> Any:
            if not is_split(leaf, self.Layers):
                return leaf
            return take_rows(leaf, self.Layers, rows)

        stacked = jtu.tree_map(take, self.stacked, is_leaf=is_named)
        return changed(self, stacked=stacked, Layers=self.Layers.resize(len(rows)))

    if not TYPE_CHECKING:  # or any attribute would pass a type checker

        def __getattr__(self, name: str) -> Any:
            """Says where a field of the blocks is."""
            if hasattr(type(self), name):
                # A property whose own error is of an attribute, and is raised again
                return object.__getattribute__(self, name)
            what = type(self).__name__
            # A stack that is being built has no blocks yet.
            blocks = self.__dict__.get("stacked")
            # Of fields alone, which are found without running code of the blocks
            if name not in getattr(blocks, "__dataclass_fields__", ()):
                raise AttributeError(f"{what!r} object has no attribute {name!r}")
            raise AttributeError(
                f"A {what} has no attribute {name!r}, but its layers do: that of all is"
                f" .stacked.{name}, that of the first [0].{name}."
            )

    @property
    def _stacks(self) -> dict[str, Any]:
        return {"": self}

    def _with_blocks(self, blocks: PyTree) -> Self:
        return changed(self, stacked=blocks)

    @property
    def _split(self) -> Split:
        """The arrays of the block, split over the layers."""
        return split_tree(self._stored, self.Layers, self._caller)

    @property
    def _stored(self) -> Marked:
        """The block, as an argument of a loop that slices all of its arrays."""
        return Marked(self.stacked, "stored")

    @property
    def _caller(self) -> Caller:
        """For errors about the stack's own arrays."""
        return Caller(type(self).__name__, name_in_stack)


# Haliax's maps of trees, quantization and state dicts go layer by layer through what is
# such a stack for `isinstance`. Equinox (0.13) disables `register` of its modules,
# which have no fields to check here.
abc.ABCMeta.register(haliax.nn.Stacked, Stacked)
