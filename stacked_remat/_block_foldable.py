"""`BlockFoldable`: what `Stacked`, `StackedPattern` and `BlockSeq` have in common.

The methods that apply layers (`fold`, `scan`, `vmap` and their `_via` forms) are all
`_applied`: it makes a `FoldCall` (`call_of`), divides an `eqx.nn.State` among the
layers, and calls `_run`, which each class has: a loop of JAX over stacks, or a Python
loop. `fold_vjp` and `scan_vjp` are `_vjp` in `_stacked.py`. The rest is what layers
have in common with a list, and `init` with its types.
"""

import abc
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Concatenate,
    Generic,
    Never,
    ParamSpec,
    Protocol,
    Self,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

import equinox as eqx
from equinox.nn import State
from haliax import Axis
from haliax.state_dict import ModuleWithStateDictSerialization, StateDict

from ._haliax_names import HaliaxStackNames
from ._layer_checks import block_builder, check_first_call, check_second_call
from ._policy import ScanCheckpointPolicy, ScanCheckpointSpec, resolve_policy
from ._scan.arguments import Caller, argument_namer, signature_of, warn_of_ambiguous
from ._scan.checks import layers_axis
from ._scan.layer_state import divide_state, only_own_state, with_whole_state
from ._scan.marks import changed, check_unmarked
from ._scan.step import FoldCall, Verb
from ._scan.until import Until, check_until
from ._state_dict import layers_to_state_dict
from ._static import PyTree
from ._sweep.kinds import Pattern

if TYPE_CHECKING:
    from ._block_seq import BlockSeq
    from ._stacked import Stacked

P = ParamSpec("P")  # the arguments that build a block
M = TypeVar("M", bound=eqx.Module)  # the blocks of a stack
B = TypeVar("B", bound=eqx.Module)  # the blocks that a class method builds or is given
B_co = TypeVar("B_co", bound=eqx.Module, covariant=True)
S = TypeVar("S")  # a subclass of a class of layers
T = TypeVar("T")  # a carry
Y = TypeVar("Y")  # an output


class BuiltByInit(Protocol[P, B_co]):
    """A module class with a static `init`, as is usual with Haliax."""

    @property
    def init(self) -> Callable[P, B_co]: ...


class PolicyOptions(TypedDict, total=False):
    """The options of `init`: two names of one argument."""

    remat: ScanCheckpointSpec | None
    gradient_checkpointing: ScanCheckpointSpec | None


class _InitStacked(Protocol):
    @overload
    def __call__(
        self,
        Layers: Axis | int,
        Block: BuiltByInit[P, B],
        **options: Unpack[PolicyOptions],
    ) -> "Callable[P, Stacked[B]]": ...

    @overload
    def __call__(
        self,
        Layers: Axis | int,
        Block: Callable[P, B],
        **options: Unpack[PolicyOptions],
    ) -> "Callable[P, Stacked[B]]": ...


class _InitBlockSeq(Protocol):
    def __call__(
        self,
        Layers: Axis | int,
        Block: Callable[..., B],
        **options: Unpack[PolicyOptions],
    ) -> "Callable[..., BlockSeq[B]]": ...


class InitOf:
    """For type checkers: `init` of a class of layers, and of a subclass, `class
    Tower(Stacked[Block])`.

    A stack of `Never` is a class that does not say what its layers are.
    """

    @overload
    def __get__(self, layers: object, cls: "type[Stacked[Never]]") -> _InitStacked: ...

    @overload
    def __get__(
        self, layers: object, cls: "type[BlockSeq[Never]]"
    ) -> _InitBlockSeq: ...

    @overload
    def __get__(
        self, layers: object, cls: type[S]
    ) -> Callable[..., Callable[..., S]]: ...

    def __get__(self, layers: object, cls: Any) -> Any: ...  # never called


class BlockFoldable(HaliaxStackNames, ModuleWithStateDictSerialization, Generic[M]):
    """Layers that can be folded, scanned and mapped over: a `Stacked`, a
    `StackedPattern` or a `BlockSeq`.

    As in a list, `len(blocks)` is the number of layers, `blocks[i]` one of them,
    `blocks[2:5]` a stack of some, and `for block in blocks` goes through all.

    Attributes:
        Layers: the axis of the layers; a constructor takes their number too.
        remat: the checkpoint policy of `fold` and `scan`, unless the call gives
            another.
    """

    # Tells `map_unsliced` to leave the fields of a stack within a layer to its own loop
    _slices_its_own_layers: ClassVar[bool] = True
    _can_stop: ClassVar[bool] = False  # whether `until` may stop their loop

    if (
        TYPE_CHECKING
    ):  # `eqx.AbstractVar` is a field, which comes first, for a type checker

        @property
        def Layers(self) -> Axis: ...

        @property
        def remat(self) -> ScanCheckpointPolicy: ...

        # One signature of `init` can't say both what arguments the block takes and that
        # a subclass returns its own class.
        init = InitOf()
    else:

        @classmethod
        def init(
            cls: Any,
            Layers: Axis | int,
            Block: Any,
            *others: PyTree,
            remat: ScanCheckpointSpec | None = None,
            gradient_checkpointing: ScanCheckpointSpec | None = None,
            **arguments: PyTree,
        ) -> Callable[..., Any]:
            """Build the layers: of a `Stacked` all at once, of a `BlockSeq` one after
            the other.

            Args:
                Layers: the axis to stack along; a number is an axis of this size named
                    `layers`.
                Block: a module class, with a static `init` (Haliax style) or a
                    constructor (Equinox style), or any function that returns a module.
                remat: the checkpoint policy; `True` by default. See
                    `ScanCheckpointPolicy`.
                gradient_checkpointing: another name for `remat`.
                *others: refused: arguments of the block are for the function that is
                    returned.
                **arguments: refused too.

            Returns:
                A function of the block's arguments, which returns layers of this class.
                Named arrays with the axis and plain arrays of at least one dimension
                are split over the layers, keys among them; the rest is shared. `shared`
                and `per_layer` choose for one argument.

            Raises:
                ValueError: for an argument of another length than the axis, and for a
                    key, or a list with a Python value for each layer, that is neither
                    split nor marked.
                TypeError: if `Layers` is no axis or number, and if `Block` is an
                    instance, or doesn't build an `eqx.Module`.
            """
            what = f"{cls.__name__}.init"
            check_first_call(others, arguments, what)
            if remat is not None and gradient_checkpointing is not None:
                raise ValueError(
                    "remat and gradient_checkpointing name one argument. Pass one of"
                    " them."
                )
            # Haliax's name for the policy, in code that was written for its `Stacked`
            spec = gradient_checkpointing if remat is None else remat
            policy = resolve_policy(True if spec is None else spec)
            axis = layers_axis(Layers, what)
            build = block_builder(Block, what)
            caller = Caller(what, argument_namer(build, skip=0))

            def build_layers(*args: PyTree, **kwargs: PyTree) -> PyTree:
                check_second_call(build, kwargs, what)
                return cls(
                    cls._build_all(build, axis, caller, args, kwargs), axis, policy
                )

            return build_layers

    @overload
    def fold(
        self, init: T, state: State, /, *args: PyTree, **kwargs: PyTree
    ) -> tuple[T, State]: ...

    @overload
    def fold(
        self, init: T, /, *args: PyTree, state: State, **kwargs: PyTree
    ) -> tuple[T, State]: ...

    @overload
    def fold(
        self,
        init: T,
        /,
        *args: PyTree,
        remat: ScanCheckpointSpec | None = None,
        unroll: int | bool | None = None,
        reverse: bool | None = None,
        until: Until | None = None,
        **kwargs: PyTree,
    ) -> T: ...

    def fold(
        self,
        init: PyTree,
        /,
        *args: PyTree,
        remat: ScanCheckpointSpec | None = None,
        unroll: int | bool | None = None,
        reverse: bool | None = None,
        until: Until | None = None,
        **kwargs: PyTree,
    ) -> PyTree:
        """Apply the layers one after the other: `for block in layers: carry =
        block(carry, *args, **kwargs)`.

        Args:
            init: the carry that goes into the first layer, a tree of arrays.
            *args: passed on to the blocks. Named arrays with the layers' axis and plain
                arrays of at least one dimension are split over the layers; the rest is
                shared. `shared(x)` gives every layer the whole array, and
                `per_layer(x)` splits it or is an error. Of an `eqx.nn.State` each layer
                gets what it keeps there itself; it returns `(carry, state)`.
            remat: a policy for this call instead of the stack's own.
            unroll: how many layers one iteration runs; `True` for all, which alone
                counts where layers are cut, of several kinds or on the host.
            reverse: go from the last layer to the first.
            until: takes a carry and returns one bool; no layer is applied after the
                first carry for which it is True (early exit), with the costs that
                `stacked_remat.scan` says.
            **kwargs: as `*args`.

        Returns:
            The carry after the last layer that is applied, with the shapes of `init`.
            With a `State` among the arguments `(carry, state)`: the whole, with what
            the layers return in it.

        Raises:
            ValueError, TypeError: as `stacked_remat.scan` does; also for an option that
                is also a parameter of the block; for several states, and a layer that
                reads or returns another's.
        """
        options = {"unroll": unroll, "reverse": reverse, "until": until}
        run = _applied(self, "fold", None, remat=remat, **options)
        return run(init, *args, **kwargs)

    def scan(
        self,
        init: T,
        /,
        *args: PyTree,
        remat: ScanCheckpointSpec | None = None,
        unroll: int | bool | None = None,
        reverse: bool | None = None,
        until: Until | None = None,
        **kwargs: PyTree,
    ) -> tuple[T, PyTree]:
        """As `fold`, for blocks that return `(carry, output)`; also stacks the outputs.

        A state among a layer's outputs is not stacked: the whole one, as in `fold`, is
        in its place.
        """
        options = {"unroll": unroll, "reverse": reverse, "until": until}
        run = _applied(self, "scan", None, remat=remat, **options)
        return run(init, *args, **kwargs)

    def fold_via(
        self,
        fn: Callable[Concatenate[M, ...], Y],
        *,
        remat: ScanCheckpointSpec | None = None,
        unroll: int | bool | None = None,
        reverse: bool | None = None,
        until: Until | None = None,
    ) -> Callable[..., Y]:
        """Fold with `fn(block, carry, *args, **kwargs)` in place of the blocks' own
        call.

        Returns:
            A function of the initial carry and the further arguments. What `fn` closes
            over is shared by all layers.
        """
        options = {"unroll": unroll, "reverse": reverse, "until": until}
        return _applied(self, "fold", fn, remat=remat, **options)

    def scan_via(
        self,
        fn: Callable[Concatenate[M, ...], tuple[T, Y]],
        *,
        remat: ScanCheckpointSpec | None = None,
        unroll: int | bool | None = None,
        reverse: bool | None = None,
        until: Until | None = None,
    ) -> Callable[..., tuple[T, Y]]:
        """Scan with `fn(block, carry, *args, **kwargs) -> (carry, output)` in place of
        the blocks' call.
        """
        options = {"unroll": unroll, "reverse": reverse, "until": until}
        return _applied(self, "scan", fn, remat=remat, **options)

    def vmap(self, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Apply all layers to the same arguments with `vmap`; the outputs get the
        layers' axis in front.

        Arguments are split and shared as in `fold`. Costs the internals of all layers
        at once.
        """
        return _applied(self, "map", None)(None, *args, **kwargs)

    def vmap_via(self, fn: Callable[Concatenate[M, ...], Y]) -> Callable[..., Y]:
        """As `vmap`, with `fn(block, *args, **kwargs)` in place of the blocks' own
        call.
        """
        return functools.partial(_applied(self, "map", fn), None)

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> Never:
        """Refused, since it doesn't say how the layers are applied."""
        raise TypeError(
            f"A {type(self).__name__} is not called. Write blocks.fold(x) to apply its"
            " layers one after the other, blocks.scan(x) if each returns (carry,"
            " output), blocks.vmap(shared(x)) to give all the same. With"
            " stacked_remat.fold, pass .stacked of a Stacked: each step gets a layer."
        )

    def with_remat(self, remat: ScanCheckpointSpec) -> Self:
        """These layers, the same arrays, with another checkpoint policy."""
        return changed(self, remat=resolve_policy(remat))

    def unstacked(self) -> tuple[M, ...]:
        """The layers as separate modules, in order. Copies the arrays of stacks."""
        return tuple(self)

    @abc.abstractmethod
    def get_layer(self, index: Any) -> M:
        """One layer; negative indices count from the end, and one outside of the layers
        is an `IndexError`.

        In a `Stacked` it may be traced; the nearest layer is taken for one outside, as
        always in JAX.
        """

    def to_state_dict(self, prefix: str | None = None) -> StateDict:
        """The layers' arrays in the form of a torch `Sequential`, under `prefix.0.key`,
        `prefix.1.key`, …
        """
        return layers_to_state_dict(self.unstacked(), prefix)

    def __len__(self) -> int:
        return self.Layers.size

    @abc.abstractmethod
    def __iter__(self) -> Iterator[M]: ...

    @overload
    def __getitem__(self, index: int) -> M: ...

    @overload
    def __getitem__(self, index: slice) -> Self: ...

    def __getitem__(self, index: Any) -> PyTree:
        if isinstance(index, slice):
            return self._layers(index)
        return self.get_layer(index)

    @abc.abstractmethod
    def _layers(self, rows: slice) -> Self:
        """Some of the layers."""

    @abc.abstractmethod
    def _own_part(self, state: State, what: str) -> PyTree:
        """What of a state is the layers' own, marked to be divided among them; `what`
        is for errors.
        """

    @property
    @abc.abstractmethod
    def _kinds(self) -> Sequence[M]:
        """Blocks of every kind among the layers."""

    @property
    def _pattern(self) -> Pattern | None:
        """Which layer is of which kind, if there are several kinds."""
        return None

    @abc.abstractmethod
    def _run(
        self, call: FoldCall, init: PyTree, args: PyTree, kwargs: PyTree
    ) -> tuple[PyTree, PyTree]:
        """Apply the layers with further arguments; the last carry, and the outputs."""


# Functions, because Equinox makes a module of a method for each call.


def call_of(
    layers: BlockFoldable[Any],
    method: str,
    verb: Verb,
    fn: Callable[..., Any] | None = None,
    *,
    remat: ScanCheckpointSpec | None = None,
    **options: Any,
) -> FoldCall:
    """A call of a method of layers, of which each step calls `fn`, or the block."""
    # Methods pass on their options as they were given, and None where they were not
    options = {name: value for name, value in options.items() if value is not None}
    written = [*options] if remat is None else [*options, "remat"]
    if fn is None and written:
        _check_options(layers, method, written)
    if "until" in options:
        check_until(options["until"])
        if not layers._can_stop:
            raise TypeError(
                f"until= stops a loop over layers that are alike; a"
                f" {type(layers).__name__} takes none. Use a Stacked."
            )
    # Errors name arguments as the user's function does, or as the blocks' `__call__`.
    # Of layers of several classes the first stands for all; without layers nothing is
    # named.
    owner = fn or operator.call
    if fn is None and layers._kinds:
        owner = type(layers._kinds[0]).__call__
    policy = layers.remat if remat is None else remat
    skip = 2  # the block and the carry
    if verb == "map":
        # All layers run at once, so a policy has nothing to say
        policy = False
        skip = 1
    names = argument_namer(owner, skip=skip, first=("stacked",))
    return FoldCall(
        Caller(f"{type(layers).__name__}.{method}", names),
        verb,
        fn=fn or operator.call,
        owner=owner,
        axis=layers.Layers,
        policy=resolve_policy(policy),
        takes_block=True,
        pattern=layers._pattern,
        **options,
    )


def _check_options(
    layers: BlockFoldable[Any], method: str, names: Sequence[str]
) -> None:
    """Refuse options of a method that may also be arguments of the blocks."""
    for kind in {*map(type, layers._kinds)}:
        parameters = signature_of(kind.__call__).parameters
        for name in sorted({*names} & {*parameters}):
            via = (
                f"{method.removesuffix('_vjp')}_via(lambda block, x: block(x,"
                f" {name}=...), {name}=...)(x)"
            )
            raise TypeError(
                f"{name}= may be for {method} or for {kind.__name__}.__call__, which"
                f" has a parameter `{name}` too. Rename that one, or write {via}."
            )


def _applied(
    layers: BlockFoldable[Any],
    verb: Verb,
    fn: Callable[..., Any] | None,
    **options: Any,
) -> Callable[..., Any]:
    """A function of the first carry, None for a map, and the arguments, which applies
    the layers.
    """
    method = "vmap" if verb == "map" else verb
    call = call_of(layers, method, verb, fn, **options)
    what = call.caller.what

    def run(init: PyTree, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        check_unmarked(init)
        whole, (args, kwargs) = divide_state(
            init, (args, kwargs), layers, layers._own_part, what
        )
        # None in the block's place: paths into arguments count it
        arguments = (None, *args), kwargs
        warn_of_ambiguous(init, arguments, layers.Layers, call.caller)
        if whole is not None and call.until is not None:
            raise ValueError(
                f"{what}: with until=, an eqx.nn.State would have nothing of the layers"
                " that do not run. Let all layers run, or put what they keep in the"
                " carry."
            )
        with only_own_state(whole, what):
            carry, outputs = layers._run(call, init, args, kwargs)
        if whole is not None:
            state, outputs = with_whole_state(outputs, whole, layers, what)
            # A fold returns no outputs: the state is a second result. A scan has it in
            # its outputs, in place of the states of layers.
            if verb == "fold":
                return carry, state
        return call.result(carry, outputs)

    return run
