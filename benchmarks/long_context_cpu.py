"""Runs a training step at 65,536 tokens on the CPU: its time, loss and peak memory.

    python -m benchmarks.long_context_cpu

Runs the step of `models/configs/qwen3_moe_65k_cpu.yaml` in one process for each of `--policies`, and writes
`results/long_context_cpu.json`. It fails if the norms of gradients differ. Further options are keys of the
config.
"""

import functools
import time
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
from haliax import Axis

from models.decoder.decoder import Decoder
from models.lm import next_token_loss
from models.run_config import LmRunConfig
from stacked_remat.training import (
    TrainState,
    TrainStep,
    build_optimizer,
    parse_config,
    remat_policy,
)
from stacked_remat.training.throughput import peak_resident_bytes

from .command import Rows, benchmark
from .qwen3_context import random_batch
from .record import in_a_process

CONFIG = Path(__file__).parents[1] / "models/configs/qwen3_moe_65k_cpu.yaml"
VOCAB = Axis("vocab", 257)


@benchmark("long_context_cpu")
def main(
    config: Path = CONFIG, policies: tuple[str, ...] = ("true", "nested"), overrides: tuple[str, ...] = ()
) -> Rows:
    norms = []
    for policy in policies:
        row = in_a_process(run_step, ["--config_path", str(config), "--remat", policy, *overrides])
        norms.append(row["grad_norm"])
        yield {"policy": policy, **row}
    if not np.allclose(norms, norms[0], rtol=1e-3):
        raise SystemExit(f"gradients differ between policies: {dict(zip(policies, norms, strict=True))}")


def run_step(arguments: list[str]) -> dict[str, Any]:
    """Compile and run one step on random tokens; peak memory is of the whole process so far."""
    config = parse_config(LmRunConfig, arguments)
    batch = random_batch(config.data.batch_size, config.data.seq_len, VOCAB.size)
    optimizer = build_optimizer(config.optimizer, config.trainer.num_steps)
    remat = remat_policy(config.remat, config.model.remat_presets)
    initial = functools.partial(Decoder.init, config.model, VOCAB, remat=remat)
    state = TrainState.init(eqx.filter_jit(initial)(key=jax.random.key(0)), optimizer)
    step = TrainStep(next_token_loss, optimizer)
    compiled = eqx.filter_jit(step, donate="all-except-first").lower(batch, state).compile()
    before = time.monotonic()
    _, metrics = jax.block_until_ready(compiled(batch, state))
    return {
        "tokens": batch.num_tokens,
        "layers": config.model.num_layers,
        "seconds": round(time.monotonic() - before, 1),
        "loss": float(metrics["loss"]),
        "grad_norm": float(metrics["grad_norm"]),
        "peak_resident_bytes": peak_resident_bytes(),
    }


if __name__ == "__main__":
    main()
