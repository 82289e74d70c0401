"""`BlockFoldable`: what `Stacked`, `StackedPattern` and `BlockSeq` have in common."""

import abc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, Generic, Self, TypeVar, overload

import equinox as eqx
from equinox.nn import State
from haliax import Axis
from haliax.state_dict import ModuleWithStateDictSerialization, StateDict

from ._noted import noted_stack_call
from ._policy import ScanCheckpointPolicy, ScanCheckpointSpec, resolve_policy
from ._scan.layer_state import through_state
from ._scan.marks import changed
from ._stacked_methods import check_options
from ._state_dict import layers_to_state_dict

M = TypeVar("M", bound=eqx.Module)
B = TypeVar("B", bound=eqx.Module)
T = TypeVar("T")
Y = TypeVar("Y")


class BlockFoldable(ModuleWithStateDictSerialization, Generic[M]):
    """Layers that can be folded, scanned and mapped over: a `Stacked`, a `StackedPattern` or a `BlockSeq`.

    As in a list, `len(blocks)` is the number of layers, `blocks[i]` one of them, `blocks[2:5]` a stack of
    some, and `for block in blocks` goes through all.

    Attributes:
        Layers: the axis of the layers.
        remat: the checkpoint policy of `fold` and `scan`, unless the call gives another.
    """

    slices_its_own_layers: ClassVar[bool] = True

    if TYPE_CHECKING:  # a type checker takes abstract variables for fields that come first

        @property
        def Layers(self) -> Axis: ...

        @property
        def remat(self) -> ScanCheckpointPolicy: ...

    else:
        Layers: eqx.AbstractVar[Axis]
        """The axis of the layers."""
        remat: eqx.AbstractVar[ScanCheckpointPolicy]

    @property
    def Block(self) -> Axis:
        """The axis of the layers, by Haliax's name for it."""
        return self.Layers

    @overload
    def fold(self, init: T, state: State, /, *args: Any, **kwargs: Any) -> tuple[T, State]: ...

    @overload
    def fold(self, init: T, /, *args: Any, state: State, **kwargs: Any) -> tuple[T, State]: ...

    @overload
    def fold(
        self,
        init: T,
        /,
        *args: Any,
        remat: ScanCheckpointSpec | None = None,
        unroll: int | bool | None = None,
        reverse: bool | None = None,
        **kwargs: Any,
    ) -> T: ...

    def fold(
        self,
        init: Any,
        /,
        *args: Any,
        remat: ScanCheckpointSpec | None = None,
        unroll: int | bool | None = None,
        reverse: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Apply the layers one after the other: `for block in layers: carry = block(carry, *args, **kwargs)`.

        Args:
            init: the carry that goes into the first layer, a tree of arrays.
            *args: passed on to the blocks. Named arrays with the layers' axis and plain arrays of at least
                one dimension are split over the layers; the rest is shared. `shared(x)` gives every layer the
                whole array, and `per_layer(x)` splits it or is an error. Of an `eqx.nn.State` each layer gets
                what it keeps there itself; it returns `(carry, state)`.
            remat: a policy for this call instead of the stack's own.
            unroll: how many layers one iteration of the loop runs; `True` for all.
            reverse: go from the last layer to the first.
            **kwargs: as `*args`.

        Returns:
            The carry after the last layer that is applied, with the shapes of `init`. With a `State` among
            the arguments `(carry, state)`: the whole, with what the layers return in it.

        Raises:
            ValueError, TypeError: as `stacked_remat.scan` does; also for an option that is also a parameter
                of the block; for several states, and a layer that reads or returns another's.
        """
        check_options(self._kinds(), "fold", remat=remat, unroll=unroll, reverse=reverse)
        run = self.fold_via(self._block_call(), remat=remat, unroll=unroll, reverse=reverse)
        return run(init, *args, **kwargs)

    def scan(
        self,
        init: T,
        /,
        *args: Any,
        remat: ScanCheckpointSpec | None = None,
        unroll: int | bool | None = None,
        reverse: bool | None = None,
        **kwargs: Any,
    ) -> tuple[T, Any]:
        """As `fold`, for blocks that return `(carry, output)`; also stacks the outputs.

        A state among a layer's outputs is not stacked: the whole one, as of `fold`, is in its place.
        """
        check_options(self._kinds(), "scan", remat=remat, unroll=unroll, reverse=reverse)
        run = self.scan_via(self._block_call(), remat=remat, unroll=unroll, reverse=reverse)
        return run(init, *args, **kwargs)

    def fold_via(
        self,
        fn: Callable[Concatenate[M, ...], Y],
        *,
        remat: ScanCheckpointSpec | None = None,
        unroll: int | bool | None = None,
        reverse: bool | None = None,
    ) -> Callable[..., Y]:
        """Fold with `fn(block, carry, *args, **kwargs)` in place of the blocks' own call.

        Returns:
            A function of the initial carry and the further arguments. What `fn` closes over is shared
            by all layers.
        """
        if call := noted_stack_call():
            return call(self, "fold_via", fn, {"remat": remat, "unroll": unroll, "reverse": reverse})
        run = self._scan_via("fold", fn, *self._options(remat, unroll, reverse))
        run = through_state(run, self, self._own_part, "fold")

        def folded(init: Any, /, *args: Any, **kwargs: Any) -> Any:
            carry, outputs = run(init, *args, **kwargs)
            return (carry, outputs) if isinstance(outputs, State) else carry

        return folded

    def scan_via(
        self,
        fn: Callable[Concatenate[M, ...], tuple[T, Y]],
        *,
        remat: ScanCheckpointSpec | None = None,
        unroll: int | bool | None = None,
        reverse: bool | None = None,
    ) -> Callable[..., tuple[T, Y]]:
        """Scan with `fn(block, carry, *args, **kwargs) -> (carry, output)` in place of the blocks' call."""
        if call := noted_stack_call():
            return call(self, "scan_via", fn, {"remat": remat, "unroll": unroll, "reverse": reverse})
        run = self._scan_via("scan", fn, *self._options(remat, unroll, reverse))
        return through_state(run, self, self._own_part, "scan")

    def vmap(self, /, *args: Any, **kwargs: Any) -> Any:
        """Apply all layers to the same arguments with `vmap`; the outputs get the layers' axis in front.

        Arguments are split and shared as in `fold`. Costs the internals of all layers at once.
        """
        return self.vmap_via(self._block_call())(*args, **kwargs)

    def vmap_via(self, fn: Callable[Concatenate[M, ...], Y]) -> Callable[..., Y]:
        """As `vmap`, with `fn(block, *args, **kwargs)` in place of the blocks' own call."""
        mapped = self._vmap_via(fn)
        run = through_state(
            lambda _, *args, **kwargs: (None, mapped(*args, **kwargs)), self, self._own_part, "vmap"
        )
        return lambda *args, **kwargs: run(None, *args, **kwargs)[1]

    def with_remat(self, remat: ScanCheckpointSpec) -> Self:
        """These layers, the same arrays, with another checkpoint policy."""
        return changed(self, remat=resolve_policy(remat))

    @abc.abstractmethod
    def unstacked(self) -> Sequence[M]:
        """The layers as separate modules."""

    @abc.abstractmethod
    def get_layer(self, index: Any) -> M:
        """One layer; negative indices count from the end, an index out of range is an `IndexError`."""

    def to_state_dict(self, prefix: str | None = None) -> StateDict:
        """The layers' arrays in the form of a torch `Sequential`, under `prefix.0.key`, `prefix.1.key`, …"""
        return layers_to_state_dict(self.unstacked(), prefix)

    def __len__(self) -> int:
        return self.Layers.size

    @abc.abstractmethod
    def __iter__(self) -> Iterator[M]: ...

    @overload
    def __getitem__(self, index: int) -> M: ...

    @overload
    def __getitem__(self, index: slice) -> Self: ...

    def __getitem__(self, index: Any) -> Any:
        return self._layers(index) if isinstance(index, slice) else self.get_layer(index)

    @abc.abstractmethod
    def _layers(self, rows: slice) -> Self:
        """Some of the layers."""

    @abc.abstractmethod
    def _own_part(self, state: State, what: str) -> Any:
        """What of a state is the layers' own, marked to be divided among them; `what` is for errors."""

    @abc.abstractmethod
    def _vmap_via(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`vmap_via`, of arguments without a whole state."""

    @abc.abstractmethod
    def _kinds(self) -> Iterable[M]:
        """Blocks of every kind among the layers."""

    @abc.abstractmethod
    def _block_call(self) -> Callable[..., Any]:
        """The call of a block, as a function of the block and its arguments."""

    def _options(
        self, remat: ScanCheckpointSpec | None, unroll: int | bool | None, reverse: bool | None
    ) -> tuple[ScanCheckpointSpec, int | bool, bool]:
        """The options of a call, with the defaults for those not given."""
        return (
            self.remat if remat is None else remat,
            1 if unroll is None else unroll,
            False if reverse is None else reverse,
        )

    @abc.abstractmethod
    def _scan_via(
        self,
        verb: str,
        fn: Callable[..., Any],
        remat: ScanCheckpointSpec,
        unroll: int | bool,
        reverse: bool,
    ) -> Callable[..., tuple[Any, Any]]:
        """`scan_via`, or, for the verb `fold`, `fold_via` with None as outputs."""
