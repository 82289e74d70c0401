"""The folder that a run leaves behind."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run's results: the resolved config, the metrics, and the final checkpoint."""

    root: Path

    @property
    def config(self) -> Path:
        """The resolved config, YAML."""
        return self.root / "config.yaml"

    @property
    def metrics(self) -> Path:
        """Metrics, JSON lines."""
        return self.root / "metrics.jsonl"

    @property
    def checkpoint(self) -> Path:
        """The checkpoint, a folder."""
        return self.root / "checkpoint"

    @staticmethod
    def create(root: Path, config: Mapping[str, Any], *, overwrite: bool = False) -> "RunFolder":
        """Makes the folder and writes the resolved config into it.

        Args:
            root: the folder; its parents are made too.
            config: the resolved config.
            overwrite: delete an earlier run's config, metrics and checkpoint, and nothing else.

        Raises:
            FileExistsError: the folder holds an earlier run's results and `overwrite` is false.
        """
        folder = RunFolder(root)
        results = [path for path in (folder.config, folder.metrics, folder.checkpoint) if path.exists()]
        if results and not overwrite:
            raise FileExistsError(
                f"{root} holds the results of an earlier run ({', '.join(path.name for path in results)}). "
                f"Give this run a folder of its own with --trainer.run_dir, or delete those results with "
                f"--trainer.overwrite true."
            )
        for path in results:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        root.mkdir(parents=True, exist_ok=True)
        folder.config.write_text(yaml.safe_dump(dict(config), sort_keys=False), encoding="utf-8")
        return folder
