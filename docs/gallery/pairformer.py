# %% [markdown]
# # A Pairformer: two carries
#
# How to fold layers that pass on more than one array. Those of protein structure models
# (Abramson et al. 2024, AlphaFold 3) pass on two: one row for each residue, and one for
# each pair. A carry is any tree of arrays.

# %%
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from matplotlib.figure import Figure

from stacked_remat import Stacked, memory

WIDTH, LENGTH = 16, 12


class Layer(eqx.Module):
    """Triangle products of the pairs, then attention of the residues with the pairs as
    bias.
    """

    norms: dict[str, eqx.nn.LayerNorm]
    maps: dict[str, eqx.nn.Linear]

    def __init__(self, key):
        sizes = dict.fromkeys(("triangle", "out", "outer"), WIDTH)
        sizes |= {"edges": 4 * WIDTH, "qkv": 3 * WIDTH, "bias": 1}
        self.norms = {name: eqx.nn.LayerNorm(WIDTH) for name in sizes}
        self.maps = {}
        keys = jax.random.split(key, len(sizes))
        for of_map, (name, size) in zip(keys, sizes.items(), strict=True):
            self.maps[name] = eqx.nn.Linear(WIDTH, size, False, key=of_map)

    def apply(self, name, x):
        """A normalized linear map of the last axis."""
        flat = x.reshape(-1, x.shape[-1])
        return jax.vmap(lambda row: self.maps[name](self.norms[name](row)))(
            flat
        ).reshape(*x.shape[:-1], -1)

    def __call__(self, carry):
        single, pair = carry
        a, b = jnp.split(jax.nn.glu(self.apply("edges", pair)), 2, axis=-1)
        triangles = jnp.einsum("ikc,kjc->ijc", a, b) / pair.shape[0] ** 0.5
        pair = pair + self.apply("triangle", triangles)
        q, k, v = jnp.split(self.apply("qkv", single), 3, axis=-1)
        scores = q @ k.T / WIDTH**0.5 + self.apply("bias", pair)[..., 0]
        single = single + self.apply("out", jax.nn.softmax(scores) @ v)
        outer = self.apply("outer", single)
        return single, pair + outer[:, None] * outer[None]


def distances(model, near):
    layers, embed, read = model
    start = near.mean(1)[:, None] * embed, near[..., None] * embed
    return layers.fold(start)[1] @ read


# %% [markdown]
# ## Training
#
# The model is told which points of a line are close to each other, and predicts all
# distances.


# %%
def line(key, count):
    points = 6 * jax.random.uniform(key, (count, LENGTH))
    distance = jnp.abs(points[:, :, None] - points[:, None])
    return (distance < 1.0).astype(jnp.float32), distance


def loss(model, near, distance):
    return jnp.mean((jax.vmap(distances, (None, 0))(model, near) - distance) ** 2)


@eqx.filter_jit
def step(model, state, key):
    value, slope = eqx.filter_value_and_grad(loss)(model, *line(key, 32))
    updates, state = optimizer.update(slope, state)
    return eqx.apply_updates(model, updates), state, value


optimizer, keys = optax.adam(3e-3), jax.random.split(jax.random.key(0), 4)
embed, read = jax.random.normal(jax.random.key(1), (2, WIDTH))
model = Stacked.init(4, Layer, remat="nested")(keys), embed, 0.1 * read
state = optimizer.init(eqx.filter(model, eqx.is_array))
for number, key in enumerate(jax.random.split(jax.random.key(2), 101)):
    model, state, value = step(model, state, key)
    if number % 50 == 0:
        print(f"step {number:3}  squared error {value:.3f}")
near, distance = line(jax.random.key(3), 256)
constant = near * distance[near > 0].var() + (1 - near) * distance[near == 0].var()
print(f"squared error of two means, for close pairs and others: {constant.mean():.3f}")
assert value < 0.7 * constant.mean()
order = jnp.argsort(distance[0, distance[0].max(1).argmax()])  # from one end on
shown = {"true": distance[0], "predicted": distances(model, near[0])}
figure = Figure((6, 2.6), layout="constrained")
panels = figure.subplots(1, 2)
for axes, (title, values) in zip(panels, shown.items(), strict=True):
    image = axes.imshow(values[order][:, order], cmap="gray", vmin=0, vmax=5)
    axes.set(title=title, xlabel="point", ylabel="point")
_ = figure.colorbar(image, ax=panels, label="distance")

# %% [markdown]
# ## What the gradient of 48 layers takes, for 256 residues


# %%
def gradient(remat):
    return jax.grad(lambda layers, carry: jnp.sum(layers.fold(carry, remat=remat)[1]))


deep = eqx.filter_eval_shape(
    Stacked.init(48, Layer), jax.random.split(jax.random.key(0), 48)
)
carry = (
    jax.ShapeDtypeStruct((256, 16), jnp.float32),
    jax.ShapeDtypeStruct((256, 256, 16), jnp.float32),
)
print(memory.compare(gradient, deep, carry, candidates=[True, "nested"]))
