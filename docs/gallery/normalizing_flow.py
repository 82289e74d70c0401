# %% [markdown]
# # A normalizing flow, and its inverse by `reverse`
#
# How to apply an invertible model in both directions. Coupling layers map data to
# noise, one after the other. Samples go the other way, through the inverse of each
# layer from the last to the first: the same stack, with `reverse=True`.

# %%
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from matplotlib.figure import Figure

from stacked_remat import Stacked

DEPTH = 16


class Coupling(eqx.Module):
    """Scales and shifts the second coordinate by functions of the first, then swaps
    them (RealNVP).
    """

    net: eqx.nn.MLP

    def __init__(self, key):
        self.net = eqx.nn.MLP(
            1, 2, 32, 1, activation=jnp.tanh, final_activation=jnp.tanh, key=key
        )

    def __call__(self, carry):
        (first, second), log_det = carry
        scale, shift = self.net(first[None])
        return jnp.stack([second * jnp.exp(scale) + shift, first]), log_det + scale

    def inverse(self, y):
        second, first = y
        scale, shift = self.net(first[None])
        return jnp.stack([first, (second - shift) * jnp.exp(-scale)])


flow = Stacked.init(DEPTH, Coupling, remat="nested")(
    jax.random.split(jax.random.key(0), DEPTH)
)


def to_noise(flow, x):
    """The noise of a point, and the logarithm of the determinant of the map there."""
    return flow.fold((x, jnp.zeros(())))


# %% [markdown]
# ## The inverse, by another method of the layers


# %%
def to_data(flow, noise):
    return flow.fold_via(Coupling.inverse, reverse=True)(noise)


points = jax.random.normal(jax.random.key(1), (256, 2))
noise, _ = jax.vmap(to_noise, (None, 0))(flow, points)
error = jnp.abs(jax.vmap(to_data, (None, 0))(flow, noise) - points).max()
print(f"back from the noise, within {error:.0e}")
assert error < 1e-3

# %% [markdown]
# ## Training
#
# The data are two half circles. The loss is the negative log-likelihood.


# %%
def half_circles(key, count):
    of_angle, of_noise = jax.random.split(key)
    angle = jnp.pi * jax.random.uniform(of_angle, (count,))
    upper = jnp.arange(count) % 2 == 0
    x = jnp.where(upper, jnp.cos(angle), 1 - jnp.cos(angle))
    y = jnp.where(upper, jnp.sin(angle), 0.5 - jnp.sin(angle))
    return jnp.stack([x, y], 1) + 0.05 * jax.random.normal(of_noise, (count, 2))


def loss(flow, batch):
    noise, log_det = jax.vmap(to_noise, (None, 0))(flow, batch)
    return jnp.mean(0.5 * jnp.sum(noise**2, 1) + jnp.log(2 * jnp.pi) - log_det)


@eqx.filter_jit
def step(flow, state, key):
    value, slope = eqx.filter_value_and_grad(loss)(flow, half_circles(key, 256))
    updates, state = optimizer.update(slope, state)
    return eqx.apply_updates(flow, updates), state, value


optimizer = optax.adam(3e-3)
state = optimizer.init(eqx.filter(flow, eqx.is_array))
for number, key in enumerate(jax.random.split(jax.random.key(2), 301)):
    flow, state, value = step(flow, state, key)
    if number % 100 == 0:
        print(f"step {number:3}  nats {value:6.3f}")

# %%
samples = eqx.filter_jit(jax.vmap(to_data, (None, 0)))(
    flow, jax.random.normal(jax.random.key(3), (1000, 2))
)
data = half_circles(jax.random.key(4), 1000)
nearest = jnp.linalg.norm(samples[:, None] - data[None], axis=-1).min(1)
print(
    "median distance of a sample to the nearest of 1,000 points:"
    f" {jnp.median(nearest):.3f}"
)
assert value < 1.0 and jnp.median(nearest) < 0.1
figure = Figure((6, 3), layout="constrained")
axes = figure.subplots()
axes.plot(*data[:300].T, ".", label="data")
axes.plot(*samples[:300].T, "x", label="samples of the flow")
_ = axes.legend()
