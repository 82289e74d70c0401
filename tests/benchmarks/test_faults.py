"""Tests of benchmarks/faults.py."""

import json

import pytest

from benchmarks.faults import CASES, CONFIG, main


@pytest.mark.deep
def test_a_killed_run_ends_like_an_uninterrupted_one_and_a_fault_in_one_message(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(
        "benchmarks.faults.CONFIG", CONFIG.replace("num_steps: 150", "num_steps: 20")
    )
    path = main(["--kills", "1", "--only", "damaged metrics", "--out", str(tmp_path)])
    killed, row = json.loads(path.read_text())["rows"]
    assert (
        killed["kills"] == 1
        and killed["lines"] >= 20 * killed["runs"]
        and killed["differing"] == []
    )
    assert (row["name"], row["passed"], row["status"]) == ("damaged metrics", True, 1)


@pytest.mark.parametrize(
    ("status", "output", "ends_well"),
    [
        (1, "error: config.yaml is empty", True),
        (0, "error: config.yaml is empty", False),
        (1, "Traceback (most recent call last): error: config.yaml is empty", False),
        (1, "error: something else", False),
    ],
)
def test_a_case_checks_status_and_message(status, output, ends_well):
    case = next(
        case for case in CASES if case.name == "an empty config.yaml in the run"
    )
    assert case.ends_well(status, output) is ends_well
