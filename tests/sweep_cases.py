"""A sweep with the fields of a `Remat`, and a block for the tests of what it makes."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from stacked_remat._remat import Remat
from stacked_remat._schedule import shrinking
from stacked_remat._static import Static
from stacked_remat._sweep.primitive import run_layers
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


def assert_close(actual, expected, tolerance: float = 2e-5):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1.0, np.abs(b).max()))


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
