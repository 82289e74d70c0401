"""Tests of the benchmark of a training step beside PyTorch's."""

import json
import warnings

import jax
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from benchmarks.cpu_step import main

pytestmark = pytest.mark.torch

SMALL = dict(
    layers=2,
    width=16,
    heads=4,
    kv_heads=2,
    head_dim=4,
    experts=4,
    chosen=2,
    inner=8,
    vocab=32,
)
SMALL |= dict(batch=2, positions=16)


@pytest.fixture(autouse=True)
def two_policies(monkeypatch):
    monkeypatch.setattr("benchmarks.cpu_step.REMATS", ("products_saved", True))


def test_losses_and_gradients_are_theirs_and_rows_have_ratios(tmp_path):
    sizes = [f"--{name}={size}" for name, size in SMALL.items()]
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integers
        path = main([*sizes, "--rounds", "2", "--out", str(tmp_path)])
    rows = json.loads(path.read_text())["rows"]
    assert len({(row["name"], row["remat"]) for row in rows}) == len(rows) == 4
    assert all(row["ratio"] > 0 for row in rows)
