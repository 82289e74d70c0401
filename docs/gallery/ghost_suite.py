# %% [markdown]
# # A training loop of GhostSuite
#
# GhostSuite (PyTorch) scores examples by an engine around the training loop. Here is a
# manager with the names of its methods, so that such a loop can be ported line by line.
# All of it is two functions, `val_direction` and `grad_dot`.

# %%
from pathlib import Path
from tempfile import TemporaryDirectory

import equinox as eqx
import haliax as hax
import jax
import optax
from haliax import Axis

from stacked_remat import ghost

Batch, In = Axis("batch", 8), Axis("in", 4)


# %% [markdown]
# ## The manager
#
# It holds the attached batch, and what was found for it. There are no hooks to attach
# or to remove, and the validation batch is not appended to that of training.


# %%
class GhostEngineManager:
    def __init__(self, losses, validation, log, *, every=1, save_every=100):
        self.log = log
        self.every = every
        self.save_every = save_every

        @eqx.filter_jit
        def scored(model, batch):
            direction = ghost.val_direction(model, losses, validation)
            gradients, found = ghost.grad_dot(model, losses, batch, direction=direction)
            return gradients, found, losses(model, batch)

        @eqx.filter_jit
        def plain(model, batch):
            return ghost.val_direction(model, losses, batch)

        self.scored = scored
        self.plain = plain
        self.clear_gradients()

    def attach_train_batch(self, batch, *, step, examples):
        self.batch = batch
        self.step = step
        self.examples = examples

    def prepare_forward_input(self):
        return self.batch

    def prepare_gradients(self, model, batch):
        if self.step % self.every:
            return self.plain(model, batch)
        gradients, *self.found = self.scored(model, batch)
        return gradients

    def aggregate_and_log(self):
        if self.found is not None:
            found = ghost.StepScores.of(*self.found, self.step, self.examples)
            self.log.append(found)

    def clear_gradients(self):
        self.batch = self.found = None

    def should_save_metrics(self, step):
        return step % self.save_every == 0

    def save_metrics(self):
        self.log.flush()

    def cleanup(self):
        self.clear_gradients()
        self.save_metrics()


# %% [markdown]
# The loop: the label of example 3 is wrong in every batch.


# %%
def losses(model, batch):
    return (hax.dot(batch["x"], model, axis=In) - batch["y"]) ** 2


def batch_of(seed, *, wrong=()):
    x = hax.random.normal(jax.random.key(seed), (Batch, In))
    signs = [-1.0 if row in wrong else 1.0 for row in range(Batch.size)]
    return {"x": x, "y": hax.sum(x, In) * hax.named(signs, Batch)}


model = hax.zeros(In)
optimizer = optax.sgd(0.05)
state = optimizer.init(model)
with TemporaryDirectory() as folder:
    log = ghost.ScoreLog(Path(folder))
    manager = GhostEngineManager(losses, batch_of(0), log, every=2)
    ghost.check_examples(model, losses, batch_of(1))
    for step in range(1, 21):
        batch = batch_of(step, wrong=[3])
        manager.attach_train_batch(batch, step=step, examples=range(Batch.size))
        gradients = manager.prepare_gradients(model, manager.prepare_forward_input())
        manager.aggregate_and_log()
        updates, state = optimizer.update(gradients, state)
        model = eqx.apply_updates(model, updates)
        manager.clear_gradients()
        if manager.should_save_metrics(step):
            manager.save_metrics()
    manager.cleanup()
    ranking = ghost.rank_examples(Path(folder))
print(f"held-out loss {hax.mean(losses(model, batch_of(0))).item():.3f}")

# %% [markdown]
# `python -m stacked_remat.ghost bottom FOLDER` prints the same.

# %%
for name, score in zip(ranking.ids, ranking.scores, strict=True):
    print(f"example {name}  {score:+.3f}")
