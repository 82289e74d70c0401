"""Runs the examples of `docs/gallery`, and makes a page of each.

An example is a Python script whose cells begin with `# %%`, those of text with `# %%
[markdown]`.
"""

import contextlib
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
GALLERY = ROOT / "docs" / "gallery"

# A link that works where the repository is read
_EXAMPLE = re.compile(r"(?<=\]\()([\w./-]+)\.py(?=\))")
_CELL = re.compile(r"^# %%( \[markdown\])?\n", re.MULTILINE)


class Cell(NamedTuple):
    """A cell of an example: Markdown or Python, and the line of the script on which it
    begins, from 1.
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
    if not re.match(r"# %% \[markdown\]\n# # ", source):
        raise ValueError(
            f"{script} must begin with `# %% [markdown]` and a title, `# # Title`"
        )
    _, *parts = _CELL.split(source)
    found, line = [], 1
    for mark, part in zip(parts[::2], parts[1::2], strict=True):
        text = part.strip("\n")
        found.append(
            Cell(
                text if mark is None else re.sub("^# ?", "", text, flags=re.M),
                mark is None,
                line + 1,
            )
        )
        line += 1 + part.count("\n")
    return found


def run(script: Path) -> list[str]:
    """What each cell prints; runs them in this process, one after the other, in one
    namespace.

    Raises:
        ValueError: fewer than two of its cells print.
    """
    namespace: dict[str, Any] = {"__name__": script.stem}
    outputs = []
    for cell in cells_of(script):
        printed = io.StringIO()
        if cell.is_code:
            program = compile("\n" * (cell.line - 1) + cell.text, script, "exec")
            with contextlib.redirect_stdout(printed):
                exec(program, namespace)
        outputs.append(printed.getvalue())
    if sum(map(bool, outputs)) < 2:
        raise ValueError(
            f"{script}: an example prints in at least two cells, to show what happens"
        )
    return outputs


def with_links_to_pages(markdown: str) -> str:
    """Links to examples made links to their pages, which only the site has."""
    return _EXAMPLE.sub(r"\1.md", markdown)


def page(script: Path, outputs: Sequence[str]) -> str:
    """The example as a page, with what each cell printed under it."""
    heading, *rest = cells_of(script)
    title, _, introduction = heading.text.partition("\n")
    file = f"[Python, with the cells of a notebook]({script.name}){{ download }}"
    parts = [title, file, with_links_to_pages(introduction.strip())]
    for cell, output in zip(rest, outputs[1:], strict=True):
        parts.append(
            f"```python\n{cell.text}\n```"
            if cell.is_code
            else with_links_to_pages(cell.text)
        )
        if output:
            parts.append(f"```text\n{output.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"
