"""Qwen3-30B-A3B at long context, really run: gradients checked, then time, throughput and allocated memory.

    python -m benchmarks.qwen3_step --tokens 8192 32768 65536

For a GPU that holds the weights (an H200). They are random and made on the device. First the gradients of
each policy are compared with those of the first at a context where all fit; a policy whose gradients differ
is not timed. Then forward and backward are timed, and the medians, tokens a second, the share of the measured
bf16 matrix-product peak and the peak of allocated memory are written to `results/qwen3_step_<device>.json`.

Utilisation counts three forward passes a token and no recomputation, 96 GFLOP at 65,536 tokens.
"""

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis

from models.qwen3_moe import Qwen3MoeConfig
from models.train_lm import TrainLmConfig
from stacked_remat.training import BATCH_AXIS, POSITION_AXIS, TokenBatch, parse_config

from .qwen3_context import CONFIG, POLICIES, VOCAB, forward_and_backward
from .record import RESULTS, versions


def main(arguments: list[str] | None = None) -> Path:
    options = _parser().parse_args(arguments)
    config = parse_config(TrainLmConfig, ["--config_path", str(options.config), *options.overrides])
    assert isinstance(config.model, Qwen3MoeConfig)
    device = re.sub(r"\W+", "_", jax.devices()[0].device_kind.lower())
    path = options.out / f"qwen3_step_{device}.json"
    peak = matmul_peak(options.matmul)
    print(f"bf16 matrix products: {peak / 1e12:.0f} TFLOP/s", flush=True)
    parts = random_parts(forward_and_backward(config, options.check)[1][1])
    agreeing, differences = _checked(config, parts, options)
    rows: list[dict[str, Any]] = []
    for tokens in options.tokens:
        for name in agreeing:
            row = _timed(config, parts, tokens, name, options.rounds, peak)
            rows.append(row)
            print(json.dumps(row), flush=True)
            record = {"device": device, "versions": versions(), "matmul_peak": peak}
            record |= {"check_tokens": options.check, "gradient_differences": differences, "rows": rows}
            path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {path}")
    return path


def model_flops(config: Qwen3MoeConfig, tokens: int) -> float:
    """FLOPs a token of forward and backward pass, without recomputation: three times the forward pass."""
    heads = config.num_heads * config.HeadDim.size
    projections = config.hidden_dim * (2 * heads + 2 * config.num_kv_heads * config.HeadDim.size)
    active = config.experts.experts_per_token * 3 * config.hidden_dim * config.experts.intermediate_dim
    layer = 2 * (projections + active + config.hidden_dim * config.experts.num_experts)
    attention = 4 * heads * tokens / 2
    return 3 * (config.num_layers * (layer + attention) + 2 * config.hidden_dim * VOCAB.size)


def matmul_peak(size: int) -> float:
    """Measured FLOP/s of square bf16 matrix products."""
    a = jnp.ones((size, size), jnp.bfloat16)
    product = jax.jit(lambda a, b: a @ b)
    product(a, a).block_until_ready()
    best = float("inf")
    for _ in range(10):
        before = time.perf_counter()
        product(a, a).block_until_ready()
        best = min(best, time.perf_counter() - before)
    return 2 * size**3 / best


def random_parts(shapes: Any) -> Any:
    """Arrays of these shapes, made on the device one by one: normal and a fiftieth in size, vectors one."""

    @jax.jit(static_argnums=(1, 2))
    def normal(key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.random.normal(key, shape, dtype) * jnp.asarray(0.02, dtype)

    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0, impl="rbg"), len(leaves))
    made = [
        jnp.ones(leaf.shape, leaf.dtype) if leaf.ndim < 3 and leaf.shape[-1] < 10_000 and leaf.size < 10**6
        else normal(key, leaf.shape, leaf.dtype)
        for key, leaf in zip(keys, leaves, strict=True)
    ]  # fmt: skip
    return jax.tree.unflatten(structure, made)


def _compiled(config: TrainLmConfig, tokens: int, name: str) -> tuple[Callable[..., Any], TokenBatch]:
    fn, _ = forward_and_backward(config, tokens)
    axes = (Axis(BATCH_AXIS, 1), Axis(POSITION_AXIS, tokens))
    ids = hax.random.randint(jax.random.key(1), axes, 0, VOCAB.size)
    batch = TokenBatch(ids, hax.roll(ids, -1, axes[1]), hax.ones(axes, dtype=jnp.float32))
    return eqx.filter_jit(fn(POLICIES[name])), batch


def _checked(
    config: TrainLmConfig, parts: Any, options: argparse.Namespace
) -> tuple[list[str], dict[str, float]]:
    """The policies whose gradients are those of the first, and how far each is off, relative to the norm."""
    reference, differences, agreeing = None, {}, []
    for name in options.policies:
        run, batch = _compiled(config, options.check, name)
        gradients = [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(run(batch, parts)[1])]
        if reference is None:
            reference = gradients
        squares = [(jnp.sum((a - b) ** 2), jnp.sum(b**2)) for a, b in zip(gradients, reference, strict=True)]
        off, whole = (float(sum(column)) ** 0.5 for column in zip(*squares, strict=True))
        differences[name] = off / whole
        fine = whole > 0 and off <= 1e-2 * whole  # bfloat16: other fusions round otherwise
        agreeing += [name] if fine else []
        print(f"{name}: gradients off by {off / whole:.1e}{'' if fine else ', not timed'}", flush=True)
    return agreeing, differences


def _timed(
    config: TrainLmConfig, parts: Any, tokens: int, name: str, rounds: int, peak: float
) -> dict[str, Any]:
    row: dict[str, Any] = {"tokens": tokens, "policy": name}
    try:
        run, batch = _compiled(config, tokens, name)
        jax.block_until_ready(run(batch, parts))
        seconds = []
        for _ in range(rounds):
            before = time.perf_counter()
            jax.block_until_ready(run(batch, parts))
            seconds.append(time.perf_counter() - before)
    except jax.errors.JaxRuntimeError as error:
        return row | {"refused": str(error).splitlines()[0][:200]}
    median = statistics.median(seconds)
    assert isinstance(config.model, Qwen3MoeConfig)
    useful = model_flops(config.model, tokens) * tokens / median
    stats = jax.devices()[0].memory_stats() or {}
    return row | {
        "seconds": median,
        "tokens_per_second": tokens / median,
        "utilisation_of_matmul_peak": useful / peak,
        "peak_bytes_so_far": stats.get("peak_bytes_in_use"),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8_192, 32_768, 65_536])
    parser.add_argument(
        "--policies", nargs="+", default=["True", "nested", "offload"], choices=list(POLICIES)
    )
    parser.add_argument("--check", type=int, default=4_096, help="context at which gradients are compared")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--matmul", type=int, default=8_192, help="size of the matrix products of the peak")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--overrides", nargs=argparse.REMAINDER, default=[], help="keys of the config, last")
    return parser


if __name__ == "__main__":
    main()
