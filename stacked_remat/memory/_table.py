"""Figures as text: tables in 80 columns, numbers of bytes, and large counts.

For `_report.py`; other messages take `readable_bytes` alone.
"""

import textwrap
from collections.abc import Iterable, Sequence

_WIDTH = 80  # characters of a line
_LEAST = 16  # characters that names of rows have at least, however wide the figures are


def as_table(title: str, rows: Sequence[Sequence[str]], notes: Iterable[str]) -> str:
    """Headings (the first row) and rows under a title, and notes below.

    Names in the first column break into lines, figures do not.
    """
    columns = zip(*rows, strict=True)
    first, *widths = [max(map(len, column)) for column in columns]
    of_figures = sum(widths) + 2 * len(widths)
    first = min(first, max(_LEAST, _WIDTH - of_figures))
    lines = []
    for row_name, *figures in rows:
        name, *more_name = textwrap.wrap(row_name, first) or [""]
        cells = [name.ljust(first)]
        cells += map(str.rjust, figures, widths)
        lines.append("  ".join(cells).rstrip())
        lines += more_name
    # Headings are on one line.
    lines.insert(1, "-" * (first + of_figures))
    lines.insert(0, _wrap(title))
    lines += map(_wrap, notes)
    return "\n".join(lines)


# Breaks a text into lines, each but the first indented; paths are left whole.
_wrap = textwrap.TextWrapper(
    _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
).fill


_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def readable_bytes(count: int) -> str:
    """Write a number of bytes with two decimals: `3.52 GiB`."""
    unit, name = common_unit([abs(count)])
    decimals = 2 if unit > 1 else 0
    return f"{count / unit:.{decimals}f} {name}"


def common_unit(counts: Iterable[int]) -> tuple[int, str]:
    """The unit in which the largest of some numbers of bytes is readable, in bytes, and
    its name.
    """
    # 1024**power is the largest unit that is not above the largest number.
    power = max(max(counts, default=0).bit_length() - 1, 0) // 10
    power = min(power, len(_BINARY_UNITS) - 1)
    return 1024**power, _BINARY_UNITS[power]


def readable_count(count: float) -> str:
    """Write a large number with three digits and a decimal prefix: `12.3 T`."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(count) < 1000:
            return f"{count:{'.3g' if prefix else '.0f'}} {prefix}".rstrip()
        count /= 1000
    return f"{count:.3g} E"
