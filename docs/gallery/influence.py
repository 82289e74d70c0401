# %% [markdown]
# # Influence by replay: what the loss would be without an example
#
# What an example did in a training run. The run is a fold of its step, so the
# loss after it can be differentiated by the weight of each example in each step. That
# is exact for the run, with its order and its optimizer, where the dot product of two
# gradients describes one step.

# %%
import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax
from matplotlib.figure import Figure

from stacked_remat import ScanCheckpointPolicy, Stacked, fold, ghost

Layers, Embed, Steps, Batch = hax.make_axes(layers=4, embed=8, steps=40, batch=8)
Clean = Batch.resize(64)


class Block(eqx.Module):
    linear: hax.nn.Linear

    @staticmethod
    def init(*, key):
        return Block(hax.nn.Linear.init(Embed, Embed.alias("out"), key=key))

    def __call__(self, x):
        return x + 0.5 * hax.tanh(self.linear(x)).rename({"out": "embed"})


def losses(model, batch):
    """Of each example: is the first number above the mean of all?"""
    x, label = batch
    logit = model.fold(x)["embed", 0]
    return hax.nn.softplus(-logit * (2 * label - 1))


# %% [markdown]
# ## The run
#
# Each step has a batch of its own, and about a quarter of the labels is wrong.
# `weighted_step` makes the step: the mean of the losses times their weights, and an
# Optax optimizer.

# %%
keys = jax.random.split(jax.random.key(0), 4)
x = hax.random.normal(keys[0], (Steps, Batch, Embed))
wrong = hax.random.bernoulli(keys[1], (Steps, Batch), 0.25)
label = (x["embed", 0] > hax.mean(x, Embed)) ^ wrong
clean_x = hax.random.normal(keys[2], (Clean, Embed))
clean = clean_x, clean_x["embed", 0] > hax.mean(clean_x, Embed)

model = Stacked.init(Layers, Block)(key=jax.random.split(keys[3], Layers.size))
optimizer = optax.inject_hyperparams(optax.adam)(0.03, eps_root=1e-30)
start = model, optimizer.init(model)


def held_out(state):
    return hax.mean(losses(state[0], clean)).scalar()


@eqx.filter_jit
def replayed(start, batches, rates, remat="nested"):
    step = ghost.weighted_step(losses, optimizer)
    per_step = {"learning_rate": rates}
    return ghost.replay(
        step, start, batches, held_out, Steps, Batch, per_step=per_step, remat=remat
    )


found = replayed(start, (x, label), jnp.full(Steps.size, 0.03))
print(
    f"held-out loss {held_out(start):.3f} before, {found.loss:.3f} after {Steps.size}"
    " steps"
)

# %% [markdown]
# ## Which examples harm
#
# The derivative of the loss by an example's weight is above zero where the run would be
# better without it.

# %%
harm, is_wrong = found.examples.array.ravel(), wrong.array.ravel()
worst = jnp.argsort(-harm)[: int(is_wrong.sum())]
print(
    f"{is_wrong.mean():.0%} of the labels are wrong, {is_wrong[worst].mean():.0%} of"
    " the most harmful ones"
)
assert is_wrong[worst].mean() > 2 * is_wrong.mean()
figure = Figure((6, 2.5), layout="constrained")
axes = figure.subplots()
axes.set(xlabel="d loss / d weight of the example", ylabel="examples", yscale="log")
axes.hist([harm[~is_wrong], harm[is_wrong]], label=["right label", "wrong label"])
_ = axes.legend()

# %% [markdown]
# Leaving them out, in the same run:

# %%
kept = hax.named(
    jnp.ones(harm.size).at[worst].set(0.0).reshape(Steps.size, -1), (Steps, Batch)
)
without = held_out(
    fold(ghost.weighted_step(losses, optimizer), Steps)(start, (x, label), kept)
)
print(f"held-out loss {without:.3f} without them")
assert without < found.loss

# %% [markdown]
# ## Learning rates, and memory
#
# What differs from step to step has derivatives too. The states that are kept are those
# of the policy: here at most four of the forty.

# %%
of_rates = found.per_step["learning_rate"]
print("d loss / d learning rate, first steps:", of_rates[:3].round(2))
few = replayed(
    start, (x, label), jnp.full(Steps.size, 0.03), ScanCheckpointPolicy(max_carries=4)
)
assert jnp.allclose(few.examples.array, found.examples.array, atol=1e-4)
