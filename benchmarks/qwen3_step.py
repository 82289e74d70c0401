"""Runs Qwen3-30B-A3B at long context: gradients checked, then time, throughput and allocated memory.

    python -m benchmarks.qwen3_step --tokens 8192 32768 65536

For a GPU that holds the weights (an H200), which are random. First, at a context where all policies fit, the
kernels of attention are compared with its definition, with documents, a window and sinks, and the gradients
of each policy with those of the first; a policy whose gradients differ is not timed. Then attention and
experts of one layer are timed, then forward and backward of the model, and medians, tokens per second, the
share of the measured bf16 matrix-product peak and the peak of allocated memory are written to
`results/qwen3_step_<device>.json` after every policy. Each policy runs in its own process, so that peaks of
memory are separate.

Utilisation counts three forward passes and no recomputation, 96 GFLOP per token at 65,536 tokens.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis

from models.qwen3 import Qwen3MoeConfig
from models.run_config import LmRunConfig
from stacked_remat import OffloadError, check_offload
from stacked_remat._placement import platform_of
from stacked_remat.training import BATCH_AXIS, POSITION_AXIS, TokenBatch, parse_config
from stacked_remat.training.throughput import peak_resident_bytes

from . import attention_layer, expert_layer
from .qwen3_context import CONFIG, POLICIES, forward_and_backward
from .record import RESULTS, allocate_as_needed, write_results


def main(arguments: list[str] | None = None) -> Path | None:
    options = _parser().parse_args(arguments)
    config = parse_config(LmRunConfig, ["--config_path", str(options.config), *options.overrides])
    if options.alone:
        print(json.dumps(_alone(config, options)))
        return None
    allocate_as_needed()
    found = _in_a_process(options, "check", options.policies, options.tokens)
    if "refused" in found:
        raise SystemExit(f"the gradients could not be compared: {found['refused']}")
    print(f"bf16 matrix products: {found['matmul_peak'] / 1e12:.3g} TFLOP/s", flush=True)
    print(f"attention off by {found['attention_differences']}", flush=True)
    print(f"offloading on this device: {found['offload_check']}", flush=True)
    agreeing = []
    for name, difference in found["gradient_differences"].items():
        fine = difference <= 1e-2  # bfloat16: other fusions round otherwise
        agreeing += [name] if fine else []
        print(f"{name}: gradients off by {difference:.1e}{'' if fine else ', not timed'}", flush=True)
    path = options.out / f"qwen3_step_{found['device']}.json"
    found["layers"] = _in_a_process(options, "layers", options.policies, options.layers)
    for row in [one for rows in found["layers"].values() for one in rows]:
        print(json.dumps(row), flush=True)
    rows: list[dict[str, Any]] = []
    for tokens in options.tokens:
        for name in agreeing:
            row = {"tokens": tokens, "policy": name, **_in_a_process(options, "time", [name], [tokens])}
            if "seconds" in row:
                useful = model_flops(config, tokens) * tokens / row["seconds"]
                row["utilisation_of_matmul_peak"] = useful / found["matmul_peak"]
            rows.append(row)
            print(json.dumps(row), flush=True)
            write_results(path, check_tokens=options.check, **found, rows=rows)
    print(f"wrote {path}")
    if wrong := [name for name in options.policies if name not in agreeing]:
        raise SystemExit(f"wrong gradients, not timed: {', '.join(wrong)}")
    return path


def model_flops(config: LmRunConfig, tokens: int) -> float:
    """FLOPs per token of forward and backward without recomputation: three times the forward pass."""
    config = config.resolved(check_folder=False)
    model = config.model
    if not isinstance(model, Qwen3MoeConfig):
        raise SystemExit(f"model.type must be qwen3_moe here; the config has {type(model).__name__}.")
    heads = model.num_heads * model.HeadDim.size
    projections = model.hidden_dim * (2 * heads + 2 * model.num_kv_heads * model.HeadDim.size)
    sparse = model.num_layers - len(model.experts.dense_layers)
    active = model.experts.experts_per_token * 3 * model.hidden_dim * model.experts.intermediate_dim
    active += model.hidden_dim * model.experts.num_experts
    dense = 3 * model.hidden_dim * model.Mlp.size * len(model.experts.dense_layers)
    attention = 4 * heads * tokens / 2
    layers = model.num_layers * (2 * projections + attention) + 2 * (sparse * active + dense)
    return 3 * (layers + 2 * model.hidden_dim * config.Vocab.size)


def matmul_peak(size: int) -> float:
    """Measured FLOP/s of square bf16 matrix products, ten at a time to hide the cost of launches."""
    # Random, because the rate depends on the values, and zeros are faster.
    a, b = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in jax.random.split(jax.random.key(0)))
    product = jax.jit(lambda a, b: a @ b)
    product(a, b).block_until_ready()
    best = float("inf")
    for _ in range(3):
        before = time.perf_counter()
        jax.block_until_ready([product(a, b) for _ in range(10)])
        best = min(best, (time.perf_counter() - before) / 10)
    return 2 * size**3 / best


def random_parts(shapes: Any) -> Any:
    """Random arrays of these shapes: normal with standard deviation 0.02; vectors are ones.

    Stacks are made a layer at a time, because the random bits of a whole one would be the peak of memory.
    """

    def normal(key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.random.normal(key, shape, dtype) * jnp.asarray(0.02, dtype)

    @jax.jit(static_argnums=(1, 2))
    def made(key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        if len(shape) < 3:
            return normal(key, shape, dtype)
        return jax.lax.map(lambda key: normal(key, shape[1:], dtype), jax.random.split(key, shape[0]))

    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0, impl="rbg"), len(leaves))
    arrays = [
        jnp.ones(leaf.shape, leaf.dtype) if leaf.ndim < 3 and leaf.shape[-1] < 10_000 and leaf.size < 10**6
        else made(key, leaf.shape, leaf.dtype)
        for key, leaf in zip(keys, leaves, strict=True)
    ]  # fmt: skip
    return jax.tree.unflatten(structure, arrays)


def heads_of(config: LmRunConfig) -> tuple[int, int, int]:
    """Heads of keys, query heads for each, and their width."""
    model = config.resolved(check_folder=False).model
    assert isinstance(model, Qwen3MoeConfig)
    return model.num_kv_heads, model.num_heads // model.num_kv_heads, model.HeadDim.size


def _experts(config: LmRunConfig, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """The experts of a layer by the backend for this device, beside the walk over blocks and a dense MLP."""
    model = config.resolved(check_folder=False).model
    assert isinstance(model, Qwen3MoeConfig)
    chosen = model.experts
    sizes = expert_layer.Sizes(
        tokens, model.hidden_dim, chosen.intermediate_dim, chosen.num_experts, chosen.experts_per_token
    )
    backends = {"cuda": ["tokamax"], "tpu": ["megablox"]}.get(platform_of(jax.local_devices()[0]), [])
    return expert_layer.timed_rows(sizes, ["block", *backends], rounds)


def _in_a_process(
    options: argparse.Namespace, job: str, policies: list[str], tokens: list[int]
) -> dict[str, Any]:
    """The job's result, or its last error under `refused`."""
    command = [sys.executable, "-m", "benchmarks.qwen3_step", "--alone", job, "--config", str(options.config)]
    command += [f"--{key}={getattr(options, key)}" for key in ("check", "rounds", "matmul")]
    command += ["--policies", *policies, "--tokens", *map(str, tokens)]
    command += ["--overrides", *options.overrides]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in said if re.match(r"[\w.]*(Error|Exit|Fit)\b", line)] or said
        return {"refused": (errors or [f"exit status {done.returncode}"])[-1][:300]}
    return json.loads(done.stdout.splitlines()[-1])


def _alone(config: LmRunConfig, options: argparse.Namespace) -> dict[str, Any]:
    model_flops(config, 1)  # refuses other models
    shapes = forward_and_backward(config, options.check)[1][1]
    if options.alone == "layers":
        found = {"attention": [], "experts": _experts(config, options.tokens[0], options.rounds)}
        peak = matmul_peak(options.matmul)
        found["attention"] = attention_layer.timed_rows(
            heads_of(config), options.tokens, options.rounds, peak
        )
        return found
    if options.alone == "time":
        parts = random_parts(shapes)
        return _timed(config, parts, options.tokens[0], options.policies[0], options.rounds)
    return {
        "device": re.sub(r"\W+", "_", jax.devices()[0].device_kind.lower()),
        "matmul_peak": matmul_peak(options.matmul),
        "attention_differences": attention_layer.differences(heads_of(config), options.check),
        "offload_check": _offload_check(),
        "gradient_differences": _differences(config, random_parts(shapes), options.check, options.policies),
    }


def _offload_check() -> str:
    try:
        check_offload()
    except OffloadError as error:
        return str(error)
    return "passed"


def _compiled(config: LmRunConfig, tokens: int, name: str) -> tuple[Callable[..., Any], TokenBatch]:
    fn, _ = forward_and_backward(config, tokens)
    axes = (Axis(BATCH_AXIS, 1), Axis(POSITION_AXIS, tokens))
    ids = hax.random.randint(jax.random.key(1), axes, 0, config.resolved(check_folder=False).Vocab.size)
    batch = TokenBatch(ids, hax.roll(ids, -1, axes[1]), hax.ones(axes, dtype=jnp.float32))
    return eqx.filter_jit(fn(POLICIES[name])), batch


def _differences(config: LmRunConfig, parts: Any, tokens: int, policies: list[str]) -> dict[str, float]:
    """The relative difference between the gradients of each policy and of the first.

    Raises:
        ArithmeticError: the gradients of the first are zero or not finite.
    """
    reference, differences = None, {}
    for name in policies:
        run, batch = _compiled(config, tokens, name)
        gradients = [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(run(batch, parts)[1])]
        reference = gradients if reference is None else reference
        squares = [(jnp.sum((a - b) ** 2), jnp.sum(b**2)) for a, b in zip(gradients, reference, strict=True)]
        off, whole = (float(sum(column)) ** 0.5 for column in zip(*squares, strict=True))
        if not 0 < whole < float("inf"):
            raise ArithmeticError(f"the norm of the gradients of {policies[0]} is {whole}")
        # NaN can't be written as JSON.
        differences[name] = off / whole if off < float("inf") else 1e300
    return differences


def _timed(config: LmRunConfig, parts: Any, tokens: int, name: str, rounds: int) -> dict[str, Any]:
    run, batch = _compiled(config, tokens, name)
    jax.block_until_ready(run(batch, parts))
    seconds = []
    for _ in range(rounds):
        before = time.perf_counter()
        jax.block_until_ready(run(batch, parts))
        seconds.append(time.perf_counter() - before)
    median = statistics.median(seconds)
    allocated = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return {
        "seconds": median,
        "tokens_per_second": tokens / median,
        "peak_bytes": allocated if allocated is not None else peak_resident_bytes(),
    }


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--tokens", type=_at_least_one, nargs="+", default=[8_192, 32_768, 65_536])
    parser.add_argument(
        "--policies", nargs="+", default=["True", "nested", "offload"], choices=list(POLICIES)
    )
    parser.add_argument(
        "--check", type=_at_least_one, default=4_096, help="context at which gradients are compared"
    )
    parser.add_argument(
        "--layers",
        type=_at_least_one,
        nargs="+",
        default=[8_192, 65_536, 262_144],
        help="contexts of attention alone; experts alone take the first",
    )
    parser.add_argument("--rounds", type=_at_least_one, default=3)
    parser.add_argument(
        "--matmul", type=_at_least_one, default=8_192, help="size of the matrix products of the peak"
    )
    parser.add_argument(
        "--alone",
        choices=("check", "layers", "time"),
        help="run one job in this process and print its result",
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--overrides", nargs=argparse.REMAINDER, default=[], help="keys of the config, last")
    return parser


if __name__ == "__main__":
    main()
