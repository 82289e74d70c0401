"""Whether tokamax's kernels can be called, and how.

tokamax (Python 3.12 and later) has them in private modules, so the versions that were tried are listed, and
others are refused.
"""

import contextlib
import importlib.metadata
import logging
from collections.abc import Iterator, Mapping

import jax
from jax.extend import backend

from .._placement import target_device
from ._backends import UnsupportedCallError

_VERSIONS = ("0.0.17",)
_called_for: dict[str, str] = {}


def why_not_kernels(what: str, capabilities: Mapping[float, str]) -> str | None:
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
    """Within it, kernels are for the program's device, which need not be attached, and may mix dtypes.

    Raises:
        UnsupportedCallError: this process has called them for another kind of GPU. jaxlib (0.12) compiles
            Mosaic for the first one only.
    """
    device = target_device()
    capability = _called_for.setdefault("capability", device.compute_capability)
    if capability != device.compute_capability:
        raise UnsupportedCallError(
            f"A process compiles tokamax's kernels for one kind of GPU, here of compute capability "
            f"{capability}, not {device.compute_capability} too: compile for {device.device_kind} in another."
        )
    log = logging.getLogger("absl")
    log.addFilter(_says_more_than_tuning)
    own = backend.get_default_device, jax.devices
    backend.get_default_device, jax.devices = lambda: device, lambda *_: [device]
    try:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            yield
    finally:
        backend.get_default_device, jax.devices = own
        log.removeFilter(_says_more_than_tuning)


def _says_more_than_tuning(record: logging.LogRecord) -> bool:
    """False for tokamax's word, a page for every kernel, that it takes its own guess of a tiling."""
    return not str(record.msg).startswith("Autotuning cache miss")
