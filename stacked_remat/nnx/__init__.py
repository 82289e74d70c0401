"""Flax NNX: scans over layers with the policies of this library."""

from . import extra as extra
from .layers import ModuleBlock as ModuleBlock, pattern as pattern, stack as stack
from .scanning import remat_scan as remat_scan
