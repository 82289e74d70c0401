# %% [markdown]
# # A planner session
#
# Which policy fits? `memory.plan` compiles a training step, for the device at hand or
# for a GPU that is not there (`target="h200"`), and takes the policy with the fewest
# FLOPs among those that fit.

# %%
import textwrap

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax
from matplotlib.figure import Figure

from stacked_remat import Stacked, memory

LAYERS, WIDTH = 16, 64


class Block(eqx.Module):
    up: jax.Array
    down: jax.Array

    def __call__(self, x):
        return x + jax.nn.silu(x @ self.up) @ self.down


def make():
    weights = (
        jnp.zeros((LAYERS, WIDTH, 4 * WIDTH)),
        jnp.zeros((LAYERS, 4 * WIDTH, WIDTH)),
    )
    blocks = Stacked.init(hax.Axis("layers", LAYERS), Block)(*weights)
    return blocks, optimizer.init(blocks)


optimizer = optax.adam(1e-3)
blocks, state = eqx.filter_eval_shape(make)  # shapes are enough
x = jax.ShapeDtypeStruct((4096, WIDTH), jnp.float32)


# %% [markdown]
# Give it what will run: the whole step, with the optimizer's state, updated in place.


# %%
def step(remat):
    def update(blocks, state, x):
        gradient = jax.grad(lambda blocks: jnp.mean(blocks.fold(x, remat=remat) ** 2))(
            blocks
        )
        updates, state = optimizer.update(gradient, state, blocks)
        return eqx.apply_updates(blocks, updates), state

    return update


trials = {}


def show(trial):
    trials[trial.name] = trial.report.total / 2**20
    print(f"{trial.report.total / 2**20:6.1f} MiB under {trial.name}")


options = {"donate": ["blocks", "state"], "host_budget": 0}
found = memory.plan(
    step, blocks, state, x, budget="45MiB", vary=False, show=show, **options
)
print(f"{found.policy!r} fits 45 MiB")
figure = Figure((7, 1.6), layout="constrained")
axes = figure.subplots()
axes.set(xlabel="memory of the step (MiB)")
axes.barh([*trials], [*trials.values()], color="gray")
axes.axvline(45, color="black", ls="--", label="budget")
_ = axes.legend()

# %% [markdown]
# Without `vary=False` the plan also chooses which values inside layers are kept, and
# how many of the first layers keep all of theirs.

# %%
policies = [False, True, "nested"]
least = memory.report(step(False), blocks, state, x).flops.matmul
for budget in ("35MiB", "100MiB", "1GiB"):
    found = memory.plan(
        step,
        blocks,
        state,
        x,
        budget=budget,
        candidates=policies,
        **options,
    )
    times = found.report.flops.matmul / least
    print(f"{budget:>6}: {times:.3f} times the fewest FLOPs, under")
    print(textwrap.indent(textwrap.fill(str(found.policy), 70), " " * 8))

# %% [markdown]
# Where nothing fits, the error says what the smallest needs:

# %%
try:
    memory.plan(step, blocks, state, x, budget="20MiB", candidates=policies, **options)
except memory.BudgetError as error:
    print(textwrap.fill(str(error).splitlines()[0], 80))

# %% [markdown]
# For a training run the same is a command, which also finds the longest context, the
# largest batch and the fewest devices ([Plan a run](../training.md#plan-a-run)).
