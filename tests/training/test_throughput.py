"""The clock, the peaks of devices, and the count of training FLOPs."""

from pathlib import Path

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stacked_remat import fold
from stacked_remat.training import throughput
from stacked_remat.training.throughput import Clock, peak_memory_bytes, training_flops

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
    assert clock.goodput == 4 / 204
    clock.restart()
    with clock.paused():
        now[0] += 50
    now[0] += 0.5
    clock.tick(6)
    assert clock.step_seconds == 0.5 and clock.tokens_per_second == 12.0


@pytest.mark.parametrize("remat", [False, "nested"])
def test_frozen_weights_have_no_gradient_product(remat):
    """Adapters on frozen layers, with attention's kind of product, after frozen and
    before frozen weights.
    """

    def layer(x, w):
        x = jnp.tanh(x @ w["frozen"] + x @ w["a"] @ w["b"])
        return x + (x @ x.T) @ x

    def loss(model, batch):
        run = fold(layer, hax.Axis("layers", 6), remat=remat)
        return jnp.sum(
            run(jnp.ones((4, 3)) @ model["first"], model["layers"]) @ model["head"]
        ), {}

    shapes = {"frozen": (6, 3, 3), "a": (6, 3, 2), "b": (6, 2, 3)}
    model = {"first": jnp.ones((3, 3)), "head": jnp.ones((3, 5))}
    model["layers"] = {name: jnp.ones(shape) for name, shape in shapes.items()}
    adapters = {
        "first": False,
        "head": False,
        "layers": {"frozen": False, "a": True, "b": True},
    }
    first, frozen, adapter, attention, head = (
        2 * 4 * n for n in (9, 9, 2 * 3 * 2, 2 * 4 * 3, 15)
    )
    expected = first + 6 * (2 * frozen + 3 * adapter + 3 * attention) + 2 * head
    assert training_flops(loss, model, BATCH, eqx.filter(model, adapters)) == expected
    everything = 2 * first + 3 * (6 * (frozen + adapter + attention) + head)
    assert training_flops(loss, model, BATCH) == everything
    shapes = eqx.filter_eval_shape(lambda: model)
    assert training_flops(loss, shapes, BATCH) == everything


def test_flops_that_depend_on_the_data_are_none():
    def loss(weights, batch):
        trips = batch.tokens.array[0, 0]
        return jnp.sum(jax.lax.fori_loop(0, trips, lambda _, w: w @ w, weights)), {}

    assert training_flops(loss, jnp.ones((3, 3)), BATCH) is None


def test_memory_on_a_cpu_is_the_peak_of_the_process():
    # The peak begins again at what is resident
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_memory_bytes()
    held = np.ones(2**26, np.uint8)
    del held
    after = peak_memory_bytes()
    assert before is not None and after is not None and 2**25 < after - before < 2**27
