import json

import pytest

from benchmarks.fault_cases import CASES, Outcome
from benchmarks.faults import main

NAMES = ["damaged metrics", "SIGTERM before the first step"]


@pytest.mark.deep
def test_a_killed_run_ends_as_if_it_had_not_been_and_faults_end_in_one_message(tmp_path):
    path = main(["--kills", "1", "--only", *NAMES, "--out", str(tmp_path)])
    found = json.loads(path.read_text())
    assert found["kills"] >= 1 and found["lines"] >= 155 * found["runs"] and found["differing"] == []
    assert {row["name"]: (row["passed"], row["status"]) for row in found["cases"]} == {
        name: (True, 75 if name.startswith("SIG") else 1) for name in NAMES
    }


def test_a_name_of_no_case_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--only", "damaged metric"])
    assert "no case 'damaged metric'. Did you mean 'damaged metrics'?" in capsys.readouterr().err


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
def test_a_case_is_told_from_one_that_fails(status, output, ends_well):
    case = next(case for case in CASES if case.name == "a number for a section")
    assert case.ends_well(Outcome(status, output)) is ends_well
