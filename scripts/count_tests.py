"""Add up JUnit reports and print `N passed, N failed, N skipped`.

    python scripts/count_tests.py [--failed N] [--skipped N] report.xml ...

A report that is missing, unreadable or holds no test counts as one failure. `--failed`
and `--skipped` add steps that write no report. Exits with 1 if anything failed or
nothing passed.
"""

import argparse
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path


def count(report: Path) -> Counter[str]:
    """Tests of one report that `passed`, `failed` (or broke) and were `skipped` (or
    failed as expected).

    A test whose teardown fails as well is still one test.
    """
    try:
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    except (OSError, ElementTree.ParseError):
        cases = []
    if not cases:
        print(f"{report}: no report of tests", file=sys.stderr)
        return Counter(failed=1)
    kinds: dict[tuple[str | None, str | None], set[str]] = {}
    for case in cases:
        kinds.setdefault((case.get("classname"), case.get("name")), set()).update(
            child.tag for child in case
        )
    return Counter(
        (
            "failed"
            if found & {"failure", "error"}
            else "skipped"
            if "skipped" in found
            else "passed"
        )
        for found in kinds.values()
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Add up JUnit reports.")
    parser.add_argument(
        "--failed", type=int, default=0, help="failed steps that write no report"
    )
    parser.add_argument(
        "--skipped", type=int, default=0, help="skipped steps that write no report"
    )
    parser.add_argument("reports", nargs="*", type=Path)
    options = parser.parse_args()
    total = Counter(failed=options.failed, skipped=options.skipped)
    for report in options.reports:
        total.update(count(report))
    print(
        f"{total['passed']} passed, {total['failed']} failed, {total['skipped']}"
        " skipped"
    )
    return 1 if total["failed"] or not total["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
