"""Figures as text: tables in 80 columns, numbers of bytes, and large counts."""

import textwrap
from collections.abc import Iterable, Sequence

_WIDTH, _LEAST = 80, 16  # columns of a terminal, and of them for the names of rows


def as_table(title: str, rows: Sequence[Sequence[str]], notes: Iterable[str]) -> str:
    """Headings and rows under a title; names in the first column break into lines,
    figures do not.
    """
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    first = min(first, max(_LEAST, _WIDTH - sum(others) - 2 * len(others)))

    def lines(row: Sequence[str]) -> list[str]:
        name, *rest = textwrap.wrap(row[0], first) or [""]
        figures = map(str.rjust, row[1:], others)
        return ["  ".join([name.ljust(first), *figures]).rstrip(), *rest]

    head, *body = map(lines, rows)
    rule = "-" * (first + sum(others) + 2 * len(others))
    below = (line for part in (*body, *map(_wrapped, notes)) for line in part)
    return "\n".join([*_wrapped(title), *head, rule, *below])


def _wrapped(text: str) -> list[str]:
    """A text in lines, each but the first indented; paths are left whole."""
    return textwrap.wrap(
        text,
        _WIDTH,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    ) or [""]


_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def readable_bytes(count: int) -> str:
    """Write a number of bytes with two decimals: `3.52 GiB`."""
    unit, name = common_unit([abs(count)])
    return f"{count / unit:.{2 if unit > 1 else 0}f} {name}"


def common_unit(counts: Iterable[int]) -> tuple[int, str]:
    """The unit in which the largest of some numbers of bytes is readable, in bytes, and
    its name.
    """
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
