"""Runs Qwen3-30B-A3B at long context: gradients checked, then time, throughput and allocated memory.

    python -m benchmarks.qwen3_step --tokens 16384 65536 --minutes 10 --profile
    python -m benchmarks.qwen3_step --jobs gradients step --tokens 65536 --overrides --model.num_layers 4

For a GPU that holds the weights (an H200), which are random. First the kernels of attention are compared with
its definition, with documents, a window and sinks; then attention and experts of one layer are timed. At a
context where all policies fit, the gradients of each are compared with those in float32 by plain loops. A
policy that is farther from these than the first one is, by more than rounding explains, is not timed. Last,
forward and backward of the model are timed. Medians, tokens per second, the share of the measured bf16
matrix-product peak and the peak of allocated memory are written to `results/qwen3_step_<device>.json` after
every job. Each job runs in its own process, so that peaks of memory are separate, and is stopped when
`--minutes` are over; what it has found until then is kept.

Utilisation counts three forward passes and no recomputation, 96 GFLOP per token at 65,536 tokens.
"""

import argparse
import gzip
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis

from models.qwen3 import Qwen3MoeConfig
from models.run_config import LmRunConfig
from stacked_remat import OffloadError, ScanCheckpointSpec, check_offload
from stacked_remat._placement import platform_of
from stacked_remat.ops import backends_taken
from stacked_remat.training import BATCH_AXIS, POSITION_AXIS, TokenBatch, parse_config
from stacked_remat.training.throughput import peak_resident_bytes

from . import attention_layer, expert_layer
from .qwen3_context import CONFIG, POLICIES, forward_and_backward
from .record import RESULTS, allocate_as_needed, write_results

_TOLERANCE = 1.2  # times the difference of the first policy from float32: other fusions round otherwise
_LONGEST_ROUNDS = 20  # seconds, after which no other round begins
_LOOPS = ("--model.experts.backend", "block", "--model.attention.backend", "blockwise")
_KINDS = {
    "attention": "sdpa|fmha|flash|cudnn|attention",
    "experts": "ragged_dot|mosaic",
    "dense products": "nvjet|gemm|cutlass|cublas",
    "copies": "transpose|[Mm]emcpy|copy",
}
"""Of kernels, by what their names have."""


def main(arguments: list[str] | None = None) -> Path | None:
    options = _parser().parse_args(arguments)
    config = _config(options)
    if unknown := [name for name in options.policies if name not in _policies(config)]:
        raise SystemExit(f"--policies {unknown[0]!r} is none of {', '.join(_policies(config))}")
    if options.alone:
        for row in JOBS[options.alone](config, options):
            print(json.dumps(row), flush=True)
        return None
    allocate_as_needed()
    until = time.monotonic() + 60 * options.minutes
    rows: list[dict[str, Any]] = []

    def job(name: str, policies: list[str], tokens: list[int]) -> list[dict[str, Any]]:
        found = _in_a_process(options, name, policies, tokens, until - time.monotonic())
        for row in found:
            print(json.dumps(row), flush=True)
        return found

    (device,) = job("device", options.policies, options.tokens)
    if "refused" in device:
        raise SystemExit(f"nothing runs here: {device['refused']}")
    path = options.out / f"qwen3_step_{device['device']}.json"

    def keep(name: str, found: list[dict[str, Any]]) -> None:
        rows.extend({"job": name, **row} for row in found)
        write_results(path, check_tokens=options.check, **device, rows=rows)

    for name in ("kernels", "attention", "experts", "gradients"):
        if name in options.jobs:
            keep(name, job(name, options.policies, options.layers))
    compared = {row["policy"]: row["off"] for row in rows if row["job"] == "gradients" and "off" in row}
    agreeing = [name for name, off in compared.items() if off <= _TOLERANCE * next(iter(compared.values()))]
    if "gradients" not in options.jobs:
        agreeing = options.policies
    for tokens in options.tokens if "step" in options.jobs else ():
        for policy in agreeing:
            found = job("step", [policy], [tokens])
            for row in found:
                row |= {"tokens": tokens, "policy": policy, "num_layers": config.model.num_layers}
                if "seconds" in row:
                    useful = model_flops(config, tokens) * tokens / row["seconds"]
                    row["utilisation_of_matmul_peak"] = useful / device["matmul_peak"]
            keep("step", found)
    print(f"wrote {path}")
    for row in rows:
        if not row.get("agrees", True):
            raise SystemExit("attention by {kernel}, {case}: off by {off:.2g} of its norm".format_map(row))
    if wrong := [name for name in options.policies if name not in agreeing]:
        reasons = [row["refused"] for row in rows if row["job"] == "gradients" and "refused" in row]
        raise SystemExit(f"gradients differ or are missing, not timed: {', '.join([*wrong, *reasons])}")
    return path


def _config(options: argparse.Namespace, *more: str) -> LmRunConfig:
    return parse_config(LmRunConfig, ["--config_path", str(options.config), *options.overrides, *more])


def _policies(config: LmRunConfig) -> dict[str, ScanCheckpointSpec]:
    return {"False": False, **POLICIES, **config.model.remat_presets}


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


def _in_a_process(
    options: argparse.Namespace, job: str, policies: list[str], tokens: list[int], seconds: float
) -> list[dict[str, Any]]:
    """The rows of a job; the last one says under `refused` what ended it early."""
    command = [sys.executable, "-m", "benchmarks.qwen3_step", "--alone", job, "--config", str(options.config)]
    command += [f"--{key}={getattr(options, key)}" for key in ("check", "rounds", "matmul")]
    command += ["--profile"] if options.profile else []
    command += ["--policies", *policies, "--tokens", *map(str, tokens)]
    command += ["--overrides", *options.overrides]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    ended = ""
    try:
        printed, said = running.communicate(timeout=max(1.0, seconds))
    except subprocess.TimeoutExpired:
        running.kill()
        printed, _ = running.communicate()
        ended = "no time was left"
    else:
        lines = [line for line in said.splitlines() if line.strip()]
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exit|Fit)\b", line)] or lines
        if running.returncode != 0:
            ended = (errors or [f"exit status {running.returncode}"])[-1][:300]
    rows = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    return [*rows, {"refused": ended}] if ended else rows


Rows = Iterator[dict[str, Any]]


def _device(config: LmRunConfig, options: argparse.Namespace) -> Rows:
    model_flops(config, 1)  # refuses other models
    name = re.sub(r"\W+", "_", jax.devices()[0].device_kind.lower())
    peak = matmul_peak(options.matmul)
    yield {"device": name, "matmul_peak": peak, "offload_check": _offload_check()}


def _kernels(config: LmRunConfig, options: argparse.Namespace) -> Rows:
    return attention_layer.differences(heads_of(config), options.check)


def _attention(config: LmRunConfig, options: argparse.Namespace) -> Rows:
    peak = matmul_peak(options.matmul)
    return attention_layer.timed_rows(heads_of(config), options.tokens, options.rounds, peak)


def _experts(config: LmRunConfig, options: argparse.Namespace) -> Rows:
    """The experts of a layer by the backend for this device, beside the walk over blocks and a dense MLP."""
    model = config.resolved(check_folder=False).model
    assert isinstance(model, Qwen3MoeConfig)
    chosen = model.experts
    sizes = expert_layer.Sizes(
        options.tokens[0],
        model.hidden_dim,
        chosen.intermediate_dim,
        chosen.num_experts,
        chosen.experts_per_token,
    )
    backends = {"cuda": ["tokamax"], "tpu": ["megablox"]}.get(platform_of(jax.local_devices()[0]), [])
    yield from expert_layer.timed_rows(sizes, ["block", *backends], options.rounds)


def _gradients(config: LmRunConfig, options: argparse.Namespace) -> Rows:
    """The relative difference between the gradients of each policy and those in float32, by plain loops.

    Raises:
        ArithmeticError: these are zero or not finite.
    """
    parts = random_parts(forward_and_backward(config, options.check)[1][1])

    def gradients(config: LmRunConfig, name: str) -> list[Any]:
        run, batch = _compiled(config, options.check, name)
        return [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(run(batch, parts)[1])]

    with jax.default_matmul_precision("highest"):
        exact = gradients(_config(options, "--model.compute_dtype", "float32", *_LOOPS), "True")
    first = None
    for name in options.policies:
        found = gradients(config, name)
        first = found if first is None else first
        yield {"policy": name, "off": _off(found, exact), "off_first": _off(found, first)}


def _off(found: list[Any], wanted: list[Any]) -> float:
    """The norm of the difference, relative."""
    squares = [(jnp.sum((a - b) ** 2), jnp.sum(b**2)) for a, b in zip(found, wanted, strict=True)]
    off, whole = (float(sum(column)) ** 0.5 for column in zip(*squares, strict=True))
    if not 0 < whole < float("inf"):
        raise ArithmeticError(f"the norm of the gradients to compare with is {whole}")
    return off / whole if off < float("inf") else 1e300  # NaN can't be written as JSON


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
    return eqx.filter_jit(fn(_policies(config)[name])), batch


def _step(config: LmRunConfig, options: argparse.Namespace) -> Rows:
    (tokens,), (name,) = options.tokens, options.policies
    parts = random_parts(forward_and_backward(config, tokens)[1][1])
    run, batch = _compiled(config, tokens, name)
    began = time.perf_counter()
    with backends_taken() as backends:
        jax.block_until_ready(run(batch, parts))
    first, seconds = time.perf_counter() - began, []
    while len(seconds) < options.rounds and sum(seconds) < _LONGEST_ROUNDS:
        before = time.perf_counter()
        jax.block_until_ready(run(batch, parts))
        seconds.append(time.perf_counter() - before)
    median = statistics.median(seconds)
    allocated = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    yield {
        "seconds": median,
        "tokens_per_second": tokens / median,
        "peak_bytes": allocated if allocated is not None else peak_resident_bytes(),
        "first_seconds": first,
        "backends": backends,
    }
    if options.profile:
        yield from _longest(lambda: run(batch, parts))


def _longest(call: Callable[[], Any]) -> Rows:
    """The time of a call by kinds of kernels, and those with most of it; of operations on a CPU."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        (path,) = Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    named = [event for event in events if event.get("name") == "thread_name"]
    threads = {(event["pid"], event["tid"]): event["args"]["name"] for event in named}
    took: Counter[str] = Counter()
    for event in events:
        if "dur" in event and re.match("Stream|tf_XLA", threads.get((event["pid"], event["tid"]), "")):
            took[event["name"]] += event["dur"]
    of_kinds: Counter[str] = Counter()
    for name, spent in took.items():
        found = (kind for kind, pattern in _KINDS.items() if re.search(pattern, name))
        of_kinds[next(found, "others")] += spent
    yield from ({"kind": name, "profiled_seconds": spent / 1e6} for name, spent in of_kinds.most_common())
    yield from ({"longest": name, "profiled_seconds": spent / 1e6} for name, spent in took.most_common(20))


JOBS: dict[str, Callable[[LmRunConfig, argparse.Namespace], Rows]] = {
    "device": _device,
    "kernels": _kernels,
    "attention": _attention,
    "experts": _experts,
    "gradients": _gradients,
    "step": _step,
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
        "--policies", nargs="+", default=["True", "nested", "offload"], help="and presets of the model"
    )
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=list(JOBS))
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
    parser.add_argument("--minutes", type=float, default=10, help="after which nothing more is run")
    parser.add_argument("--profile", action="store_true", help="say where the time of steps goes")
    parser.add_argument("--alone", choices=list(JOBS), help="run one job in this process and print its rows")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--overrides", nargs=argparse.REMAINDER, default=[], help="keys of the config, last")
    return parser


if __name__ == "__main__":
    main()
