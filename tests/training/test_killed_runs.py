"""Runs that are killed with SIGKILL and restarted by the same command end as if never interrupted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from stacked_remat.training import TrainState, build_optimizer, load_checkpoint

from .killable_run import OPTIMIZER, TRAINER
from .next_byte import next_byte

ROOT = Path(__file__).resolve().parents[2]
UNREPEATABLE = {"tokens_per_second", "step_seconds", "peak_memory_bytes"}

BEFORE_ANY_CHECKPOINT = ["step:3"]
ABOUT_TO_COMMIT = ["os.rename:checkpoints/12.orbax-checkpoint-tmp':1"]
DURING_A_SAVE = [
    ["os.mkdir:checkpoints/4.orbax-checkpoint-tmp:1"],
    ["os.mkdir:checkpoints/4.orbax-checkpoint-tmp/state:1"],
    ["os.rename:checkpoints/4.orbax-checkpoint-tmp/:1"],
    ["open:checkpoints/8.orbax-checkpoint-tmp:2"],
    ["os.rename:checkpoints/8.orbax-checkpoint-tmp/:2"],
    ["shutil.rmtree:checkpoints/4:1", "os.remove::3"],
    ["os.rename:checkpoints/16.orbax-checkpoint-tmp':1"],
    ["os.rename:.result.json.:1"],
]


def run(*runs):
    """Starts each run, a folder and moments, in a process of one device with little optimization."""
    quick = "--xla_backend_optimization_level=0 --xla_cpu_multi_thread_eigen=false"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "XLA_FLAGS": quick}
    argument = json.dumps([[str(folder), moments] for folder, moments in runs])
    command = [sys.executable, "-m", "tests.training.killable_run", argument]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    expected = [-9 if moments else 0 for _, moments in runs]
    assert done.stdout == json.dumps(expected) + "\n", f"{done.stdout}\n{done.stderr[-3000:]}"


def curve(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in UNREPEATABLE} for line in lines]


def weights(folder):
    optimizer = build_optimizer(OPTIMIZER, TRAINER.num_steps)
    state = load_checkpoint(folder / "checkpoints", TrainState.init(next_byte(30), optimizer))
    assert int(state.step) == TRAINER.num_steps
    return np.asarray(state.model.table)


def assert_as_uninterrupted(tmp_path, killed):
    """Of a run killed at each of these lists of moments and started once more, and one that is not killed."""
    whole, folder = tmp_path / "whole", tmp_path / "run"
    run((whole, []), *((folder, moments) for moments in killed), (folder, []))
    losses = [line["loss"] for line in curve(whole) if "loss" in line]
    assert len(losses) == len(set(losses)) == 16
    assert (folder / "result.json").read_text() == (whole / "result.json").read_text()
    assert curve(folder) == curve(whole)
    np.testing.assert_array_equal(weights(folder), weights(whole))
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["16"]


@pytest.mark.deep
def test_a_killed_run_ends_like_an_uninterrupted_one(tmp_path):
    assert_as_uninterrupted(tmp_path, [BEFORE_ANY_CHECKPOINT, ABOUT_TO_COMMIT])


@pytest.mark.slow
def test_a_run_may_be_killed_at_any_moment_of_a_save(tmp_path):
    assert_as_uninterrupted(tmp_path, DURING_A_SAVE)
