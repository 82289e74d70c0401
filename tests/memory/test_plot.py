"""Tests of `plot`."""

import sys

import jax.numpy as jnp
import pytest

from stacked_remat.memory import Comparison, compare, plot


def programs(remat):
    return lambda x: x @ x


def test_a_png_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    comparison = compare(programs, jnp.ones((8, 8)), candidates=[True, "offload"])
    path = plot(comparison, tmp_path / "memory.png", title="Two policies")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_nothing_to_plot(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="nothing to plot"):
        plot(Comparison(()), tmp_path / "memory.png")


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ImportError, match=r"pip install 'stacked_remat\[plot\]'"):
        plot(Comparison(()), tmp_path / "memory.png")
