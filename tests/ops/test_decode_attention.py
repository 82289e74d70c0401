"""Tests of `decode_attention` against causal attention over the whole sequence."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from stacked_remat.ops import causal_attention, decode_attention

from ..jaxprs import equations_of
from ..random_arrays import normal

Batch, Slot, HeadDim = Axis("batch", 3), Axis("slot", 9), Axis("head_dim", 6)
KVHeads, HeadsPerKV = Axis("kv_heads", 2), Axis("heads_per_kv", 3)
# The beginning, the middle and the end
Positions = hax.named(jnp.array([0, 4, 8]), Batch)


def sequences(dtype=jnp.float32):
    query = normal(0, Batch, Slot, KVHeads, HeadsPerKV, HeadDim, dtype=dtype)
    key, value = (
        normal(seed, Batch, KVHeads, Slot, HeadDim, dtype=dtype) for seed in (1, 2)
    )
    return query, key, value


def at(query, positions):
    """The query of each row at its position."""
    return query[{Batch: hax.arange(Batch), Slot: positions}]


def attend(query, key, value, positions=Positions, **options):
    return decode_attention(
        query, key, value, Slot, HeadDim, positions=positions, **options
    )


SINKS = normal(9, HeadsPerKV, KVHeads)


@pytest.mark.parametrize(
    ("window", "scale", "sinks", "softcap", "ValueDim"),
    [
        (None, None, None, None, HeadDim),
        (1, None, SINKS, None, HeadDim.resize(4)),
        (4, 0.2, SINKS, 0.7, Axis("value_dim", 8)),
    ],
)
def test_it_is_causal_attention_at_the_position_of_each_row(
    window, scale, sinks, softcap, ValueDim
):
    query, key, value = sequences()
    if ValueDim != HeadDim:
        value = normal(5, Batch, KVHeads, Slot, ValueDim)
    options = dict(window=window, scale=scale, sinks=sinks, softcap=softcap)

    @jax.jit
    def both(positions):
        whole = causal_attention(
            query, key, value, Slot, KVHeads, HeadDim, backend="exact", **options
        )
        return attend(at(query, positions), key, value, positions, **options), at(
            whole, positions
        )

    for positions in [(0, 4, 8), (7, 7, 1)]:
        found, expected = both(hax.named(jnp.array(positions), Batch))
        assert found.axes == (Batch, KVHeads, HeadsPerKV, ValueDim)
        np.testing.assert_allclose(found.array, expected.array, atol=1e-6)


def test_several_positions_of_a_sequence_at_once():
    query, key, value = sequences()
    Pos = Axis("position", Slot.size)
    whole = causal_attention(
        query, key, value, Slot, KVHeads, HeadDim, window=4, backend="exact"
    )
    found = attend(
        query.rename({"slot": "position"}), key, value, hax.arange(Pos), window=4
    )
    np.testing.assert_allclose(found.array, whole.array, atol=1e-6)


def test_axes_may_come_in_any_order():
    query, key, value = sequences()
    own = at(query, Positions)
    turned = attend(
        own.rearrange((HeadDim, HeadsPerKV, Batch, KVHeads)),
        key.rearrange((Slot, HeadDim, KVHeads, Batch)),
        value.rearrange((HeadDim, Batch, Slot, KVHeads)),
    )
    assert turned.axes == (HeadDim, HeadsPerKV, Batch, KVHeads)
    np.testing.assert_allclose(
        turned.rearrange(own.axes).array,
        attend(own, key, value).array,
        rtol=1e-5,
        atol=1e-6,
    )


def test_tangents_are_differences():
    query, key, value = sequences()
    own = at(query, Positions)

    @jax.jit
    def along(step):
        def moved(step):
            return attend(own + step, key - step, value * step, softcap=0.8).array

        return jax.jvp(moved, (step,), (1.0,))[1], moved(step)

    (found, _), (_, ahead), (_, behind) = along(0.5), along(0.51), along(0.49)
    np.testing.assert_allclose(found, (ahead - behind) / 0.02, atol=2e-3)


def test_half_precision_has_wide_scores_and_sums():
    query, key, value = sequences(jnp.bfloat16)
    own = at(query, Positions)
    found = attend(own, key, value)
    exact = attend(*(x.astype(jnp.float32) for x in (own, key, value)))
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.array.astype(jnp.float32), exact.array, atol=2e-2)
    products = [
        one
        for one in equations_of(attend, own, key, value)
        if one.primitive.name == "dot_general"
    ]
    assert [one.params["preferred_element_type"] for one in products] == [
        jnp.float32
    ] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(window=0), "window must be a number of positions, at least 1; got 0"),
        (
            dict(positions=Positions.astype(jnp.float32)),
            "`positions` must be integers; got float32",
        ),
        (
            dict(positions=hax.arange(Axis("other", 2))),
            "`positions` has other=2; .* may have batch=3",
        ),
        (
            dict(sinks=hax.ones((KVHeads, HeadDim))),
            "`sinks` has kv_heads=2, head_dim=6; .* may have",
        ),
        (
            dict(query=sequences()[0]),
            r"query has the axis 'slot' of the cache's slots; rename",
        ),
        (
            dict(key=hax.ones((Batch, KVHeads, HeadDim))),
            "`key` has .*; it must have slot=9, head_dim=6",
        ),
        (
            dict(value=hax.ones((Batch, Slot, HeadDim))),
            "`value` has .*; it must have batch=3, kv_heads=2",
        ),
        (dict(softcap=-1), "softcap must be a positive number, or None .*; got -1"),
        (
            dict(query=hax.ones((Batch, HeadDim))),
            "`query` has .*; it must have batch=3, kv_heads=2",
        ),
    ],
)
def test_arguments_are_checked(change, message):
    query, key, value = sequences()
    arguments = dict(query=at(query, Positions), key=key, value=value) | change
    with pytest.raises(ValueError, match=message):
        attend(**arguments)
