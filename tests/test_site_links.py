"""Links of the documentation lead to files where the repository is read, and to pages on the site."""

import re
from pathlib import Path

import pytest

from scripts.site_links import links_on_site

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
    ("page", "link", "on_site"),
    [
        ("gallery/index.md", "visitor.py", "visitor.md"),
        ("extending.md", "gallery/visitor.py", "gallery/visitor.md"),
        ("api/lora.md", "../gallery/qwen3_lora.py", "../gallery/qwen3_lora.md"),
        ("index.md", "../benchmarks/results/chart.svg#only-light", "results/chart.svg#only-light"),
        ("api/lora.md", "../../benchmarks/results/chart.png", "../results/chart.png"),
        ("training.md", "../models/run_config.py", "config-reference.md"),
        ("training.md", "data.md#chats", "data.md#chats"),
        ("training.md", "https://example.com/gallery/visitor.py", "https://example.com/gallery/visitor.py"),
    ],
)
def test_links_lead_to_the_pages_of_the_site(page, link, on_site):
    assert links_on_site(f"see [it]({link}), (x)", page) == f"see [it]({on_site}), (x)"
