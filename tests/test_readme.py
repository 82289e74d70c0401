"""What the README and the documentation show runs, and the README's map is complete."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MAPPED = ("stacked_remat/", "models/", "benchmarks/", "scripts/")

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MAP_ROW = re.compile(r"^\| `([^`]+)` \| (.*?) \|$", re.MULTILINE)


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


@pytest.mark.parametrize("page", [page for page in PAGES if _program(page).strip()], ids=_name)
def test_the_python_on_the_page_runs(page):
    exec(compile(_program(page), page, "exec"), {"__name__": page.stem})


def _map() -> dict[str, str]:
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## The map\n")[1].split("\n## ")[0]
    return dict(MAP_ROW.findall(section))


def _tracked() -> set[str]:
    git = subprocess.run(["git", "ls-files", *MAPPED], cwd=ROOT, capture_output=True, text=True, check=False)
    if git.returncode != 0:
        pytest.skip("this is no git checkout, so what is tracked is unknown")
    return {path for path in git.stdout.splitlines() if (ROOT / path).exists()}


def test_the_map_names_every_file_and_no_other():
    rows = _map()
    folders = tuple(row for row in rows if row.endswith("/"))
    tracked = _tracked()
    missing = {path for path in tracked if path not in rows and not path.startswith(folders)}
    gone = {
        row
        for row in rows
        if row not in tracked and not (row in folders and any(path.startswith(row) for path in tracked))
    }
    assert not missing, f"the README's map lacks {sorted(missing)}"
    assert not gone, f"the README's map names what is not there: {sorted(gone)}"


def test_every_line_of_the_map_says_something():
    assert all(purpose.strip() for purpose in _map().values())
