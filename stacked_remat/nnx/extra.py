"""Checks that Flax is installed.

`__init__.py` imports it before the files that import Flax, so that the error says which
extra of this package to install.
"""

import importlib.util

if importlib.util.find_spec("flax") is None:
    raise ModuleNotFoundError(
        "stacked_remat.nnx needs flax, which is not installed: pip install"
        " 'stacked_remat[nnx]'.",
        name="flax",
    )
