"""Pages of the documentation that are generated when it is built, as hooks of
mkdocs.
"""

import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

# mkdocs runs this file as a module of no package.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from models.run_config import LmRunConfig  # noqa: E402
from scripts import gallery  # noqa: E402
from scripts.page_tables import with_tables  # noqa: E402
from scripts.reported_memory import cases  # noqa: E402
from stacked_remat.training import config_reference  # noqa: E402


def on_config(config: Any) -> Any:
    """A link to the repository at the top of each page, where it has an address."""
    if address := gallery.repository_address():
        config.repo_url, config.repo_name = address, config.site_name
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages, pictures and notebooks of the gallery, which it runs."""
    scripts = gallery.examples()
    os.environ["JAX_PLATFORMS"] = "cpu"  # also of the processes
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        max_workers=2, mp_context=spawn, max_tasks_per_child=1
    ) as pool:
        printed = list(pool.map(gallery.run_or_read, scripts))
    for script, outputs in zip(scripts, printed, strict=True):
        made = {
            f"gallery/{script.stem}.md": gallery.page(script, outputs, config.repo_url),
            f"gallery/{script.stem}.ipynb": gallery.notebook(
                script, outputs, config.repo_url
            ),
        }
        for name, picture in gallery.pictures(script, outputs).items():
            made[f"gallery/{name}"] = picture
        for name, content in made.items():
            files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Puts in tables, the config reference, links to examples and their pictures;
    refuses a figure that no result has.
    """
    if page.file.generated_by:  # above: examples and what programs printed
        return markdown
    try:
        found = gallery.with_links_to_pages(with_tables(markdown))
        if page.file.src_uri == "gallery/index.md":
            pictures = [Path(uri).name for uri in files.src_uris if uri.endswith("svg")]
            found = gallery.with_thumbnails(found, pictures)
        return found.replace("<!-- config-reference -->", config_reference(LmRunConfig))
    except ValueError as error:
        raise PluginError(f"{page.file.src_uri}: {error}") from None


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Gives the calculator what compile-only reports say."""
    script = (
        '<script type="application/json"'
        f' id="reported-memory">{json.dumps(cases())}</script>'
    )
    return html.replace("<!-- reported-memory -->", script)
