import json

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from stacked_remat.training import TrainState, checkpoint, load_checkpoint, save_checkpoint

Embed, Out = hax.make_axes(embed=3, out=2)


def state(out=Out):
    model = hax.nn.Linear.init(Embed, out, key=jax.random.key(0))
    return TrainState.init(model, optax.adam(1e-3))


def test_a_state_comes_back_bit_by_bit(tmp_path):
    saved = state()
    save_checkpoint(tmp_path / "checkpoint", saved, {"n": 1})
    loaded = load_checkpoint(tmp_path / "checkpoint", jax.tree.map(jnp.zeros_like, saved))
    assert eqx.tree_equal(loaded, saved)
    from_shapes = load_checkpoint(tmp_path / "checkpoint", eqx.filter_eval_shape(state))
    assert eqx.tree_equal(from_shapes, saved)
    assert json.loads((tmp_path / "checkpoint" / "config.json").read_text()) == {"n": 1}


def test_a_checkpoint_is_replaced_as_a_whole(tmp_path):
    folder = tmp_path / "checkpoint"
    save_checkpoint(folder, state(), {"n": 1})
    changed = jax.tree.map(lambda leaf: leaf + jnp.ones_like(leaf), state())
    save_checkpoint(folder, changed, {"n": 2})
    assert eqx.tree_equal(load_checkpoint(folder, state()), changed)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_save_that_fails_leaves_the_earlier_checkpoint(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoint"
    save_checkpoint(folder, state(), {"n": 1})

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint.eqx, "tree_serialise_leaves", fail)
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(folder, state(), {"n": 2})
    monkeypatch.undo()
    assert eqx.tree_equal(load_checkpoint(folder, state()), state())
    assert json.loads((folder / "config.json").read_text()) == {"n": 1}


def test_another_model_is_refused(tmp_path):
    save_checkpoint(tmp_path / "checkpoint", state(), {})
    with pytest.raises(ValueError, match=r"does not fit the state.*config.json"):
        load_checkpoint(tmp_path / "checkpoint", state(Out.resize(5)))


def test_a_missing_checkpoint_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"No checkpoint in .*state.eqx is missing"):
        load_checkpoint(tmp_path, state())


def test_half_precision_comes_back(tmp_path):
    saved = {"w": jnp.arange(4, dtype=jnp.bfloat16)}
    save_checkpoint(tmp_path / "checkpoint", saved, {})
    loaded = load_checkpoint(tmp_path / "checkpoint", {"w": jnp.zeros(4, jnp.bfloat16)})
    assert loaded["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(loaded["w"], saved["w"])
