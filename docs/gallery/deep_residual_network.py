# %% [markdown]
# # A residual network that is too deep to train otherwise
#
# How to train a network of a thousand convolutions. Its gradient is compiled and not
# run, so that nothing large is allocated, and the compiler says what it would take.
# Then a narrow network of the same depth trains.

# %%
import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax
from matplotlib.figure import Figure

from stacked_remat import Stacked, memory

DEPTH = 1000


class Block(eqx.Module):
    """`x + conv(relu(x))`, both of `[image, height, width, channel]`."""

    kernel: jax.Array

    def __call__(self, x):
        dimensions = jax.lax.conv_dimension_numbers(
            x.shape, self.kernel.shape, ("NHWC", "HWIO", "NHWC")
        )
        change = jax.lax.conv_general_dilated(
            jax.nn.relu(x), self.kernel, (1, 1), "SAME", dimension_numbers=dimensions
        )
        return x + change


def network(channels, make=jnp.zeros):
    return Stacked.init(hax.Axis("layers", DEPTH), Block)(
        make((DEPTH, 3, 3, channels, channels))
    )


# %% [markdown]
# ## What a gradient takes
#
# 32 images of 64 x 64 pixels and 16 channels: a carry of 8 MiB. Shapes are enough to
# compile, and one layer is compiled, not a thousand.


# %%
def gradient(remat):
    return jax.grad(lambda blocks, x: jnp.mean(blocks.fold(x, remat=remat) ** 2))


blocks = eqx.filter_eval_shape(network, 16)
images = jax.ShapeDtypeStruct((32, 64, 64, 16), jnp.float32)
policies = [False, True, "nested"]
found = memory.compare(gradient, blocks, images, candidates=policies)
plain, full, nested = (trial.report for trial in found.trials)
for policy, report in zip(policies, (plain, full, nested), strict=True):
    times = report.flops.matmul / plain.flops.matmul
    print(
        f"{policy!s:7} {report.temporaries / 2**30:6.2f} GiB   {times:.2f} x the FLOPs"
        " of False"
    )
assert nested.temporaries < 2**30 < 7 * 2**30 < full.temporaries
figure = Figure((7, 1.8), layout="constrained")
axes = figure.subplots()
axes.set(xlabel="temporaries (GiB)")
axes.margins(x=0.1)
sizes = [report.temporaries / 2**30 for report in (plain, full, nested)]
_ = axes.bar_label(axes.barh([*map(str, policies)], sizes), fmt="%.2f", padding=2)

# %% [markdown]
# `True` keeps the carry of each layer, a thousand in all. `nested` keeps 45, because 45
# · 46 / 2 is more than a thousand, and computes each layer once more.
#
# ## It trains
#
# The same depth with 4 channels and images of 8 x 8, which the network learns to blur.


# %%
def small(shape):
    return (
        jax.random.normal(jax.random.key(0), shape)
        * (0.1 / (9 * shape[-1] * DEPTH)) ** 0.5
    )


def loss(blocks, x, blurred):
    return jnp.mean((blocks.fold(x, remat="nested") - blurred) ** 2)


@jax.jit
def step(blocks, state, x, blurred):
    value, slope = jax.value_and_grad(loss)(blocks, x, blurred)
    updates, state = optimizer.update(slope, state)
    return optax.apply_updates(blocks, updates), state, value


optimizer = optax.adam(2e-5)
blocks = network(4, small)
state = optimizer.init(blocks)
x = jax.random.normal(jax.random.key(1), (8, 8, 8, 4))
blurred = (
    sum(
        jnp.roll(x, (down, right), (1, 2))
        for down in (-1, 0, 1)
        for right in (-1, 0, 1)
    )
    / 9
)
for number in range(16):
    blocks, state, value = step(blocks, state, x, blurred)
    if number % 5 == 0:
        print(f"step {number:2}  loss {value:.3f}")
