"""Whether tokamax's kernels can be called, and how.

tokamax (Python 3.12 and later) has them in private modules, so the versions that were tried are listed, and
others are refused.
"""

import contextlib
import importlib.metadata
from collections.abc import Iterator, Mapping

import jax
from jax.extend import backend

from .._placement import target_device

_VERSIONS = ("0.0.17",)


def why_not_tokamax(what: str, capabilities: Mapping[float, str]) -> str | None:
    """Why there is no such kernel for the device that the program is for; None if there is.

    Args:
        what: the kernels, for the reason.
        capabilities: the compute capabilities of GPUs that they are for, with names.
    """
    capability = getattr(target_device(), "compute_capability", "0")
    if float(capability) not in capabilities:
        known = " and ".join(f"{number} ({name})" for number, name in capabilities.items())
        return f"{what} are for GPUs of compute capability {known}, not {capability}"
    try:
        version = importlib.metadata.version("tokamax")
    except importlib.metadata.PackageNotFoundError:
        return "it needs Python 3.12 or later and tokamax: pip install 'stacked_remat[tokamax]'"
    if version not in _VERSIONS:
        return f"it was tried with tokamax {', '.join(_VERSIONS)}, not {version}"
    return None


@contextlib.contextmanager
def calling_tokamax() -> Iterator[None]:
    """Within it, kernels are for the program's device, which need not be attached, and may mix dtypes."""
    own, device = backend.get_default_device, target_device()
    backend.get_default_device = lambda: device
    try:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            yield
    finally:
        backend.get_default_device = own
