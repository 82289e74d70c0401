"""What `Stacked` and `BlockSeq` have in common, as a protocol to annotate with."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import equinox as eqx
from haliax import Axis

from ._policy import ScanCheckpointSpec

M = TypeVar("M", bound=eqx.Module)
RematOverride: TypeAlias = ScanCheckpointSpec | None  # None: the policy that the layers were built with
Unroll: TypeAlias = int | bool | None


@runtime_checkable
class BlockFoldable(Protocol[M]):
    """Layers that can be folded, scanned and mapped over: a `Stacked` or a `BlockSeq`.

    `remat=None` means the policy that the layers were built with.
    """

    Block: Axis

    @property
    def Layers(self) -> Axis: ...

    def fold(
        self,
        init: Any,
        *args: Any,
        remat: ScanCheckpointSpec | None = None,
        unroll: int | bool | None = None,
        **kwargs: Any,
    ) -> Any: ...

    def scan(
        self,
        init: Any,
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

    def vmap(self, *args: Any, **kwargs: Any) -> Any: ...

    def vmap_via(self, fn: Callable[..., Any]) -> Callable[..., Any]: ...

    def unstacked(self) -> Sequence[M]: ...

    def get_layer(self, index: int) -> M: ...
