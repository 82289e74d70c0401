"""Tests of stacked_remat/training/array_layout.py."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax

from stacked_remat.training import TrainState
from stacked_remat.training.array_layout import arrays_by_name, differences, layout

Embed, Out = hax.make_axes(embed=3, out=2)


def state(out=Out, dtype=jnp.float32):
    model = hax.nn.Linear.init(Embed, out, key=jax.random.key(0), use_bias=False)
    model = jax.tree.map(lambda leaf: leaf.astype(dtype), model)
    return TrainState.init({"head": model, "name": "x", "nothing": None}, optax.adam(1e-3))


def test_arrays_and_shapes_are_named_by_their_paths():
    names = {"step", "skips", "trained.head.weight", "optimizer_state.0.count"}
    names |= {f"optimizer_state.0.{moment}.head.weight" for moment in ("mu", "nu")}
    assert set(arrays_by_name(state())) == names
    assert set(arrays_by_name(eqx.filter_eval_shape(state))) == names
    assert layout(state()) == layout(eqx.filter_eval_shape(state))


def test_differences_name_path_shape_axes_and_dtype():
    assert differences(layout(state()), layout(state())) == []
    other = layout(state(hax.Axis("out", 4), jnp.bfloat16))
    lines = differences(layout(state()), other)
    weight = "float32[out 2, embed 3], expected bfloat16[out 4, embed 3]"
    assert f"mismatched: trained.head.weight is {weight}" in lines
    assert differences({"a": {"shape": [2], "dtype": "int32"}}, {}) == ["unknown: a int32[2]"]
    assert differences({}, {"b": {"shape": [], "dtype": "int32"}}) == ["missing: b int32[]"]
