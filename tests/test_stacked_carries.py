"""What keeps the gradient of a scan from holding the carry of every layer, and what does not.

Facts about JAX, measured: the compiled memory of one program written in different ways. They say why this
library has a reverse sweep of its own; a JAX that changes one of them fails here.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from stacked_remat import ScanCheckpointPolicy, checkpoint, fold

SIZE = 1 << 12


def body(x, w):
    return x + jnp.mean(jnp.tanh(jnp.sin(x[:, None] * w[None])), axis=1), None


def scan(x, ws, body=body):
    return lax.scan(body, x, ws)[0]


def two_levels(x, ws):
    """What Flax Linen's `remat_scan` does: a checkpointed scan over a segment, in a scan over segments."""
    segments = ws.reshape(len(ws) // 8, 8, *ws.shape[1:])
    inner = functools.partial(scan, body=jax.checkpoint(body))
    return lax.scan(lambda x, ws: (jax.checkpoint(inner)(x, ws), None), x, segments)[0]


nothing_saveable = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)

PROGRAMS = {
    "lax.scan": scan,
    "jax.checkpoint on the body": functools.partial(scan, body=jax.checkpoint(body)),
    "jax.checkpoint around the scan": jax.checkpoint(scan),
    "nothing_saveable around the scan": nothing_saveable(scan),
    "jax.checkpoint on the body and around the scan": jax.checkpoint(
        functools.partial(scan, body=jax.checkpoint(body))
    ),
    "checkpoint on the body": functools.partial(scan, body=checkpoint(body)),
    "two levels": two_levels,
    "nested": lambda x, ws: fold(lambda x, w: body(x, w)[0], "layers", remat="nested")(x, ws),
    "max_carries": lambda x, ws: fold(
        lambda x, w: body(x, w)[0], "layers", remat=ScanCheckpointPolicy(max_carries=4)
    )(x, ws),
}


def carries(name, layers):
    """Bytes of temporaries of the gradient, in carries."""
    gradient = jax.grad(lambda x, ws: jnp.sum(PROGRAMS[name](x, ws)), (0, 1))
    x, ws = jax.ShapeDtypeStruct((SIZE,), jnp.float32), jax.ShapeDtypeStruct((layers, 4), jnp.float32)
    return jax.jit(gradient).lower(x, ws).compile().memory_analysis().temp_size_in_bytes / (4 * SIZE)


INTERNALS = (9, 13)  # the carry, and two or three internals of four times its size


@pytest.mark.parametrize(
    "name, growth",
    [
        ("lax.scan", INTERNALS),
        ("jax.checkpoint on the body", (1, 1)),
        ("jax.checkpoint around the scan", INTERNALS),
        ("nothing_saveable around the scan", INTERNALS),
        ("jax.checkpoint on the body and around the scan", (1, 1)),
        ("checkpoint on the body", (1, 1)),
        ("two levels", (4 / 32, 4 / 32)),  # four segments more
        ("nested", (3 / 32, 3 / 32)),  # 11 carries in place of 8
        ("max_carries", (0, 0)),
    ],
)
def test_what_a_layer_adds(name, growth):
    """In carries, from 32 to 64 layers."""
    least, most = growth
    assert least - 0.01 <= (carries(name, 64) - carries(name, 32)) / 32 <= most + 0.01
