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
    """Write a number of bytes with three digits or so: `3.52 GiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def readable_count(count: int) -> str:
    """Write a large number with a decimal prefix: `12.3 T`."""
    size = float(count)
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(size) < 1000:
            return f"{size:.0f}" if prefix == "" else f"{size:.3g} {prefix}"
        size /= 1000
    return f"{size:.3g} E"
