from types import SimpleNamespace

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stacked_remat import fold
from stacked_remat.training import RandomLoss, peak_flops, throughput, training_flops
from stacked_remat.training.throughput import Clock, peak_memory_bytes

from .token_batches import held_out_of

BATCH = held_out_of(np.arange(40, dtype=np.uint16), 8, 2).batch(0)


def test_the_clock_leaves_out_the_first_step_and_pauses(monkeypatch):
    now = [10.0]
    monkeypatch.setattr(throughput.time, "monotonic", lambda: now[0])
    clock = Clock()
    now[0] += 100  # compiling
    clock.tick(6)
    assert np.isnan(clock.step_seconds) and np.isnan(clock.tokens_per_second)
    for seconds in (1.0, 3.0):
        now[0] += seconds
        clock.tick(6)
        with clock.paused():
            now[0] += 50
    assert clock.step_seconds == 2.0 and clock.tokens_per_second == 3.0
    clock.restart()
    with clock.paused():
        now[0] += 50
    now[0] += 0.5
    clock.tick(6)
    assert clock.step_seconds == 0.5 and clock.tokens_per_second == 12.0


@pytest.mark.parametrize(
    ("kind", "flops"),
    [("NVIDIA H200", 989e12), ("TPU v5p", 459e12), ("TPU v6 lite", 918e12), ("cpu", None), ("TPU v99", None)],
)
def test_peaks_go_by_what_jax_calls_a_device(kind, flops):
    assert peak_flops(SimpleNamespace(device_kind=kind)) == flops


@pytest.mark.parametrize("remat", [False, True, "nested"])
def test_flops_are_those_of_the_model_whatever_is_computed_again(remat):
    def layer(x, w):
        return hax.tanh(hax.dot(x, w, axis="in").rename({"out": "in"}))

    def loss(weights, batch):
        x = hax.ones(hax.make_axes(row=4, **{"in": 3}))
        return hax.sum(fold(layer, "layers", remat=remat)(x, weights)).scalar(), {}

    weights = hax.named(jnp.ones((6, 3, 3)), ("layers", "in", "out"))
    assert training_flops(loss, weights, BATCH) == 3 * 6 * 2 * 4 * 3 * 3


def test_a_loss_that_draws_random_numbers_is_counted_too():
    def loss(weights, batch, key):
        return jnp.sum(jnp.ones((4, 3)) @ weights) * jax.random.uniform(key), {}

    assert training_flops(RandomLoss(loss), jnp.ones((3, 5)), BATCH) == 3 * 2 * 4 * 3 * 5


def test_flops_that_depend_on_the_data_are_not_claimed():
    def loss(weights, batch):
        trips = batch.tokens.array[0, 0]
        return jnp.sum(jax.lax.fori_loop(0, trips, lambda _, w: w @ w, weights)), {}

    assert training_flops(loss, jnp.ones((3, 3)), BATCH) is None


def test_memory_on_a_cpu_is_that_of_the_process():
    assert (peak_memory_bytes() or 0) > 50 * 2**20
