# %% [markdown]
# # A residual network with BatchNorm
#
# How to stack layers that keep state. Each has running statistics in an `eqx.nn.State`:
# the stack takes the state of the model, and each layer gets its part. See [layers that
# keep state](../state.md).

# %%
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from matplotlib.figure import Figure

from stacked_remat import Stacked

DEPTH, CHANNELS, SIZE = 12, 8, 8


class Block(eqx.Module):
    """`x + conv(relu(norm(x)))` of `[channel, height, width]`."""

    norm: eqx.nn.BatchNorm
    conv: eqx.nn.Conv2d

    def __init__(self, key):
        self.norm = eqx.nn.BatchNorm(CHANNELS, "batch", mode="ema", momentum=0.9)
        self.conv = eqx.nn.Conv2d(
            CHANNELS, CHANNELS, 3, padding=1, use_bias=False, key=key
        )

    def __call__(self, x, state):
        y, state = self.norm(x, state)
        return x + self.conv(jax.nn.relu(y)), state


class Classifier(eqx.Module):
    stem: eqx.nn.Conv2d
    blocks: Stacked[Block]
    head: eqx.nn.Linear

    def __init__(self, key):
        of_stem, of_blocks, of_head = jax.random.split(key, 3)
        self.stem = eqx.nn.Conv2d(1, CHANNELS, 3, padding=1, key=of_stem)
        self.blocks = Stacked.init(DEPTH, Block, remat="nested")(
            jax.random.split(of_blocks, DEPTH)
        )
        self.head = eqx.nn.Linear(CHANNELS, 2, key=of_head)

    def __call__(self, image, state):
        x, state = self.blocks.fold(self.stem(image), state)
        return self.head(x.mean((1, 2))), state


model, state = eqx.nn.make_with_state(Classifier)(jax.random.key(0))
print(
    "running means of all layers:"
    f" {state.get(model.blocks.stacked.norm.ema_state_index)[0].shape}"
)

# %% [markdown]
# ## Training
#
# Stripes, across or down, in noise. The gradient replays layers, and each updates its
# statistics once.


# %%
def images(key, count):
    of_label, of_place, of_noise = jax.random.split(key, 3)
    down = jax.random.bernoulli(of_label, 0.5, (count,))
    place = jax.random.randint(of_place, (count, 1, 1), 0, 2)
    rows, columns = jnp.mgrid[:SIZE, :SIZE]
    stripes = (jnp.where(down[:, None, None], columns, rows) + place) % 2
    noise = jax.random.normal(of_noise, (count, SIZE, SIZE))
    return (stripes + noise)[:, None], down.astype(jnp.int32)


def loss(model, state, x, labels):
    run = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    scores, state = run(x, state)
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean(), state


@eqx.filter_jit
def step(model, state, moments, key):
    (value, state), slope = eqx.filter_value_and_grad(loss, has_aux=True)(
        model, state, *images(key, 64)
    )
    updates, moments = optimizer.update(slope, moments)
    return eqx.apply_updates(model, updates), state, moments, value


optimizer = optax.adam(3e-3)
moments = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
for number, key in enumerate(jax.random.split(jax.random.key(1), 61)):
    model, state, moments, value = step(model, state, moments, key)
    if number % 20 == 0:
        print(f"step {number:2}  loss {value:.3f}")

# %% [markdown]
# ## Inference
#
# With the statistics as they are, one image at a time.

# %%
inference = eqx.nn.inference_mode(model)
x, labels = images(jax.random.key(2), 512)
scores = jax.vmap(lambda image: inference(image, state)[0])(x)
accuracy = jnp.mean(scores.argmax(1) == labels)
print(f"{accuracy:.1%} of 512 new images")
assert accuracy > 0.95
figure = Figure((7, 1.7), layout="constrained")
for axes, image, score in zip(figure.subplots(1, 5), x, scores, strict=False):
    axes.imshow(image[0], cmap="gray", interpolation="none")
    axes.set(title=["across", "down"][score.argmax()], xticks=[], yticks=[])
