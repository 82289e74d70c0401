"""`StackedPattern`: layers of several kinds, each kind a `Stacked`, applied in one
scan.

A *kind* has a name, a class of block and a *stack* of its layers. The *pattern* is the
kind of each layer, in their order; `Pattern` in `_sweep/kinds.py` is the same with
numbers, for the sweep, which finds by it in which stack a layer is, and at which row.
Each argument that is split over all layers is divided into the parts of each kind
(`divide` in `_scan/layer_axis.py`). Most methods are those of `StackedKinds`.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import equinox as eqx
from haliax import Axis

from ._block_foldable import B, BuiltByInit, M
from ._layer_checks import block_builder, check_layer_index, check_second_call
from ._policy import ScanCheckpointPolicy, ScanCheckpointSpec, resolve_policy
from ._scan.arguments import Caller, argument_namer
from ._scan.checks import layers_axis
from ._scan.layer_axis import divide
from ._scan.marks import changed
from ._stacked import Stacked, StackedKinds
from ._static import PyTree
from ._sweep.kinds import Pattern


class StackedPattern(StackedKinds[M]):
    """Layers of several kinds in any order, each kind stacked, applied one after the
    other in one loop.

    ```python
    Layers = hax.Axis("layers", 26)
    kinds = {"local": LocalBlock, "global": GlobalBlock}
    pattern = ("local",) * 5 + ("global",)  # again and again, as far as the layers go
    init = StackedPattern.init(Layers, kinds, pattern, remat="nested")
    blocks = init(config, key=keys)
    y = blocks.fold(x)
    ```

    `fold` and `scan` equal `for block in blocks: carry = block(carry, ...)`, under
    every policy. Program size and compile time grow with the number of kinds and not
    with that of layers.

    All kinds take the same carry and the same arguments (`per_kind` gives each its
    own). Outputs may differ: `scan` returns a dict with those of each kind, stacked
    over the layers of this kind.

    Attributes:
        stacks: for each kind a `Stacked` of its layers, in order; its own policy is not
            used.
        pattern: the kind of each layer.

    Raises:
        TypeError: if `Layers` is no axis, `stacks` no dict of `Stacked`, or `pattern`
            no sequence of names.
        ValueError: for a pattern with unknown kinds, or of another length than the
            axis; for stacks that do not have the layers that the pattern says.
    """

    stacks: dict[str, Stacked[M]]
    pattern: tuple[str, ...] = eqx.field(static=True, converter=tuple)
    Layers: Axis = eqx.field(static=True, converter=layers_axis)
    remat: ScanCheckpointPolicy = eqx.field(
        static=True, converter=resolve_policy, default=ScanCheckpointPolicy()
    )

    def __check_init__(self):
        what = type(self).__name__
        _check_pattern(self.pattern, self.stacks, what)
        if len(self.pattern) != self.Layers.size:
            raise ValueError(
                f"`{self.Layers.name}` has {self.Layers.size} layers, and the pattern"
                f" {len(self.pattern)}. Give the kind of every layer."
            )
        self._check_stacks()

    def _check_stacks(self) -> None:
        """Refuse stacks of other numbers of layers than the pattern says, which
        `jax.tree.map` of a function of stacks may have put in.
        """
        what = type(self).__name__
        for name, stack in self.stacks.items():
            wanted = self.Layers.resize(self.pattern.count(name))
            axis = type(stack).__name__
            if isinstance(stack, Stacked):
                axis = stack.Layers
            if axis != wanted:
                raise ValueError(
                    f"By the pattern stacks[{name!r}] is a Stacked of {wanted}; got"
                    f" {axis}. Of layers that exist write {what}({{{name!r}:"
                    " Stacked.of(layers), ...}, pattern, n), with the kind of every"
                    f" layer; or build them by {what}.init(Layers, kinds,"
                    " pattern)(...)."
                )

    @classmethod
    def init(
        cls,
        Layers: Axis | int,
        kinds: Mapping[str, BuiltByInit[..., B] | Callable[..., B]],
        pattern: Sequence[str],
        *,
        remat: ScanCheckpointSpec = True,
    ) -> "Callable[..., StackedPattern[B]]":
        """Build the layers, those of a kind all at once.

        Args:
            Layers: the axis of all layers; a number is an axis of this size named
                `layers`.
            kinds: for the name of each kind, what builds a block, as `Stacked.init`
                takes it.
            pattern: the kind of each layer. A shorter one is repeated, as far as the
                layers go.
            remat: the checkpoint policy. See `ScanCheckpointPolicy`.

        Returns:
            A function of the blocks' arguments, split and shared as by `Stacked.init`:
            of what is split, the layers of each kind get their parts. `per_kind` gives
            each kind other arguments.

        Raises:
            ValueError, TypeError: as `Stacked.init`; for a pattern with unknown kinds.
        """
        what = f"{cls.__name__}.init"
        axis = layers_axis(Layers, what)
        policy = resolve_policy(remat)
        _check_pattern(pattern, kinds, what)
        # The rest of a longer one would have no effect
        if len(pattern) > axis.size:
            raise ValueError(
                f"{what}: the pattern is of {len(pattern)} layers, and `{axis.name}`"
                f" has {axis.size}. Give one that is not longer."
            )
        again_and_again = itertools.cycle(pattern)
        names = [*itertools.islice(again_and_again, axis.size)]
        builders = {}
        for name, Block in sorted(kinds.items()):
            call = f"{what}(Layers, {{{name!r}: Block, ...}}, pattern)"
            builders[name] = block_builder(Block, what, call)
        # All kinds take the same arguments, which errors name as the first one does
        first, *_ = builders.values()
        caller = Caller(what, argument_namer(first, skip=0))
        numbered = Pattern.of(names, builders)

        def build_stacks(*args: PyTree, **kwargs: PyTree) -> PyTree:
            for build in builders.values():
                check_second_call(build, kwargs, what)
            parts, _ = divide((args, kwargs), axis, numbered, caller)
            stacks = {}
            for name, (own_args, own_kwargs) in zip(builders, parts, strict=True):
                of_kind = axis.resize(names.count(name))
                make = Stacked.init(of_kind, builders[name], remat=policy)
                stacks[name] = make(*own_args, **own_kwargs)
            make_pattern: Any = cls
            return make_pattern(stacks, tuple(names), axis, policy)

        return build_stacks

    def get_layer(self, index: Any) -> M:
        number = check_layer_index(index, self.Layers)
        stack = self._stacks[self.pattern[number]]
        return stack.get_layer(self._row(number))

    def _row(self, number: int) -> int:
        """The place of a layer in the stack of its kind."""
        return self.pattern[:number].count(self.pattern[number])

    def __iter__(self) -> Iterator[M]:
        # Each kind's layers are in order in its stack, so its next one is the one to
        # take
        layers = {name: iter(stack) for name, stack in self._stacks.items()}
        return (next(layers[name]) for name in self.pattern)

    def _layers(self, rows: slice) -> Self:
        numbers = range(len(self))[rows]
        stacks = {}
        for name, stack in self._stacks.items():
            of_kind = [
                self._row(number) for number in numbers if self.pattern[number] == name
            ]
            stacks[name] = stack._at(of_kind)
        resized = self.Layers.resize(len(numbers))
        return changed(self, stacks=stacks, pattern=self.pattern[rows], Layers=resized)

    @property
    def _stacks(self) -> dict[str, Stacked[M]]:
        self._check_stacks()
        return dict(sorted(self.stacks.items()))

    def _with_blocks(self, blocks: PyTree) -> Self:
        stacks = {}
        for name, stack in self._stacks.items():
            stacks[name] = stack._with_blocks(blocks.values[name])
        return changed(self, stacks=stacks)

    @property
    def _pattern(self) -> Pattern:
        return Pattern.of(self.pattern, self.stacks)


def _are_names(names: Any) -> bool:
    return all(isinstance(name, str) for name in names)


def _check_pattern(pattern: Any, kinds: Any, what: str) -> None:
    """Refuse what is no dict of kinds, and no sequence of their names."""
    if not isinstance(kinds, Mapping) or not kinds or not _are_names(kinds):
        raise TypeError(
            f"{what} takes the kinds of layers as a dict with a name for each, "
            f'{{"local": LocalBlock, "global": GlobalBlock}}; got {kinds!r}.'
        )
    is_sequence = isinstance(pattern, Sequence) and not isinstance(pattern, str)
    if not is_sequence or not _are_names(pattern):
        raise TypeError(
            f'{what} takes a pattern of names, ("local", "local", "global"); got'
            f" {pattern!r}."
        )
    for name in pattern:
        if name not in kinds:
            raise ValueError(
                f"{what}: the pattern has a layer of kind {name!r}, and the kinds are"
                f" {', '.join(map(repr, kinds))}."
            )
