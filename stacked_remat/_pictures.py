"""Pictures by matplotlib, which only they need, and rows of bars as text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

FORMATS = (".png", ".svg")
_BARS = "▁▂▃▄▅▆▇█"


class PictureError(ValueError):
    """A picture can't be drawn; says why and what to do."""


def check_picture(key: str, path: str | Path) -> None:
    """Raises PictureError for a file of another format or in no folder; `key` is the
    option that asks for a picture.
    """
    if Path(path).suffix not in FORMATS:
        raise PictureError(
            f"{key} is written as {' or '.join(FORMATS)}, by its name; got"
            f" {str(path)!r}."
        )
    folder = Path(path).parent
    if not folder.is_dir():
        raise PictureError(f"{key}: the folder {str(folder)!r} does not exist.")


def new_figure(key: str, width: float, height: float) -> Any:
    """An empty figure of this size in inches.

    Raises:
        PictureError: matplotlib is not installed; `key` is the option that asks for a
            picture.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PictureError(
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


def text_bars(values: Sequence[float], low: float | None = None) -> str:
    """A bar of one character for each value, from `low`, or the least, to the
    largest.
    """
    low = min(values) if low is None else low
    high = max(values)
    bars = ""
    for value in values:
        height = 0.0 if high == low else (value - low) / (high - low)
        bars += _BARS[round(height * (len(_BARS) - 1))]
    return bars
