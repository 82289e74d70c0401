"""Runs a training step at 65,536 tokens on the CPU: its time, loss and peak memory.

    python -m benchmarks.long_context_cpu

Runs the step of `models/configs/qwen3_moe_65k_cpu.yaml` in one process for each policy, and writes
`results/long_context_cpu.json`. It fails if the norms of gradients differ.
"""

import argparse
import functools
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis

from models.lm import build_model, next_token_loss
from models.run_config import LmRunConfig
from stacked_remat.training import (
    BATCH_AXIS,
    POSITION_AXIS,
    TokenBatch,
    TrainState,
    build_optimizer,
    parse_config,
    remat_policy,
    train_step,
)
from stacked_remat.training.throughput import peak_resident_bytes

from .record import RESULTS, write_results

CONFIG = Path(__file__).parents[1] / "models/configs/qwen3_moe_65k_cpu.yaml"
VOCAB = Axis("vocab", 257)


def main(arguments: list[str] | None = None) -> Path | None:
    options = _parser().parse_args(arguments)
    if options.alone:
        print(json.dumps(run_step(options.config, options.policies[0], options.overrides)))
        return None
    rows = [_in_a_process(options, policy) for policy in options.policies]
    norms = [row["grad_norm"] for row in rows]
    if not np.allclose(norms, norms[0], rtol=1e-3):
        raise SystemExit(
            f"gradients differ between policies: {dict(zip(options.policies, norms, strict=True))}"
        )
    path = options.out / "long_context_cpu.json"
    write_results(path, rows=rows)
    print(f"wrote {path}")
    return path


def run_step(config_path: Path, policy: str, overrides: list[str]) -> dict[str, Any]:
    """Compile and run one step on random tokens; peak memory is of the whole process so far."""
    config = parse_config(LmRunConfig, ["--config_path", str(config_path), "--remat", policy, *overrides])
    axes = (Axis(BATCH_AXIS, config.data.batch_size), Axis(POSITION_AXIS, config.data.seq_len))
    tokens = hax.random.randint(jax.random.key(1), axes, 0, VOCAB.size)
    batch = TokenBatch(tokens, hax.roll(tokens, -1, axes[1]), hax.ones(axes, dtype=jnp.float32))
    optimizer = build_optimizer(config.optimizer, config.trainer.num_steps)
    remat = remat_policy(config.remat, config.model.remat_presets)
    initial = functools.partial(build_model, config.model, VOCAB, remat=remat)
    state = TrainState.init(eqx.filter_jit(initial)(key=jax.random.key(0)), optimizer)
    step = functools.partial(train_step, loss_function=next_token_loss, optimizer=optimizer)
    compiled = eqx.filter_jit(step, donate="all-except-first").lower(batch, state).compile()
    before = time.monotonic()
    _, metrics = jax.block_until_ready(compiled(batch, state))
    return {
        "policy": policy,
        "tokens": batch.num_tokens,
        "layers": config.model.num_layers,
        "seconds": round(time.monotonic() - before, 1),
        "loss": float(metrics["loss"]),
        "grad_norm": float(metrics["grad_norm"]),
        "peak_resident_bytes": peak_resident_bytes(),
    }


def _in_a_process(options: argparse.Namespace, policy: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.long_context_cpu", "--alone"]
    command += ["--config", str(options.config), "--policies", policy, "--overrides", *options.overrides]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    row = json.loads(done.stdout.splitlines()[-1])
    print(
        f"{policy:8}  {row['layers']} layers, {row['tokens']:,} tokens  {row['seconds']:7.1f} s  "
        f"loss {row['loss']:.4f}  peak {row['peak_resident_bytes'] / 2**30:.2f} GiB resident",
        flush=True,
    )
    return row


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--policies", nargs="+", default=["true", "nested"])
    parser.add_argument("--overrides", nargs=argparse.REMAINDER, default=[], help="keys of the config, last")
    parser.add_argument("--alone", action="store_true", help="run one policy in this process, print its row")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser


if __name__ == "__main__":
    main()
