# %% [markdown]
# # Attribution: which examples harm
#
# A third of the training labels is wrong; the dot product of each example's gradient
# with that of a small clean set finds them, in the backward pass.

# %%
import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from matplotlib.figure import Figure

from stacked_remat import Stacked, ghost

Layers, Batch, Embed = hax.make_axes(layers=6, batch=48, embed=16)
Clean = Batch.resize(32)

# %% [markdown]
# The loss function returns the loss of each example. It is given batches of one example
# too.


# %%
class Block(eqx.Module):
    linear: hax.nn.Linear

    @staticmethod
    def init(*, key):
        return Block(hax.nn.Linear.init(Embed, Embed.alias("out"), key=key))

    def __call__(self, x):
        return x + 0.3 * hax.tanh(self.linear(x)).rename({"out": "embed"})


class Classifier(eqx.Module):
    blocks: Stacked[Block]
    head: hax.NamedArray

    def losses(self, batch):
        x, label = batch
        logit = hax.dot(self.blocks.fold(x), self.head, axis=Embed)
        return hax.nn.softplus(-label * logit)


def losses(model, batch):
    return model.losses(batch)


def examples(seed, axis):
    x = hax.random.normal(jax.random.key(seed), (axis, Embed))
    return x, hax.sign(x["embed", 0] + x["embed", 1])


clean, (x, right) = examples(1, Clean), examples(2, Batch)
wrong = jnp.arange(Batch.size) < Batch.size // 3
label = right * hax.named(1.0 - 2.0 * wrong.astype(jnp.float32), Batch)

# %% [markdown]
# ## Train, and score as it goes
#
# One call gives the gradient that training needs and the scores of all examples. A
# score above zero means that a step on the example lowers the loss of the clean set.


# %%
@eqx.filter_jit
def step(model):
    direction = ghost.val_direction(model, losses, clean)
    gradient, found = ghost.grad_dot(model, losses, (x, label), direction=direction)
    return jax.tree.map(
        lambda weight, slope: weight - 0.1 * slope, model, gradient
    ), found.total.array


keys = jax.random.split(jax.random.key(0), Layers.size)
model = Classifier(
    Stacked.init(Layers, Block, remat="nested")(key=keys), 0.1 * hax.ones(Embed)
)
ghost.check_examples(model, losses, (x, label))  # no loss depends on other examples
total = jnp.zeros(Batch.size)
for _ in range(20):
    model, scores = step(model)
    total += scores / jnp.abs(scores).sum()

# %% [markdown]
# ## The lowest scores
#
# `x` marks an example whose label is wrong; no score was computed from that.

# %%
order = jnp.argsort(total)
print("".join("x" if wrong[index] else "." for index in order))
print(f"wrong labels among the worst third: {int(wrong[order[:16]].sum())} of 16")
print(f"mean score: right {total[~wrong].mean():.3f}, wrong {total[wrong].mean():.3f}")
figure = Figure((6, 2.5), layout="constrained")
axes = figure.subplots()
axes.set(xlabel="score", ylabel="examples")
axes.hist([total[~wrong], total[wrong]], 12, label=["right label", "wrong label"])
_ = axes.legend()

# %% [markdown]
# ## Scores by layer
#
# There is a score for each array and layer.

# %%
_, found = ghost.grad_dot(
    model, losses, (x, label), direction=ghost.val_direction(model, losses, clean)
)
by_layer = found.scores["blocks.*.linear.weight"].array
for layer, size in enumerate(jnp.abs(by_layer).sum(1).tolist()):
    print(f"layer {layer}  {size:.3f}")
