"""Runs the examples of `docs/gallery`, and makes a page and a notebook of each.

    python -m scripts.gallery docs/gallery/visitor.py    # prints what its cells print, as JSON

An example is a Python script whose cells begin with `# %%`, those of text with `# %% [markdown]`.
"""

import contextlib
import dataclasses
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GALLERY = ROOT / "docs" / "gallery"

_PAGE = re.compile(r"\[([^\]]+)\]\([^)]+\.md[^)]*\)")  # a link that only the site has
_CELL = re.compile(r"^# %%( \[markdown\])?\n", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Cell:
    """A cell of an example.

    Attributes:
        text: Markdown, or Python.
        is_code: whether it is Python.
        line: of the script on which the text begins, from 1.
    """

    text: str
    is_code: bool
    line: int


def examples() -> list[Path]:
    """The scripts of the gallery, in the order of their names."""
    return sorted(GALLERY.glob("*.py"))


def cells_of(script: Path) -> list[Cell]:
    """The cells of an example.

    Raises:
        ValueError: it does not begin with a cell of text whose first line is a title.
    """
    source = script.read_text(encoding="utf-8")
    marks = list(_CELL.finditer(source))
    if not re.match(r"# %% \[markdown\]\n# # ", source):
        raise ValueError(f"{script} must begin with `# %% [markdown]` and a title, `# # Title`")
    ends = [*(mark.start() for mark in marks[1:]), len(source)]
    found = []
    for mark, end in zip(marks, ends, strict=True):
        text, is_code = source[mark.end() : end].strip("\n"), mark[1] is None
        if not is_code:
            text = "\n".join(line.removeprefix("#").removeprefix(" ") for line in text.splitlines())
        found.append(Cell(text, is_code, source[: mark.end()].count("\n") + 1))
    return found


def run(script: Path) -> list[str]:
    """What each cell prints; runs them in this process, one after the other, in one namespace."""
    namespace: dict[str, Any] = {"__name__": script.stem}
    outputs = []
    for cell in cells_of(script):
        printed = io.StringIO()
        if cell.is_code:
            program = compile("\n" * (cell.line - 1) + cell.text, script, "exec")
            with contextlib.redirect_stdout(printed):
                exec(program, namespace)
        outputs.append(printed.getvalue())
    return outputs


def run_apart(script: Path) -> list[str]:
    """`run` in a process of its own, on one CPU device.

    Raises:
        RuntimeError: the example fails; with what it wrote.
        ValueError: fewer than two of its cells print.
    """
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(
        [sys.executable, "-m", "scripts.gallery", str(script)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{script} fails:\n{done.stderr}")
    outputs = json.loads(done.stdout)
    if sum(map(bool, outputs)) < 2:
        raise ValueError(f"{script}: an example prints in at least two cells, to show what happens")
    return outputs


def page(script: Path, outputs: Sequence[str]) -> str:
    """The example as a page, with what each cell printed under it."""
    heading, *rest = cells_of(script)
    title, _, introduction = heading.text.partition("\n")
    files = f"[Notebook]({script.stem}.ipynb){{ download }} · [Python]({script.name}){{ download }}"
    parts = [title, files, introduction.strip()]
    for cell, output in zip(rest, outputs[1:], strict=True):
        parts.append(f"```python\n{cell.text}\n```" if cell.is_code else cell.text)
        if output:
            parts.append(f"```text\n{output.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def notebook(script: Path, outputs: Sequence[str]) -> str:
    """The example as a Jupyter notebook, with what each cell printed, and no links to pages."""
    cells = []
    for number, (cell, output) in enumerate(zip(cells_of(script), outputs, strict=True)):
        text = cell.text if cell.is_code else _PAGE.sub(r"\1", cell.text)
        made: dict[str, Any] = {
            "id": f"cell-{number}",
            "cell_type": "code" if cell.is_code else "markdown",
            "metadata": {},
            "source": text.splitlines(keepends=True),
        }
        if cell.is_code:
            stream = {"output_type": "stream", "name": "stdout", "text": output.splitlines(keepends=True)}
            made |= {"execution_count": None, "outputs": [stream] if output else []}
        cells.append(made)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]))))
