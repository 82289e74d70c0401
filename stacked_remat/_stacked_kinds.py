"""What `Stacked` and `StackedPattern` have in common: layers of one or several kinds, each kind stacked."""

import abc
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import equinox as eqx
import jax.tree_util as jtu
from equinox.nn import State
from haliax.state_dict import StateDict, flatten_modules_for_export, unflatten_modules_from_export
from jax.tree_util import KeyPath

from ._block_foldable import BlockFoldable, M, loop_over
from ._placement import on_device
from ._policy import ScanCheckpointSpec
from ._scan.arguments import Caller, argument_namer, check_ambiguous
from ._scan.layer_axis import split_tree
from ._scan.layer_state import check_no_state, part_of
from ._scan.layers import Loop, layers_at_once, map_layers, scan_layers
from ._scan.marks import check_unmarked, is_array, stored
from ._scan.pattern import per_kind
from ._scan.step import Verb
from ._scan.sweep_back import SweepBack
from ._scan.vjp import sweep_forward
from ._state_dict import layers_from_state_dict, stack_as
from ._static import PyTree
from ._sweep.store import at_least_one

if TYPE_CHECKING:
    from ._stacked import Stacked


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
        """As `fold`; also returns a function that sweeps back over the layers: a `SweepBack`.

        ```python
        y, sweep_back = blocks.fold_vjp(x)
        result = sweep_back(y_cotangent)                      # result.layers: the gradients of the blocks
        result = sweep_back(y_cotangent, visitor, state)      # calls visitor(visit, state) for every layer
        ```

        Arguments as in `fold`. See `SweepBack` for what it takes and returns, and `stacked_remat.fold_vjp`
        for the policies that it supports. A visitor is traced once for each kind of layers: `visit.layer` is
        a block of its kind, `visit.layer_index` counts all layers. The layers of the result are a stack of
        this class.
        """
        return self._vjp("fold", init, args, kwargs, remat=remat, unroll=unroll, reverse=reverse)

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
        """As `fold_vjp`, for blocks that return `(carry, output)`; gives `((carry, outputs), sweep_back)`.

        For layers of several kinds `outputs` and their cotangent are dicts with those of each kind.
        """
        return self._vjp("scan", init, args, kwargs, remat=remat, unroll=unroll, reverse=reverse)

    def _vjp(
        self, verb: Verb, init: PyTree, args: tuple[PyTree, ...], kwargs: dict[str, Any], **options: Any
    ) -> tuple[PyTree, SweepBack]:
        loop = loop_over(self, f"{verb}_vjp", verb, **options)
        check_unmarked(init)
        if verb == "fold":
            check_no_state((args, kwargs), loop.call.caller.what)
        check_ambiguous(init, (None, *args), kwargs, self.Layers, loop.call.caller)
        y, sweep_back = sweep_forward(loop, init, ((self._blocks(stored), *args), kwargs))
        template = eqx.filter(self, is_array, inverse=True)
        return y, sweep_back.wrapping(
            lambda result: result._replace(layers=template._with_blocks(result.layers))
        )

    def unstacked(self) -> tuple[M, ...]:
        """The layers as separate modules, in order. Copies their arrays."""
        return tuple(self)

    def from_state_dict(self, state_dict: StateDict, prefix: str | None = None) -> Self:
        """These layers with their arrays read from keys `prefix.0.key`, `prefix.1.key`, …

        Raises:
            ValueError: names every layer that is missing, mismatched or unknown, and arrays that all layers
                of a stack share and that differ there.
        """
        if not isinstance(self, StackedKinds):
            raise TypeError(
                "from_state_dict reads into a stack, whose layers say which arrays there are. Write "
                "stack.from_state_dict(state_dict, prefix)."
            )
        stacks, order = self._stacks, self._kind_of_each
        types = {name: layer_types(stacks[name]) for name in {*order}}
        layers = layers_from_state_dict([types[name] for name in order], state_dict, prefix)

        def read(name: str, stack: "Stacked[M]") -> M:
            own = [layer for layer, other in zip(layers, order, strict=True) if other == name]
            return stack_as(stack.stacked, own, stack.Layers) if own else stack.stacked

        return self._with_blocks(self._per_kind(read))

    def flatten_for_export(self) -> Self:
        """These layers with every layer's modules in Haliax's export form.

        A linear layer of several axes, for example, becomes one with a matrix.
        """

        def flat(_: str, stack: "Stacked[M]") -> M:
            return _map_blocks(flatten_modules_for_export, stack, ("stacked",), stack.stacked)

        return self._with_blocks(self._per_kind(flat))

    def unflatten_from_export(self, template: Self) -> Self:
        """The inverse of `flatten_for_export`.

        Args:
            template: a stack with the axes of the result; only its structure is read.
        """
        templates = template._stacks

        def restored(name: str, stack: "Stacked[M]") -> M:
            names = ("stacked", "template.stacked")
            blocks = stack.stacked, templates[name].stacked
            return _map_blocks(unflatten_modules_from_export, stack, names, *blocks)

        return self._with_blocks(self._per_kind(restored))

    @property
    @abc.abstractmethod
    def _stacks(self) -> dict[str, "Stacked[M]"]:
        """A stack of each kind, in alphabetical order."""

    @property
    @abc.abstractmethod
    def _kind_of_each(self) -> tuple[str, ...]:
        """The kind of each layer."""

    @abc.abstractmethod
    def _with_blocks(self, blocks: PyTree) -> Self:
        """The same with other blocks, as `_per_kind` gives them."""

    def _per_kind(self, fn: "Callable[[str, Stacked[M]], Any]") -> PyTree:
        """`fn` of each kind, as an argument of a loop."""
        found = {name: fn(name, stack) for name, stack in self._stacks.items()}
        return per_kind(found) if self._pattern else found[""]

    @property
    def _kinds(self) -> list[M]:
        return [stack.stacked for stack in self._stacks.values()]

    def _blocks(self, how: Callable[[PyTree], PyTree]) -> PyTree:
        return self._per_kind(lambda _, stack: how(stack.stacked))

    def _own_part(self, state: State, what: str) -> PyTree:
        return self._per_kind(lambda _, stack: part_of(state, stack.stacked, stack.Layers, what))

    def _runner(self, loop: Loop) -> Callable[[Any, Any], tuple[PyTree, PyTree]]:
        return functools.partial(layers_at_once if loop.call.verb == "map" else scan_layers, loop)


def layer_types(stack: "Stacked[M]") -> M:
    """One layer, of a stack that may have none, with the type of each array, on the device."""

    def first(stack: "Stacked") -> PyTree:
        caller = Caller(type(stack).__name__, name_in_stack)
        layout, arrays, shared = split_tree(stored(stack.stacked), stack.Layers, caller)
        return on_device(layout.layer([at_least_one(array)[0] for array in arrays], shared))

    return eqx.filter_eval_shape(first, stack)


def name_in_stack(path: KeyPath) -> str:
    """How to call a leaf of the blocks, for errors."""
    return f"stacked{jtu.keystr(path)}"


def _map_blocks(fn: Callable[..., Any], stack: PyTree, names: tuple[str, ...], *blocks: PyTree) -> PyTree:
    caller = Caller(fn.__name__, argument_namer(fn, len(names), names))
    split = split_tree((tuple(map(stored, blocks)), {}), stack.Layers, caller)
    return map_layers(fn, *split, caller.what)
