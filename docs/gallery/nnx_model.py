# %% [markdown]
# # An NNX model
#
# How to train an NNX model in less memory. A model whose layers are applied by
# `nnx.scan` keeps the carry of each for the backward pass. With `remat_scan` in its
# place it keeps few, and everything else stays as it is.

# %%
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from matplotlib.figure import Figure

from stacked_remat.nnx import remat_scan

LAYERS, WIDTH = 64, 16


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = (
            nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs),
            nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs),
        )
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x)))) / LAYERS**0.5


class Network(nnx.Module):
    def __init__(self, scan, rngs):
        create = nnx.split_rngs(splits=LAYERS)(nnx.vmap(Layer))
        self.first, self.layers = nnx.Linear(2, WIDTH, rngs=rngs), create(rngs)
        self.last, self.scan = nnx.Linear(WIDTH, 1, rngs=rngs), scan

    def __call__(self, x):
        forward = self.scan(
            lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
        )
        return self.last(forward(self.first(x), self.layers))[:, 0]


# %% [markdown]
# The training step is the usual one. The task: is a point inside a ring?


# %%
@nnx.jit
def step(model, optimizer, x, inside):
    def loss(model):
        return optax.sigmoid_binary_cross_entropy(model(x), inside).mean()

    value, gradient = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradient)
    return value


x = jax.random.uniform(jax.random.key(0), (1024, 2), minval=-1.0)
radius = jnp.linalg.norm(x, axis=1)
inside = ((radius > 0.4) & (radius < 0.8)).astype(jnp.float32)


def train(scan):
    model = Network(scan, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(2e-3), wrt=nnx.Param)
    compiled = step.lower(model, optimizer, x, inside).compile()
    losses = [float(compiled(model, optimizer, x, inside)) for _ in range(25)]
    return model, losses, compiled.compiled.memory_analysis().temp_size_in_bytes


model, ours, memory = train(remat_scan)
_, theirs, more = train(nnx.scan)
for number in range(0, 25, 8):
    print(
        f"step {number:2}  loss {ours[number]:.4f} with remat_scan,"
        f" {theirs[number]:.4f} with nnx.scan"
    )
print(f"memory of a step: {memory / 2**20:.1f} MiB and {more / 2**20:.1f} MiB")
assert abs(ours[-1] - theirs[-1]) < 1e-2 and 10 * memory < more

# %% [markdown]
# The losses, and where in the square a point is inside, by the model (shaded) and in
# truth (dots):

# %%
side = jnp.linspace(-1, 1, 64)
square = jnp.stack(jnp.meshgrid(side, side), -1)
logits = model(square.reshape(-1, 2)).reshape(64, 64)
print(f"{jnp.mean((model(x) > 0) == inside):.1%} of the points are right")
figure = Figure((7, 3), layout="constrained")
losses, plane = figure.subplots(1, 2, width_ratios=(3, 2))
losses.set(xlabel="step", ylabel="loss (nats)")
losses.plot(theirs, lw=4, alpha=0.4, label="nnx.scan")
losses.plot(ours, "--", label="remat_scan")
losses.legend()
plane.set(aspect="equal", xticks=[], yticks=[])
plane.contourf(side, side, logits, [0, jnp.inf], colors=["lightgray"])
_ = plane.plot(*x[inside == 1].T, "k.", ms=2)
