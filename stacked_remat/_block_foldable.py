"""What `Stacked` and `BlockSeq` have in common, as a protocol to annotate with."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, Self, TypeVar, overload, runtime_checkable

import equinox as eqx
from haliax import Axis

from ._policy import ScanCheckpointSpec

M_co = TypeVar("M_co", bound=eqx.Module, covariant=True)


@runtime_checkable
class BlockFoldable(Protocol[M_co]):
    """Layers that can be folded, scanned and mapped over: a `Stacked` or a `BlockSeq`.

    `remat=None` means the policy that the layers were built with.
    """

    Block: Axis

    @property
    def Layers(self) -> Axis:
        """The axis of the layers; `Block` is another name for it."""
        ...

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
        """Apply the layers one after the other, and return the last carry; see `Stacked.fold`."""
        ...

    def scan(
        self,
        init: Any,
        /,
        *args: Any,
        remat: ScanCheckpointSpec | None = None,
        unroll: int | bool | None = None,
        reverse: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        """As `fold`, for blocks that return `(carry, output)`; also stacks the outputs."""
        ...

    def fold_via(
        self,
        fn: Callable[..., Any],
        *,
        remat: ScanCheckpointSpec | None = None,
        unroll: int | bool | None = None,
        reverse: bool | None = None,
    ) -> Callable[..., Any]:
        """Fold with `fn(block, carry, *args, **kwargs)` in place of the blocks' own call."""
        ...

    def scan_via(
        self,
        fn: Callable[..., tuple[Any, Any]],
        *,
        remat: ScanCheckpointSpec | None = None,
        unroll: int | bool | None = None,
        reverse: bool | None = None,
    ) -> Callable[..., tuple[Any, Any]]:
        """Scan with `fn(block, carry, *args, **kwargs) -> (carry, output)` in place of the blocks' call."""
        ...

    def vmap(self, /, *args: Any, **kwargs: Any) -> Any:
        """Apply every layer by itself; the outputs get the layers' axis in front."""
        ...

    def vmap_via(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """As `vmap`, with `fn(block, *args, **kwargs)` in place of the blocks' own call."""
        ...

    def with_remat(self, remat: ScanCheckpointSpec) -> Self:
        """These layers with another checkpoint policy."""
        ...

    def unstacked(self) -> Sequence[M_co]:
        """The layers as separate modules."""
        ...

    def get_layer(self, index: int) -> M_co:
        """One layer; negative indices count from the end, and one outside is an `IndexError`."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[M_co]: ...

    @overload
    def __getitem__(self, index: int) -> M_co: ...

    @overload
    def __getitem__(self, index: slice) -> Self: ...
