"""Text of error messages: axes, long lists, and what a misspelt name may have been meant to be."""

import difflib
from collections.abc import Collection, Iterable, Sequence
from typing import Any


def axes_text(axes: Iterable[Any]) -> str:
    """Axes as `layers=48, embed=2048`; `no axes` where there are none."""
    return ", ".join(f"{axis.name}={axis.size}" for axis in axes) or "no axes"


def did_you_mean(name: str, valid: Collection[str]) -> str:
    """A space and "Did you mean `x`?", or nothing where no valid name is close."""
    close = difflib.get_close_matches(name, valid, n=1)
    return f" Did you mean `{close[0]}`?" if close else ""


def shortened(items: Sequence[str], separator: str = ", ", most: int = 50) -> str:
    """The first items, and how many more there are."""
    more = [f"and {len(items) - most} more"] if len(items) > most else []
    return separator.join([*items[:most], *more])
