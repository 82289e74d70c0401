"""Tests of benchmarks/faults.py."""

import json

import pytest

from benchmarks.faults import CASES, CONFIG, main


@pytest.mark.parametrize(
    ("options", "name", "cases"),
    [
        pytest.param(
            ["--kills", "0", "--only", "damaged metrics"],
            "faults",
            [("damaged metrics", True, 1)],
            marks=pytest.mark.deep,
        ),
        pytest.param(["--kills", "1", "--streamed"], "faults_streamed", [], marks=pytest.mark.slow),
    ],
)
def test_killed_runs_end_like_uninterrupted_ones_and_faults_in_one_message(
    options, name, cases, tmp_path, monkeypatch
):
    monkeypatch.setattr("benchmarks.faults.CONFIG", CONFIG.replace("num_steps: 150", "num_steps: 20"))
    path = main([*options, "--out", str(tmp_path)])
    assert path.stem == name
    killed, *rows = json.loads(path.read_text())["rows"]
    assert killed["kills"] == int(options[1]) and killed["lines"] >= 20 * killed["runs"]
    assert killed["differing"] == []
    assert [(row["name"], row["passed"], row["status"]) for row in rows] == cases


@pytest.mark.parametrize(
    ("status", "output", "ends_well"),
    [
        (1, "error: config.yaml is empty", True),
        (0, "error: config.yaml is empty", False),
        (1, "Traceback (most recent call last): error: config.yaml is empty", False),
        (1, "error: config.yaml is empty\nerror: again", False),
        (1, "error: something else", False),
    ],
)
def test_a_case_checks_status_and_message(status, output, ends_well):
    case = next(case for case in CASES if case.name == "an empty config.yaml in the run")
    assert case.ends_well(status, output) is ends_well
