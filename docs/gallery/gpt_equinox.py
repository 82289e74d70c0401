# %% [markdown]
# # A GPT in plain Equinox
#
# A GPT written in Equinox: attention, an MLP, and twelve layers of them in one
# `Stacked`. The arrays have no names; the layers are the first dimension. It learns two
# lines of verse, byte by byte.

# %%
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from matplotlib.figure import Figure

from stacked_remat import Stacked

WIDTH, HEADS, CONTEXT, LAYERS = 32, 4, 16, 12
normal = jax.random.normal

# %% [markdown]
# A block takes the carry, `[position, width]`, and returns the next one. It does not
# depend on other layers.


# %%
class Block(eqx.Module):
    qkv: jax.Array
    out: jax.Array
    up: jax.Array
    down: jax.Array

    def __init__(self, *, key):
        keys = jax.random.split(key, 4)
        self.qkv = normal(keys[0], (WIDTH, 3 * WIDTH)) / WIDTH**0.5
        self.out = normal(keys[1], (WIDTH, WIDTH)) / (WIDTH * LAYERS) ** 0.5
        self.up = normal(keys[2], (WIDTH, 4 * WIDTH)) / WIDTH**0.5
        self.down = normal(keys[3], (4 * WIDTH, WIDTH)) / (4 * WIDTH * LAYERS) ** 0.5

    def __call__(self, x):
        qkv = (jax.nn.standardize(x) @ self.qkv).reshape(
            CONTEXT, 3, HEADS, WIDTH // HEADS
        )
        seen = jax.nn.dot_product_attention(
            qkv[:, 0], qkv[:, 1], qkv[:, 2], is_causal=True
        )
        x = x + seen.reshape(CONTEXT, WIDTH) @ self.out
        return x + jax.nn.gelu(jax.nn.standardize(x) @ self.up) @ self.down


class Gpt(eqx.Module):
    embedding: jax.Array
    positions: jax.Array
    blocks: Stacked[Block]

    def __init__(self, *, key):
        first, second, third = jax.random.split(key, 3)
        self.embedding = normal(first, (256, WIDTH)) / WIDTH**0.5
        self.positions = 0.1 * normal(second, (CONTEXT, WIDTH))
        self.blocks = Stacked.init(LAYERS, Block, remat="nested")(
            key=jax.random.split(third, LAYERS)
        )

    def __call__(self, tokens):
        x = self.blocks.fold(self.embedding[tokens] + self.positions)
        return jax.nn.standardize(x) @ self.embedding.T


# %% [markdown]
# The training step is that of any Equinox model. `jax.vmap` over the sequences goes
# through the stack.


# %%
def loss(model, tokens):
    logits = jax.vmap(model)(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


optimizer = optax.adam(5e-3)


@eqx.filter_jit(donate="all")
def step(model, state, tokens):
    value, gradient = eqx.filter_value_and_grad(loss)(model, tokens)
    updates, state = optimizer.update(gradient, state, model)
    return eqx.apply_updates(model, updates), state, value


VERSE = b"""Tyger Tyger, burning bright,
In the forests of the night;
"""
data = jnp.asarray(list(VERSE))
starts = jnp.arange(len(VERSE) - CONTEXT)
tokens = data[starts[:, None] + jnp.arange(CONTEXT + 1)]
model = Gpt(key=jax.random.key(0))
state = optimizer.init(eqx.filter(model, eqx.is_array))
values = []
for number in range(101):
    model, state, value = step(model, state, tokens)
    values.append(value)
    if number % 25 == 0:
        print(f"step {number:3}  loss {value:.3f} nats a byte")

frequency = jnp.bincount(data, length=256) / len(VERSE)
figure = Figure((6, 2.5), layout="constrained")
axes = figure.subplots()
axes.set(xlabel="step", ylabel="loss (nats a byte)", yscale="log")
axes.plot(values, label="the model")
entropy = jax.scipy.special.entr(frequency).sum()
axes.axhline(entropy, color="black", ls="--", label="frequencies of bytes alone")
_ = axes.legend()

# %% [markdown]
# Given the first 16 bytes, it writes the most likely bytes:

# %%
model, text = eqx.filter_jit(model), list(VERSE[:CONTEXT])
for _ in range(len(VERSE) - CONTEXT):
    text.append(int(model(jnp.asarray(text[-CONTEXT:]))[-1].argmax()))
print(bytes(text).decode(errors="replace"))
