"""Where the benchmarks leave what they found, and what they ran with."""

import importlib.metadata
from pathlib import Path

RESULTS = Path(__file__).parent / "results"

_NAMES = ("jax", "jaxlib", "equinox", "haliax", "flax", "jax-cuda13-plugin", "libtpu")


def versions() -> dict[str, str]:
    """The versions of everything that is measured, as far as it is installed."""
    found = {}
    for name in _NAMES:
        try:
            # The one that is imported, where an environment also has what is left of another.
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
