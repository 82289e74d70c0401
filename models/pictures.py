"""Pictures that commands draw by matplotlib, which only they need."""

from pathlib import Path
from typing import Any

from stacked_remat.training import ConfigError

FORMATS = (".png", ".svg")


def new_figure(key: str, width: float, height: float) -> Any:
    """An empty figure of this size in inches.

    Raises:
        ConfigError: matplotlib is not installed; `key` is the option that asks for a
            picture.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"{key} is drawn by matplotlib, which is not installed: pip install"
            " matplotlib."
        ) from error
    return Figure((width, height), layout="constrained")


def save_figure(figure: Any, path: str | Path) -> None:
    """Writes a figure in the format that the file's name says."""
    import matplotlib

    # The words of an SVG are text.
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(path, format=Path(path).suffix[1:])
