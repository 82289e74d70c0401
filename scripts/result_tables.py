"""Tables of `benchmarks/results` for the documentation, so that no figure is copied by hand."""

import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"

_BYTES = ("temporaries", "total", "host", "peak_resident_bytes")
_BYTES += ("sent", "moved", "needed")
_BYTES += ("arguments", "outputs", "host_temporaries")
_UNITS = {"matmul_flops": ("TFLOP", 1e12, 1), "compile_seconds": ("compile seconds", 1, 1)}
_UNITS |= {"carries": ("carries", 1, 1), "seconds": ("seconds", 1, 1)}
_UNITS |= {key: (key.removesuffix("_bytes").replace("_", " ") + ", GiB", 2**30, 2) for key in _BYTES}
_MEASURED = {*_UNITS, "flops_exact"}
"""The keys that do not say what was run."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """A part of one or more results, as a table.

    A cell is a key of the rows, as `temporaries`; `key / other`, divided by another key of the row; or
    `key / name=value, ...`, divided by the row that differs in these alone.
    """

    files: tuple[str, ...]
    rows: tuple[str, ...]
    """The cells that begin a line; rows of the results that have the same ones share the line. Rows that lack
    one are left out, unless it or all that they have is `refused`."""
    columns: tuple[str, ...] = ()
    """Keys whose values make a column each."""
    cells: tuple[str, ...] = ()
    """What each of those columns shows."""
    only: Mapping[str, str] = field(default_factory=dict)
    """A regular expression of what a key must be."""

    def markdown(self) -> str:
        """The table: memory in GiB, FLOPs in TFLOP; a value that the results lack is a dash.

        Raises:
            ValueError: there is no such file.
        """
        results = [row for file in self.files for row in rows_of(file)]
        chosen = [row for row in results if self._is_chosen(row)]
        found: dict[tuple[str, ...], dict[str, str]] = {}
        for row in chosen:
            texts = {label: text for cell in self.rows for label, text in _shown(cell, row, results)}
            if "refused" not in texts and len(texts) < len({*self.rows} - {"refused"}):
                continue
            line = found.setdefault(tuple(texts.values()), texts)
            column = ", ".join(_heading(key, row[key]) for key in self.columns)
            for label, text in (pair for cell in self.cells for pair in _shown(cell, row, results)):
                line[column if len(self.cells) == 1 else f"{column}: {label}"] = text
        return _lines(list(found.values()))

    def _is_chosen(self, row: Row) -> bool:
        return all(re.fullmatch(pattern, str(row.get(key))) for key, pattern in self.only.items())


def rows_of(name: str) -> list[Row]:
    """The rows of a file, with its target.

    Raises:
        ValueError: there is no such file.
    """
    path = RESULTS / name
    if not path.is_file():
        raise ValueError(f"benchmarks/results has no {name}")
    found = json.loads(path.read_text(encoding="utf-8"))
    shared = {key: found[key] for key in ("target",) if key in found}
    return [dict(_flat({**shared, **row})) for row in found["rows"]]


def values(name: str) -> set[float]:
    """Every number of a file's rows, in GiB, TFLOP and seconds."""
    numbers = [
        (key, value) for row in rows_of(name) for key, value in row.items() if isinstance(value, int | float)
    ]
    return {value / _UNITS.get(key.rpartition(": ")[2], ("", 1))[1] for key, value in numbers}


def _flat(row: Row) -> Iterator[tuple[str, Any]]:
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}: {name}", inner) for name, inner in _flat(value))
        else:
            yield key, value


def _lines(rows: list[dict[str, str]]) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns, [":---" if column in _words(rows) else "---:" for column in columns]]
    lines += [[row.get(column, "–") for column in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _words(rows: list[dict[str, str]]) -> set[str]:
    """The columns that have words in them."""
    return {key for row in rows for key, value in row.items() if re.search("[a-z]{2}", value)}


def _shown(cell: str, row: Row, rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """The label and the text of a cell of a `Table`; nothing where the row lacks it."""
    key, _, divisor = cell.partition(" / ")
    if row.get(key) is None:
        return
    if not divisor:
        yield _cell(key, row[key])
        return
    if "=" not in divisor:
        yield cell, f"{row[key] / row[divisor]:,.2f}"
        return
    wanted = dict(part.split("=") for part in divisor.split(", "))
    label = "FLOPs" if key == "matmul_flops" else key
    to = row[key] / _baseline(row, rows, wanted)[key]
    yield f"{label} / {', '.join(_heading(*item) for item in wanted.items())}", f"{to:,.2f}"


def _baseline(row: Row, rows: Sequence[Row], wanted: Mapping[str, str]) -> Row:
    """The row that has what is wanted, and differs in nothing else that was given."""

    def given(of: Row) -> dict[str, Any]:
        return {key: value for key, value in of.items() if key not in _MEASURED | wanted.keys()}

    found = [other for other in rows if all(str(other[key]) == value for key, value in wanted.items())]
    (base,) = (other for other in found if given(other) == given(row))
    return base


def _heading(key: str, value: Any) -> str:
    text = value if isinstance(value, str) else f"{value:,}"
    return f"{key} {text}" if text[0].isdigit() else text


def _cell(key: str, value: Any) -> tuple[str, str]:
    group, _, name = key.rpartition(": ")
    label, unit, digits = _UNITS.get(name, (name if group else name.replace("_", " "), 1, 3))
    prefix = f"{group.replace('_', ' ')}: " if group else ""
    if isinstance(value, list):
        return f"{prefix}median {label}", f"{statistics.median(value):,.3f}"
    if isinstance(value, bool | str) or value is None:
        return prefix + label, str(value).replace("|", "\\|")
    if isinstance(value, int) and unit == 1 and value < 1e9:
        return prefix + label, f"{value:,}"
    if isinstance(value, int) and unit == 1:  # products, by the names of programs
        return f"{prefix}{label}, TFLOP", f"{value / 1e12:,.3f}"
    return prefix + label, f"{value / unit:,.{digits}f}"
