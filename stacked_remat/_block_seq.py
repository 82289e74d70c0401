"""`BlockSeq`: layers that need not be alike, with the methods and the policies of
`Stacked`.

Its layers are not stacked, so no loop of JAX can run them: a Python loop does
(`scan_unrolled` in `_scan/layers.py`), with the segments that the policy says as
`jax.checkpoint`s. Arguments are split as for a `Stacked`, and each layer's part of them
is read before the loop.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Self

import equinox as eqx
from equinox.nn import State
from haliax import Axis
from haliax.state_dict import StateDict

from ._block_foldable import BlockFoldable, M
from ._layer_checks import axis_of_modules, check_layer_index
from ._memory_spaces import on_device
from ._policy import ScanCheckpointPolicy, ScanCheckpointSpec, resolve_policy
from ._scan.arguments import Caller
from ._scan.checks import layers_axis
from ._scan.layer_axis import split_tree
from ._scan.layer_state import (
    for_layer,
    of_one_layer,
    part_of,
    stack_outputs_and_states,
)
from ._scan.layers import scan_unrolled
from ._scan.marks import changed
from ._scan.step import FoldCall
from ._state_dict import layers_from_state_dict
from ._static import PyTree


class BlockSeq(BlockFoldable[M]):
    """A sequence of layers, applied one after the other by a Python loop.

    The layers may differ in shapes, structure and control flow, and what goes from one
    to the next may change its shape and structure. It supports policies and splits
    arguments exactly as `Stacked` does. Compile time and program size grow with the
    number of layers: prefer `Stacked` where layers are alike, and `StackedPattern`
    where they are of a few kinds.

    Attributes:
        blocks: the layers.

    Raises:
        TypeError: if `Layers` is no axis, or a block is not an `eqx.Module`.
        ValueError: where the number of blocks is not the size of the axis.
    """

    blocks: Sequence[M]
    Layers: Axis = eqx.field(static=True, converter=layers_axis)
    remat: ScanCheckpointPolicy = eqx.field(
        static=True, converter=resolve_policy, default=ScanCheckpointPolicy()
    )

    def __check_init__(self):
        axis_of_modules(self.blocks, self.Layers, type(self).__name__)

    @classmethod
    def of(
        cls,
        layers: eqx.nn.Sequential | Sequence[Callable[..., Any]],
        Layers: Axis | int | str = "layers",
        *,
        remat: ScanCheckpointSpec = True,
    ) -> "BlockSeq[Any]":
        """The layers of an `eqx.nn.Sequential`, or of a list of modules and functions.

        ```python
        blocks = BlockSeq.of([stem, jax.nn.relu, *blocks, head])
        y = blocks.fold(x, remat="nested")
        keys = jax.random.split(key, len(model))
        y, state = BlockSeq.of(model).fold(x, state, key=keys)
        ```

        Args:
            layers: in order. Each of a `Sequential` becomes one of its own, which takes
                a state and a key whether the layer does or not; a function becomes an
                `eqx.nn.Lambda`.
            Layers: their axis, its name, or their number.
            remat: the checkpoint policy. See `ScanCheckpointPolicy`.

        Raises:
            TypeError: for what is no such list.
            ValueError: for another number of layers than the axis has.
        """
        Lambda: Any = eqx.nn.Lambda
        blocks: Any = layers
        # A `Sequential` gives its layers a state and a key only where they take them,
        # and one layer in a `Sequential` is called as it would be there.
        if isinstance(layers, eqx.nn.Sequential):
            blocks = [eqx.nn.Sequential([layer]) for layer in layers]
        elif isinstance(layers, Sequence):
            blocks = []
            for layer in layers:
                # A class is refused below, as what is no module
                is_function = not isinstance(layer, eqx.Module | type)
                is_function = is_function and callable(layer)
                blocks.append(Lambda(layer) if is_function else layer)
        make: Any = cls
        axis = axis_of_modules(blocks, Layers, f"{cls.__name__}.of")
        return make(blocks, axis, remat)

    @classmethod
    def _build_all(
        cls,
        build: Callable[..., Any],
        Layers: Axis,
        caller: Caller,
        args: PyTree,
        kwargs: PyTree,
    ) -> list[PyTree]:
        split = split_tree((args, kwargs), Layers, caller)
        blocks = []
        for index in range(Layers.size):
            layer_args, layer_kwargs = split.layer(index)
            blocks.append(build(*layer_args, **layer_kwargs))
        return blocks

    def _own_part(self, state: State, what: str) -> State:
        return part_of(state, self.blocks, what, whole=of_one_layer(self.blocks))

    @property
    def _kinds(self) -> Sequence[M]:
        return self.blocks

    def _run(
        self, call: FoldCall, init: PyTree, args: PyTree, kwargs: PyTree
    ) -> tuple[PyTree, PyTree]:
        def step(carry: PyTree, inputs: PyTree) -> tuple[PyTree, PyTree]:
            block, arguments = on_device(inputs)
            # A copy of its state, which can't be read once it is old.
            (_, *args), kwargs = for_layer(arguments, block)
            args = [block, *args]
            return call.outputs(call.applied(carry, args, kwargs), (args, kwargs))

        # Arguments begin with the block in every loop over layers; here with None
        arguments = (None, *args), kwargs
        split = split_tree(arguments, self.Layers, call.caller)
        # They become arrays of JAX, as in every loop. Blocks keep their NumPy arrays,
        # by which they may decide.
        split = split.in_jax()
        inputs = []
        for index, block in enumerate(self.blocks):
            inputs.append((block, for_layer(split.layer(index), block)))
        carry, ys = scan_unrolled(call, init, inputs, step, self.Layers)
        return carry, stack_outputs_and_states(ys, self.Layers, call.caller.what)

    def fold_vjp(self, *args: PyTree, **kwargs: PyTree) -> NoReturn:
        """Not supported: a `TypeError` that says what to use instead."""
        raise TypeError(
            "A BlockSeq has no fold_vjp and no scan_vjp: its layers may differ, so no"
            " loop visits them. Use jax.vjp of its fold or scan, or a Stacked."
        )

    scan_vjp = fold_vjp

    def get_layer(self, index: Any) -> M:
        return self.blocks[check_layer_index(index, self.Layers)]

    def __iter__(self) -> Iterator[M]:
        return iter(self.blocks)

    def _layers(self, rows: slice) -> Self:
        blocks = self.blocks[rows]
        return changed(self, blocks=blocks, Layers=self.Layers.resize(len(blocks)))

    def from_state_dict(self, state_dict: StateDict, prefix: str | None = None) -> Self:
        """This sequence with its arrays read from `prefix.0.key`, …, with errors as in
        `Stacked`.
        """
        layers = layers_from_state_dict(self.blocks, state_dict, prefix)
        return eqx.tree_at(lambda sequence: list(sequence.blocks), self, layers)
