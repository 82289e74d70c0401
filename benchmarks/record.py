"""Where the benchmarks leave what they found, and what they ran with."""

import importlib.metadata
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def versions() -> dict[str, str]:
    """The installed versions of everything that is measured."""
    names = ("jax", "jaxlib", "equinox", "haliax", "flax", "jax-cuda13-plugin", "libtpu")
    installed = {dist.metadata["Name"].lower(): dist.version for dist in importlib.metadata.distributions()}
    return {name: installed[name] for name in names if name in installed}
