"""Tables of `benchmarks/results` for the documentation, so that no figure is copied by hand."""

import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"

MARKER = re.compile(r"^<!-- table: (\S+) -->$", re.MULTILINE)
"""Where a page wants the table of a file."""

_BYTES = ("temporaries", "total", "host", "announced_bytes", "allocated_bytes", "peak_resident_bytes")
_LEFT_OUT = ("arguments", "outputs", "host_temporaries", "flops_exact")
_UNITS = {"matmul_flops": ("TFLOP", 1e12, 1), "compile_seconds": ("compile seconds", 1, 1)}
_UNITS |= {key: (key.removesuffix("_bytes").replace("_", " ") + ", GiB", 2**30, 2) for key in _BYTES}


def with_tables(page: str) -> str:
    """The page with the table of each file that it marks.

    Raises:
        ValueError: there is no such file.
    """
    return MARKER.sub(lambda found: table(found[1]), page)


def table(name: str) -> str:
    """A file's rows as a Markdown table: memory in GiB, arithmetic in TFLOP, ratios as they are."""
    path = RESULTS / name
    if not path.is_file():
        raise ValueError(f"benchmarks/results has no {name}")
    found = json.loads(path.read_text(encoding="utf-8"))
    if name == "faults.json" or "rows" not in found:
        found = {"rows": [{key: value for key, value in found.items() if isinstance(value, int | float)}]}
    rows = [dict(_cells(row, found["rows"])) for row in found["rows"]]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns, [":---" if column in _words(rows) else "---:" for column in columns]]
    lines += [[row.get(column, "") for column in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _words(rows: list[dict[str, str]]) -> set[str]:
    """The columns that have words in them."""
    return {key for row in rows for key, value in row.items() if re.search("[a-z]{2}", value)}


def _cells(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """The columns of a row with their texts; a column that says the same in all rows is left out."""
    for key, value in row.items():
        if key in _LEFT_OUT or (key == "seconds" and "median_seconds" in row):
            continue
        if isinstance(value, Mapping):
            yield from ((f"{key}: {name}", text) for name, text in _cells(value, [value]))
        elif key in ("refused", "compile_seconds") or (value is not None and _differ(key, rows)):
            yield from _cell(key, value)


def _differ(key: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    return len(rows) == 1 or any(row.get(key) != rows[0].get(key) for row in rows)


def _cell(key: str, value: Any) -> Iterator[tuple[str, str]]:
    label, unit, digits = _UNITS.get(key, (key.replace("_", " "), 1, 3))
    if isinstance(value, list):
        yield f"median {label}", f"{statistics.median(value):,.3f}"
    elif isinstance(value, bool | str) or value is None:
        yield label, str(value).replace("|", "\\|")
    elif isinstance(value, int) and unit == 1 and value < 1e9:
        yield label, f"{value:,}"
    elif isinstance(value, int) and unit == 1:  # products, by the names of programs
        yield f"{label}, TFLOP", f"{value / 1e12:,.3f}"
    else:
        yield label, f"{value / unit:,.{digits}f}"
