"""`scripts/count_tests.py` counts passed, failed and skipped tests."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "count_tests.py"

PASSED = '<testcase classname="tests.test_a" name="{}"/>'
FAILED = '<testcase classname="tests.test_a" name="{}"><failure message="no">x</failure></testcase>'
BROKEN = '<testcase classname="tests.test_a" name="{}"><error message="teardown">x</error></testcase>'
SKIPPED = '<testcase classname="tests.test_a" name="{}"><skipped type="pytest.skip" message="no"/></testcase>'


@pytest.fixture
def write(tmp_path):
    def write_report(name: str, *cases: str) -> Path:
        path = tmp_path / f"{name}.xml"
        path.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>", encoding="utf-8")
        return path

    return write_report


def count(*arguments: str | Path) -> tuple[int, str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout.splitlines()[-1]


def test_reports_are_added_up(write):
    one = write("one", PASSED.format("a"), PASSED.format("b"), SKIPPED.format("c"))
    two = write("two", PASSED.format("a"))
    assert count(one, two) == (0, "3 passed, 0 failed, 1 skipped")


def test_a_failure_fails(write):
    report = write("one", PASSED.format("a"), FAILED.format("b"))
    assert count(report) == (1, "1 passed, 1 failed, 0 skipped")


def test_a_test_that_passes_and_breaks_in_teardown_is_one_failure(write):
    report = write("one", PASSED.format("a"), BROKEN.format("a"), PASSED.format("b"))
    assert count(report) == (1, "1 passed, 1 failed, 0 skipped")


def test_a_run_without_tests_fails(write, tmp_path):
    full = write("one", PASSED.format("a"))
    assert count(full, write("two")) == (1, "1 passed, 1 failed, 0 skipped")
    assert count(full, tmp_path / "missing.xml") == (1, "1 passed, 1 failed, 0 skipped")


def test_nothing_but_skipped_tests_fails(write):
    assert count(write("one", SKIPPED.format("a"))) == (1, "0 passed, 0 failed, 1 skipped")


def test_steps_without_a_report_count(write):
    report = write("one", PASSED.format("a"))
    assert count("--skipped", "1", report) == (0, "1 passed, 0 failed, 1 skipped")
    assert count("--failed", "1", report) == (1, "1 passed, 1 failed, 0 skipped")
