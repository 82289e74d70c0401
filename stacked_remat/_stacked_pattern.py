"""`StackedPattern`: layers of several kinds, each kind a `Stacked`, applied in one
scan.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import equinox as eqx
from haliax import Axis

from ._block_foldable import B, BuiltByInit, M, block_builder, check_layer_index
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
        TypeError: for what is no axis, a dict of `Stacked` or a sequence of names.
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
        for name, stack in self.stacks.items():
            wanted = self.Layers.resize(self.pattern.count(name))
            found = stack.Layers if isinstance(stack, Stacked) else type(stack).__name__
            if found != wanted:
                raise ValueError(
                    f"By the pattern stacks[{name!r}] is a Stacked of {wanted}; got"
                    f" {found}. Build them by {what}.init(Layers, kinds, pattern)(...)."
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
        axis, policy = layers_axis(Layers, what), resolve_policy(remat)
        _check_pattern(pattern, kinds, what)
        if len(pattern) > axis.size:
            raise ValueError(
                f"{what}: the pattern is of {len(pattern)} layers, and `{axis.name}`"
                f" has {axis.size}. Give one that is not longer."
            )
        names = [pattern[i % len(pattern)] for i in range(axis.size)] if pattern else []
        builders = {
            name: block_builder(Block, what) for name, Block in sorted(kinds.items())
        }
        caller = Caller(what, argument_namer(next(iter(builders.values())), skip=0))
        named = Pattern.of(names, builders)

        def build_stacks(*args: PyTree, **kwargs: PyTree) -> PyTree:
            parts, _ = divide((args, kwargs), axis, named, caller)
            stacks = {}
            for (name, builder), (of_kind, by_name) in zip(
                builders.items(), parts, strict=True
            ):
                make = Stacked.init(
                    axis.resize(names.count(name)), builder, remat=policy
                )
                stacks[name] = make(*of_kind, **by_name)
            build: Any = cls
            return build(stacks, tuple(names), axis, policy)

        return build_stacks

    def get_layer(self, index: Any) -> M:
        number = check_layer_index(index, self.Layers)
        name = self.pattern[number]
        return self.stacks[name].get_layer(self.pattern[:number].count(name))

    def __iter__(self) -> Iterator[M]:
        layers = {name: iter(stack) for name, stack in self.stacks.items()}
        return (next(layers[name]) for name in self.pattern)

    def _layers(self, rows: slice) -> Self:
        kinds, chosen = self.pattern[rows], range(len(self))[rows]
        stacks = {
            name: stack._at(
                [
                    self.pattern[:i].count(name)
                    for i in chosen
                    if self.pattern[i] == name
                ]
            )
            for name, stack in self.stacks.items()
        }
        return changed(
            self, stacks=stacks, pattern=kinds, Layers=self.Layers.resize(len(kinds))
        )

    @property
    def _stacks(self) -> dict[str, Stacked[M]]:
        return dict(sorted(self.stacks.items()))

    def _with_blocks(self, blocks: PyTree) -> Self:
        stacks = {
            name: stack._with_blocks(blocks.values[name])
            for name, stack in self._stacks.items()
        }
        return changed(self, stacks=stacks)

    @property
    def _pattern(self) -> Pattern:
        return Pattern.of(self.pattern, self.stacks)


def _check_pattern(pattern: Any, kinds: Any, what: str) -> None:
    if (
        not isinstance(kinds, Mapping)
        or not kinds
        or not all(isinstance(name, str) for name in kinds)
    ):
        raise TypeError(
            f"{what} takes the kinds of layers as a dict with a name for each, "
            f'{{"local": LocalBlock, "global": GlobalBlock}}; got {kinds!r}.'
        )
    is_names = isinstance(pattern, Sequence) and all(
        isinstance(name, str) for name in pattern
    )
    if isinstance(pattern, str) or not is_names:
        raise TypeError(
            f'{what} takes a pattern of names, ("local", "local", "global"); got'
            f" {pattern!r}."
        )
    if unknown := [name for name in pattern if name not in kinds]:
        raise ValueError(
            f"{what}: the pattern has a layer of kind {unknown[0]!r}, and the kinds are"
            f" {', '.join(map(repr, kinds))}."
        )
