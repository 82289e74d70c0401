"""Tables of figures as plain text, and with rich where it is installed."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Table:
    """A titled table; the first column is text, the others are right-aligned. Headings may have lines."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        headings = [heading.split("\n") for heading in self.columns]
        height = max(map(len, headings))
        head = list(zip(*([""] * (height - len(lines)) + lines for lines in headings), strict=True))
        widths = [max(map(len, cells)) for cells in zip(*head, *self.rows, strict=True)]

        def line(row: tuple[str, ...]) -> str:
            first, *others = zip(row, widths, strict=True)
            cells = [first[0].ljust(first[1]), *(text.rjust(width) for text, width in others)]
            return "  ".join(cells).rstrip()

        rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
        return "\n".join([self.title, *map(line, head), rule, *map(line, self.rows), *self.notes])

    def __rich__(self) -> Any:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(
            title=self.title,
            caption="\n".join(self.notes) or None,
            caption_justify="left",
            box=SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        for k, column in enumerate(self.columns):
            # In a narrow terminal text wraps; a policy's name cut short would be useless.
            table.add_column(
                Text(column),
                justify="left" if k == 0 else "right",
                overflow="fold",
                no_wrap=k > 0,
            )
        for row in self.rows:
            table.add_row(*map(Text, row))
        return table


class Tabular(ABC):
    """Shown as a table."""

    @abstractmethod
    def _table(self) -> Table: ...

    def __str__(self) -> str:
        return str(self._table())

    def __rich__(self) -> Any:
        return self._table().__rich__()


_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def readable_bytes(count: int) -> str:
    """Write a number of bytes with two decimals: `3.52 GiB`."""
    return _scaled(count, 1024, _BINARY_UNITS, ".2f")


def common_unit(counts: Iterable[int]) -> tuple[int, str]:
    """The unit in which the largest of some numbers of bytes is readable, in bytes, and its name."""
    power = max(max(counts, default=0).bit_length() - 1, 0) // 10
    power = min(power, len(_BINARY_UNITS) - 1)
    return 1024**power, _BINARY_UNITS[power]


def readable_count(count: int) -> str:
    """Write a large number with three digits and a decimal prefix: `12.3 T`."""
    return _scaled(count, 1000, ("", "k", "M", "G", "T", "P", "E"), ".3g").rstrip()


def _scaled(count: float, base: int, units: tuple[str, ...], digits: str) -> str:
    power = 0
    while abs(count) >= base and power < len(units) - 1:
        count, power = count / base, power + 1
    return f"{count:{digits if power else '.0f'}} {units[power]}"
