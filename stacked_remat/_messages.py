"""Text that people read and write: messages with axes, lists and suggestions, and
numbers of bytes.

Errors of the whole library, and of `models/`, are written with these. Values and names
from a file are of any length and may hold any letters, so messages have them by `shown`
and `printable`, and lists of problems cut by `shortened`.
"""

import difflib
import re
import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np


def axes_text(axes: Iterable[Any]) -> str:
    """Axes as `layers=48, embed=2048`; `no axes` where there are none."""
    shown_axes = [f"{axis.name}={axis.size}" for axis in axes]
    return ", ".join(shown_axes) or "no axes"


def check_loss_and_optimizer(function: str, loss: Any, optimizer: Any) -> None:
    """Raise TypeError for what a function takes in place of a loss function and an
    optimizer of Optax, such as these two in the other order.
    """
    if callable(loss) and hasattr(optimizer, "update"):
        return
    raise TypeError(
        f"{function} takes a loss function and then an optimizer of Optax; got"
        f" {type(loss).__name__} and {type(optimizer).__name__}. Write"
        f" {function}(loss, optax.adamw(1e-3))."
    )


def did_you_mean(name: str, valid: Collection[str]) -> str:
    """A space and "Did you mean `x`?", or nothing where no valid name is close, nor the
    only one that begins with `name`.
    """
    close = difflib.get_close_matches(name, valid, n=1)
    longer = [one for one in valid if name and one.startswith(name)]
    if not close and len(longer) == 1:
        close = longer
    if close:
        return f" Did you mean `{close[0]}`?"
    return ""


def shortened(items: Sequence[str], separator: str = ", ", most: int = 50) -> str:
    """The first items, and how many more there are."""
    shown_items = [*items[:most]]
    if len(items) > most:
        shown_items.append(f"and {len(items) - most} more")
    return separator.join(shown_items)


# How values from files are shown: a nested list of a config may be of any size
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100
_SHORT.maxlevel = 3


def shown(value: Any) -> str:
    """The repr of a value from a file, shortened where it is long or deep."""
    return _SHORT.repr(value)


def printable(text: str) -> str:
    """A text from a file, in quotes and cut where it is long or holds letters that
    can't be printed.
    """
    if text.isprintable() and len(text) < 500:
        return text
    return reprlib.repr(text)


def float_problems(dtypes: Mapping[str, str]) -> list[str]:
    """One line for each tensor of a safetensors file whose dtype is not a float."""
    floats = ("F64", "F32", "F16", "BF16")  # as the format names them
    expected = ", ".join(floats)
    return [
        f"not a float: {printable(name)} is {dtype}, expected one of {expected}"
        for name, dtype in dtypes.items()
        if dtype not in floats
    ]


def entry_problems(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """One line for each entry that is missing, unknown, or not as expected, such as in
    its shape.
    """
    missing = []
    mismatched = []
    for key, value in expected.items():
        if key not in found:
            missing.append(f"missing: {key} {value}")
        elif found[key] != value:
            mismatched.append(f"mismatched: {key} is {found[key]}, expected {value}")
    unknown = [
        f"unknown: {printable(key)} {value}"
        for key, value in found.items()
        if key not in expected
    ]
    return missing + unknown + mismatched


def parse_bytes(size: int | str) -> int:
    """Read a number of bytes: an integer, or text such as `"80GiB"`, `"1.5 TiB"` or
    `"80GB"`.

    Raises:
        ValueError: for anything else, saying what can be read.
    """
    is_integer = isinstance(size, int | np.integer) and not isinstance(size, bool)
    if is_integer and int(size) >= 0:
        return int(size)
    # A number of few enough digits that a float holds it, and a unit
    written = r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([KMGT]i?B|kB|B)\s*"
    match = re.fullmatch(written, size) if isinstance(size, str) else None
    if match is None:
        raise ValueError(
            f"cannot read {size!r:.60} as a number of bytes: expected a non-negative"
            " integer or text such as '80GiB' (2**30 each), '80GB' (10**9 each),"
            " '512MiB' or '1.5TiB'"
        )
    number, unit = match.groups()
    # "KiB" and "kB" alike by their first letter; a binary unit has an i
    power = "BKMGT".index(unit[0].upper())
    return int(float(number) * (1024 if "i" in unit else 1000) ** power)
