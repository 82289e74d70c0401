"""Blocks, losses and the Python loop for the tests of the sweep."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from stacked_remat._remat import Remat
from stacked_remat._schedule import Schedule, shrinking
from stacked_remat._static import Static
from stacked_remat._sweep.api import run_layers
from stacked_remat._sweep.trace import UntracedLayer, trace_layers

from .blocks import quick_jit

WIDTH, ROWS = 4, 3

jit = quick_jit


def sweep(body, init, xs, *, length, unsliced=None, reverse=False, unroll=1, **fields):
    """`lax.scan(body, init, xs)` by a sweep that follows a `Remat` with these fields."""

    def layer(_, carry, x):
        carry, y = body(carry, x)
        arrays, rest = eqx.partition(y, eqx.is_array_like)
        return carry, (arrays, Static(rest))

    stacks = jax.tree.leaves(xs)
    assert all(len(leaf) == length for leaf in stacks)
    masks = [unsliced or [False] * len(stacks)]
    remat = Remat(length, **fields)
    traced = trace_layers([UntracedLayer(layer, [], xs, masks[0])], init, offloads=remat.offloads)
    given = traced[0].init, [stacks]
    carry, (ys,) = run_layers(traced, masks, *given, remat=remat, reverse=reverse, unroll=unroll)
    return carry, ys


def stack(length: int, dtype=jnp.float32) -> dict:
    """Layers with weights, an integer, a typed key and `None`."""
    keys = jax.random.split(jax.random.key(length), 3)
    return {
        "w": 0.5 * jax.random.normal(keys[0], (length, WIDTH, WIDTH), dtype),
        "b": jax.random.normal(keys[1], (length, WIDTH), dtype),
        "id": jnp.arange(length),
        "key": jax.random.split(keys[2], length),
        "none": None,
    }


def block(shift, carry, x):
    """One layer: `shift` is shared, the carry has an integer leaf."""
    h, count = carry
    noise = (jax.random.key_data(x["key"])[0] % 7).astype(h.dtype)
    bias = jnp.where(x["id"] % 2 == 0, x["b"], -x["b"])
    h = h + jnp.tanh(h @ x["w"] + jnp.broadcast_to(bias * shift, h.shape) + noise)
    return (h, count + 1), {"mean": jnp.mean(h, 0), "count": count}


def loop(body, init, xs, *, length: int, reverse: bool = False):
    """The Python loop."""
    carry, ys = init, [None] * length
    for i in reversed(range(length)) if reverse else range(length):
        carry, ys[i] = body(carry, jax.tree.map(lambda leaf, i=i: leaf[i], xs))
    return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *ys)


def loss(run, parameters, frozen, length: int):
    """Uses the carry, the outputs, and a closure over a value that is being differentiated."""
    h, shift, w, b = parameters
    doubled = shift + shift
    xs = {**frozen, "w": w, "b": b}
    (h, count), ys = run(functools.partial(block, doubled), (h, jnp.int32(0)), xs)
    weights = jnp.linspace(0.5, 1.5, length, dtype=h.dtype)[:, None]
    value = jnp.sum(h**2) + jnp.sum(ys["mean"] * jnp.broadcast_to(weights, ys["mean"].shape))
    return value, (h, count, ys["count"])


def inputs(length: int, dtype=jnp.float32):
    xs = stack(length, dtype)
    h = jax.random.normal(jax.random.key(7), (ROWS, WIDTH), dtype)
    shift = jnp.linspace(0.5, 1.0, WIDTH, dtype=dtype)
    frozen = {name: xs[name] for name in ("id", "key", "none")}
    return (h, shift, xs["w"], xs["b"]), frozen


def derivatives(run, length: int, dtype=jnp.float32):
    parameters, frozen = inputs(length, dtype)
    return jax.value_and_grad(lambda p: loss(run, p, frozen, length), has_aux=True)(parameters)


def assert_close(actual, expected, tolerance: float = 2e-5):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1.0, np.abs(b).max()))


@functools.cache
def expected(length: int, reverse: bool = False):
    return jit(lambda: derivatives(functools.partial(loop, length=length, reverse=reverse), length))()


def check(schedule: Schedule, reverse: bool = False, first_layers: int = 0, **kwargs):
    length = schedule.length + first_layers
    run = functools.partial(
        sweep, length=length, schedule=schedule, reverse=reverse, first_layers=first_layers, **kwargs
    )
    assert_close(jit(lambda: derivatives(run, length))(), expected(length, reverse))


def mlp(carry, x):
    up, down = x
    # The derivative of tanh uses its unnamed result, so naming that would not save its recomputation.
    h = checkpoint_name(carry @ up, "h")
    return carry + jnp.tanh(h) @ down, None


def mlp_gradients(run, length: int, trained: tuple[int, ...] = (0, 1, 2), hidden: int = 6):
    """Jaxpr of gradients with respect to (up, down, input)."""

    def value(up, down, x):
        return jnp.sum(run(mlp, x, (up, down))[0] ** 2)

    shapes = [(length, WIDTH, hidden), (length, hidden, WIDTH), (ROWS, WIDTH)]
    return jax.make_jaxpr(jax.grad(value, trained))(*(jnp.ones(shape) for shape in shapes)), value


def nested(length: int, **kwargs):
    return functools.partial(sweep, length=length, schedule=shrinking(length), **kwargs)
