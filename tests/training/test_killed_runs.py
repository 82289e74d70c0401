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


def run(folder, *moments):
    """Starts a run once for each list of moments, in processes of one device with little optimization."""
    quick = "--xla_backend_optimization_level=0 --xla_cpu_multi_thread_eigen=false"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "XLA_FLAGS": quick}
    runs = json.dumps([[str(folder), own] for own in moments])
    command = [sys.executable, "-m", "tests.training.killable_run", runs]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    expected = [-9 if own else 0 for own in moments]
    assert done.stdout == json.dumps(expected) + "\n", f"{done.stdout}\n{done.stderr[-3000:]}"


def curve(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in UNREPEATABLE} for line in lines]


def weights(folder):
    optimizer = build_optimizer(OPTIMIZER, TRAINER.num_steps)
    state = load_checkpoint(folder / "checkpoints", TrainState.init(next_byte(30), optimizer))
    assert int(state.step) == TRAINER.num_steps
    return np.asarray(state.model.table)


def assert_as_uninterrupted(folder, whole):
    assert (folder / "result.json").read_text() == (whole / "result.json").read_text()
    assert curve(folder) == curve(whole)
    np.testing.assert_array_equal(weights(folder), weights(whole))
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["16"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(folder, [])
    losses = [line["loss"] for line in curve(folder) if "loss" in line]
    assert len(losses) == 16 and len(set(losses)) == 15  # the first update has a learning rate of zero
    return folder


def test_a_killed_run_ends_like_an_uninterrupted_one(whole, tmp_path):
    folder = tmp_path / "run"
    run(folder, BEFORE_ANY_CHECKPOINT, ABOUT_TO_COMMIT, [])
    assert_as_uninterrupted(folder, whole)


@pytest.mark.slow
def test_a_run_may_be_killed_at_any_moment_of_a_save(whole, tmp_path):
    folder = tmp_path / "run"
    run(folder, *DURING_A_SAVE, [])
    assert_as_uninterrupted(folder, whole)
