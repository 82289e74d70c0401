"""A training loop with a manager: the same weights as without, and the scores of
`grad_dot` in its log.
"""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from stacked_remat.ghost import GhostManager, ScoreLog, grad_dot, val_direction
from stacked_remat.ghost.log import read_scores

Batch, In = Axis("batch", 6), Axis("in", 4)


def losses(model, batch):
    return (hax.dot(batch["x"], model, axis=In) - batch["y"]) ** 2


def batch_of(seed):
    x, y = jax.random.split(jax.random.key(seed))
    return {"x": hax.random.normal(x, (Batch, In)), "y": hax.random.normal(y, Batch)}


def test_a_loop_with_a_manager(tmp_path):
    manager = GhostManager(
        losses,
        batch_of(0),
        ScoreLog(tmp_path),
        every=2,
        save_every=4,
        options={"norms": True},
    )
    plain = eqx.filter_jit(
        eqx.filter_grad(lambda model, batch: losses(model, batch).mean().scalar())
    )
    model, expected = hax.zeros(In), {}
    for step in range(1, 8):
        batch = batch_of(step)
        manager.attach_train_batch(
            batch, step=step, examples=range(6), texts=[f"text {n}" for n in range(6)]
        )
        gradients = manager.prepare_gradients(model, manager.prepare_forward_input())
        found = manager.aggregate_and_log()
        assert (found is None) == (step not in (2, 4, 6))
        np.testing.assert_allclose(
            gradients.array, plain(model, batch).array, rtol=1e-5
        )
        if found is not None:
            direction = val_direction(model, losses, batch_of(0))
            _, again = grad_dot(model, losses, batch, direction=direction)
            expected[step] = np.asarray(again.total.array)
        model = model - 0.1 * gradients
        manager.clear_gradients()
        assert manager.should_save_metrics(step) == (step == 4)
    assert not list(tmp_path.iterdir())
    manager.cleanup()
    rows = read_scores(
        tmp_path, ["step", "example", "score", "norm", "loss", "text"]
    ).to_pylist()
    assert [(row["step"], row["example"]) for row in rows] == [
        (s, str(n)) for s in (2, 4, 6) for n in range(6)
    ]
    np.testing.assert_allclose(
        [row["score"] for row in rows],
        [*expected[2], *expected[4], *expected[6]],
        rtol=1e-5,
    )
    assert min(row["norm"] for row in rows) > 0 and rows[1]["text"] == "text 1"


def test_losses_may_be_plain_arrays_that_depend_on_no_other_example():
    x, y, model = np.eye(3, dtype=np.float32), np.ones(3, np.float32), jnp.zeros(3)
    plain = lambda model, batch: (batch[0] @ model - batch[1]) ** 2  # noqa: E731
    summed = lambda model, batch: plain(model, batch) * len(batch[0])  # noqa: E731
    manager, refusing = (
        GhostManager(losses, (x, y), every=2) for losses in (plain, summed)
    )
    for step in (1, 2):
        for each in (manager, refusing):
            each.attach_train_batch((x, y), step=step, examples=range(3))
        found = manager.prepare_gradients(model, manager.prepare_forward_input())
        np.testing.assert_allclose(found, np.full(3, -2 / 3), rtol=1e-6)
        if step == 1:
            refusing.prepare_gradients(model, (x, y))
    scores = manager.aggregate_and_log()
    assert scores is not None and scores.total.array.shape == (3,)
    with pytest.raises(
        ValueError, match="it depends on other examples"
    ):  # at the first scored step
        refusing.prepare_gradients(model, (x, y))


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        GhostManager(losses, batch_of(0), every=0)
    with pytest.raises(
        ValueError, match="options can't have has_aux, per_token: only granularity"
    ):
        GhostManager(losses, batch_of(0), options={"per_token": True, "has_aux": True})
    with pytest.raises(RuntimeError, match="call attach_train_batch before each step"):
        GhostManager(losses, batch_of(0)).prepare_forward_input()
