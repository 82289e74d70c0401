"""Tests that training adapters has no gradients and no optimizer state of frozen
weights.
"""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from haliax import Axis

from stacked_remat import Stacked
from stacked_remat.lora import LoraConfig, apply_lora, lora_filter
from stacked_remat.memory import report
from stacked_remat.training import (
    BATCH_AXIS,
    POSITION_AXIS,
    TokenBatch,
    TrainState,
    TrainStep,
)

from ..blocks import assert_equal, with_remat3
from .stacks import Expert, filled

Layers, Wide, Hidden = hax.make_axes(layers=12, wide=128, hidden=256)
Batch, Pos = Axis(BATCH_AXIS, 1), Axis(POSITION_AXIS, 4)
WEIGHTS = 2 * Layers.size * Wide.size * Hidden.size * 4
# Not False, which keeps the internals of layers: a Haliax linear's scaled weight is
# one.
POLICIES = {"True": True, "nested": "nested", "offload": "offload"}
ADAM = optax.adam(1e-2)


def stack_of(rank, remat=True):
    """A stack with adapters of `rank`, without any where it is None."""
    keys = jax.random.split(jax.random.key(0), Layers.size)
    stack = Stacked.init(Layers, Expert, remat=remat)(Wide, Hidden, key=keys)
    return (
        stack
        if rank is None
        else apply_lora(stack, LoraConfig(rank, 2.0, ("*",)), key=jax.random.key(1))
    )


def state_of(rank, remat):
    stack = stack_of(rank, remat)
    return (
        TrainState.init(stack, ADAM)
        if rank is None
        else TrainState.init(stack, ADAM, lora_filter(stack))
    )


def loss(stack, batch):
    x = hax.broadcast_axis(batch.tokens.astype(jnp.float32), Wide)
    out = stack.fold_via(lambda expert, x: x + expert(x))(x)
    value = hax.mean(out * out).scalar()
    return value, {"loss": value}


STEP = TrainStep(loss, ADAM)


def first_batch():
    tokens = hax.ones((Batch, Pos), dtype=jnp.int32)
    return TokenBatch(tokens, tokens, tokens.astype(jnp.float32))


@pytest.mark.parametrize("remat", with_remat3(POLICIES))
def test_the_compiled_step_holds_no_gradient_of_the_frozen_weights(
    remat, standard_promotion
):
    found = {
        rank: report(
            STEP,
            eqx.filter_eval_shape(first_batch),
            eqx.filter_eval_shape(state_of, rank, remat),
            donate="state",
        )
        for rank in (None, 2)
    }
    assert found[None].temporaries > 0.9 * WEIGHTS
    # One layer's weights, sliced out of the stacks, its adapters' gradients and the
    # carries.
    assert found[2].temporaries < 2 * WEIGHTS / Layers.size
    # Weights and two moments of each, against weights only.
    assert found[None].arguments > 2.9 * WEIGHTS and found[2].arguments < 1.1 * WEIGHTS
    assert found[2].aliased > 0.99 * WEIGHTS
    assert found[2].flops.matmul < 0.8 * found[None].flops.matmul


def test_only_adapters_change(standard_promotion):
    stack = jax.tree.map(
        lambda leaf: leaf / 8, filled(eqx.filter_eval_shape(stack_of, 2), 0)
    )
    state = TrainState.init(stack, ADAM, lora_filter(stack))
    frozen, before = jax.tree.map(
        np.asarray, (eqx.filter(state.frozen, eqx.is_array), state.trained)
    )
    step = eqx.filter_jit(STEP, donate="all-except-first")
    for _ in range(2):
        state, _ = step(first_batch(), state)
    assert_equal(eqx.filter(state.frozen, eqx.is_array), frozen)
    for old, new in zip(
        jax.tree.leaves(before), jax.tree.leaves(state.trained), strict=True
    ):
        assert not np.array_equal(old, new)
