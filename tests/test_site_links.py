"""Links of the documentation lead to files where the repository is read, and to pages on the site."""

import re
from pathlib import Path

import pytest

from scripts.gallery import with_links_to_pages

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += sorted((ROOT / "docs/gallery").glob("*.py"))
LINK = re.compile(r"""(?:\]\(|(?:src|srcset|href)=")(?!https?:)([^)#"\s]+)(?:#[\w-]+)?[)"]""")


def test_every_relative_link_leads_to_a_file_of_the_repository():
    links = [(page, link) for page in PAGES for link in LINK.findall(text_of(page))]
    dead = [(page.name, link) for page, link in links if not (page.parent / link).exists()]
    assert not dead and len(links) > 100


def text_of(page):
    lines = page.read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(line for line in lines if page.suffix == ".md" or line.startswith("#"))


@pytest.mark.parametrize(
    ("link", "on_site"),
    [
        ("visitor.py", "visitor.md"),
        ("../gallery/llama_lora.py", "../gallery/llama_lora.md"),
        ("data.md#chats", "data.md#chats"),
        ("https://example.com/gallery/visitor.py", "https://example.com/gallery/visitor.py"),
    ],
)
def test_links_to_examples_lead_to_their_pages(link, on_site):
    assert with_links_to_pages(f"see [it]({link}), (x)") == f"see [it]({on_site}), (x)"
