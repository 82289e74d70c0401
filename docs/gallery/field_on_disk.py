# %% [markdown]
# # A field that takes more than memory
#
# How to keep the states of a large simulation on disk. A field of 1,024 × 1,024 numbers
# takes 4 MiB, and the gradient of 10,000 steps would keep 40 GiB of them. Written to a
# file, they take the memory of a few, and no step runs more often than if memory held
# all. See [carries on disk](../policies.md#carries-on-disk).

# %%
import tempfile

import haliax as hax
import jax
import jax.numpy as jnp
from matplotlib.figure import Figure

from stacked_remat import ScanCheckpointPolicy, fold

WIDTH = 1_024
DT = 0.1
Time = hax.Axis("time", 40)  # 10,000 only takes longer


def step(field, diffusion):
    """The Allen-Cahn equation on a torus: phases that separate, and diffuse."""
    neighbours = jnp.zeros_like(field)
    for axis in (0, 1):
        neighbours += jnp.roll(field, 1, axis) + jnp.roll(field, -1, axis)
    return field + DT * (diffusion * (neighbours - 4 * field) + field - field**3)


def order(field, diffusion, remat):
    """How far the phases have separated at the end."""
    return jnp.mean(fold(step, Time, remat=remat)(field, diffusion) ** 2)


field = 0.1 * jax.random.normal(jax.random.key(0), (WIDTH, WIDTH))
diffusion = jnp.linspace(0.5, 1.0, Time.size)
print(f"a state of {field.nbytes / 2**20:.0f} MiB, {Time.size} steps")

# %%
end = jax.jit(fold(step, Time))(field, diffusion)
figure = Figure((7, 3), layout="constrained")
for axes, state, title in zip(
    figure.subplots(1, 2), (field, end), ("at first", "at the end"), strict=True
):
    axes.imshow(
        state[:128, :128], cmap="coolwarm", vmin=-1, vmax=1, interpolation="none"
    )
    axes.set(title=title, xticks=[], yticks=[])

# %% [markdown]
# ## What each policy takes
#
# The folder is on a disk with room for all states. (Here it is a temporary one; where
# `/tmp` is in memory, take another.) Beside its temporaries a program has the field,
# its gradient, and a copy of the state that is being written or read.

# %%
folder = tempfile.mkdtemp()
policies = {
    "True": True,
    "nested": "nested",
    "disk": ScanCheckpointPolicy(save_carries="disk", carries_folder=folder),
    "nested, disk": ScanCheckpointPolicy(
        nested=True, save_carries="disk", carries_folder=folder
    ),
}
gradients = {}
for name, remat in policies.items():
    gradient = jax.jit(jax.grad(order, (0, 1)), static_argnums=2)
    gradients[name] = gradient.lower(field, diffusion, remat).compile()
    memory = gradients[name].memory_analysis()
    print(f"{name:12} {memory.temp_size_in_bytes / 2**20:6.0f} MiB of temporaries")

# %% [markdown]
# ## The gradient
#
# By the first state, and by the diffusion at each step. With 10,000 steps the
# temporaries of `True` grow to 40 GiB and those of `"nested"` to 0.6 GiB; those of
# `"disk"` stay as they are.

# %%
of_field, of_diffusion = gradients["disk"](field, diffusion)
expected, _ = gradients["True"](field, diffusion)
print(f"by the field: norm {jnp.linalg.norm(of_field):.3e}")
print(
    f"by the diffusion: first step {of_diffusion[0]:.3e}, last {of_diffusion[-1]:.3e}"
)
assert jnp.allclose(of_field, expected, rtol=1e-4, atol=1e-12)
