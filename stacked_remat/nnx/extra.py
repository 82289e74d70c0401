"""Checks that Flax is installed."""

import importlib.util

if importlib.util.find_spec("flax") is None:
    raise ModuleNotFoundError(
        "stacked_remat.nnx needs flax, which is not installed: pip install"
        " 'stacked_remat[nnx]'.",
        name="flax",
    )
