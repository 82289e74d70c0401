"""The tables of `benchmarks/results` that pages declare, and the figures in their
sentences.

So no figure is copied by hand.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.record import RESULTS

MARKER = re.compile(r"^<!-- (table|figures): (.*?)\s*-->$", re.MULTILINE | re.DOTALL)
"""Where a page wants a table: files of results, and in the lines below the fields of a
`Table`, as

    <!-- table: stack_memory_h200.json
    rows: name; temporaries
    only: inner=16384
    -->

`figures` shows nothing and says where figures of sentences come from.
"""

_BYTES = (
    "temporaries",
    "total",
    "host",
    "peak_resident_bytes",
    "sent",
    "moved",
    "needed",
)
_BYTES += ("arguments", "outputs", "host_temporaries")
_BYTES += ("resident", "written", "read", "planned_total")
_UNITS = {
    "matmul_flops": ("TFLOP", 1e12, 1),
    "compile_seconds": ("compile seconds", 1, 1),
}
_UNITS |= {"carries": ("carries", 1, 1), "seconds": ("seconds", 1, 1)}
_UNITS |= {
    key: (key.removesuffix("_bytes").replace("_", " ") + ", GiB", 2**30, 2)
    for key in _BYTES
}
_MEASURED = {*_UNITS, "flops_exact", "refused"}
"""The keys that do not say what was run."""

_NOT_SENTENCES = re.compile(
    r"^```.*?^```$|^    .*?$|`[^`]*`|<[^>]*>|\]\([^)]*\)", re.MULTILINE | re.DOTALL
)
_VERSION = re.compile(r"(?:Python|JAX|jax|jaxlib) \d[\d.]*")
_FIGURE = re.compile(
    r"(?<![\w.,/-])(\d[\d,]*(?:\.\d+)?)(?![\w.,/]*\d)"
    r"(?:[ -]?(GiB|MiB|TiB|TFLOP|ms|s|seconds|minutes|%)(?![\w/]))?"
)
_SCALE = {"MiB": 1 / 1024, "TiB": 1024, "ms": 1e-3, "minutes": 60, "%": 1e-2}

Row = Mapping[str, Any]


def with_tables(page: str) -> str:
    """The page with its tables.

    Raises:
        ValueError: there is no such file or table, or a figure (a number with decimals
            or a unit, other than in code) is not in the results that the page names.
    """
    tables = [(kind, declared(text)) for kind, text in MARKER.findall(page)]
    shown = iter(
        [table.markdown() if kind == "table" else "" for kind, table in tables]
    )
    known = {number for _, table in tables for number in table.numbers()}
    missing = [
        text
        for text, value, digit in figures(page)
        if not any(abs(value - k) <= digit for k in known)
    ]
    if missing:
        raise ValueError(
            f"no result of the page has {', '.join(missing)}; name its file by a table"
            " or figures"
        )
    return MARKER.sub(lambda _: next(shown), page)


def figures(page: str) -> Iterator[tuple[str, float, float]]:
    """The figures that a page has itself: texts, values in GiB or seconds, half of
    their last digits.
    """
    text = _VERSION.sub("", _NOT_SENTENCES.sub("", page))
    for found in _FIGURE.finditer(text):
        number, unit = found.groups()
        if unit or "." in number:
            scale = _SCALE.get(unit, 1)
            digits = len(number.partition(".")[2])
            yield (
                found[0],
                float(number.replace(",", "")) * scale,
                0.5001 * 10**-digits * scale,
            )


@dataclass(frozen=True)
class Table:
    """A part of one or more results, as a table.

    A cell is a key of the rows, as `temporaries`, or
    `key / name=value, ...`, divided by the row that differs in these alone.
    """

    files: tuple[str, ...]
    rows: tuple[str, ...] = ()
    """The cells that begin a line; rows of the results that have the same ones share
    the line. Rows that lack one are left out, unless it or all that they have is
    `refused`."""
    columns: tuple[str, ...] = ()
    """Keys whose values make a column each."""
    cells: tuple[str, ...] = ()
    """What each of those columns shows."""
    only: Mapping[str, str] = field(default_factory=dict)
    """A regular expression of what a key must be."""

    def markdown(self) -> str:
        """The table: memory in GiB, FLOPs in TFLOP; a value that the results lack is a
        dash.

        Raises:
            ValueError: there is no such file.
        """
        results = self._results()
        found: dict[tuple[str, ...], dict[str, str]] = {}
        for row in results:
            if not all(
                re.fullmatch(pattern, str(row.get(key)))
                for key, pattern in self.only.items()
            ):
                continue
            texts = {
                label: text
                for cell in self.rows
                for label, text in _shown(cell, row, results)
            }
            if "refused" not in texts and len(texts) < len({*self.rows} - {"refused"}):
                continue
            line = found.setdefault(tuple(texts.values()), texts)
            column = ", ".join(_heading(key, row[key]) for key in self.columns)
            for label, text in (
                pair for cell in self.cells for pair in _shown(cell, row, results)
            ):
                line[column if len(self.cells) == 1 else f"{column}: {label}"] = text
        return _lines(list(found.values()))

    def numbers(self) -> Iterator[float]:
        """The numbers of the table, and of all rows of its files in GiB, TFLOP and
        seconds.
        """
        for text in re.findall(r"\d[\d,]*\.?\d*", self.markdown() if self.rows else ""):
            yield float(text.replace(",", ""))
        for key, value in (pair for row in self._results() for pair in row.items()):
            if isinstance(value, int | float):
                yield value / _UNITS.get(key.rpartition(": ")[2], ("", 1))[1]

    def _results(self) -> list[Row]:
        """The rows of the files, with their targets."""
        if missing := [name for name in self.files if not (RESULTS / name).is_file()]:
            raise ValueError(f"benchmarks/results has no {', '.join(missing)}")
        found = [
            json.loads((RESULTS / name).read_text(encoding="utf-8"))
            for name in self.files
        ]
        return [
            dict(
                _flat({**({"target": one["target"]} if "target" in one else {}), **row})
            )
            for one in found
            for row in one["rows"]
        ]


def declared(text: str) -> Table:
    """The table that a page declares."""
    files, *lines = text.splitlines()
    parts = {
        key: tuple(value.split("; "))
        for key, value in (line.split(": ", 1) for line in lines)
    }
    only = dict(part.split("=", 1) for part in parts.pop("only", ()))
    return Table(tuple(files.split()), only=only, **parts)


def _flat(row: Row) -> Iterator[tuple[str, Any]]:
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}: {name}", inner) for name, inner in _flat(value))
        else:
            yield key, value


def _lines(rows: Sequence[Mapping[str, str]]) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    words = {
        key
        for row in rows
        for key, value in row.items()
        if re.search("[a-z]{2}", value)
    }
    lines = [columns, [":---" if column in words else "---:" for column in columns]]
    lines += [[row.get(column, "–") for column in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _shown(cell: str, row: Row, rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """The label and the text of a cell of a `Table`; nothing where the row lacks it."""
    key, _, divisor = cell.partition(" / ")
    if row.get(key) is None:
        return
    if not divisor:
        yield _cell(key, row[key])
        return
    wanted = dict(part.split("=") for part in divisor.split(", "))
    label = "FLOPs" if key == "matmul_flops" else key
    to = row[key] / _baseline(row, rows, wanted)[key]
    yield (
        f"{label} / {', '.join(_heading(*item) for item in wanted.items())}",
        f"{to:,.2f}",
    )


def _baseline(row: Row, rows: Sequence[Row], wanted: Mapping[str, str]) -> Row:
    """The row that has what is wanted, and differs in nothing else that was given."""

    def given(of: Row) -> dict[str, Any]:
        return {
            key: value
            for key, value in of.items()
            if key not in _MEASURED | wanted.keys()
        }

    found = [
        other
        for other in rows
        if all(str(other[key]) == value for key, value in wanted.items())
    ]
    (base,) = (other for other in found if given(other) == given(row))
    return base


def _heading(key: str, value: Any) -> str:
    text = value if isinstance(value, str) else f"{value:,}"
    return f"{key} {text}" if text[0].isdigit() else text


def _cell(key: str, value: Any) -> tuple[str, str]:
    group, _, name = key.rpartition(": ")
    label, unit, digits = _UNITS.get(
        name, (name if group else name.replace("_", " "), 1, 3)
    )
    label = f"{group.replace('_', ' ')}: {label}" if group else label
    if isinstance(value, bool | str):
        return label, str(value).replace("|", "\\|")
    if isinstance(value, int) and unit == 1:
        return label, f"{value:,}"
    return label, f"{value / unit:,.{digits}f}"
