"""Scan over layers, at any depth and any context, in the memory you have."""

import importlib
import typing

from . import _compat as _compat
from ._block_foldable import BlockFoldable as BlockFoldable
from ._block_seq import BlockSeq as BlockSeq
from ._checkpoint import (
    checkpoint as checkpoint,
    checkpoint_name as checkpoint_name,
    internals_are_saved as internals_are_saved,
)
from ._fused.update import (
    FusedResult as FusedResult,
    FusedState as FusedState,
    FusedUpdate as FusedUpdate,
    fused_update as fused_update,
)
from ._offload_check import OffloadError as OffloadError, check_offload as check_offload
from ._pipeline.schedule import Schedule as Schedule
from ._pipeline.value_and_grad import Pipeline as Pipeline, pipeline as pipeline
from ._policy import (
    ScanCheckpointPolicy as ScanCheckpointPolicy,
    ScanCheckpointSpec as ScanCheckpointSpec,
)
from ._scan.api import fold as fold, lax_scan as lax_scan, map as map, scan as scan
from ._scan.marks import (
    LayerStack as LayerStack,
    per_kind as per_kind,
    per_layer as per_layer,
    shared as shared,
    unsliced as unsliced,
)
from ._scan.sweep_back import SweepBack as SweepBack
from ._scan.visitor import (
    LayerResult as LayerResult,
    LayerVisit as LayerVisit,
    SweepResult as SweepResult,
)
from ._stacked import Stacked as Stacked
from ._stacked_pattern import StackedPattern as StackedPattern
from ._tiled import tiled as tiled
from ._while.api import while_loop as while_loop

if typing.TYPE_CHECKING:
    from . import (
        diffrax as diffrax,
        ghost as ghost,
        levanter as levanter,
        lora as lora,
        memory as memory,
        nnx as nnx,
        ops as ops,
        streaming as streaming,
        training as training,
    )

__version__ = "0.1.0"


def __getattr__(name: str) -> typing.Any:
    """The packages and modules of the library, each imported when it is first used."""
    if name in (
        "diffrax",
        "ghost",
        "levanter",
        "lora",
        "memory",
        "nnx",
        "ops",
        "streaming",
        "training",
    ):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    packages = (
        "diffrax",
        "ghost",
        "levanter",
        "lora",
        "memory",
        "nnx",
        "ops",
        "streaming",
        "training",
    )
    return sorted({*globals(), *packages})
