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

from stacked_remat import Stacked, memory

WIDTH, LENGTH = 16, 12


class Layer(eqx.Module):
    """Triangle products of the pairs, then attention of the residues with the pairs as
    bias.
    """

    norms: dict[str, eqx.nn.LayerNorm]
    maps: dict[str, eqx.nn.Linear]

    def __init__(self, key):
        sizes = dict(
            edges=4 * WIDTH,
            triangle=WIDTH,
            bias=1,
            qkv=3 * WIDTH,
            out=WIDTH,
            outer=WIDTH,
        )
        keys = jax.random.split(key, len(sizes))
        self.norms = {name: eqx.nn.LayerNorm(WIDTH) for name in sizes}
        self.maps = {
            n: eqx.nn.Linear(WIDTH, sizes[n], False, key=keys[i])
            for i, n in enumerate(sizes)
        }

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
    return (
        layers.fold((near.mean(1)[:, None] * embed, near[..., None] * embed))[1] @ read
    )


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
