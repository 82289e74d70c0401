"""Tests of benchmarks/faults.py."""

import json
import re

import pytest

from benchmarks.fault_cases import CASES, CONFIG
from benchmarks.faults import main


@pytest.mark.parametrize(
    ("options", "name", "cases"),
    [
        pytest.param(
            ["--kills", "0", "--only", "an empty config"],
            "faults",
            [("an empty config", True, 1)],
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
    found = json.loads(path.read_text())
    assert (
        found["kills"] == int(options[1])
        and found["lines"] >= 20 * found["runs"]
        and found["differing"] == []
    )
    assert [(row["name"], row["passed"], row["status"]) for row in found["cases"]] == cases


def test_an_unknown_case_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--only", "damaged metric"])
    assert re.search("no case 'damaged metric'. Did you mean .damaged metrics.", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("status", "output", "ends_well"),
    [
        (1, "error: `trainer` is 5, which has no keys", True),
        (0, "error: `trainer` is 5, which has no keys", False),
        (1, "Traceback (most recent call last): error: which has no keys", False),
        (1, "error: which has no keys\nerror: again", False),
        (1, "error: something else", False),
    ],
)
def test_a_case_checks_status_and_message(status, output, ends_well):
    case = next(case for case in CASES if case.name == "a number for a section")
    assert case.ends_well(status, output) is ends_well
