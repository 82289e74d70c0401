"""The errors of usual mistakes, with their texts, are those on the page about them."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "docs/errors.md").read_text(encoding="utf-8")
(SETUP,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
BLOCKS = re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def _entries(block):
    """Lines of code, each with what it raises; without it, they prepare the next."""
    for entry in block.strip().split("\n\n"):
        code, *lines = entry.splitlines()
        yield code.removeprefix(">>> "), lines


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("block", BLOCKS, ids=re.findall(r"^## (.*)$", PAGE, re.MULTILINE))
def test_a_mistake_says_what_the_page_says(block):
    names: dict = {}
    exec(SETUP, names)
    for code, lines in _entries(block):
        if not lines:
            exec(code, names)
            continue
        with pytest.raises((TypeError, ValueError, IndexError)) as error:
            exec(code, names)
        found = f"{error.type.__name__}: {error.value}"
        assert found.split() == " ".join(lines).split(), code
        assert len(lines) <= 3, code


def test_the_page_has_most_mistakes():
    assert sum(block.count(">>> ") for block in BLOCKS) >= 80
