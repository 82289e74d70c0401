"""Checks that the packages of the `train` extra are installed, and imports those of the
`data` extra.
"""

import importlib.util
from typing import Any

from .errors import DataError

# By the names of their modules, in the order of pyproject.toml.
PACKAGES = ("optax", "pydantic", "rich", "yaml", "orbax", "grain", "fsspec")


def check_installed(packages: tuple[str, ...] = PACKAGES) -> None:
    """Raises a ModuleNotFoundError that names missing packages and the extra to
    install.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(
            f"stacked_remat.training needs {', '.join(missing)}, which is not"
            " installed: pip install 'stacked_remat[train]'.",
            name=missing[0],
        )


def optional(package: str, user: str) -> Any:
    """A package of the `data` extra; a DataError says what needs it and how to install
    it.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise DataError(
            f"{user} needs {package}, which is not installed: pip install"
            " 'stacked_remat[data]'."
        ) from error


check_installed()
