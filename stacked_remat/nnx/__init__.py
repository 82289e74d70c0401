"""Flax NNX: scans over layers with the policies of this library."""

from . import extra as extra
from .scanning import remat_scan as remat_scan
