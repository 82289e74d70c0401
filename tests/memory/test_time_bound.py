"""Tests of the bytes that programs move between host and device, and of the time bounds
from them.
"""

import dataclasses

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax
import pytest

from stacked_remat import ScanCheckpointPolicy, Stacked, fused_update, memory
from stacked_remat.memory import TARGETS, TimeBound, count_flops

from ..blocks import Tanh

LAYERS, TOKENS, WIDTH = 7, 3, 8
Layers = hax.Axis("layers", LAYERS)
WEIGHT, CARRY = 4 * WIDTH * WIDTH, 4 * TOKENS * WIDTH  # bytes of one layer's
PRODUCT = 2 * TOKENS * WIDTH * WIDTH


def blocks(dtype=jnp.float32):
    weight = jnp.ones((LAYERS, WIDTH, WIDTH), dtype)
    return jax.device_put(Stacked(Tanh(weight), Layers), jax.memory.Space.Host)


X = jnp.ones((TOKENS, WIDTH))
NESTED_OFFLOAD = ScanCheckpointPolicy(nested=True, save_carries="offload")


def moved(fn, *args):
    found = count_flops(jax.make_jaxpr(fn)(*args))
    assert found.exact
    return found.bytes_from_host, found.bytes_to_host, found.matmul // PRODUCT


@pytest.mark.parametrize(
    ("remat", "replayed", "carries"),
    [
        (True, 0, 0),
        ("offload", 0, LAYERS),
        (
            "nested",
            3,
            0,
        ),  # segments of 4 and 3; the inputs of the last one's layers are kept
        (NESTED_OFFLOAD, 4, 3),  # segments of 3, 2 and 2
        (ScanCheckpointPolicy(max_carries=2), 15, 0),
    ],
)
def test_bytes_of_a_step_with_its_weights_on_the_host(remat, replayed, carries):
    def loss(x, blocks):
        return jnp.sum(blocks.fold(x, remat=remat))

    runs = 2 * LAYERS + replayed  # forward, replay, visits
    reads = runs + 2  # either sweep begins with a layer that is read ahead
    kept = carries * CARRY
    of_x = moved(jax.grad(loss), X, blocks())
    assert of_x == (reads * WEIGHT + kept, kept, runs + LAYERS)

    of_weights = moved(jax.grad(loss, 1), X, blocks())
    written = 2 * LAYERS * WEIGHT  # each layer's gradient, into a buffer of zeros
    assert of_weights == (reads * WEIGHT + kept, written + kept, runs + 2 * LAYERS)

    fused = fused_update(
        lambda blocks, x: loss(x, blocks), optax.sgd(0.1, momentum=0.9)
    )
    state = fused.init(blocks())
    state = eqx.tree_at(
        lambda s: s.stacks, state, jax.device_put(state.stacks, jax.memory.Space.Host)
    )
    step = moved(fused, blocks(), state, X)
    # Momentum is read and written once for each layer, as are the weights that are
    # written.
    assert step == (
        (reads + LAYERS) * WEIGHT + kept,
        2 * LAYERS * WEIGHT + kept,
        runs + 2 * LAYERS,
    )


def test_a_conditional_counts_the_most_in_each_direction():
    def either(x, y):
        return jax.lax.cond(
            x[0, 0] > 0,
            lambda: jax.device_put(y, jax.memory.Space.Device)[:1] @ x,
            lambda: jax.device_put(
                jax.device_put(x, jax.memory.Space.Host), jax.memory.Space.Device
            )[:1],
        )

    x, y = jnp.ones((4, 4)), jax.device_put(jnp.ones((8, 4)), jax.memory.Space.Host)
    found = count_flops(jax.make_jaxpr(either)(x, y))
    assert (found.matmul, found.bytes_from_host, found.bytes_to_host) == (
        2 * 4 * 4,
        4 * 8 * 4,
        4 * 4 * 4,
    )
    assert found.too_high
    same = count_flops(
        jax.make_jaxpr(lambda y: jax.device_put(y, jax.memory.Space.Host))(y)
    )
    assert same.bytes_from_host == same.bytes_to_host == 0  # it is there already


def test_a_report_of_weights_on_the_host_has_its_least_time():
    target = dataclasses.replace(TARGETS["local"], flops=1e9, link=1e6)

    def fold(blocks, x):
        return blocks.fold(x)

    on_host = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=leaf.sharding
        ),
        blocks(),
    )
    for arguments in (blocks(), on_host):
        found = memory.report(fold, arguments, X, target=target)
        read = (LAYERS + 1) * WEIGHT  # one layer is read ahead of the first
        assert found.flops.bytes_from_host == read
        assert found.least_time == TimeBound(LAYERS * PRODUCT / 1e9, read / 1e6)
        assert f"at least {found.least_time.transfer:.3g} s of transfers" in " ".join(
            str(found).split()
        )
        assert "2.00 KiB from the host, 0 B to the host" in str(found)
        assert memory.report(fold, arguments, X).least_time is None
    resident = memory.report(
        fold, jax.device_put(blocks(), jax.memory.Space.Device), X, target=target
    )
    assert resident.least_time is not None and resident.least_time.hidden
    assert "from the host" not in str(resident)
