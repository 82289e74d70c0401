"""The commands of the page "Train your model" run, one after the other, in an empty folder."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "train-your-model.md"
BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run(block, folder):
    """What a block of commands prints; every command has to succeed."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags, "COLUMNS": "120"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{block}\nsays:\n{done.stdout}"
    return done.stdout


@pytest.mark.torch
@pytest.mark.skipif(
    not all(importlib.util.find_spec(package) for package in ("torch", "transformers")),
    reason="the page loads the exported model with transformers",
)
def test_every_command_of_the_page_runs(tmp_path):
    shown = {}
    for block in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        if not block.startswith("pip install"):
            shown[block] = run(block, tmp_path)

    def of(words):
        (found,) = [text for block, text in shown.items() if words in block]
        return found

    assert "fits 1.00 GiB" in of("models.plan_lm")
    assert "stopped by SIGTERM" in of("kill -TERM") and "stopped with exit status 75" in of("kill -TERM")
    assert "resuming after step" in shown["python -m models.train_lm --config_path my-model.yaml\n"]
    result = json.loads((tmp_path / "runs" / "mine" / "result.json").read_text())
    assert result["held_out_after"]["held_out"] < result["held_out_before"]["held_out"] - 1
    assert len(of("models.generate")) > len("The statement")
    exported = {path.name for path in (tmp_path / "exported").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= exported
