# %% [markdown]
# # A diffusion transformer: conditioning in every layer
#
# How to give every layer the same conditioning. A layer of a DiT (Peebles and Xie 2023)
# scales, shifts and gates by a linear map of its own of the time and the class (adaLN).
# The conditioning is one array for all layers, marked as `shared`.

# %%
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from matplotlib.figure import Figure

from stacked_remat import Stacked, shared

DEPTH, WIDTH, SIZE = 6, 32, 8
norm = eqx.nn.LayerNorm(WIDTH, use_weight=False, use_bias=False)


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    modulation: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.attention = eqx.nn.MultiheadAttention(4, WIDTH, key=keys[0])
        self.mlp = eqx.nn.MLP(
            WIDTH, WIDTH, 2 * WIDTH, 1, activation=jax.nn.gelu, key=keys[1]
        )
        self.modulation = eqx.nn.Linear(WIDTH, 6 * WIDTH, key=keys[2])

    def __call__(self, x, condition):
        def change(branch, scale, shift, gate):
            return gate * branch(jax.vmap(norm)(x) * (1 + scale) + shift)

        of_attention, of_mlp = self.modulation(condition).reshape(2, 3, WIDTH)
        x = x + change(lambda h: self.attention(h, h, h), *of_attention)
        return x + change(jax.vmap(self.mlp), *of_mlp)


def velocity(model, image, time, label):
    """The velocity of a noisy image `[row, column]`, of which each row is a token."""
    condition = jax.nn.silu(model["time"](time[None]) + model["class"](label))
    x = jax.vmap(model["encode"])(image) + model["places"]
    return jax.vmap(model["decode"])(model["blocks"].fold(x, shared(condition)))


keys = jax.random.split(jax.random.key(0), 6)
model = {
    "time": eqx.nn.MLP(1, WIDTH, WIDTH, 1, activation=jax.nn.silu, key=keys[0]),
    "class": eqx.nn.Embedding(2, WIDTH, key=keys[1]),
    "encode": eqx.nn.Linear(SIZE, WIDTH, key=keys[2]),
    "places": jax.random.normal(keys[3], (SIZE, WIDTH)),
    "blocks": Stacked.init(DEPTH, Block, remat="nested")(
        jax.random.split(keys[4], DEPTH)
    ),
    "decode": eqx.nn.Linear(WIDTH, SIZE, key=keys[5]),
}

# %% [markdown]
# ## Training
#
# Stripes down (0) or across (1), by flow matching: the model predicts the velocity from
# noise to an image.


# %%
def images(key, count):
    labels, offset = jax.random.randint(key, (2, count), 0, jnp.array([[2], [4]]))
    along = jnp.where(labels[:, None, None] == 0, *jnp.mgrid[:SIZE, :SIZE][::-1])
    return jnp.where((along + offset[:, None, None]) % 4 < 2, 1.0, -1.0), labels


def loss(model, key):
    of_image, of_noise, of_time = jax.random.split(key, 3)
    x, labels = images(of_image, 64)
    noise, time = (
        jax.random.normal(of_noise, x.shape),
        jax.random.uniform(of_time, (64,)),
    )
    between = time[:, None, None] * x + (1 - time[:, None, None]) * noise
    return jnp.mean(
        (
            jax.vmap(velocity, (None, 0, 0, 0))(model, between, time, labels)
            - (x - noise)
        )
        ** 2
    )


@eqx.filter_jit
def step(model, state, key):
    value, slope = eqx.filter_value_and_grad(loss)(model, key)
    updates, state = optimizer.update(slope, state)
    return eqx.apply_updates(model, updates), state, value


optimizer = optax.adam(2e-3)
state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
for number, key in enumerate(jax.random.split(jax.random.key(1), 201)):
    model, state, value = step(model, state, key)
    if number % 100 == 0:
        print(f"step {number:3}  loss {value:.3f}")

# %% [markdown]
# ## Sampling: 32 steps of Euler's method

# %%
noise = jax.random.normal(jax.random.key(3), (SIZE, SIZE))
figure = Figure((6, 2.2), layout="constrained")
at_first, *sampled = figure.subplots(1, 3)
at_first.imshow(noise, cmap="gray", vmin=-1, vmax=1, interpolation="none")
at_first.set(title="noise", xticks=[], yticks=[])
for label, axes in zip(jnp.arange(2), sampled, strict=True):
    image = jax.lax.fori_loop(
        0, 32, lambda k, x: x + velocity(model, x, k / 32, label) / 32, noise
    )
    along, across = image.var(label).mean(), image.var(1 - label).mean()
    print(f"class {label}  variance along stripes {along:.3f}, across {across:.3f}")
    assert along < 0.3 * across
    axes.imshow(image, cmap="gray", vmin=-1, vmax=1, interpolation="none")
    axes.set(title=f"class {label}", xticks=[], yticks=[])
