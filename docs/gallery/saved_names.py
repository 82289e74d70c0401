# %% [markdown]
# # A policy with saved names, and what it costs
#
# If memory is left over, but not enough to keep everything, name values in the block,
# and let a policy keep some of them.

# %%
import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from matplotlib.figure import Figure

from stacked_remat import ScanCheckpointPolicy, Stacked, checkpoint_name, memory

LAYERS, TOKENS, WIDTH, HIDDEN = 24, 4096, 128, 512

# %% [markdown]
# An MLP with a gate. Its three products have the same cost; what they return differs in
# size. `wide` is four times a carry, `narrow` is as large as one. A name changes
# nothing by itself.


# %%
class Block(eqx.Module):
    gate: jax.Array
    up: jax.Array
    down: jax.Array

    def __call__(self, x):
        wide = checkpoint_name(x @ self.gate, "gate")
        other = checkpoint_name(x @ self.up, "up")
        narrow = checkpoint_name((jax.nn.silu(wide) * other) @ self.down, "out")
        return x + jnp.tanh(narrow)


shape = (LAYERS, WIDTH, HIDDEN)
weights = jnp.zeros(shape), jnp.zeros(shape), jnp.zeros((LAYERS, HIDDEN, WIDTH))
blocks = Stacked.init(hax.Axis("layers", LAYERS), Block)(*weights)
x = jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.float32)


def gradient(remat):
    return jax.grad(
        lambda blocks, x: jnp.mean(blocks.fold(x, remat=remat)), argnums=(0, 1)
    )


# %% [markdown]
# Nothing runs: each policy is compiled, and its memory and the FLOPs of its products
# are compared.

# %%
keep = {
    "everything": False,
    "gate and up": ScanCheckpointPolicy(save_block_internals=["gate", "up"]),
    "gate and out": ScanCheckpointPolicy(save_block_internals=["gate", "out"]),
    "out": ScanCheckpointPolicy(save_block_internals=["out"]),
    "only carries": True,
    "some carries, out": ScanCheckpointPolicy(
        nested=True, save_block_internals=["out"]
    ),
    "some carries": "nested",
}
found = memory.compare(gradient, blocks, x, candidates=list(keep.values()))
reports = dict(zip(keep, (trial.report for trial in found.trials), strict=True))
least = reports["everything"].flops.matmul
print(f"{'kept':18} {'MiB':>6} {'FLOPs':>11}")
for name, report in reports.items():
    print(
        f"{name:18} {report.temporaries / 2**20:6.0f}"
        f" {report.flops.matmul / least:11.3f}"
    )
figure = Figure((7, 3), layout="constrained")
axes = figure.subplots()
axes.set(xlabel="temporaries (MiB)", ylabel="FLOPs / those of everything")
for (name, report), marker in zip(reports.items(), "osD^v<>", strict=True):
    temporaries = report.temporaries / 2**20
    axes.plot(temporaries, report.flops.matmul / least, marker, label=name)
_ = axes.legend()

# %% [markdown]
# Each name kept spares one product of the recomputation, so what matters is bytes for
# each. `out` spares as many products as `gate` for a quarter of the memory.

# %%
carries = reports["only carries"]
for name in ("out", "gate and out", "gate and up"):
    more = (reports[name].temporaries - carries.temporaries) / 2**20
    spared = (carries.flops.matmul - reports[name].flops.matmul) / 1e9
    print(
        f"{name:13} {more:4.0f} MiB for {spared:5.1f} GFLOP: {more / spared:5.1f} MiB a"
        " GFLOP"
    )
assert (
    carries.temporaries
    < reports["out"].temporaries
    < reports["gate and up"].temporaries
)

# %% [markdown]
# A misspelt name keeps nothing, since one policy may serve stacks of different blocks.
# The comparison shows it:

# %%
policy = ScanCheckpointPolicy(save_block_internals=["gaet"])
print(memory.report(gradient(policy), blocks, x).temporaries == carries.temporaries)
