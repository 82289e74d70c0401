# %% [markdown]
# # A diffusion transformer: conditioning in every layer
#
# Each layer of a DiT (Peebles and Xie 2023) scales, shifts and gates by a linear map of its own of the time
# and the class (adaLN-Zero). The conditioning is one array for all layers, marked as `shared`; the maps are
# the layers' own weights.

# %%
import equinox as eqx
import jax
import jax.numpy as jnp
import optax

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
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, activation=jax.nn.gelu, key=keys[1])
        linear = eqx.nn.Linear(WIDTH, 6 * WIDTH, key=keys[2])
        self.modulation = jax.tree.map(jnp.zeros_like, linear)  # every layer begins as the identity

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
    "blocks": Stacked.init(DEPTH, Block, remat="nested")(jax.random.split(keys[4], DEPTH)),
    "decode": eqx.nn.Linear(WIDTH, SIZE, key=keys[5]),
}

# %% [markdown]
# ## Training
#
# Stripes down (0) or across (1), by flow matching: the model predicts the velocity from noise to an image.


# %%
def images(key, count):
    of_label, of_place = jax.random.split(key)
    labels = jax.random.randint(of_label, (count,), 0, 2)
    place = jax.random.randint(of_place, (count, 1, 1), 0, 4)
    rows, columns = jnp.mgrid[:SIZE, :SIZE]
    along = jnp.where(labels[:, None, None] == 0, columns, rows)
    return jnp.where((along + place) % 4 < 2, 1.0, -1.0), labels


def loss(model, key):
    of_image, of_noise, of_time = jax.random.split(key, 3)
    x, labels = images(of_image, 64)
    noise, time = jax.random.normal(of_noise, x.shape), jax.random.uniform(of_time, (64,))
    between = time[:, None, None] * x + (1 - time[:, None, None]) * noise
    return jnp.mean((jax.vmap(velocity, (None, 0, 0, 0))(model, between, time, labels) - (x - noise)) ** 2)


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
# ## Sampling


# %%
@eqx.filter_jit
def sample(model, noise, label, steps=32):
    def euler(x, time):
        return x + velocity(model, x, time, label) / steps, None

    return jax.lax.scan(euler, noise, jnp.arange(steps) / steps)[0]


for label in (0, 1):
    image = sample(model, jax.random.normal(jax.random.key(3), (SIZE, SIZE)), jnp.asarray(label))
    print(
        *("".join(" ░▒▓█"[int(2 + 2 * jnp.clip(v, -1, 1))] * 2 for v in row) for row in image), "", sep="\n"
    )
    assert image.var(label).mean() < 0.3 * image.var(1 - label).mean()  # alike along the stripes
