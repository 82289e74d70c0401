"""Time per step of `train_lm` beside a bare loop over its compiled step.

    XLA_FLAGS=--xla_cpu_multi_thread_eigen=false python -m benchmarks.training_loop

The bare loop calls the same step on one batch that is on the device already, and waits
once, at its end. What a run does beside the step is in the ratio: making batches,
moving them to the device, reading metrics, logging, progress. XLA has one thread with
that flag, so that with two cores the host has one of its own, as beside a GPU. Both run
in turn in one process; a ratio is the median over rounds. With `--local_every 2` a
third run writes local checkpoints every two steps, to a folder in memory where there
is one, and `local_ratio` is its time beside that of the run without. Writes
`results/training_loop.json`.
"""

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
from rich.console import Console

from models.candidate import Candidate
from models.run_config import LmRunConfig
from models.run_state import initial_state
from models.train_lm import train_lm
from stacked_remat.training import (
    ConsoleProgress,
    Partitioning,
    load_tokenizer,
    open_training_data,
    parse_config,
)

from .command import Rows, benchmark

CONFIG = Path(__file__).parents[1] / "models" / "configs" / "qwen3_moe_tiny.yaml"
_MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else None  # a folder in it
_WARM_UP = 5  # steps that are not counted: the first compiles
# Options of a run whose step takes this long on one core
SIZES = {
    "short": ("--data.seq_len", "64", "--data.batch_size", "4"),
    "middle": ("--data.seq_len", "128", "--data.batch_size", "8"),
    "long": ("--data.seq_len", "128", "--data.batch_size", "32"),
}


@benchmark("training_loop")
def main(
    sizes: tuple[str, ...] = tuple(SIZES),
    steps: int = 150,
    rounds: int = 5,
    local_every: int = 0,
    overrides: tuple[str, ...] = (),
) -> Rows:
    """Medians of the time per step, and of the ratio of the run to the bare loop."""
    for name in sizes:
        local_ratios = []
        with (
            tempfile.TemporaryDirectory() as folder,
            tempfile.TemporaryDirectory(dir=_MEMORY) as local,
        ):
            run = _Run(Path(folder), steps, (*SIZES[name], *overrides))
            pairs = []
            for _ in range(rounds):
                pairs.append((run.trained(), run.bare()))
                if local_every:
                    with_local = run.trained(
                        f"--trainer.checkpoint.local_dir={local}",
                        f"--trainer.checkpoint.local_every_steps={local_every}",
                    )
                    local_ratios.append(with_local / pairs[-1][0])
        trained, bare = zip(*pairs, strict=True)
        ratios = [ours / theirs for ours, theirs in pairs]
        of_local = {}
        if local_ratios:
            of_local["local_ratio"] = round(statistics.median(local_ratios), 3)
        yield {
            "size": name,
            "step_milliseconds": round(1e3 * statistics.median(bare), 2),
            "run_milliseconds": round(1e3 * statistics.median(trained), 2),
            "ratio": round(statistics.median(ratios), 3),
            "least_ratio": round(min(ratios), 3),
            **of_local,
        }


class _Run:
    """A run of `train_lm` and the bare loop over the same step."""

    def __init__(self, folder: Path, steps: int, options: tuple[str, ...]):
        self._folder = folder
        self._steps = steps
        self._numbers = itertools.count()
        self._options = (
            f"--config_path={CONFIG}",
            *options,
            f"--trainer.num_steps={steps + _WARM_UP}",
            "--trainer.eval_batches=1",
            "--trainer.mesh.axes={data: 1}",
            f"--data.cache_dir={folder / 'cache'}",
        )
        self._bare = self._bare_loop(parse_config(LmRunConfig, self._options))

    def trained(self, *options: str) -> float:
        """Seconds per step of a run with further options, after its first steps."""
        run_dir = self._folder / str(next(self._numbers))
        arguments = (*self._options, *options, f"--trainer.run_dir={run_dir}")
        watch: Any = _Watch()
        quiet = ConsoleProgress(Console(quiet=True))
        train_lm(parse_config(LmRunConfig, arguments), quiet, watch)
        # The loop asks once a step whether to stop, a step after the device.
        times = watch.times
        return (times[-1] - times[_WARM_UP - 1]) / (len(times) - _WARM_UP)

    def bare(self) -> float:
        """Seconds per step of the loop over the compiled step."""
        self._bare(_WARM_UP)
        began = time.monotonic()
        self._bare(self._steps)
        return (time.monotonic() - began) / self._steps

    def _bare_loop(self, config: LmRunConfig) -> Callable[[int], None]:
        config = config.resolved()
        step = Candidate(config).train_step
        tokenizer = load_tokenizer(
            config.tokenizer_name, config.data.chat_date, rows=config.vocab_size
        )
        data = open_training_data(
            config.data,
            tokenizer,
            seed=0,
            progress=ConsoleProgress(Console(quiet=True)),
        )
        batch = Partitioning.one_device().shard_batch(data.training.next())
        data.training.close()
        compiled = eqx.filter_jit(step, donate="all-except-first")
        states = [initial_state(config)]

        def loop(steps: int) -> None:
            state = states.pop()
            for _ in range(steps):
                state, _ = compiled(batch, state)
            states.append(jax.block_until_ready(state))

        return loop


class _Watch:
    """Notes when a run asks whether to stop, as `StopSignals` that receive none."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.received = None

    def defer(self) -> None:
        self.times.append(time.monotonic())


if __name__ == "__main__":
    main()
