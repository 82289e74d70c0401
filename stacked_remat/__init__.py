"""Scan over layers, at any depth and any context, in the memory you have."""

import importlib
from typing import TYPE_CHECKING, Any

from . import _compat as _compat
from ._block_foldable import BlockFoldable
from ._block_seq import BlockSeq
from ._checkpoint import checkpoint, checkpoint_name, checkpoint_sequential, internals_are_saved
from ._fused import FusedResult, FusedState, FusedUpdate, fused_update
from ._offload_check import OffloadError, check_offload
from ._policy import ScanCheckpointPolicy, ScanCheckpointSpec
from ._scan.api import fold, lax_scan, map, scan
from ._scan.layer_axis import per_kind
from ._scan.marks import LayerStack, per_layer, shared, unsliced
from ._scan.sweep_back import SweepBack
from ._scan.visitor import LayerResult, LayerVisit, SweepResult
from ._scan.vjp import fold_vjp, scan_vjp
from ._stacked import Stacked
from ._stacked_pattern import StackedPattern
from ._tiled import tiled

if TYPE_CHECKING:
    from . import ghost, lora, memory, nnx as nnx, ops, streaming, training as training

__version__ = "0.1.0"

__all__ = [
    "BlockFoldable",
    "BlockSeq",
    "FusedResult",
    "FusedState",
    "FusedUpdate",
    "LayerResult",
    "LayerStack",
    "LayerVisit",
    "OffloadError",
    "ScanCheckpointPolicy",
    "ScanCheckpointSpec",
    "Stacked",
    "StackedPattern",
    "SweepBack",
    "SweepResult",
    "__version__",
    "check_offload",
    "checkpoint",
    "checkpoint_name",
    "checkpoint_sequential",
    "fold",
    "fold_vjp",
    "fused_update",
    "ghost",
    "internals_are_saved",
    "lax_scan",
    "lora",
    "map",
    "memory",
    "ops",
    "per_kind",
    "per_layer",
    "scan",
    "scan_vjp",
    "shared",
    "streaming",
    "tiled",
    "unsliced",
]


def __getattr__(name: str) -> Any:
    """The packages and modules of the library, each imported when it is first used."""
    if name in ("ghost", "lora", "memory", "nnx", "ops", "streaming", "training"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
