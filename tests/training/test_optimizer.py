"""Optimizers and learning-rate schedules: configs, first updates, decay, and Muon's
matrices.
"""

import functools
from fractions import Fraction
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from stacked_remat import Stacked
from stacked_remat.training import (
    AdafactorConfig,
    AdamWConfig,
    ConstantSchedule,
    CosineSchedule,
    LinearSchedule,
    LionConfig,
    MuonConfig,
    SgdConfig,
    WarmupStableDecaySchedule,
    build_optimizer,
    learning_rate_schedule,
)

# optax's Adam raises a float to an integer power.
pytestmark = pytest.mark.usefixtures("standard_promotion")

Embed, Out, Vocab, Layers = hax.make_axes(embed=3, out=2, vocab=5, layers=4)
ALL = [AdamWConfig, LionConfig, AdafactorConfig, MuonConfig, SgdConfig]
# The first step at the full rate, without clipping or decay.
PLAIN: dict[str, Any] = {
    "warmup": 0,
    "weight_decay": 0.0,
    "max_grad_norm": None,
    "schedule": ConstantSchedule(),
}


def first_update(config, parameters, gradients) -> Any:
    """The first update of the parameters."""
    return _first_update(config)(parameters, gradients)


@functools.cache
def _first_update(config):
    optimizer = build_optimizer(config, 10)
    return jax.jit(
        lambda parameters, gradients: optimizer.update(
            gradients, optimizer.init(parameters), parameters
        )[0]
    )


def rates(schedule, warmup, num_steps=20):
    found = learning_rate_schedule(
        AdamWConfig(learning_rate=0.5, warmup=warmup, schedule=schedule), num_steps
    )
    return np.asarray(
        jax.jit(jax.vmap(lambda step: jnp.asarray(found(step))))(jnp.arange(num_steps))
    )


FALLING: list[Any] = [
    CosineSchedule,
    LinearSchedule,
    functools.partial(WarmupStableDecaySchedule, decay_fraction=0.3),
]


@pytest.mark.parametrize("make", [*FALLING, ConstantSchedule])
def test_the_rate_grows_evenly_to_the_highest_and_falls_to_the_lowest(
    make,
):
    ratio: Any = {} if make is ConstantSchedule else {"min_lr_ratio": 0.2}
    for num_steps, warmup in (
        (1, 0),
        (2, 0),
        (2, 1),
        (3, 1),
        (20, 4),
        (20, 0.2),
        (37, 20),
    ):
        found = rates(make(**ratio), warmup, num_steps)
        steps = int(warmup * num_steps) if warmup < 1 else warmup
        expected = 0.5 * np.arange(1, steps + 2) / (steps + 1)
        np.testing.assert_allclose(found[: steps + 1], expected, rtol=1e-4)
        assert (np.diff(found[steps:]) <= 1e-7).all()
        config = AdamWConfig(learning_rate=0.5, warmup=warmup, schedule=make(**ratio))
        after = float(learning_rate_schedule(config, num_steps)(num_steps))
        np.testing.assert_allclose(
            after, 0.5 * ratio.get("min_lr_ratio", 1.0), rtol=1e-4
        )


@pytest.mark.parametrize("make", FALLING)
def test_no_step_has_a_rate_of_zero(make):
    for num_steps, warmup in ((1, 0), (2, 0), (2, 1), (5, 3), (6, 0.5), (11, 0)):
        found = rates(make(min_lr_ratio=0.0), warmup, num_steps)
        assert (found > 0).all() and np.isfinite(found).all()


def test_the_shapes_of_schedules():
    cosine = rates(CosineSchedule(min_lr_ratio=0.2), 4, 20)
    np.testing.assert_allclose(
        cosine[[12, 16]], [0.3, 0.3 - 0.2 * np.sqrt(0.5)], rtol=1e-5
    )
    linear = rates(LinearSchedule(min_lr_ratio=0.2), 4, 20)
    np.testing.assert_allclose(linear[4:], np.linspace(0.5, 0.1, 17)[:-1], rtol=1e-5)
    wsd = rates(WarmupStableDecaySchedule(decay_fraction=0.25, min_lr_ratio=0.2), 4)
    np.testing.assert_allclose(wsd[4:15], 0.5)
    # Five steps of decay
    np.testing.assert_allclose(wsd[14:], np.linspace(0.5, 0.1, 7)[:-1], rtol=1e-5)
    np.testing.assert_allclose(
        rates(WarmupStableDecaySchedule(decay_fraction=1.0), 0, 2), [0.5, 0.25]
    )


def test_shares_of_steps_are_those_of_the_decimal_number():
    """In binary most of these are a little more or less than they say."""
    for percent in range(100):
        for num_steps in (1, 7, 50, 100, 1000, 12_500):
            nearest = round(Fraction(percent, 100) * num_steps)
            warmup = AdamWConfig(warmup=percent / 100).warmup_steps(num_steps)
            assert warmup == min(nearest, num_steps - 1), (percent, num_steps)
            if percent:
                decay = WarmupStableDecaySchedule(
                    decay_fraction=percent / 100
                ).decay_steps(num_steps)
                assert decay == max(nearest, 1), (percent, num_steps)
    assert (
        AdamWConfig(warmup=1e-5).warmup_steps(10**6) == 10
        and AdamWConfig(warmup=1.0).warmup_steps(9) == 1
    )


def test_schedules_with_too_few_steps_are_refused():
    with pytest.raises(
        ValueError, match=r"warmup = 10 takes 10 steps, but trainer.num_steps = 10"
    ):
        learning_rate_schedule(AdamWConfig(warmup=10), 10)
    late = AdamWConfig(warmup=8, schedule=WarmupStableDecaySchedule(decay_fraction=0.5))
    with pytest.raises(
        ValueError, match=r"takes 5 steps of decay, but the warm-up leaves 2"
    ):
        learning_rate_schedule(late, 10)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            AdamWConfig(**{**PLAIN, "weight_decay": 0.1}, learning_rate=0.1),
            [-0.11, 0.12],
        ),
        (LionConfig(**PLAIN, learning_rate=0.1), [-0.1, 0.1]),
        (SgdConfig(**PLAIN, learning_rate=0.1), [-0.03, 0.01]),
        (SgdConfig(**PLAIN, learning_rate=0.1, nesterov=True), [-0.057, 0.019]),
        (
            SgdConfig(
                **{**PLAIN, "max_grad_norm": 0.1}, learning_rate=1.0, momentum=0.0
            ),
            [-0.09487, 0.03162],
        ),
        (
            AdafactorConfig(**PLAIN, learning_rate=0.1, scale_by_parameter=False),
            [-0.1, 0.1],
        ),
        (
            AdafactorConfig(**PLAIN, learning_rate=0.1),
            [-0.1 * 2.5**0.5, 0.1 * 2.5**0.5],
        ),
    ],
)
def test_first_steps_of_each_method(config, expected):
    parameters, gradients = {"w": jnp.array([1.0, -2.0])}, {"w": jnp.array([0.3, -0.1])}
    np.testing.assert_allclose(
        first_update(config, parameters, gradients)["w"], expected, rtol=1e-4
    )


class OwnNorm(eqx.Module):
    gain: jax.Array


class PreNorm(eqx.Module):
    """A layer and its norm: only the latter is not decayed."""

    norm: eqx.nn.RMSNorm
    layer: eqx.nn.Linear


def test_every_norms_weights_do_not_decay():
    linear = eqx.nn.Linear(3, 3, use_bias=False, key=jax.random.key(0))
    norms = [
        eqx.nn.LayerNorm(4),
        eqx.nn.RMSNorm(4),
        eqx.nn.GroupNorm(2, 4),
        eqx.nn.BatchNorm(4, "batch", mode="batch"),
    ]
    norms += [hnn.LayerNorm.init(Embed), hnn.RmsNorm.init(Embed), OwnNorm(jnp.ones(3))]
    norms += [
        jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), norm) for norm in norms[:3]
    ]
    decayed = [
        PreNorm(eqx.nn.RMSNorm(3), linear),
        eqx.nn.WeightNorm(linear),
        {"norm": linear},
    ]
    parameters = eqx.filter({"norms": norms, "decayed": decayed}, eqx.is_inexact_array)
    still = jax.tree.map(jnp.zeros_like, parameters)
    updates = first_update(
        SgdConfig(**{**PLAIN, "weight_decay": 0.5}), parameters, still
    )
    assert not any(leaf.any() for leaf in jax.tree.leaves(updates["norms"]))
    assert not updates["decayed"][0].norm.weight.any()
    for layer in (
        updates["decayed"][0].layer,
        updates["decayed"][1].layer,
        updates["decayed"][2]["norm"],
    ):
        assert layer.weight.any()


@pytest.mark.parametrize("make", ALL)
def test_every_optimizer_follows_its_schedule_and_decays_weights_alone(make):
    parameters = {
        "norm": hnn.RmsNorm.init(Embed, use_bias=False),
        "linear": hnn.Linear.init(Embed, Out, key=jax.random.key(0)),
    }
    parameters = jax.tree.map(jnp.ones_like, parameters)
    still = jax.tree.map(jnp.zeros_like, parameters)
    config = make(**{**PLAIN, "weight_decay": 0.5, "warmup": 1}, learning_rate=0.1)
    updates = first_update(config, parameters, still)
    np.testing.assert_allclose(updates["linear"].weight.array, -0.025, rtol=1e-6)
    assert (
        not updates["linear"].bias.array.any()
        and not updates["norm"].weight.array.any()
    )
    gradients = {"w": jnp.array([0.1, 0.2, -0.3])}
    warm, whole = (
        first_update(
            make(**{**PLAIN, "warmup": warmup}, learning_rate=0.1),
            {"w": jnp.ones(3)},
            gradients,
        )["w"]
        for warmup in (2, 0)
    )
    np.testing.assert_allclose(3 * warm, whole, rtol=1e-5)


class Block(eqx.Module):
    project: hnn.Linear
    plain: eqx.nn.Linear
    norm: hnn.RmsNorm

    @staticmethod
    def init(*, key):
        return Block(
            hnn.Linear.init(Embed, Out, key=key),
            eqx.nn.Linear(3, 2, key=key),
            hnn.RmsNorm.init(Embed, use_bias=False),
        )


@eqx.filter_jit
def language_model():
    keys = jax.random.split(jax.random.key(0), Layers.size)
    return {
        "layers": Stacked.init(Layers, Block)(key=keys),
        "embedding": hnn.Embedding.init(Vocab, Embed, key=keys[0]),
        "head": hnn.Linear.init(Embed, Vocab, key=keys[1], use_bias=False),
    }


def random_like(tree):
    generator = np.random.default_rng(1)
    return jax.tree.map(
        lambda leaf: jnp.asarray(generator.normal(size=leaf.shape), jnp.float32), tree
    )


def test_muon_orthogonalises_each_layers_matrix_and_uses_adamw_for_the_rest():
    parameters = eqx.filter(language_model(), eqx.is_inexact_array)
    gradients = random_like(parameters)
    config = MuonConfig(**PLAIN, learning_rate=1.0)
    updates = first_update(config, parameters, gradients)
    adamw = optax.adamw(1.0, 0.9, 0.95, weight_decay=0.0, nesterov=True)
    adam: Any = jax.jit(lambda g, p: adamw.update(g, adamw.init(p), p)[0])(
        gradients, parameters
    )
    for weight in (
        updates["layers"].stacked.project.weight,
        updates["layers"].stacked.plain.weight,
    ):
        raw = weight if isinstance(weight, jax.Array) else weight.array
        singular = np.linalg.svd(np.asarray(raw), compute_uv=False)  # of each layer
        assert singular.shape == (4, 2)
        # Newton-Schulz leaves singular values between 0.7 and 1.2, scaled to 0.2 *
        # sqrt(3)
        assert (singular > 0.6 * 0.2 * 3**0.5).all() and (
            singular < 1.3 * 0.2 * 3**0.5
        ).all()
    for part in (
        lambda tree: tree["layers"].stacked.norm.weight.array,
        lambda tree: tree["layers"].stacked.plain.bias,
        lambda tree: tree["embedding"].weight.array,
        lambda tree: tree["head"].weight.array,
    ):
        np.testing.assert_allclose(part(updates), part(adam), rtol=1e-5)


def test_muon_orthogonalises_each_expert_separately():
    Experts = hax.Axis("experts", 2)
    experts = hnn.MoELinear.init(
        Experts, Embed, Out, key=jax.random.key(0), use_bias=False
    )
    gradients = random_like(experts)
    only_first = jax.tree.map(lambda leaf: leaf.at[1].set(0.0), gradients)
    config = MuonConfig(**PLAIN, learning_rate=1.0)
    both, first = (
        first_update(config, experts, g).weight.array for g in (gradients, only_first)
    )
    np.testing.assert_allclose(both[0], first[0], rtol=1e-5)
