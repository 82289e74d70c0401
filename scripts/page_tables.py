"""The tables that pages declare, and the figures in their sentences, which results must have."""

import re
from collections.abc import Iterator

from scripts.result_tables import Table, values

MARKER = re.compile(r"^<!-- (table|figures): (.*?)\s*-->$", re.MULTILINE | re.DOTALL)
"""Where a page wants a table: files of `benchmarks/results`, and in the lines below what of them, as

    <!-- table: stack_memory_h200.json
    rows: name; temporaries
    only: inner=16384
    -->

has it: `rows`, `columns` and `cells` of a `Table`, and `only`.
`figures` shows nothing and says where figures of sentences come from.
"""

_NOT_SENTENCES = re.compile(r"^```.*?^```$|^    .*?$|`[^`]*`|<[^>]*>|\]\([^)]*\)", re.MULTILINE | re.DOTALL)
_VERSION = re.compile(r"(?:Python|JAX|jax|jaxlib) \d[\d.]*")
_FIGURE = re.compile(
    r"(?<![\w.,/-])(\d[\d,]*(?:\.\d+)?)(?![\w.,/]*\d)"
    r"(?:[ -]?(GiB|MiB|TiB|TFLOP|ms|s|seconds|minutes|%)(?![\w/]))?"
)
_SCALE = {"MiB": 1 / 1024, "TiB": 1024, "ms": 1e-3, "minutes": 60, "%": 1e-2}


def with_tables(page: str) -> str:
    """The page with its tables.

    Raises:
        ValueError: there is no such file or table, or a figure (a number with decimals or a unit, other than
            in code) is not in the results that the page names.
    """
    known = _known(page)
    missing = [
        text for text, value, digit in figures(page) if not any(abs(value - k) <= digit for k in known)
    ]
    if missing:
        raise ValueError(
            f"no result of the page has {', '.join(missing)}; name its file by a table or figures"
        )
    return MARKER.sub(lambda found: declared(found[2]).markdown() if found[1] == "table" else "", page)


def declared(text: str) -> Table:
    """The table that a page declares."""
    files, *lines = text.splitlines()
    parts = {key: tuple(value.split("; ")) for key, value in (line.split(": ", 1) for line in lines)}
    only = dict(part.split("=", 1) for part in parts.pop("only", ()))
    return Table(tuple(files.split()), only=only, **{"rows": (), **parts})


def figures(page: str) -> Iterator[tuple[str, float, float]]:
    """The figures that a page has itself: texts, values in GiB or seconds, half of their last digits."""
    text = _VERSION.sub("", _NOT_SENTENCES.sub("", page))
    for found in _FIGURE.finditer(text):
        number, unit = found.groups()
        if unit or "." in number:
            scale = _SCALE.get(unit, 1)
            digits = len(number.partition(".")[2])
            yield found[0], float(number.replace(",", "")) * scale, 0.5001 * 10**-digits * scale


def _known(page: str) -> set[float]:
    """The numbers in the tables of a page, and of all rows of their files."""
    tables = [declared(text) for _, text in MARKER.findall(page)]
    shown = re.findall(r"\d[\d,]*\.?\d*", "".join(table.markdown() for table in tables))
    files = {file for table in tables for file in table.files}
    return {float(number.replace(",", "")) for number in shown}.union(*(values(file) for file in files))
