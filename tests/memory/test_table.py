"""Tests of tables in 80 columns."""

import re

import pytest

from stacked_remat.memory._table import Table, readable_bytes

POLICY = "save_carries='offload',nested=True,first_layers=12,first_policy=True"
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
NOTE = "link: a sentence that says what a column means, in more words than one line of a terminal holds"
TABLE = Table("plan", ("policy", *HEADINGS), ((POLICY, *CELLS),), (NOTE,))


def test_figures_are_whole_and_policies_and_notes_break_in_80_columns():
    head, rows, notes = re.split("-{20,}", str(TABLE).replace("\nlink:", "-" * 20 + "link:"))
    assert head.split()[1:] == " ".join([*HEADINGS_IN_LINES[0], "policy", *HEADINGS_IN_LINES[1]]).split()
    first, *others = (line.strip() for line in rows.splitlines() if line.strip())
    policy, *cells = first.split()
    assert cells == " ".join(CELLS).split() and policy + "".join(others) == POLICY
    assert all(line.endswith((",", "_")) for line in (policy, *others[:-1]))
    assert " ".join(notes.split()) == NOTE
    assert max(map(len, str(TABLE).splitlines())) <= 80


@pytest.mark.parametrize(
    ("count", "beside", "text"),
    [
        (0, None, "0 B"),
        (1023, None, "1023 B"),
        (2**30, None, "1.00 GiB"),
        (-3 * 2**19, None, "-1.50 MiB"),
        (2**29, 2**31, "0.50 GiB"),
        (2**60, None, "1048576.00 TiB"),
    ],
)
def test_bytes_are_readable_in_their_own_unit_or_in_that_of_another_number(count, beside, text):
    assert readable_bytes(count, beside) == text
