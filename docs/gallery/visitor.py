# %% [markdown]
# # A visitor: the signal and the noise of each layer's gradient
#
# Statistics of gradients, found in the backward pass. The backward pass reverses every
# layer once, with its input and the cotangent of its output, and calls a visitor there.
# This one finds how noisy each layer's gradient is over the examples of a batch, and
# stores no gradient of the stack.

# %%
import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from matplotlib.figure import Figure

from stacked_remat import LayerResult, Stacked

Layers, WIDTH, EXAMPLES = hax.Axis("layers", 16), 32, 64


class Block(eqx.Module):
    weight: jax.Array

    def __call__(self, x):
        return x + jnp.tanh(x @ self.weight)


weights = (
    jax.random.normal(jax.random.key(0), (Layers.size, WIDTH, WIDTH))
    / (4 * WIDTH) ** 0.5
)
blocks = Stacked.init(Layers, Block, remat="nested")(weights)
x = jax.random.normal(jax.random.key(1), (EXAMPLES, WIDTH))
target = jnp.roll(x, 1, axis=1)

# %% [markdown]
# `visit.vjp()` gives the cotangent of the layer's input, to go on with, and the
# gradient of the layer. The same function, row by row, gives the gradient of each
# example, of one layer at a time.


# %%
def signal_and_noise(visit, state):
    found = visit.vjp()

    def squared_norm(row, ct):
        _, back = jax.vjp(lambda layer: layer(row), visit.layer)
        (of_example,) = back(ct)
        return jnp.sum((EXAMPLES * of_example.weight) ** 2)

    signal = jnp.sum(found.layer.weight**2)
    second = jnp.mean(jax.vmap(squared_norm)(visit.carry, visit.cotangent))
    return LayerResult(found.carry, layer_state=jnp.stack([signal, second - signal]))


@jax.jit
def measure(blocks, x):
    y, sweep_back = blocks.fold_vjp(x)
    cotangent = 2 * (y - target) / y.size  # of the mean squared error
    return sweep_back(
        cotangent, signal_and_noise, layer_state=jnp.zeros((Layers.size, 2))
    ).layer_state


found = measure(blocks, x)
for layer, (signal, noise) in enumerate(found.tolist()):
    if layer % 3 == 0:
        scale = noise / signal
        print(f"layer {layer:2}  gradient {signal**0.5:.3f}  noise scale {scale:6.1f}")
figure = Figure((6, 2.5), layout="constrained")
axes = figure.subplots()
axes.set(xlabel="layer", ylabel="noise scale")
_ = axes.bar(range(Layers.size), found[:, 1] / found[:, 0])

# %% [markdown]
# The noise scale is about the batch size above which larger batches stop helping
# (McCandlish et al. 2018). The norms are those of `jax.grad`:


# %%
def loss(blocks):
    return jnp.mean((blocks.fold(x) - target) ** 2)


gradient = jax.grad(loss)(blocks).stacked.weight
assert jnp.allclose(found[:, 0], jnp.sum(gradient**2, (1, 2)), rtol=1e-3)
print(
    f"one gradient of the stack: {gradient.nbytes:,} bytes; what the visitor stored:"
    f" {found.nbytes} bytes"
)

# %% [markdown]
# Visitors may also update the layers ([Write a visitor](../extending.md)).
