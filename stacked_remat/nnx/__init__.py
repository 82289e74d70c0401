"""Flax NNX: scans over layers with the policies of this library."""

from . import extra as extra
from .layers import Stacked as Stacked, stack as stack, to_device as to_device, to_host as to_host
from .scanning import remat_scan as remat_scan
