"""Tests of tables in text and in rich, on a narrow terminal."""

import re

import pytest

from stacked_remat.memory._table import Table

POLICY = "ScanCheckpointPolicy(save_carries='offload',nested=True,first_layers=12)"
HEADINGS = (
    "total\nGiB",
    "temp.\nGiB",
    "host\nGiB",
    "moved\nGiB",
    "link\ntokens/s",
    "FLOPs\n/ least",
    "compile\ns",
)
HEADINGS_IN_LINES = list(zip(*(heading.split("\n") for heading in HEADINGS), strict=True))
CELLS = ["1234.56", "123.45", "123.45", "123.45", "123 k", "1.67 ?", "123.4"]
TABLE = Table("plan", ("policy", *HEADINGS), ((POLICY, *CELLS),))


def test_figures_are_whole_and_policies_fold_in_80_columns():
    rich_console = pytest.importorskip("rich.console")
    console = rich_console.Console(width=80)
    with console.capture() as capture:
        console.print(TABLE)
    head, rows = re.split("─+", capture.get())
    assert head.split()[1:] == " ".join([*HEADINGS_IN_LINES[0], "policy", *HEADINGS_IN_LINES[1]]).split()
    first, *others = (line.strip() for line in rows.splitlines() if line.strip())
    policy, *cells = first.split()
    assert cells == " ".join(CELLS).split() and policy + "".join(others) == POLICY


def test_text_has_headings_of_lines_over_their_columns():
    title, *head, rule, row = str(TABLE).splitlines()
    assert title == "plan" and set(rule) == {"-"} and row.startswith(POLICY)
    assert [line.split()[0] for line in head] == ["total", "policy"]
    assert head[0].endswith("compile") and len(head[0]) == len(head[1]) == len(row) == len(rule)
