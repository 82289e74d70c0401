"""Derivative rules of users between weights and losses: followed, or refused where they mix examples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from stacked_remat import fold, ghost


def with_vjp(back, forward=lambda x: (x, x)):
    """The identity, or `forward`, with another derivative."""

    @jax.custom_vjp
    def changed(x):
        return forward(x)[0]

    changed.defvjp(forward, back)
    return changed


def with_jvp(tangent):
    """The identity with another derivative."""

    @jax.custom_jvp
    def changed(x):
        return x

    changed.defjvp(lambda primals, tangents: (primals[0], tangent(primals[0], tangents[0])))
    return changed


def through_layers(layer):
    """Layers that are swept back by a rule of this library."""
    weights = jnp.sin(jnp.arange(48.0)).reshape(3, 4, 4)
    return lambda x: fold(lambda x, weight: layer(x @ weight), Axis("layers", 3), remat="nested")(x, weights)


CLIPPED = with_vjp(lambda _, ct: (jnp.clip(ct, -1.0, 1.0),))
KEPT = {
    "identity": with_vjp(lambda _, ct: (ct,)),
    "reversed gradient": with_vjp(lambda _, ct: (-0.3 * ct,)),
    "straight through": with_vjp(lambda x, ct: (jnp.where(abs(x) < 1, ct, 0.0),), lambda x: (jnp.sign(x), x)),
    "by data": with_vjp(lambda x, ct: (jnp.einsum("bd,bd,be->be", ct, x, jax.nn.relu(x)),)),
    "stopped forward": with_vjp(lambda _, ct: (ct,), lambda x: (jax.lax.stop_gradient(x), None)),
    "scaled tangent": with_jvp(lambda x, tangent: jnp.cos(x) * tangent),
    "layers": through_layers(jnp.tanh),
    "row by row": lambda x: jax.lax.map(lambda row: jax.nn.relu(with_vjp(lambda _, ct: (2 * ct,))(row)), x),
    "relu": jax.nn.relu,
    "softmax": lambda x: jax.nn.softmax(x, 1),
    "logaddexp": lambda x: jnp.logaddexp(x, 2 * x),
    "logsumexp": lambda x: jax.nn.logsumexp(x, 1, keepdims=True),
}
BROKEN = {
    "clipped by norm": with_vjp(lambda _, ct: (ct / jnp.maximum(1.0, jnp.linalg.norm(ct)),)),
    "clipped": CLIPPED,
    "clipped row by row": lambda x: jax.lax.map(jax.jit(CLIPPED), x),
    "clipped in layers": through_layers(CLIPPED),
    "signs": with_vjp(lambda _, ct: (jnp.sign(ct),)),
    "noise": with_vjp(lambda _, ct: (ct + 0.1,)),
    "decay": with_vjp(lambda x, ct: (ct + 0.1 * x,)),
    "centred": with_vjp(lambda _, ct: (ct - jnp.mean(ct, 0, keepdims=True),)),
    "other order": with_vjp(lambda _, ct: (ct[::-1],)),
    "by all data": with_vjp(lambda x, ct: (ct * jnp.sum(x**2),)),
    "centred tangent": with_jvp(lambda _, tangent: tangent - jnp.mean(tangent, 0, keepdims=True)),
    "tangent by all data": with_jvp(lambda x, tangent: tangent * jnp.sum(x)),
}


def losses_after(changed):
    return lambda weight, x: jnp.sum(jnp.sin(changed(x @ weight)), 1)


def test_rules_that_keep_examples_apart_are_scored_as_they_are():
    x, weight = (jax.random.normal(jax.random.key(seed), (4, 4)) for seed in range(2))
    along = jnp.cos(weight)

    def gradients(fn):
        own = jax.grad(lambda weight, row: losses_after(fn)(weight, row[None])[0])
        return jnp.stack([jnp.sum(own(weight, row) * along) for row in x])

    def scores(fn):
        return ghost.grad_dot(weight, losses_after(fn), x, direction=along)[1].total.array

    found, expected = jax.jit(lambda: [{n: of(fn) for n, fn in KEPT.items()} for of in (scores, gradients)])()
    for name in KEPT:
        scale = np.abs(expected[name]).max()
        np.testing.assert_allclose(found[name], expected[name], 0, 1e-5 * scale, err_msg=name)


@pytest.mark.parametrize("name", BROKEN)
def test_rules_that_mix_examples_or_are_not_linear_are_refused(name):
    x, weight = jnp.ones((4, 4)), jnp.eye(4)
    with pytest.raises(ghost.UnsupportedLeafError, match="the derivative rule of `changed at .*rules.py"):
        jax.eval_shape(
            lambda: ghost.grad_dot(weight, losses_after(BROKEN[name]), x, direction=weight)[1].total
        )
