import jax.numpy as jnp
import numpy as np
import pytest

from stacked_remat.training import (
    NonFiniteLossError,
    OptimizerConfig,
    Progress,
    Tracker,
    TrainerConfig,
    TrainState,
    build_optimizer,
    held_out_evaluator,
    learning_rate_schedule,
    train,
)

from .next_byte import next_byte, next_byte_loss
from .token_batches import held_out_of, stream_of

# optax's Adam raises a float to an integer power.
pytestmark = pytest.mark.usefixtures("standard_promotion")

OPTIMIZER = OptimizerConfig(learning_rate=0.3, warmup_steps=1, weight_decay=0.0)


class Recorder(Tracker, Progress):
    def __init__(self):
        self.logged, self.shown, self.calls = [], [], []

    def log(self, step, metrics):
        self.logged.append((step, {name: np.asarray(value).tolist() for name, value in metrics.items()}))

    def close(self):
        self.calls.append("close")

    def message(self, text):
        self.shown.append(text)

    def work(self, what, done, total, status):
        self.calls.append(what)

    def start(self, num_steps):
        self.calls.append(f"start {num_steps}")

    def advance(self, step, loss, tokens_per_second):
        self.calls.append(step)

    def stop(self):
        self.calls.append("stop")


def stream(size, seed):
    """Counts up by one or two modulo 7: half a bit a token for who knows, log 7 for who does not."""
    return (np.cumsum(np.random.default_rng(seed).integers(1, 3, size)) % 7).astype(np.uint16)


def run(recorder, *, loss_function=next_byte_loss, **config):
    trainer = TrainerConfig(**{"num_steps": 30, "log_every": 10, "eval_batches": 3, **config})
    optimizer = build_optimizer(OPTIMIZER, trainer.num_steps)
    return train(
        TrainState.init(next_byte(7), optimizer),
        loss_function=loss_function,
        optimizer=optimizer,
        schedule=learning_rate_schedule(OPTIMIZER, trainer.num_steps),
        training=stream_of(stream(2000, 0), 8, 4, trainer.seed),
        evaluate=held_out_evaluator(loss_function, held_out_of(stream(400, 1), 8, 4), trainer.eval_batches),
        config=trainer,
        trackers=[recorder],
        progress=recorder,
    )


def test_training_lowers_the_held_out_loss_to_what_can_be_known():
    result = run(Recorder())
    np.testing.assert_allclose(result.held_out_before, np.log(7), rtol=1e-5)
    assert result.held_out_after < np.log(2) + 0.15
    assert int(result.state.step) == 30


def test_the_same_seed_gives_the_same_run_and_another_does_not():
    first, second, other = (run(Recorder(), seed=seed).state.model.table for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, second)
    assert jnp.any(first != other)


def test_metrics_come_at_the_start_the_end_and_in_between():
    recorder = Recorder()
    result = run(recorder, num_steps=12, log_every=5, eval_every=6)
    trained = [(step, line) for step, line in recorder.logged if "loss" in line]
    assert [step for step, _ in trained] == [1, 5, 10, 12]
    assert set(trained[0][1]) == {"loss", "grad_norm", "learning_rate", "tokens_per_second"}
    assert trained[0][1]["learning_rate"] == 0 and trained[1][1]["tokens_per_second"] > 0
    held_out = [(step, line["held_out_loss"]) for step, line in recorder.logged if "held_out_loss" in line]
    assert [step for step, _ in held_out] == [0, 6, 12]
    assert (held_out[0][1], held_out[2][1]) == (result.held_out_before, result.held_out_after)
    assert recorder.calls == ["start 12", *range(1, 13), "stop"]  # closing trackers is the caller's


def test_evaluation_reads_as_many_batches_as_it_is_told():
    few, many = (run(Recorder(), num_steps=2, eval_batches=n).held_out_after for n in (1, 10))
    assert few != many


def test_a_loss_that_is_not_finite_stops_the_run_and_says_so():
    recorder = Recorder()

    def diverges(model, batch):
        loss, _ = next_byte_loss(model, batch)
        loss = jnp.where(loss < 1.7, jnp.nan, loss)
        return loss, {"loss": loss}

    with pytest.raises(NonFiniteLossError, match=r"The loss of step \d+ is nan.*learning_rate"):
        run(recorder, loss_function=diverges)
    assert recorder.calls[-1] == "stop"
