"""Scan over layers, at any depth and any context, in the memory you have."""

from . import _compat as _compat
from ._block_foldable import BlockFoldable as BlockFoldable
from ._block_seq import BlockSeq as BlockSeq
from ._checkpoint import checkpoint_name as checkpoint_name
from ._offload_check import OffloadError as OffloadError, check_offload as check_offload
from ._policy import ScanCheckpointPolicy as ScanCheckpointPolicy, ScanCheckpointSpec as ScanCheckpointSpec
from ._scan import fold as fold, map as map, scan as scan
from ._scan_layers import internals_are_saved as internals_are_saved
from ._stacked import Stacked as Stacked
