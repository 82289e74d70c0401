"""Links of the documentation that lead to files of the repository, turned into those of the site's pages."""

import posixpath
import re

_LINK = re.compile(r"(?<=\]\()[\w./-]+")
# Paths from the root of the repository, and what the site has in their place, from its own root.
_ON_THE_SITE = (
    (re.compile(r"docs/gallery/(\w+)\.py"), r"gallery/\1.md"),
    (re.compile(r"benchmarks/results/(\w+\.(?:svg|png))"), r"results/\1"),
    (re.compile(r"models/run_config\.py"), "config-reference.md"),
)


def links_on_site(markdown: str, page: str) -> str:
    """The text of a page with links to what `scripts/docs_pages.py` makes.

    On the pages themselves these are links to examples, plots and the code of the config, which work where
    the repository is read.

    Args:
        markdown: the text of the page.
        page: its path in `docs/`.
    """
    folder = posixpath.dirname(f"docs/{page}")

    def on_site(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[0]))
        for path, made in _ON_THE_SITE:
            if found := path.fullmatch(target):
                return posixpath.relpath(found.expand(made), posixpath.dirname(page) or ".")
        return link[0]

    return _LINK.sub(on_site, markdown)
