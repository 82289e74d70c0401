"""`scripts/count_tests.py` counts passed, failed and skipped tests."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "count_tests.py"

PASSED = '<testcase classname="tests.test_a" name="{}"/>'
FAILED = (
    '<testcase classname="tests.test_a" name="{}"><failure'
    ' message="no">x</failure></testcase>'
)
BROKEN = (
    '<testcase classname="tests.test_a" name="{}"><error'
    ' message="teardown">x</error></testcase>'
)
SKIPPED = (
    '<testcase classname="tests.test_a" name="{}"><skipped type="pytest.skip"'
    ' message="no"/></testcase>'
)


@pytest.fixture
def write(tmp_path):
    def write_report(name: str, *cases: str) -> Path:
        path = tmp_path / f"{name}.xml"
        path.write_text(
            f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>",
            encoding="utf-8",
        )
        return path

    return write_report


def count(*arguments: str | Path) -> tuple[int, str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout.splitlines()[-1]


def test_reports_are_added_up_and_what_did_not_run_fails(write, tmp_path):
    one = write("one", PASSED.format("a"), PASSED.format("b"), SKIPPED.format("c"))
    two = write("two", PASSED.format("a"))
    failed = write("failed", PASSED.format("a"), FAILED.format("b"))
    broken = write("broken", PASSED.format("a"), BROKEN.format("a"), PASSED.format("b"))
    skipped = write("skipped", SKIPPED.format("a"))
    assert count(one, two) == (0, "3 passed, 0 failed, 1 skipped")
    assert count("--skipped", "1", two) == (0, "1 passed, 0 failed, 1 skipped")
    one_of_two = (1, "1 passed, 1 failed, 0 skipped")
    given = [
        [failed],
        [broken],
        ["--failed", "1", two],
        [two, write("empty")],
        [two, tmp_path / "missing.xml"],
    ]
    assert [count(*arguments) for arguments in given] == [one_of_two] * len(given)
    assert count(skipped) == (1, "0 passed, 0 failed, 1 skipped")
