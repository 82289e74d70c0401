"""Runs the examples of `docs/gallery`, and makes a page and a notebook of each.

An example is a Python script whose cells begin with `# %%`, those of text with `# %%
[markdown]`, as Jupytext reads them. A cell shows what it prints, and the picture that
it names `figure` (matplotlib). Both are kept by content: an example is run again once
the script, the code of the repository or a version has changed.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import io
import json
import os
import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stacked_remat import __version__

ROOT = Path(__file__).resolve().parents[1]
GALLERY = ROOT / "docs" / "gallery"

# A link that works where the repository is read
_EXAMPLE = re.compile(r"(?<=\]\()([\w./-]+)\.py(?=\))")
# A row of the table of examples, with a link to a page
_ROW = re.compile(r"^(\| \[.*\]\((\w+)\.md\))", re.MULTILINE)
_ALT_TEXT = "what the cell drew"  # by which docs/stylesheets/site.css finds it
_CELL = re.compile(r"^# %%( \[markdown\])?\n", re.MULTILINE)
# Some examples import `models`, which only a checkout has
_IN_COLAB = """\
import sys

if "google.colab" in sys.modules:
    !git clone --quiet --branch v{version} {repository} stacked_remat
    %cd stacked_remat
    %pip install --quiet '.[train,nnx]' matplotlib"""


class Cell(NamedTuple):
    """A cell of an example: Markdown or Python, and the line of the script on which it
    begins, from 1.
    """

    text: str
    is_code: bool
    line: int


class Output(NamedTuple):
    """What a cell printed, and the picture that it drew, as SVG; empty for none."""

    text: str
    picture: str = ""


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
    found = []
    line = 1
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


def run(script: Path) -> list[Output]:
    """What each cell shows; runs them in this process, one after the other, in one
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
        figure = namespace.pop("figure", None)
        outputs.append(
            Output(printed.getvalue(), "" if figure is None else svg(figure))
        )
    if sum(bool(output.text) for output in outputs) < 2:
        raise ValueError(
            f"{script}: an example prints in at least two cells, to show what happens"
        )
    return outputs


def svg(figure: Any) -> str:
    """A figure of matplotlib as SVG, the same each time that it is drawn."""
    import matplotlib

    drawn = io.StringIO()
    # Words are text, and ids of elements depend on nothing else.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "gallery"}):
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return drawn.getvalue()


def run_or_read(script: Path) -> list[Output]:
    """What each cell shows, from the folder in `KEPT_GALLERY` if it is there."""
    folder = os.environ.get("KEPT_GALLERY")
    if not folder:
        return run(script)
    digest = hashlib.sha256(script.read_bytes() + _everything_used().encode())
    file = Path(folder) / f"{script.stem}-{digest.hexdigest()[:32]}.json"
    if file.exists():
        return [Output(*one) for one in json.loads(file.read_text(encoding="utf-8"))]
    outputs = run(script)
    file.parent.mkdir(parents=True, exist_ok=True)
    # Whole or not at all: another build may read the folder
    unfinished = file.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(outputs), encoding="utf-8")
    unfinished.replace(file)
    return outputs


@functools.cache
def _everything_used() -> str:
    """What decides the output of an example beside its script."""
    digest = hashlib.sha256()
    for folder in ("stacked_remat", "models", "scripts"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            digest.update(file.read_bytes())
    versions = [
        f"{package.name} {package.version}"
        for package in importlib.metadata.distributions()
    ]
    return f"{digest.hexdigest()} {sys.version} {sorted(versions)}"


def repository_address() -> str | None:
    """The address of the repository, where `pyproject.toml` has one."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)["project"].get("urls", {}).get("Repository")


def colab_address(script: Path, repository: str | None) -> str:
    """Where Colab opens the notebook, from the branch of the published site; empty
    where the repository is not on GitHub.
    """
    name = (repository or "").partition("https://github.com/")[2]
    file = f"blob/gh-pages/{__version__}/gallery/{script.stem}.ipynb"
    return name and f"https://colab.research.google.com/github/{name}/{file}"


def notebook(
    script: Path, outputs: Sequence[Output], repository: str | None = None
) -> str:
    """The example as a notebook (nbformat 4.5), with what each cell showed, and a cell
    that installs what it needs in Colab.
    """
    cells = []
    shown = [*zip(cells_of(script), outputs, strict=True)]
    if repository:
        setup = _IN_COLAB.format(version=__version__, repository=repository)
        shown.insert(1, (Cell(setup, is_code=True, line=0), Output("")))
    for number, (cell, output) in enumerate(shown):
        entry: dict[str, Any] = {
            "cell_type": "code" if cell.is_code else "markdown",
            "id": f"cell-{number}",
            "metadata": {},
            "source": cell.text,
        }
        if cell.is_code:
            entry |= {"execution_count": None, "outputs": _shown(output)}
        cells.append(entry)
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    content = {
        "cells": cells,
        "metadata": {"kernelspec": kernel},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(content, indent=1, ensure_ascii=False)


def _shown(output: Output) -> list[dict[str, Any]]:
    """An output in a notebook's format."""
    found: list[dict[str, Any]] = []
    if output.text:
        stream = {"output_type": "stream", "name": "stdout", "text": output.text}
        found.append(stream)
    if output.picture:
        data = {"image/svg+xml": output.picture}
        found.append({"output_type": "display_data", "metadata": {}, "data": data})
    return found


def pictures(script: Path, outputs: Sequence[Output]) -> dict[str, str]:
    """The pictures of an example by the names of their files, as its page has them."""
    found = {}
    for number, output in enumerate(outputs):
        if output.picture:
            found[_picture_name(script, number)] = output.picture
    return found


def _picture_name(script: Path, number: int) -> str:
    return f"{script.stem}-{number}.svg"


def with_links_to_pages(markdown: str) -> str:
    """Links to examples made links to their pages, which only the site has."""
    return _EXAMPLE.sub(r"\1.md", markdown)


def with_thumbnails(markdown: str, pictures: Sequence[str]) -> str:
    """The table of examples with the first picture of each that has one, by the names
    of all pictures.
    """

    def with_picture(row: re.Match[str]) -> str:
        names = [name for name in pictures if re.fullmatch(rf"{row[2]}-\d+.svg", name)]
        if not names:
            return row[0]
        return f"{row[0]}<br>![{_ALT_TEXT}]({names[0]}){{ width=240 loading=lazy }}"

    return _ROW.sub(with_picture, markdown)


def page(script: Path, outputs: Sequence[Output], repository: str | None = None) -> str:
    """The example as a page, with what each cell showed under it."""
    heading, *rest = cells_of(script)
    title, _, introduction = heading.text.partition("\n")
    file = (
        f"[Notebook]({script.stem}.ipynb){{ download }}, or the same as"
        f" [Python]({script.name}){{ download }}"
    )
    if address := colab_address(script, repository):
        file += f", or [open it in Colab]({address})"
    parts = [title, file, with_links_to_pages(introduction.strip())]
    for number, cell in enumerate(rest, 1):
        output = outputs[number]
        parts.append(
            f"```python\n{cell.text}\n```"
            if cell.is_code
            else with_links_to_pages(cell.text)
        )
        if output.text:
            parts.append(f"```text\n{output.text.rstrip()}\n```")
        if output.picture:
            parts.append(f"![{_ALT_TEXT}]({_picture_name(script, number)})")
    return "\n\n".join(parts) + "\n"
