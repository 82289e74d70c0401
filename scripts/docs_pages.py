"""Pages of the documentation that are generated when it is built, as hooks of mkdocs."""

from typing import Any

from mkdocs.structure.files import File, Files

from models.run_config import LmRunConfig
from stacked_remat.training import config_reference

_INTRODUCTION = """# Config reference

Every key of the files that `python -m models.train_lm --config_path FILE` reads, with its type, its default
and what it means, made from the dataclasses themselves; `--help` prints the same. On the command line a key
is written by its dotted name, `--trainer.num_steps 500`. `models.plan_lm` reads the same files and adds
`target` and `devices`. [Training runs](training.md) explains includes.

"""


def on_files(files: Files, config: Any) -> Files:
    """Adds the config reference to the pages."""
    page = _INTRODUCTION + config_reference(LmRunConfig)
    files.append(File.generated(config, "config-reference.md", content=page))
    return files
