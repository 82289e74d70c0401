"""Tables of figures as text."""

import dataclasses
import re
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

_WIDTH = 80
"""Columns of a terminal."""

_LEAST = 16
"""Columns that the names of rows have at least, however many the figures take."""


@dataclasses.dataclass(frozen=True)
class Table:
    """A titled table; the first column is text, the others are right-aligned. Headings may have lines.

    Text in the first column and below the table breaks into lines to fit 80 columns.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        headings = [heading.split("\n") for heading in self.columns]
        height = max(map(len, headings))
        head = [*zip(*([""] * (height - len(lines)) + lines for lines in headings), strict=True)]
        first, *others = (max(map(len, column)) for column in zip(*head, *self.rows, strict=True))
        widths = [min(first, max(_LEAST, _WIDTH - sum(others) - 2 * len(others))), *others]

        def line(row: tuple[str, ...]) -> str:
            name, *figures = row
            right = map(str.rjust, figures, others)
            return "  ".join([name.ljust(widths[0]), *right]).rstrip()

        lines = [*_wrapped(self.title), *map(line, head), "-" * (sum(widths) + 2 * len(others))]
        for name, *figures in self.rows:
            first, *rest = _broken(name, widths[0])
            lines += [line((first, *figures)), *rest]
        return "\n".join([*lines, *(text for note in self.notes for text in _wrapped(note))])


class Tabular(ABC):
    """Shown as a table."""

    @abstractmethod
    def _table(self) -> Table: ...

    def __str__(self) -> str:
        return str(self._table())

    def __rich__(self) -> Any:
        from rich.text import Text

        return Text(str(self), overflow="fold")


def _broken(name: str, width: int) -> list[str]:
    """A name in lines, each of which ends after a space, a comma, an underscore or a bracket if it can."""
    lines = [""]
    for part in re.findall(r"[^\s,_(]*[,_(]?\s*", name):
        if lines[-1] and len(lines[-1]) + len(part.rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return [line[k : k + width].rstrip() for line in lines for k in range(0, len(line) or 1, width)]


def _wrapped(text: str) -> list[str]:
    """A text in lines, each but the first indented; paths are left whole."""
    return textwrap.wrap(
        text, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    ) or [""]


_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def readable_bytes(count: int, beside: int | None = None) -> str:
    """Write a number of bytes with two decimals, `3.52 GiB`; in the unit of the number `beside`, if given."""
    unit, name = common_unit([abs(count if beside is None else beside)])
    return f"{count / unit:.{2 if unit > 1 else 0}f} {name}"


def common_unit(counts: Iterable[int]) -> tuple[int, str]:
    """The unit in which the largest of some numbers of bytes is readable, in bytes, and its name."""
    power = max(max(counts, default=0).bit_length() - 1, 0) // 10
    power = min(power, len(_BINARY_UNITS) - 1)
    return 1024**power, _BINARY_UNITS[power]


def readable_count(count: float) -> str:
    """Write a large number with three digits and a decimal prefix: `12.3 T`."""
    prefixes = ("", "k", "M", "G", "T", "P", "E")
    power = 0
    while abs(count) >= 1000 and power < len(prefixes) - 1:
        count, power = count / 1000, power + 1
    return f"{count:{'.3g' if power else '.0f'}} {prefixes[power]}".rstrip()
