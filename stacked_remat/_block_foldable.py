"""What `Stacked` and `BlockSeq` have in common, as a protocol to annotate with."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

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
    def Layers(self) -> Axis: ...

    def fold(
        self,
        init: Any,
        /,
        *args: Any,
        remat: ScanCheckpointSpec | None = None,
        unroll: int | bool | None = None,
        **kwargs: Any,
    ) -> Any: ...

    def scan(
        self,
        init: Any,
        /,
        *args: Any,
        remat: ScanCheckpointSpec | None = None,
        unroll: int | bool | None = None,
        **kwargs: Any,
    ) -> tuple[Any, Any]: ...

    def fold_via(
        self,
        fn: Callable[..., Any],
        *,
        remat: ScanCheckpointSpec | None = None,
        unroll: int | bool | None = None,
    ) -> Callable[..., Any]: ...

    def scan_via(
        self,
        fn: Callable[..., tuple[Any, Any]],
        *,
        remat: ScanCheckpointSpec | None = None,
        unroll: int | bool | None = None,
    ) -> Callable[..., tuple[Any, Any]]: ...

    def vmap(self, /, *args: Any, **kwargs: Any) -> Any: ...

    def vmap_via(self, fn: Callable[..., Any]) -> Callable[..., Any]: ...

    def unstacked(self) -> Sequence[M_co]: ...

    def get_layer(self, index: int) -> M_co: ...
