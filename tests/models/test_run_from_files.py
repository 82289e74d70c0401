"""Adapters on frozen weights that stay in their files: a run like one that has the
weights in memory.
"""

import json
import os
import threading

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models.export_hf import main as export
from models.hf_io.stacked_weights import EntriesInFiles
from models.loading import load_model
from models.run_config import LmRunConfig, find_model
from stacked_remat.lora import LoraConfig
from stacked_remat.training import TrainerConfig, UpdateConfig

from ..blocks import assert_close
from .tiny_run import make_workplace, printed, train

PLAIN = ("--optimizer", "{warmup: 0, schedule: {type: constant}}")
LORA = ("--lora", "{rank: 2, targets: ['*_proj', '*experts*']}")
BASE = {"lora": LoraConfig(2), "initialize_from_hf": "x"}
FILES = ("--trainer.streaming", "files")


def losses(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    rows = map(json.loads, lines)
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def test_a_run_equals_one_with_its_weights_in_memory_and_each_resumes_as_the_other(
    tmp_path, capsys
):
    workplace = make_workplace(tmp_path)
    base = workplace / "base"
    assert train(workplace, *PLAIN, "--trainer.num_steps", "1", run="pretrained") == 0
    status, _ = printed(export, "--run_dir", workplace / "pretrained", "--out", base)
    assert status == 0
    options = (*PLAIN, *LORA, "--initialize_from_hf", str(base), "--trainer.num_steps")
    accept = ("--trainer.checkpoint.accept_changes", "true")
    assert train(workplace, *options, "4", run="memory") == 0
    assert train(workplace, *options, "2", *FILES, run="files") == 0
    # Resumed with the weights in memory, and from files again
    assert train(workplace, *options, "3", *accept, run="files") == 0
    tiles = ("--model.tiles", "2")
    assert train(workplace, *options, "4", *accept, *FILES, *tiles, run="files") == 0
    found, expected = (losses(workplace / name) for name in ("files", "memory"))
    assert found.keys() == expected.keys()
    values = [np.array([*of_run.values()]) for of_run in (found, expected)]
    np.testing.assert_allclose(*values, rtol=1e-4)
    merged = [
        load_model(find_model(str(workplace / name))) for name in ("files", "memory")
    ]
    assert_close(*merged, atol=1e-4)
    # Other weights in the files
    (file,) = base.glob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name in tensors if "down_proj" in name)
    tensors[name] = tensors[name] * 1.5
    save_file(tensors, file, {"format": "pt"})
    capsys.readouterr()
    assert train(workplace, *options, "5", *accept, *FILES, run="files") == 1
    assert "other frozen weights" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "the frozen weights under adapters.*Give lora, and initialize_from_hf"),
        ({"lora": LoraConfig(2)}, "Give lora, and initialize_from_hf"),
        (
            BASE | {"update": {"fused": True}},
            "goes with neither trainer.update.fused nor ghost",
        ),
        (
            BASE | {"remat": "auto", "budget": "1GiB"},
            "auto may find a policy like false",
        ),
        (
            BASE | {"remat": False},
            "which would keep what was read of every layer",
        ),
    ],
)
def test_what_does_not_go_with_files_is_refused(fields, message):
    update = UpdateConfig(**fields.pop("update", {}))
    trainer = TrainerConfig(streaming="files", update=update)
    with pytest.raises(ValueError, match=message):
        LmRunConfig(trainer=trainer, **fields)


def test_mistakes_of_a_run_from_files_are_one_line(tmp_path, capsys, monkeypatch):
    workplace = make_workplace(tmp_path)
    pretrained, base = workplace / "pretrained", workplace / "base"
    assert train(workplace, *PLAIN, "--trainer.num_steps", "1", run="pretrained") == 0
    status, _ = printed(export, "--run_dir", pretrained, "--out", base)
    assert status == 0

    def error_of(folder, *more):
        capsys.readouterr()
        options = (*PLAIN, *LORA, *FILES, "--initialize_from_hf", str(folder), *more)
        assert train(workplace, *options) == 1
        return capsys.readouterr().out.splitlines()[-1]

    assert "Write it with models.export_hf" in error_of(pretrained)
    assert not (workplace / "run").exists()
    to_head = ("--lora.targets", "['*']", "--lora.rank", "2")
    assert "lora.targets: '*' is of the head too" in error_of(base, *to_head)
    read = EntriesInFiles.__call__

    def changed(entries, number):
        if threading.current_thread() is not threading.main_thread():
            (file,) = base.glob("*.safetensors")
            os.utime(file, ns=(0, 0))
        return read(entries, number)

    monkeypatch.setattr(EntriesInFiles, "__call__", changed)
    message = error_of(base)
    assert message.startswith("error: ") and "has changed since its weights" in message
