"""Runs of the training loop: metrics, evaluation, checkpoints, resuming, and steps that
are not finite.
"""

import dataclasses
import itertools
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from haliax import NamedArray

from stacked_remat.training import (
    AdamWConfig,
    CheckpointConfig,
    Checkpoints,
    ConfigError,
    NonFiniteLossError,
    Position,
    ProfilerConfig,
    RunFolder,
    RunOutputs,
    Tracker,
    TrainerConfig,
    TrainState,
    TrainStep,
    UpdateConfig,
    build_optimizer,
    checkpoint_run,
    held_out_evaluators,
    learning_rate_schedule,
    loop,
    train,
)

from .next_byte import next_byte, next_byte_loss
from .token_batches import held_out_of, stream_of

# optax's Adam raises a float to an integer power.
pytestmark = pytest.mark.usefixtures("standard_promotion")

OPTIMIZER = AdamWConfig(learning_rate=0.3, warmup=1, weight_decay=0.0)


class Recorder(Tracker):
    def __init__(self):
        self.logged, self.shown, self.calls = [], [], []

    def log(self, step, metrics):
        self.logged.append(
            (
                step,
                {name: np.asarray(value).tolist() for name, value in metrics.items()},
            )
        )

    def flush(self):
        self.calls.append(f"flush of {self.logged[-1][0]}")

    def close(self):
        self.calls.append("close")

    def message(self, text):
        self.shown.append(text)

    def start(self, num_steps, done=0):
        self.calls.append(f"start {num_steps} after {done}")

    def advance(self, step, loss, tokens_per_second, memory=None):
        assert memory is None or memory > 0
        self.calls.append(step)

    def stop(self):
        self.calls.append("stop")

    def of(self, name):
        return [(step, line[name]) for step, line in self.logged if name in line]


def stream(size, seed):
    """Counts up by one or two modulo 7: an entropy of log 2 per token, from log 7 at
    the start.
    """
    return (np.cumsum(np.random.default_rng(seed).integers(1, 3, size)) % 7).astype(
        np.uint16
    )


def run(
    recorder,
    folder,
    *,
    loss_function=next_byte_loss,
    num_sets=1,
    vocab=7,
    training=None,
    evaluators=None,
    position=None,
    **config,
):
    trainer = TrainerConfig(
        **{"num_steps": 30, "log_every": 10, "eval_batches": 3, **config}
    )
    optimizer = build_optimizer(OPTIMIZER, trainer.num_steps)
    evaluators = (
        evaluators
        if evaluators is not None
        else {
            name: held_out_evaluators(
                loss_function,
                held_out_of(stream(400, 1 + number), 8, 4),
                {},
                trainer.eval_batches,
            )["held_out"]
            for number, name in enumerate(("held_out", "code")[:num_sets])
        }
    )
    checkpoints = Checkpoints(folder / "checkpoints", trainer.checkpoint, run_config={})
    try:
        return train(
            TrainState.init(next_byte(vocab), optimizer),
            TrainStep.of(trainer, loss_function=loss_function, optimizer=optimizer),
            schedule=learning_rate_schedule(OPTIMIZER, trainer.num_steps),
            training=training or stream_of(stream(2000, 0), 8, 4, trainer.seed),
            evaluators=evaluators,
            config=trainer,
            outputs=RunOutputs(RunFolder(folder), checkpoints, [recorder], recorder),
            position=position,
        )
    finally:
        checkpoints.close()


def product_loss(model, batch):
    log_probs = jax.nn.log_softmax(jax.nn.one_hot(batch.tokens.array, 7) @ model.table)
    loss = -jnp.mean(
        jnp.take_along_axis(log_probs, batch.targets.array[..., None], axis=-1)
    )
    return loss, {"loss": loss}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with everything configured: its recorder, its result and its folder."""
    recorder, folder = Recorder(), tmp_path_factory.mktemp("finished")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        result = run(
            recorder,
            folder,
            loss_function=product_loss,
            num_sets=2,
            eval_every=12,
            checkpoint=CheckpointConfig(every_steps=20, keep_last=10),
            profiler=ProfilerConfig(start_step=3, num_steps=2, peak_flops=1e9),
        )
    return recorder, result, folder


def test_training_lowers_the_held_out_loss_to_its_entropy(finished):
    _, result, _ = finished
    np.testing.assert_allclose(result.held_out_before["held_out"], np.log(7), rtol=1e-5)
    assert result.held_out_after["held_out"] < np.log(2) + 0.15
    assert int(result.state.step) == 30 and result.stopped_by is None


def test_a_step_is_dispatched_before_the_metrics_of_the_last_one_are_read(
    tmp_path, monkeypatch
):
    """But for those before an evaluation or a checkpoint, which need its state."""
    events = []
    read = loop._Report._report
    monkeypatch.setattr(
        loop._Report,
        "_report",
        lambda self, step: (events.append(f"read {step.number}"), read(self, step)),
    )
    count, advance = itertools.count(1), loop._HeldState.advance
    monkeypatch.setattr(
        loop._HeldState,
        "advance",
        lambda *given: (events.append(f"do {next(count)}"), advance(*given))[1],
    )
    checkpoint = CheckpointConfig(every_steps=5)
    run(Recorder(), tmp_path, num_steps=8, checkpoint=checkpoint, eval_every=3)
    assert events == [
        *("do 1", "do 2", "read 1", "do 3", "read 2", "read 3"),  # evaluated
        *("do 4", "do 5", "read 4", "read 5"),  # saved
        *("do 6", "read 6", "do 7", "do 8", "read 7", "read 8"),
    ]


def test_a_number_of_the_optimizer_that_a_step_changes_is_refused(
    tmp_path, monkeypatch
):
    """It would stay what it was when the step was compiled."""

    def counted(updates, state: Any, params=None):
        return updates, {"count": state["count"] + 1}

    counting = optax.GradientTransformation(lambda params: {"count": 0}, counted)
    monkeypatch.setitem(globals(), "build_optimizer", lambda *_: counting)
    with pytest.raises(TypeError, match=r"changed state.optimizer_state\['count'\]"):
        run(Recorder(), tmp_path, num_steps=2)


def test_the_time_of_a_step_is_its_own_before_an_evaluation_too(tmp_path):
    def slow_loss(model, batch):
        def wait(loss):
            time.sleep(0.05)
            return loss

        loss, metrics = next_byte_loss(model, batch)
        done = jax.pure_callback(wait, loss, jax.lax.stop_gradient(loss))
        return loss, metrics | {"loss": done}

    recorder = Recorder()
    options = {"num_steps": 7, "log_every": 1, "eval_every": 3}
    run(recorder, tmp_path, loss_function=slow_loss, **options)
    seconds = dict(recorder.of("step_seconds"))
    assert all(0.05 <= seconds[step] for step in range(2, 8))


def test_the_learning_rate_is_that_of_the_schedule_in_every_table(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(loop, "_RATES", 8)
    recorder = Recorder()
    run(recorder, tmp_path, log_every=1)
    schedule = learning_rate_schedule(OPTIMIZER, 30)
    expected = [float(schedule(jnp.int32(step))) for step in range(30)]
    rates = [rate for _, rate in recorder.of("learning_rate")]
    np.testing.assert_allclose(rates, expected, rtol=1e-6)


def test_metrics_come_at_the_start_the_end_and_in_between(finished):
    recorder, _, _ = finished
    trained = [(step, line) for step, line in recorder.logged if "loss" in line]
    assert [step for step, _ in trained] == [1, 10, 20, 30]
    names = {
        "loss",
        "grad_norm",
        "learning_rate",
        "tokens_per_second",
        "step_seconds",
        "targets",
        "tokens",
        "goodput",
    }
    assert set(trained[0][1]) == names | {"peak_memory_bytes", "mfu"}
    np.testing.assert_allclose(trained[0][1]["learning_rate"], 0.15)
    assert [line["targets"] for _, line in trained] == [32] * 4
    assert [line["tokens"] for _, line in trained] == [32, 320, 640, 960]
    assert all(0 <= line["goodput"] <= 1 for _, line in trained)
    for _, line in trained[1:]:
        np.testing.assert_allclose(
            line["tokens_per_second"] * line["step_seconds"], 32, rtol=1e-6
        )
        # The product and the gradient of the table; the other factor depends on nothing
        # that is trained.
        np.testing.assert_allclose(
            line["mfu"] * line["step_seconds"] * 1e9, 2 * 2 * 32 * 7 * 7, rtol=1e-6
        )
    # Before each checkpoint
    flushed = [
        *range(1, 21),
        "flush of 20",
        *range(21, 31),
        "flush of 30",
    ]
    # The caller closes trackers
    assert recorder.calls == [
        "start 30 after 0",
        *flushed,
        "stop",
    ]


def test_each_held_out_set_is_evaluated_before_after_and_in_between(finished):
    recorder, result, _ = finished
    for name in ("held_out", "code"):
        losses = recorder.of(f"{name}_loss")
        assert [step for step, _ in losses] == [0, 12, 24, 30]
        assert (
            losses[0][1] == result.held_out_before[name]
            and losses[-1][1] == result.held_out_after[name]
        )
    assert set(result.held_out_after) == {"held_out", "code"}
    assert "code loss after 30 steps" in recorder.shown[-1]
    assert result.held_out_after["code"] != result.held_out_after["held_out"]


def test_checkpoints_are_written_when_the_config_says_and_a_window_of_steps_is_traced(
    finished,
):
    _, _, folder = finished
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"20", "30"}
    assert list((folder / "profile").rglob("*.xplane.pb"))


def falling_until(best):
    """A function that makes the held-out losses of evaluations before, and after the
    steps 5, 10, ...: they fall until step `best`, and rise then.
    """
    steps = iter(range(0, 1000, 5))
    return lambda model: abs(next(steps) - best) / 100 + 1.0


BY_BEST = {"eval_every": 5, "log_every": 100}


def kept_steps(folder):
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir())


def test_the_best_checkpoint_is_kept_and_a_run_ends_when_its_patience_is_over(tmp_path):
    checkpoint = CheckpointConfig(every_steps=4, keep_last=1, keep_best=True)
    recorder = Recorder()
    result = run(
        recorder,
        tmp_path,
        evaluators={"held_out": falling_until(10), "code": lambda model: 1.0},
        patience=3,
        checkpoint=checkpoint,
        **BY_BEST,
    )
    assert (result.best_step, result.best_loss) == (10, 1.0)
    assert int(result.state.step) == 25 and result.stopped_by is None
    assert kept_steps(tmp_path) == [10, 25]
    assert [step for step, _ in recorder.of("held_out_loss")] == [0, 5, 10, 15, 20, 25]
    position = checkpoint_run(tmp_path / "checkpoints")["position"]
    assert position["best_step"] == 10 and position["evaluations_since_best"] == 3
    # A process that is killed before it says so has nothing left to do.
    again = run(
        Recorder(),
        tmp_path / "again",
        evaluators={"held_out": falling_until(10)},
        patience=3,
        position=Position(**position),
        **BY_BEST,
    )
    assert again.best_step == 10 and int(again.state.step) == 0
    whole = run(
        Recorder(),
        tmp_path / "whole",
        evaluators={"held_out": falling_until(10)},
        checkpoint=dataclasses.replace(checkpoint, keep_best=False),
        **BY_BEST,
    )
    assert int(whole.state.step) == 30 and whole.best_step == 10
    assert kept_steps(tmp_path / "whole") == [30]
    # By the text of one source, while that of all sources still gets better
    of_one = run(
        Recorder(),
        tmp_path / "source",
        evaluators={
            "held_out": falling_until(1000),
            "held_out/books": falling_until(1000),
            "held_out/chats": falling_until(10),
        },
        best_source="chats",
        patience=3,
        **BY_BEST,
    )
    assert (of_one.best_step, of_one.best_loss) == (10, 1.0)
    assert int(of_one.state.step) == 25


def test_patience_needs_evaluations(tmp_path):
    with pytest.raises(ValueError, match="trainer.patience goes by .*eval_every too"):
        TrainerConfig(patience=2)
    with pytest.raises(ValueError, match="checkpoint.keep_best goes by the loss on"):
        TrainerConfig(checkpoint=CheckpointConfig(keep_best=True))
    with pytest.raises(ConfigError, match="trainer.patience .* none is held out"):
        run(Recorder(), tmp_path, evaluators={}, patience=2, **BY_BEST)
    with pytest.raises(ValueError, match="best_source is .* give one of them too"):
        TrainerConfig(best_source="chats", eval_every=5)
    sets = ["held_out", "held_out/books", "held_out/chats"]
    for names, text in (
        (sets, "there are books, chats. Did you mean `chats`?"),
        (sets[:1], "there is one source: leave trainer.best_source out"),
    ):
        with pytest.raises(ConfigError, match=re.escape(text)):
            run(
                Recorder(),
                tmp_path,
                evaluators=dict.fromkeys(names),
                best_source="chat",
                patience=2,
                **BY_BEST,
            )


class SomeMasked:
    """A stream whose batches count 5 targets, and of which the third and the fourth
    count none.
    """

    def __init__(self):
        self._whole, self._delivered = stream_of(stream(2000, 0), 8, 4, 0), 0

    def next(self):
        self._delivered += 1
        batch = self._whole.next()
        count = 0 if self._delivered in (3, 4) else 5
        weights = (np.arange(batch.weights.array.size) < count).astype(np.float32)
        named = NamedArray(
            weights.reshape(batch.weights.array.shape), batch.weights.axes
        )
        return dataclasses.replace(batch, weights=named)

    def get_state(self):
        return self._whole.get_state()


def test_targets_are_counted_and_a_step_without_any_is_said(tmp_path):
    recorder = Recorder()
    update = UpdateConfig(on_nonfinite="skip")  # of a loss that is NaN without targets
    run(
        recorder,
        tmp_path,
        training=SomeMasked(),
        num_steps=6,
        log_every=1,
        update=update,
    )
    assert recorder.of("targets") == [(1, 5), (2, 5), (3, 0), (4, 0), (5, 5), (6, 5)]
    said = [text for text in recorder.shown if "no target" in text]
    assert [text[:22] for text in said] == [
        "step 3 has no target: ",
        "step 4 has no target: ",
    ]


def diverges_below(limit, once=False):
    """The loss of the next byte, which is NaN where it is smaller."""

    def loss(model, batch):
        loss, _ = next_byte_loss(model, batch)
        marked = batch.tokens.array[0, 0] == 3 if once else True
        loss = jnp.where((loss < limit) & marked, jnp.nan, loss)
        return loss, {"loss": loss}

    return loss


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    recorder = Recorder()
    with pytest.raises(
        NonFiniteLossError, match=r"Step \d+ is not finite: loss nan.*learning_rate"
    ):
        run(recorder, tmp_path, loss_function=diverges_below(1.7))
    assert recorder.calls[-1] == "stop"


def test_steps_that_are_not_finite_can_be_skipped(tmp_path):
    recorder, skip = (
        Recorder(),
        UpdateConfig(on_nonfinite="skip", max_consecutive_skips=3),
    )
    result = run(
        recorder,
        tmp_path,
        loss_function=diverges_below(1.7, once=True),
        update=skip,
        log_every=1,
        eval_every=100,
    )
    skipped = [step for step, skips in recorder.of("skips") if skips]
    assert skipped and len(skipped) < 20
    assert f"step {skipped[0]} skipped: loss nan" in "".join(recorder.shown)
    assert int(result.state.step) == 30 and jnp.all(
        jnp.isfinite(result.state.model.table)
    )
    # the learning rate is that of the updates that were made
    rates = dict(recorder.of("learning_rate"))
    assert rates[skipped[0] + 1] == rates[skipped[0]]
    recorder = Recorder()
    with pytest.raises(NonFiniteLossError):
        run(
            recorder, tmp_path / "other", loss_function=diverges_below(1.7), update=skip
        )
    assert sum("skipped" in line for line in recorder.shown) == 3
