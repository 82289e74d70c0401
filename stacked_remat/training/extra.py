"""Training takes packages that the library does without; this says which extra brings them."""

import importlib.util

# In the order of pyproject.toml, by the names that they are imported by.
PACKAGES = ("optax", "draccus", "rich", "yaml", "orbax", "grain", "fsspec")


def check_installed(packages: tuple[str, ...] = PACKAGES) -> None:
    """Raise unless the packages can be imported.

    Raises:
        ModuleNotFoundError: names those that are missing, and the extra to install.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(
            f"stacked_remat.training takes {', '.join(missing)}, not installed here: "
            "pip install 'stacked_remat[train]'.",
            name=missing[0],
        )


check_installed()
