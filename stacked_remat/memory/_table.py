"""Tables of figures as plain text, and with rich where it is installed."""

import dataclasses
from abc import ABC, abstractmethod
from typing import Any


@dataclasses.dataclass(frozen=True)
class Table:
    """A titled table; the first column is text, the others are right-aligned."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        widths = [max(len(row[k]) for row in (self.columns, *self.rows)) for k in range(len(self.columns))]

        def line(row: tuple[str, ...]) -> str:
            first, *others = zip(row, widths, strict=True)
            cells = [first[0].ljust(first[1]), *(text.rjust(width) for text, width in others)]
            return "  ".join(cells).rstrip()

        rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
        return "\n".join([self.title, line(self.columns), rule, *map(line, self.rows), *self.notes])

    def __rich__(self) -> Any:
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(title=self.title, caption="\n".join(self.notes) or None, caption_justify="left")
        for k, column in enumerate(self.columns):
            # In a narrow terminal text wraps; a policy's name cut short would be useless.
            table.add_column(Text(column), justify="left" if k == 0 else "right", overflow="fold")
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


def readable_bytes(count: int) -> str:
    """Write a number of bytes with two decimals: `3.52 GiB`."""
    return _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB"), ".2f")


def readable_count(count: int) -> str:
    """Write a large number with three digits and a decimal prefix: `12.3 T`."""
    return _scaled(count, 1000, ("", "k", "M", "G", "T", "P", "E"), ".3g").rstrip()


def _scaled(count: float, base: int, units: tuple[str, ...], digits: str) -> str:
    power = 0
    while abs(count) >= base and power < len(units) - 1:
        count, power = count / base, power + 1
    return f"{count:{digits if power else '.0f'}} {units[power]}"
