"""The errors of usual mistakes, with their texts, are those on the page about them."""

import re
from pathlib import Path

import pytest

pytest.importorskip("flax")
pytest.importorskip("optax")
PAGE = (Path(__file__).parents[1] / "docs/errors.md").read_text(encoding="utf-8")
(SETUP,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
BLOCKS = re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def _entries(block):
    """Lines of code, each with what it raises; without it, they prepare the next."""
    for entry in block.strip().split("\n\n"):
        lines = entry.splitlines()
        code = [line[4:] for line in lines if line.startswith((">>> ", "... "))]
        yield "\n".join(code), lines[len(code) :]


def _texts(error):
    """What is raised, and the same with the notes that this library adds."""
    text = f"{type(error).__name__}: {error}"
    notes = [
        note for note in getattr(error, "__notes__", ()) if not note.startswith("---")
    ]
    return [" ".join(part.split()) for part in (text, " ".join([text, *notes]))]


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    "block", BLOCKS, ids=re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
)
def test_a_mistake_says_what_the_page_says(block):
    names: dict = {}
    exec(SETUP, names)
    for code, lines in _entries(block):
        if not lines:
            exec(code, names)
            continue
        with pytest.raises(Exception) as error:
            exec(code, names)
        shown = re.escape(" ".join(" ".join(lines).split())).replace("…", ".*")
        assert any(re.fullmatch(shown, text) for text in _texts(error.value)), code
        assert sum(map(len, lines)) <= 300, code


def test_the_page_has_the_hundred_most_likely_mistakes():
    assert (
        sum(len(lines) > 0 for block in BLOCKS for _, lines in _entries(block)) >= 100
    )
