"""Tests of tables in text and in rich, on a narrow terminal."""

import pytest

from stacked_remat.memory._table import Table

POLICY = "ScanCheckpointPolicy(save_carries='offload',nested=True,first_layers=12)"
TABLE = Table("plan", ("policy", *(f"column {k}" for k in range(6))), ((POLICY, *["123.45 GiB"] * 6),))


def test_no_policy_is_cut_short():
    rich_console = pytest.importorskip("rich.console")
    console = rich_console.Console(width=80)
    with console.capture() as capture:
        console.print(TABLE)
    rows = [line.split("│")[1].strip() for line in capture.get().splitlines() if line.startswith("│")]
    assert "".join(rows) == POLICY
    assert POLICY in str(TABLE)
