"""Tests of rotary embedding against its definition, and of scalings against Hugging
Face's.
"""

import json
import math

import haliax as hax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from stacked_remat.ops import (
    DefaultRotary,
    LinearRotary,
    Llama3Rotary,
    YarnRotary,
    apply_rotary,
    rotary_from_hf,
    rotary_table,
)

from ..random_arrays import normal

Batch, Pos, HeadDim = Axis("batch", 2), Axis("position", 5), Axis("head_dim", 6)
KVHeads = Axis("kv_heads", 2)
THETA = 100.0


def test_rotation_turns_each_pair_by_its_angle():
    x = normal(0, Pos, HeadDim)
    turned = apply_rotary(
        x, rotary_table(hax.arange(Pos), HeadDim, theta=THETA), HeadDim
    ).array
    for position in range(Pos.size):
        for pair in range(3):
            angle = position * THETA ** (-2 * pair / HeadDim.size)
            a, b = float(x.array[position, pair]), float(x.array[position, pair + 3])
            expected = [
                a * np.cos(angle) - b * np.sin(angle),
                b * np.cos(angle) + a * np.sin(angle),
            ]
            np.testing.assert_allclose(turned[position, pair::3], expected, atol=1e-5)


def test_sequences_packed_differently_have_their_own_tables():
    positions = hax.named(jnp.array([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]), (Batch, Pos))
    x = normal(4, Pos, KVHeads, Batch, HeadDim)
    turned = apply_rotary(x, rotary_table(positions, HeadDim, theta=THETA), HeadDim)
    for row in range(Batch.size):
        alone = rotary_table(positions[Batch, row], HeadDim, theta=THETA)
        np.testing.assert_allclose(
            turned[Batch, row].array,
            apply_rotary(x[Batch, row], alone, HeadDim).array,
            atol=1e-6,
        )


def yarn(**change):
    return YarnRotary(
        **(dict(factor=4.0, original_max_position_embeddings=32_768) | change)
    )


def test_a_factor_of_one_is_the_default():
    plain = DefaultRotary().frequencies(128, 1e6)
    for scaling in (
        yarn(factor=1.0),
        LinearRotary(1.0),
        Llama3Rotary(1.0, 8192, 1.0, 4.0),
    ):
        np.testing.assert_allclose(scaling.frequencies(128, 1e6), plain, rtol=1e-12)
        assert scaling.attention_factor_used == 1.0


@pytest.mark.parametrize(
    "scaling",
    [yarn(), yarn(truncate=False), Llama3Rotary(4.0, 8192, 1.0, 4.0)],
    ids=str,
)
def test_slow_pairs_are_interpolated_and_fast_ones_are_not(scaling):
    plain = DefaultRotary().frequencies(128, 1e6)
    ratio = plain / scaling.frequencies(128, 1e6)
    turns = plain * scaling.original_max_position_embeddings / (2 * math.pi)
    fast, slow = (32, 1) if isinstance(scaling, YarnRotary) else (4, 1)
    # Rounded outwards, the ramp may begin a pair early and end a pair late.
    np.testing.assert_allclose(ratio[turns > fast * 1.25], 1.0, rtol=1e-12)
    np.testing.assert_allclose(ratio[turns < slow / 1.25], 4.0, rtol=1e-12)
    between = ratio[(turns < fast / 1.25) & (turns > slow * 1.25)]
    assert (
        len(between) > 2
        and np.all(np.diff(between) > 0)
        and between[0] > 1
        and between[-1] < 4
    )


def test_the_attention_factor_multiplies_cosines_and_sines():
    plain = rotary_table(hax.arange(Pos), HeadDim, theta=THETA)
    for scaling, factor in (
        (yarn(factor=1.0, attention_factor=1.5), 1.5),
        (yarn(factor=1.0), 1.0),
        (yarn(factor=math.e, mscale=2.0, mscale_all_dim=1.0), 1.2 / 1.1),
        (yarn(factor=math.e), 1.1),
    ):
        assert scaling.attention_factor_used == pytest.approx(factor, abs=1e-12)
        if scaling.factor == 1.0:
            table = rotary_table(hax.arange(Pos), HeadDim, theta=THETA, scaling=scaling)
            np.testing.assert_allclose(
                table.cos.array, plain.cos.array * factor, rtol=1e-6
            )
            np.testing.assert_allclose(
                table.sin.array, plain.sin.array * factor, rtol=1e-6
            )


def from_hf(**parameters):
    return rotary_from_hf(parameters or None, max_position_embeddings=40_960)


def test_scalings_are_read_from_configs_new_and_old():
    assert (
        from_hf()
        == from_hf(rope_type="default")
        == from_hf(type="default")
        == DefaultRotary()
    )
    assert from_hf(type="linear", factor=2.0) == LinearRotary(2.0)
    given = dict(factor=4.0, original_max_position_embeddings=32_768)
    assert (
        from_hf(rope_type="yarn", **given)
        == from_hf(type="yarn", beta_fast=None, **given)
        == yarn()
    )
    assert from_hf(rope_type="yarn", factor=2.0) == YarnRotary(2.0, 40_960)
    assert from_hf(
        rope_type="yarn", original_max_position_embeddings=10_240
    ) == YarnRotary(4.0, 10_240)
    assert from_hf(rope_type="yarn", mscale=1.0, **given) == yarn()
    with_both = dict(mscale=1.0, mscale_all_dim=0.8, **given)
    assert from_hf(rope_type="yarn", **with_both) == yarn(
        mscale=1.0, mscale_all_dim=0.8
    )
    assert from_hf(rope_type="yarn", attention_factor=1.2, **with_both) == yarn(
        attention_factor=1.2
    )


def yarn_in_hf(factor, original=4096, **more):
    return dict(
        rope_type="yarn",
        factor=factor,
        original_max_position_embeddings=original,
        **more,
    )


@pytest.mark.torch
@pytest.mark.parametrize(
    "parameters",
    [
        yarn_in_hf(None),
        yarn_in_hf(8.0, attention_factor=1.3),
        yarn_in_hf(40.0, mscale=1.0, mscale_all_dim=0.707),
        yarn_in_hf(40.0, mscale=0.707),
        yarn_in_hf(2.0, 2048, truncate=False),
        yarn_in_hf(2.0, 4, truncate=True),
        yarn_in_hf(2.0, 64, beta_fast=2.0, beta_slow=2.0),
        dict(
            rope_type="llama3",
            factor=8.0,
            original_max_position_embeddings=8192,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        ),
        dict(
            rope_type="llama3",
            factor=16.0,
            original_max_position_embeddings=8192,
            low_freq_factor=1.0,
            high_freq_factor=1.0,
        ),
    ],
    ids=json.dumps,
)
def test_scalings_are_those_of_hugging_face(parameters, head_dim=64, theta=1e4):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        head_dim=head_dim,
        max_position_embeddings=40_960,
        rope_parameters=dict(parameters, rope_theta=theta),
    )
    reference = (
        transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeRotaryEmbedding(config)
    )
    scaling = rotary_from_hf(parameters, max_position_embeddings=40_960)
    np.testing.assert_allclose(
        scaling.frequencies(head_dim, theta), reference.inv_freq.numpy(), rtol=1e-6
    )
    assert scaling.attention_factor_used == pytest.approx(
        reference.attention_scaling, rel=1e-6
    )


def table(**change):
    return rotary_table(
        **dict(positions=hax.arange(Pos), HeadDim=HeadDim, theta=THETA) | change
    )


def turned(*axes):
    return apply_rotary(hax.ones(axes), table(), HeadDim)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: table(positions=hax.zeros(Pos)),
            "`positions` must be integers; got float32",
        ),
        (
            lambda: table(positions=hax.arange(HeadDim)),
            "positions already have the axis 'head_dim'",
        ),
        (
            lambda: table(HeadDim=HeadDim.resize(5)),
            "needs an even number of coordinates; a head has 5",
        ),
        (
            lambda: table(theta=1.0),
            "theta, the base of the wavelengths, must be above 1; got 1.0",
        ),
        (
            lambda: turned(Pos.resize(3), HeadDim),
            "`x` has position=3, .*it must have position=5",
        ),
        (
            lambda: turned(Pos, HeadDim.resize(8)),
            "`x` has position=5, head_dim=8; .* head_dim=6",
        ),
        (
            lambda: LinearRotary(0.5),
            "linear: factor must be a number of at least 1, got 0.5",
        ),
        (
            lambda: yarn(original_max_position_embeddings=0),
            "yarn: original_max_position_embeddings must be",
        ),
        (
            lambda: yarn(beta_slow=64.0),
            "beta_slow = 64.0 must be positive and at most beta_fast = 32.0",
        ),
        (
            lambda: yarn(mscale=1.0),
            "mscale = 1.0 and mscale_all_dim = None have an effect only together",
        ),
        (
            lambda: yarn(attention_factor=1.0, mscale=1.0, mscale_all_dim=1.0),
            "attention_factor and mscale can't both be set",
        ),
        (
            lambda: Llama3Rotary(8.0, 8192, 4.0, 3.0),
            "low_freq_factor = 4.0 must be positive and at most",
        ),
        (
            lambda: from_hf(rope_type="dynamic", factor=2.0),
            (
                "rope_type 'dynamic' is not supported. Those that are: default, linear,"
                " llama3, yarn"
            ),
        ),
        (
            lambda: from_hf(rope_type="linear", factor=2.0, beta_fast=3.0),
            "'linear' has no beta_fast. It has: factor",
        ),
        (
            lambda: from_hf(rope_type="default", factor=2.0),
            "'default' has no factor. It has: no fields",
        ),
        (
            lambda: from_hf(rope_type="llama3", factor=8.0),
            "'llama3' needs high_freq_factor, low_freq_factor",
        ),
        (
            lambda: from_hf(partial_rotary_factor=0.5),
            "partial_rotary_factor is not supported",
        ),
    ],
)
def test_mistakes(call, message):
    with pytest.raises(ValueError, match=message):
        call()
