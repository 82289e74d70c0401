"""Tests of tables in 80 columns."""

import re

import pytest

from stacked_remat.memory._table import as_table, readable_bytes

POLICY = "save_carries='offload', nested=True, first_layers=12, max_carries=1234567"
HEADINGS = ["total", "temp.", "host", "moved", "link", "FLOPs", "compile"]
CELLS = ["1234.56", "123.45", "123.45", "123.45", "123 k", "1.67 ?", "123.4 s"]
NOTE = (
    "link: a sentence that says what a column means, in more words than one line of a"
    " terminal holds"
)


def test_figures_are_whole_and_policies_and_notes_break_in_80_columns():
    text = as_table("plan", [["policy", *HEADINGS], [POLICY, *CELLS]], [NOTE])
    head, rows, notes = re.split("-{20,}", text.replace("\nlink:", "-" * 20 + "link:"))
    assert head.split() == ["plan", "policy", *HEADINGS]
    lines = [line for line in rows.splitlines() if line]
    assert lines[0].endswith("  ".join(["", *map(str.rjust, CELLS, map(len, CELLS))]))
    names = [lines[0].removesuffix("  ".join(CELLS)).strip(), *lines[1:]]
    assert " ".join(names) == POLICY
    assert " ".join(notes.split()) == NOTE
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (2**30, "1.00 GiB"),
        (-3 * 2**19, "-1.50 MiB"),
        (2**60, "1048576.00 TiB"),
    ],
)
def test_bytes_are_readable(count, text):
    assert readable_bytes(count) == text
