"""The documentation's page of benchmarks has a table of every result, with commands that exist."""

import importlib.util
import json
import re

import pytest

from scripts.reported_memory import cases
from scripts.result_tables import MARKER, RESULTS, table

PAGE = RESULTS.parents[1] / "docs" / "benchmarks.md"
TEXT = PAGE.read_text(encoding="utf-8")
TABLES = MARKER.findall(TEXT)


def test_every_result_is_in_a_table():
    results = {str(path.relative_to(RESULTS)) for path in RESULTS.rglob("*.json")}
    assert results == {*TABLES, *(case["source"] for case in cases())}
    commands = set(re.findall(r"\bbenchmarks\.(\w+)", TEXT))
    assert commands and all(importlib.util.find_spec(f"benchmarks.{name}") for name in commands)


@pytest.mark.parametrize("name", TABLES)
def test_a_table_has_every_row_and_the_memory_of_the_file(name):
    rows = json.loads((RESULTS / name).read_text(encoding="utf-8")).get("rows", [{}])
    head, _, *lines = table(name).splitlines()
    assert len(lines) == len(rows) and len({line.count(" | ") for line in (head, *lines)}) == 1
    for row, line in zip(rows, lines, strict=True):
        if "temporaries" in row:
            assert f"| {row['temporaries'] / 2**30:,.2f} |" in line


def test_an_unknown_result_is_an_error():
    with pytest.raises(ValueError, match="no missing.json"):
        table("missing.json")
