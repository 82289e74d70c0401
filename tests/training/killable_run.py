"""Small runs that kill themselves: `python -m tests.training.killable_run RUNS`.

RUNS is JSON, a list of the folder and the moments of each run. Each has a process of its own, which is forked
after the imports; the exit statuses are printed.

A moment is `step:N`, the end of step N, or `EVENT:TEXT:N`, the N-th audit event of this name (`os.mkdir`,
`os.rename`, ...) after the previous moment whose arguments contain the text. At the last moment the process
kills itself with SIGKILL.
"""

import contextlib
import json
import os
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from stacked_remat.training import (
    AdamWConfig,
    CheckpointConfig,
    Checkpoints,
    ConsoleProgress,
    JsonLinesTracker,
    Position,
    RandomLoss,
    RunFolder,
    RunOutputs,
    Tracker,
    TrainerConfig,
    TrainState,
    build_optimizer,
    config_as_dict,
    held_out_evaluators,
    learning_rate_schedule,
    train,
)

from .next_byte import next_byte, next_byte_loss
from .token_batches import held_out_of, stream_of

OPTIMIZER = AdamWConfig(learning_rate=0.1, warmup=3)
TRAINER = TrainerConfig(
    num_steps=16,
    log_every=1,
    eval_every=5,
    eval_batches=2,
    checkpoint=CheckpointConfig(every_steps=4, keep_last=1),
)
TOKENS = (np.random.default_rng(0).integers(0, 30, 3000) ** 2 // 30).astype(np.uint16)


def noisy_loss(model, batch, key):
    """Drops about every third embedding, so that the random numbers matter."""
    kept = jax.random.bernoulli(key, 0.7, (30, 30)).astype(jnp.float32)
    return next_byte_loss(jax.tree.map(lambda table: table * kept, model), batch)


def main(runs):
    statuses = []
    for folder, moments in runs:
        process = os.fork()
        if not process:
            with contextlib.redirect_stdout(sys.stderr):
                train_and_die(Path(folder), moments)
            os._exit(0)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
    print(json.dumps(statuses))


def train_and_die(folder, moments):
    killer = Killer(moments)
    run = RunFolder.open(folder, config_as_dict(TRAINER))
    checkpoints = Checkpoints(run.checkpoints, TRAINER.checkpoint, run_config=config_as_dict(TRAINER))
    optimizer = build_optimizer(OPTIMIZER, TRAINER.num_steps)
    state, position = TrainState.init(next_byte(30), optimizer), None
    if checkpoints.latest() is not None:
        state, restored = checkpoints.restore(state)
        position = Position(**restored)
    run.begin(config_as_dict(TRAINER))
    tracker = JsonLinesTracker(run.metrics, resumed_after=-1 if position is None else position.step)
    result = train(
        state,
        loss_function=RandomLoss(noisy_loss),
        optimizer=optimizer,
        schedule=learning_rate_schedule(OPTIMIZER, TRAINER.num_steps),
        training=stream_of(TOKENS[:2500], 16, 8, 0),
        evaluators=held_out_evaluators(
            next_byte_loss, held_out_of(TOKENS[2500:], 16, 8), {}, TRAINER.eval_batches
        ),
        config=TRAINER,
        outputs=RunOutputs(run, checkpoints, [tracker, killer], ConsoleProgress()),
        position=position,
    )
    checkpoints.close()
    run.finish({"held_out_after": dict(result.held_out_after)})


class Killer(Tracker):
    def __init__(self, moments):
        self.moments = [moment.split(":") for moment in moments]
        self.count = 0
        if self.moments:
            sys.addaudithook(lambda event, arguments: self.happened(event, str(arguments)))

    def log(self, step, metrics):
        self.happened("step", str(step))

    def close(self):
        pass

    def happened(self, event, text):
        if not self.moments or self.moments[0][0] != event:
            return None
        wanted = self.moments[0]
        if event == "step":
            if text != wanted[1]:
                return None
        else:
            self.count += wanted[1] in text
            if self.count < int(wanted[2]):
                return None
        self.moments.pop(0)
        self.count = 0
        if not self.moments:
            os.kill(os.getpid(), signal.SIGKILL)
        return None


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
