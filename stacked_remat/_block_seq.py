"""`BlockSeq`: layers that need not be alike, with the methods and the policies of `Stacked`."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, TypeVar, overload

import equinox as eqx
from haliax import Axis
from haliax.state_dict import StateDict

from ._block_foldable import BlockFoldable
from ._policy import ScanCheckpointPolicy, ScanCheckpointSpec, resolve_policy
from ._scan.arguments import Caller, argument_namer, check_no_lists, warn_of_ambiguous
from ._scan.checks import check_axis, check_reverse, check_unroll
from ._scan.layer_axis import layer_getter
from ._scan.layers import from_arguments, scan_unrolled
from ._scan.marks import changed, check_unmarked
from ._scan.stacking import stack_outputs
from ._stacked_methods import (
    BuiltByInit,
    P,
    block_builder,
    block_call,
    check_layer_index,
    check_modules,
    init_policy,
    method_caller,
)
from ._state_dict import layers_from_state_dict

M = TypeVar("M", bound=eqx.Module)
B = TypeVar("B", bound=eqx.Module)


class BlockSeq(BlockFoldable[M]):
    """A sequence of layers, applied one after the other by a Python loop.

    The layers may differ in shapes, structure and control flow as long as the carry fits. It obeys policies
    and splits arguments exactly as `Stacked` does. Compile time and program size grow with the number of
    layers: prefer `Stacked` where layers are alike, and `StackedPattern` where they are of a few kinds.

    Attributes:
        blocks: the layers.
        Block: the axis of the layers; `Layers` is another name for it.
        remat: the checkpoint policy of `fold` and `scan`, unless the call gives another.

    Raises:
        TypeError: for what is not an `Axis`, and for a block that is not an `eqx.Module`.
        ValueError: where the number of blocks is not the size of the axis.
    """

    blocks: Sequence[M]
    Block: Axis = eqx.field(static=True)
    remat: ScanCheckpointPolicy = eqx.field(
        static=True, converter=resolve_policy, default=ScanCheckpointPolicy()
    )

    def __check_init__(self):
        what = type(self).__name__
        check_axis(self.Block, f"{what}(blocks, Layers)")
        check_modules(self.blocks, what, "blocks")
        if len(self.blocks) != self.Block.size:
            raise ValueError(
                f"`{self.Block.name}` has {self.Block.size} layers, but {len(self.blocks)} blocks were given."
            )

    @overload
    @classmethod
    def init(
        cls,
        Layers: Axis,
        Block: BuiltByInit[P, B],
        *,
        remat: ScanCheckpointSpec | None = None,
        gradient_checkpointing: ScanCheckpointSpec | None = None,
    ) -> "Callable[P, BlockSeq[B]]": ...

    @overload
    @classmethod
    def init(
        cls,
        Layers: Axis,
        Block: Callable[P, B],
        *,
        remat: ScanCheckpointSpec | None = None,
        gradient_checkpointing: ScanCheckpointSpec | None = None,
    ) -> "Callable[P, BlockSeq[B]]": ...

    @classmethod
    def init(
        cls,
        Layers: Axis,
        Block: Any,
        *,
        remat: ScanCheckpointSpec | None = None,
        gradient_checkpointing: ScanCheckpointSpec | None = None,
    ) -> Any:
        """Build the layers, one after the other. Arguments and errors as in `Stacked.init`."""
        what = f"{cls.__name__}.init"
        check_axis(Layers, what)
        policy = init_policy(remat, gradient_checkpointing)
        build = block_builder(Block, what)
        caller = Caller(what, argument_namer(build, skip=0))

        def build_sequence(*args: Any, **kwargs: Any) -> Self:
            check_no_lists(args, kwargs, Layers, caller)
            calls = map(layer_getter((args, kwargs), Layers, caller), range(Layers.size))
            return cls(
                [build(*layer_args, **layer_kwargs) for layer_args, layer_kwargs in calls], Layers, policy
            )

        return build_sequence

    def _kinds(self) -> Sequence[M]:
        return self.blocks

    def _block_call(self) -> Callable[..., Any]:
        return block_call(self.blocks[0]) if self.blocks else lambda block, *args, **kwargs: None

    def _scan_via(
        self,
        verb: str,
        fn: Callable[..., Any],
        remat: ScanCheckpointSpec,
        unroll: int | bool,
        reverse: bool,
    ) -> Callable[..., tuple[Any, Any]]:
        caller = method_caller(self, verb, fn, skip=2)
        check_unroll(unroll)  # but ignored: layers that differ can only be unrolled
        backwards, resolved = check_reverse(reverse), resolve_policy(remat).normalized()

        def layer(carry: Any, inputs: Any) -> tuple[Any, Any]:
            block, (args, kwargs) = inputs
            found = fn(block, carry, *args, **kwargs)
            return found if verb == "scan" else (found, None)

        def run(init: Any, arguments: Any) -> tuple[Any, Any]:
            arguments_of = layer_getter(arguments, self.Block, caller)
            inputs = [(block, arguments_of(i)) for i, block in enumerate(self.blocks)]
            carry, ys = scan_unrolled(layer, init, inputs, self.Block, resolved, reverse=backwards)
            return carry, stack_outputs(ys, self.Block, caller.what)

        def scanned(init: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            check_unmarked(init)
            warn_of_ambiguous(init, args, kwargs, self.Block, caller)
            return from_arguments(run, resolved, self.Block)(init, (args, kwargs))

        return scanned

    def fold_vjp(self, *args: Any, **kwargs: Any) -> Any:
        """Not supported: a `TypeError` that says what to use instead."""
        raise TypeError(
            "A BlockSeq has no fold_vjp and no scan_vjp: its layers may differ, so no loop visits them. Use "
            "jax.vjp of its fold or scan, or a Stacked."
        )

    scan_vjp = fold_vjp

    def vmap_via(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """As `vmap`, with `fn(block, *args, **kwargs)` in place of the blocks' own call."""
        caller = method_caller(self, "vmap", fn, skip=1)

        def mapped(*args: Any, **kwargs: Any) -> Any:
            arguments_of = layer_getter((args, kwargs), self.Block, caller)
            outputs = []
            for i, block in enumerate(self.blocks):
                layer_args, layer_kwargs = arguments_of(i)
                outputs.append(fn(block, *layer_args, **layer_kwargs))
            return stack_outputs(outputs, self.Block, caller.what)

        return mapped

    def unstacked(self) -> tuple[M, ...]:
        """The layers."""
        return tuple(self.blocks)

    def get_layer(self, index: int) -> M:
        """One layer; negative indices count from the end, and one outside is an `IndexError`."""
        return self.blocks[check_layer_index(index, self.Block)]

    def __iter__(self) -> Iterator[M]:
        return iter(self.blocks)

    def _layers(self, rows: slice) -> Self:
        blocks = self.blocks[rows]
        return changed(self, blocks=blocks, Block=self.Block.resize(len(blocks)))

    def from_state_dict(self, state_dict: StateDict, prefix: str | None = None) -> Self:
        """This sequence with its arrays read from `prefix.0.key`, …, with errors as in `Stacked`."""
        layers = layers_from_state_dict(self.blocks, state_dict, prefix)
        return eqx.tree_at(lambda sequence: list(sequence.blocks), self, layers)
