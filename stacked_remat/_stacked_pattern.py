"""`StackedPattern`: layers of several kinds, each kind a `Stacked`, applied in one scan."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import equinox as eqx
from equinox.nn import State
from haliax import Axis
from haliax.state_dict import StateDict

from ._block_foldable import B, BlockFoldable, M
from ._policy import ScanCheckpointPolicy, ScanCheckpointSpec, resolve_policy
from ._scan.arguments import Caller, argument_namer, check_no_lists, warn_of_ambiguous
from ._scan.checks import check_reverse, check_unroll, layers_axis
from ._scan.layer_axis import split_tree
from ._scan.layer_state import check_no_state, part_of
from ._scan.layers import Layers as LayersOfKind, scan_rolled
from ._scan.marks import changed, check_unmarked, is_array
from ._scan.pattern import DividedArguments, divide, per_kind
from ._scan.stacking import take_layers
from ._scan.sweep_back import SweepBack
from ._scan.visitor import SweepResult
from ._scan.vjp import sweep_forward
from ._stacked import Stacked, applied, layer_types, stored
from ._stacked_methods import (
    BuiltByInit,
    block_builder,
    block_call,
    block_second,
    check_layer_index,
    check_options,
    init_policy,
    method_caller,
    owner_of,
)
from ._state_dict import layers_from_state_dict, stack_as
from ._sweep.kinds import Pattern


def _as_tuple(names: Any) -> tuple[str, ...]:
    """The names as a tuple; what is no sequence of names is left to be refused."""
    return tuple(names) if isinstance(names, list) else names


class StackedPattern(BlockFoldable[M]):
    """Layers of several kinds in any order, each kind stacked, applied one after the other in one loop.

    ```python
    Layers = hax.Axis("layers", 26)
    kinds = {"local": LocalBlock, "global": GlobalBlock}
    pattern = ("local",) * 5 + ("global",)  # again and again, as far as the layers go
    blocks = StackedPattern.init(Layers, kinds, pattern, remat="nested")(config, key=keys)
    y = blocks.fold(x)
    ```

    `fold` and `scan` equal `for block in blocks: carry = block(carry, ...)`. What the backward pass keeps is
    chosen layer by layer, as for a `Stacked`, whatever the pattern. Program size and compile time grow with
    the number of kinds and not with that of layers, except under policies that drop carries, which
    unroll the layers.

    All kinds take the same carry and the same arguments (`per_kind` gives each its own). Outputs may differ:
    `scan` returns a dict with those of each kind, stacked over the layers of this kind.

    Attributes:
        stacks: for each kind a `Stacked` of its layers, in order; its own policy is not used.
        pattern: the kind of each layer.
        Layers: the axis of all layers, or their number.
        remat: the checkpoint policy of `fold` and `scan`, unless the call gives another.

    Raises:
        TypeError: for what is no axis, a dict of `Stacked` or a sequence of names.
        ValueError: for a pattern with unknown kinds, or of another length than the axis; for stacks that do
            not have the layers that the pattern says.
    """

    stacks: dict[str, Stacked[M]]
    pattern: tuple[str, ...] = eqx.field(static=True, converter=_as_tuple)
    Layers: Axis = eqx.field(static=True, converter=layers_axis)
    remat: ScanCheckpointPolicy = eqx.field(
        static=True, converter=resolve_policy, default=ScanCheckpointPolicy()
    )

    def __check_init__(self):
        what = type(self).__name__
        _check_kinds(self.stacks, what)
        for name, stack in self.stacks.items():
            if not isinstance(stack, Stacked):
                raise TypeError(
                    f"{what} holds a Stacked for each kind of layers; stacks[{name!r}] is a "
                    f"{type(stack).__name__}. Build them by {what}.init(Layers, kinds, pattern)(...)."
                )
        _check_pattern(self.pattern, self.stacks, what)
        if len(self.pattern) != self.Layers.size:
            raise ValueError(
                f"`{self.Layers.name}` has {self.Layers.size} layers, and the pattern {len(self.pattern)}. "
                "Give the kind of every layer."
            )
        for name, stack in self.stacks.items():
            wanted = self.Layers.resize(self.pattern.count(name))
            if stack.Layers != wanted:
                raise ValueError(
                    f"By the pattern {wanted.size} layers of `{wanted.name}` are of the kind {name!r}; "
                    f"stacks[{name!r}] has {stack.Layers.size} of `{stack.Layers.name}`."
                )

    @classmethod
    def init(
        cls,
        Layers: Axis | int,
        kinds: Mapping[str, BuiltByInit[..., B] | Callable[..., B]],
        pattern: Sequence[str],
        *,
        remat: ScanCheckpointSpec | None = None,
        gradient_checkpointing: ScanCheckpointSpec | None = None,
    ) -> "Callable[..., StackedPattern[B]]":
        """Build the layers, those of a kind all at once.

        Args:
            Layers: the axis of all layers; a number is an axis of this size named `layers`.
            kinds: for the name of each kind, what builds a block, as `Stacked.init` takes it.
            pattern: the kind of each layer. A shorter one is repeated, as far as the layers go.
            remat: the checkpoint policy; `True` by default. See `ScanCheckpointPolicy`.
            gradient_checkpointing: another name for `remat`.

        Returns:
            A function of the blocks' arguments, split and shared as by `Stacked.init`: of what is split, the
            layers of each kind get their parts. `per_kind` gives each kind other arguments.

        Raises:
            ValueError, TypeError: as `Stacked.init`; for a pattern with unknown kinds.
        """
        what = f"{cls.__name__}.init"
        axis = layers_axis(Layers, what)
        policy = init_policy(remat, gradient_checkpointing)
        _check_kinds(kinds, what)
        _check_pattern(pattern, kinds, what)
        if len(pattern) > axis.size:
            raise ValueError(
                f"{what}: the pattern is of {len(pattern)} layers, and `{axis.name}` has {axis.size}. "
                "Give one that is not longer."
            )
        names = [pattern[i % len(pattern)] for i in range(axis.size)] if pattern else []
        builders = {name: block_builder(Block, what) for name, Block in sorted(kinds.items())}
        caller = Caller(what, argument_namer(next(iter(builders.values())), skip=0))
        numbers = Pattern(tuple(map([*builders].index, names)), len(builders))

        def build_stacks(*args: Any, **kwargs: Any) -> Any:
            check_no_lists(args, kwargs, axis, caller)
            divided = divide((args, kwargs), axis, [*builders], numbers, caller)
            stacks = {}
            for number, (name, builder) in enumerate(builders.items()):
                of_kind, by_name = divided.of(number)
                make = Stacked.init(axis.resize(names.count(name)), builder, remat=policy)
                stacks[name] = make(*of_kind, **by_name)
            build: Any = cls
            return build(stacks, tuple(names), axis, policy)

        return build_stacks

    @property
    def _names(self) -> list[str]:
        return sorted(self.stacks)

    @property
    def _numbers(self) -> Pattern:
        return Pattern(tuple(map(self._names.index, self.pattern)), len(self.stacks))

    def _kinds(self) -> list[Any]:
        return [self.stacks[name].stacked for name in self._names]

    def _block_call(self) -> Callable[..., Any]:
        return block_call(self._kinds()[0])

    def _own_part(self, state: State, what: str) -> Any:
        stacks = self.stacks.items()
        return per_kind({name: part_of(state, stack.stacked, stack.Layers, what) for name, stack in stacks})

    def _divide(self, arguments: Any, caller: Caller) -> DividedArguments:
        return divide(arguments, self.Layers, self._names, self._numbers, caller)

    def _layers_of_kinds(
        self,
        fn: Callable[..., Any],
        divided: DividedArguments,
        has_output: bool,
        caller: Caller,
        mark: Callable[[Any], Any],
    ) -> list[LayersOfKind]:
        """The layers of each kind, of which `mark` gives the arrays, with their parts of the arguments."""
        found = []
        for number, name in enumerate(self._names):
            stack, (args, kwargs) = self.stacks[name], divided.of(number)
            split = split_tree(((mark(stack.stacked), *args), kwargs), stack.Layers, caller)
            found.append(
                LayersOfKind(
                    block_second(fn, caller.what, has_output), *split, owner_of(fn), (caller.what, name)
                ).as_arrays()
            )
        return found

    def _scan_via(
        self,
        verb: str,
        fn: Callable[..., Any],
        remat: ScanCheckpointSpec,
        unroll: int | bool,
        reverse: bool,
    ) -> Callable[..., tuple[Any, Any]]:
        caller, policy = method_caller(self, verb, fn, skip=2), resolve_policy(remat)
        reverse, unroll = check_reverse(reverse), check_unroll(unroll)

        def scanned(init: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            check_unmarked(init)
            warn_of_ambiguous(init, args, kwargs, self.Layers, caller)
            divided = self._divide((args, kwargs), caller)
            kinds = self._layers_of_kinds(fn, divided, verb == "scan", caller, applied)
            carry, outputs = scan_rolled(
                kinds,
                init,
                self.Layers,
                policy,
                pattern=self._numbers,
                reverse=reverse,
                unroll=unroll,
                what=caller.what,
            )
            return carry, dict(zip(self._names, outputs, strict=True))

        return scanned

    def fold_vjp(
        self,
        init: Any,
        /,
        *args: Any,
        remat: ScanCheckpointSpec | None = None,
        unroll: int | bool | None = None,
        reverse: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Any, SweepBack]:
        """As `fold`; also returns a function that sweeps back over the layers: see `Stacked.fold_vjp`.

        A visitor is traced once for each kind. `visit.layer` is a block of its kind, `visit.layer_index`
        counts all layers, and the layers of the result are a `StackedPattern`.
        """
        check_options(self._kinds(), "fold_vjp", remat=remat, unroll=unroll, reverse=reverse)
        return self._vjp("fold_vjp", remat, unroll, reverse)(init, *args, **kwargs)

    def scan_vjp(
        self,
        init: Any,
        /,
        *args: Any,
        remat: ScanCheckpointSpec | None = None,
        unroll: int | bool | None = None,
        reverse: bool | None = None,
        **kwargs: Any,
    ) -> tuple[tuple[Any, Any], SweepBack]:
        """As `fold_vjp`, for blocks that return `(carry, output)`; gives `((carry, outputs), sweep_back)`.

        `outputs` and their cotangent are dicts with those of each kind.
        """
        check_options(self._kinds(), "scan_vjp", remat=remat, unroll=unroll, reverse=reverse)
        return self._vjp("scan_vjp", remat, unroll, reverse)(init, *args, **kwargs)

    def _vjp(
        self,
        verb: str,
        remat: ScanCheckpointSpec | None,
        unroll: int | bool | None,
        reverse: bool | None,
    ) -> Callable[..., tuple[Any, SweepBack]]:
        call, has_output = self._block_call(), verb == "scan_vjp"
        remat, unroll, reverse = self._options(remat, unroll, reverse)
        caller, policy = method_caller(self, verb, call, skip=2), resolve_policy(remat)

        def run(init: Any, given: tuple[StackedPattern, Any, Any]) -> tuple[Any, SweepBack]:
            blocks, args, kwargs = given
            divided = blocks._divide((args, kwargs), caller)
            y, sweep_back = sweep_forward(
                blocks._layers_of_kinds(call, divided, has_output, caller, stored),
                init,
                blocks.Layers,
                policy,
                pattern=blocks._numbers,
                names=blocks._names,
                has_output=has_output,
                reverse=check_reverse(reverse),
                unroll=check_unroll(unroll),
                what=caller.what,
            )
            return y, sweep_back.wrapping(
                _Joined(divided.without_arrays(), eqx.filter(blocks, is_array, inverse=True))
            )

        def swept(init: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, SweepBack]:
            check_unmarked(init)
            check_no_state((args, kwargs), verb, type(self).__name__)
            warn_of_ambiguous(init, args, kwargs, self.Layers, caller)
            return run(init, (self, args, kwargs))

        return swept

    def _vmap_via(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`vmap_via`; returns a dict with the outputs of each kind, with the axis of its layers in front."""
        caller = method_caller(self, "vmap", fn, skip=1)

        def mapped(*args: Any, **kwargs: Any) -> Any:
            divided, outputs = self._divide((args, kwargs), caller), {}
            for number, name in enumerate(self._names):
                of_kind, by_name = divided.of(number)
                outputs[name] = self.stacks[name].vmap_via(fn)(*of_kind, **by_name)
            return outputs

        return mapped

    def unstacked(self) -> tuple[M, ...]:
        """The layers as separate modules, in order. Copies their arrays."""
        return tuple(self)

    def get_layer(self, index: Any) -> M:
        """One layer; negative indices count from the end, and one outside is an `IndexError`."""
        index = check_layer_index(index, self.Layers)
        name = self.pattern[index]
        return self.stacks[name].get_layer(self.pattern[:index].count(name))

    def __iter__(self) -> Iterator[M]:
        layers = {name: iter(stack) for name, stack in self.stacks.items()}
        return (next(layers[name]) for name in self.pattern)

    def _layers(self, rows: slice) -> Self:
        chosen = range(self.Layers.size)[rows]
        stacks = {}
        for name, stack in self.stacks.items():
            of_kind = [self.pattern[:i].count(name) for i in chosen if self.pattern[i] == name]
            stacked, Layers = take_layers(stack.stacked, stack.Layers, of_kind)
            stacks[name] = changed(stack, stacked=stacked, Layers=Layers)
        pattern = tuple(self.pattern[i] for i in chosen)
        return changed(self, stacks=stacks, pattern=pattern, Layers=self.Layers.resize(len(chosen)))

    def from_state_dict(self, state_dict: StateDict, prefix: str | None = None) -> Self:
        """These layers with their arrays read from `prefix.0.key`, …, with errors as in `Stacked`."""
        kinds = {name: layer_types(self.stacks[name]) for name in {*self.pattern}}
        layers = layers_from_state_dict([kinds[name] for name in self.pattern], state_dict, prefix)
        stacks = dict(self.stacks)
        for name in kinds:
            stack = stacks[name]
            own = [layer for layer, other in zip(layers, self.pattern, strict=True) if other == name]
            stacks[name] = changed(stack, stacked=stack_as(stack.stacked, own, stack.Layers))
        return changed(self, stacks=stacks)

    def flatten_for_export(self) -> Self:
        """These layers with every layer's modules in Haliax's export form."""
        stacks = {name: stack.flatten_for_export() for name, stack in self.stacks.items()}
        return changed(self, stacks=stacks)

    def unflatten_from_export(self, template: Any) -> Self:
        """The inverse of `flatten_for_export`; only the structure of `template` is read."""
        stacks = {
            name: stack.unflatten_from_export(template.stacks[name]) for name, stack in self.stacks.items()
        }
        return changed(self, stacks=stacks)


@dataclasses.dataclass(frozen=True)
class _Joined:
    """Makes the results of kinds those of a `StackedPattern`, whose arrays `template` lacks."""

    divided: DividedArguments
    template: StackedPattern

    def __call__(self, result: SweepResult) -> SweepResult:
        names = self.template._names
        stacks = {
            name: changed(self.template.stacks[name], stacked=layers)
            for name, layers in zip(names, result.layers, strict=True)
        }
        result = result._replace(layers=changed(self.template, stacks=stacks))
        if result.args is None:
            return result
        args, kwargs = self.divided.joined([*zip(result.args, result.kwargs, strict=True)])
        return result._replace(args=tuple(args), kwargs=kwargs)


def _check_kinds(kinds: Any, what: str) -> None:
    if not isinstance(kinds, Mapping) or not kinds or not all(isinstance(name, str) for name in kinds):
        raise TypeError(
            f"{what} takes the kinds of layers as a dict with a name for each, "
            f'{{"local": LocalBlock, "global": GlobalBlock}}; got {kinds!r}.'
        )


def _check_pattern(pattern: Any, kinds: Mapping[str, Any], what: str) -> None:
    is_names = isinstance(pattern, Sequence) and all(isinstance(name, str) for name in pattern)
    if isinstance(pattern, str) or not is_names:
        raise TypeError(f'{what} takes a pattern of names, ("local", "local", "global"); got {pattern!r}.')
    if unknown := [name for name in pattern if name not in kinds]:
        raise ValueError(
            f"{what}: the pattern has a layer of kind {unknown[0]!r}, and the kinds are "
            f"{', '.join(map(repr, kinds))}."
        )
