# %% [markdown]
# # A mixture of experts on eight devices
#
# How to divide the experts of each layer over devices. Each of eight devices has two
# experts of every layer and an eighth of the tokens, which travel to their experts in
# the layer. `jax.shard_map` holds the fold. The devices are virtual ones.

# %%
import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec as P

from stacked_remat import Stacked
from stacked_remat.ops import grouped_experts

LAYERS, WIDTH, HIDDEN, CHOICES = 4, 16, 32, 2
Experts = hax.Axis("expert", 16)
mesh = jax.make_mesh((8,), ("device",), axis_types=(jax.sharding.AxisType.Auto,))


def expert(weights, x, gates):
    """A gated MLP on some tokens."""
    hidden = jax.nn.silu(x @ weights["gate"]) * (x @ weights["up"])
    return (hidden * gates[:, None]) @ weights["down"]


class Layer(eqx.Module):
    """`x + experts(x)` for the tokens of a device; `over` are the axes that the experts
    are divided over.
    """

    router: jax.Array
    experts: dict[str, jax.Array]

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        shapes = {
            "gate": (WIDTH, HIDDEN),
            "up": (WIDTH, HIDDEN),
            "down": (HIDDEN, WIDTH),
        }
        self.router = jax.random.normal(keys[0], (WIDTH, Experts.size)) / WIDTH**0.5
        self.experts = {
            name: jax.random.normal(key, (Experts.size, *shape)) / shape[0] ** 0.5
            for key, (name, shape) in zip(keys[1:], shapes.items(), strict=True)
        }

    def __call__(self, x, over):
        gates, choices = jax.lax.top_k(jax.nn.softmax(x @ self.router), CHOICES)
        return x + grouped_experts(
            expert, self.experts, Experts, x, choices, gates, over=over
        )


layers = Stacked.init(LAYERS, Layer, remat="nested")(
    jax.random.split(jax.random.key(0), LAYERS)
)

# %% [markdown]
# ## Where the weights are
#
# The second axis of the experts' weights is divided; each layer's slice is then, too.

# %%
specs = jax.tree.map(lambda leaf: P(None, "device") if leaf.ndim == 4 else P(), layers)
layers = jax.device_put(
    layers, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
)
up = layers.stacked.experts["up"]
print(
    f"up projections of all layers {up.shape}, on a device"
    f" {up.sharding.shard_shape(up.shape)}"
)

# %% [markdown]
# ## The loss, for which every device folds its own tokens, is that of one device


# %%
def local_loss(layers, x, y):
    return jax.lax.pmean(jnp.mean((layers.fold(x, ("device",)) - y) ** 2), "device")


loss = jax.shard_map(
    local_loss, mesh=mesh, in_specs=(specs, P("device"), P("device")), out_specs=P()
)
x = jax.random.normal(jax.random.key(1), (512, WIDTH))
y = jnp.sin(3 * x)
divided, one = jax.jit(loss)(layers, x, y), jnp.mean((layers.fold(x, ()) - y) ** 2)
print(f"on eight devices {divided:.6f}, on one {one:.6f}")
assert jnp.allclose(divided, one, rtol=1e-5)

# %% [markdown]
# ## Training


# %%
@jax.jit
def step(layers, state):
    value, slope = jax.value_and_grad(loss)(layers, x, y)
    updates, state = optimizer.update(slope, state)
    return optax.apply_updates(layers, updates), state, value


optimizer = optax.adam(1e-2)
state = optimizer.init(layers)
for number in range(61):
    layers, state, value = step(layers, state)
    if number % 20 == 0:
        print(f"step {number:2}  loss {value:.4f}")
assert value < 0.2 * divided
