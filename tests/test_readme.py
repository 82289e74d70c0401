"""The Python on the README's and the documentation's pages runs, and their tables of policies agree."""

import inspect
import re
import typing
from pathlib import Path

import pytest

from stacked_remat import ScanCheckpointPolicy, ScanCheckpointSpec

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
POLICY_TABLE = re.compile(
    r"^\| `remat=` \| kept for the backward pass \| arithmetic \|\n((?:\|.*\|\n)+)", re.MULTILINE
)


def _program(page: Path) -> str:
    """The Python blocks of a page as one program whose line numbers are those of the page."""
    text = page.read_text(encoding="utf-8")
    lines = [""] * text.count("\n")
    for block in BLOCK.finditer(text):
        first = text[: block.start(1)].count("\n")
        for offset, line in enumerate(block.group(1).splitlines()):
            lines[first + offset] = line
    return "\n".join(lines)


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=_name(page), marks=pytest.mark.deep if page.stem in ("porting", "nnx") else ())
        for page in PAGES
        if _program(page).strip()
    ],
)
def test_the_python_on_the_page_runs(page):
    exec(compile(_program(page), page, "exec"), {"__name__": page.stem})


def _policy_table(text: str) -> list[list[str]]:
    (table,) = POLICY_TABLE.findall(text)
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[1:]]


def test_the_tables_of_policies_agree_and_name_every_alias():
    table = _policy_table(inspect.getdoc(ScanCheckpointPolicy) or "")
    for page in ("README.md", "docs/policies.md"):
        assert _policy_table((ROOT / page).read_text(encoding="utf-8")) == table, page
    named = {code for row in table for code in re.findall(r"`([^`]+)`", row[0])}
    aliases = {
        repr(alias).replace("'", '"')
        for kind in typing.get_args(ScanCheckpointSpec)
        for alias in typing.get_args(kind)
        if isinstance(alias, str)
    }
    assert aliases | {"True", "False"} == {code for code in named if "(" not in code}
