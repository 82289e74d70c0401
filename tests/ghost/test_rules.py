"""Derivative rules of users between weights and losses."""

import jax
import jax.numpy as jnp
import numpy as np
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


KEPT = {
    "reversed gradient": with_vjp(lambda _, ct: (-0.3 * ct,)),
    "straight through": with_vjp(lambda x, ct: (jnp.where(abs(x) < 1, ct, 0.0),), lambda x: (jnp.sign(x), x)),
    "by data": with_vjp(lambda x, ct: (jnp.einsum("bd,bd,be->be", ct, x, jax.nn.relu(x)),)),
    "scaled tangent": with_jvp(lambda x, tangent: jnp.cos(x) * tangent),
    "layers": through_layers(jnp.tanh),
    "row by row": lambda x: jax.lax.map(lambda row: jax.nn.relu(with_vjp(lambda _, ct: (2 * ct,))(row)), x),
}


@jax.custom_vjp
def centred(x):
    return x


centred.defvjp(lambda x: (x, None), lambda _, ct: (ct - jnp.mean(ct, 0, keepdims=True),))


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


def test_a_rule_that_mixes_examples_is_that_of_each_example_alone():
    x, weight = (jax.random.normal(jax.random.key(seed), (4, 4)) for seed in range(2))
    gradients, found = ghost.grad_dot(weight, losses_after(centred), x, direction=weight, check=True)
    np.testing.assert_allclose(found.total.array, 0.0, atol=1e-6)
    np.testing.assert_allclose(gradients, 0.0, atol=1e-6)
