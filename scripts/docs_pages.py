"""Pages of the documentation that are generated when it is built, as hooks of mkdocs."""

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
from scripts.result_tables import RESULTS  # noqa: E402
from scripts.site_links import links_on_site  # noqa: E402
from stacked_remat.training import config_reference  # noqa: E402

_INTRODUCTION = """# Config reference

Every key of the files that `python -m models.train_lm --config_path FILE` reads, with its type, its default
and what it means, made from the dataclasses themselves; `--help` prints the same. On the command line a key
is written by its dotted name, `--trainer.num_steps 500`. `models.plan_lm` reads the same files and adds
`target`, `devices` and [what to find](training.md#plan-a-run). [Training runs](training.md) explains
includes.

"""
_REPORTED_MEMORY = "<!-- reported-memory -->"


def on_files(files: Files, config: Any) -> Files:
    """Adds the config reference, plots of results, and the gallery, which it runs."""
    page = _INTRODUCTION + config_reference(LmRunConfig)
    files.append(File.generated(config, "config-reference.md", content=page))
    for plot in sorted(RESULTS.glob("*.svg")):
        files.append(File.generated(config, f"results/{plot.name}", abs_src_path=str(plot)))
    scripts = gallery.examples()
    os.environ["JAX_PLATFORMS"] = "cpu"  # also of the processes
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=2, mp_context=spawn, max_tasks_per_child=1) as pool:
        printed = list(pool.map(gallery.run, scripts))
    for script, outputs in zip(scripts, printed, strict=True):
        name = f"gallery/{script.stem}"
        content = links_on_site(gallery.page(script, outputs), f"{name}.md")
        files.append(File.generated(config, f"{name}.md", content=content))
        files.append(File.generated(config, f"{name}.ipynb", content=gallery.notebook(script, outputs)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Puts in tables of results and links to pages, and refuses a figure that no result has."""
    if page.file.generated_by:  # above: defaults, examples and what programs printed
        return markdown
    try:
        return links_on_site(with_tables(markdown), page.file.src_uri)
    except ValueError as error:
        raise PluginError(f"{page.file.src_uri}: {error}") from None


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Gives the calculator what compile-only reports say."""
    script = f'<script type="application/json" id="reported-memory">{json.dumps(cases())}</script>'
    return html.replace(_REPORTED_MEMORY, script)
