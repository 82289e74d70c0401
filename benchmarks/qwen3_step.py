"""Steps of Qwen3-30B-A3B at long context: gradients compared, then time, throughput and
allocated memory.

    python -m benchmarks.qwen3_step --tokens 16384 65536 --profile
    python -m benchmarks.qwen3_step --check 0 --tokens 65536 --model.num_layers 4
    python -m benchmarks.qwen3_step --tokens 65536 --model.num_layers 4
        --documents 8 --name of_documents

For a GPU that holds the weights (an H200), which are random; other options are those of
the config, and policies may be presets of the model. At `--check` tokens, where all
policies fit, the gradients of each are compared with those in float32 by plain loops,
in one process. A policy that is farther from these than the first one is, by more than
rounding explains, is not timed. Then forward and backward are timed, each policy and
context in a process of its own, so that peaks of memory are separate.

Utilisation counts three forward passes and no recomputation, 96 GFLOP per token at
65,536 tokens, of the measured rate of bf16 matrix products. `--profile` adds the kinds
of kernels that take the time, and the longest kernels.
"""

import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from models.qwen3_moe import Qwen3MoeConfig
from models.run_config import LmRunConfig
from stacked_remat import ScanCheckpointSpec
from stacked_remat.ops import backends_taken
from stacked_remat.training import TokenBatch, parse_config
from stacked_remat.training.throughput import peak_memory_bytes

from .command import Rows, benchmark
from .qwen3_context import CONFIG, POLICIES, forward_and_backward, random_batch
from .record import in_a_process, matmul_peak, profiled, timed

# times the difference of the first policy from float32: other fusions round otherwise
_TOLERANCE = 1.2
_WORST = 0.1  # of the norm of the gradients: more is no rounding
_LOOPS = ("--model.experts.backend", "block", "--model.attention.backend", "blockwise")
_KINDS = {
    "attention": "sdpa|fmha|flash|cudnn|attention",
    "experts": "ragged_dot|mosaic",
    "dense products": "nvjet|gemm|cutlass|cublas",
    "copies": "transpose|[Mm]emcpy|copy",
}
"""Of kernels, by what their names have."""


@benchmark("qwen3_step_{device}")
def main(
    config: Path = CONFIG,
    tokens: tuple[int, ...] = (8_192, 32_768, 65_536),
    policies: tuple[str, ...] = ("True", "nested", "offload"),
    check: int = 4_096,
    documents: int = 1,
    rounds: int = 3,
    profile: bool = False,
    overrides: tuple[str, ...] = (),
) -> Rows:
    """The gradients of each policy, compared, and the time of each policy and context.

    Raises:
        SystemExit: the gradients of a policy are wrong or missing, another model, or an
            unknown policy.
    """
    given = ["--config_path", str(config), *overrides]
    parsed = parse_config(LmRunConfig, given)
    useful = {length: model_flops(parsed, length) for length in tokens}
    if unknown := [name for name in policies if name not in _policies(parsed)]:
        raise SystemExit(
            f"--policies {unknown[0]!r} is none of {', '.join(_policies(parsed))}"
        )
    agreeing = list(policies)
    peak = matmul_peak()
    if check:
        compared = in_a_process(gradient_rows, given, check, policies, documents)
        yield from compared
        bound = min(_TOLERANCE * compared[0]["off"], _WORST)
        agreeing = [row["policy"] for row in compared if row["off"] <= bound]
    for length in tokens:
        for name in agreeing:
            of_step = {"tokens": length, "documents": documents, "policy": name}
            of_step["num_layers"] = parsed.model.num_layers
            try:
                found = in_a_process(
                    step_rows, given, length, name, rounds, profile, documents
                )
            except (BrokenProcessPool, jax.errors.JaxRuntimeError) as error:
                found: list[dict[str, Any]] = [{"refused": str(error)[:300]}]
            for row in found:
                rate = (
                    useful[length] * length / row["seconds"]
                    if "seconds" in row
                    else 0.0
                )
                yield (
                    of_step
                    | row
                    | ({"utilisation_of_matmul_peak": rate / peak} if rate else {})
                )
    if wrong := [name for name in policies if name not in agreeing]:
        raise SystemExit(f"gradients differ, not timed: {', '.join(wrong)}")


def _policies(config: LmRunConfig) -> dict[str, ScanCheckpointSpec]:
    return {**POLICIES, **config.model.remat_presets}


def model_flops(config: LmRunConfig, tokens: int) -> float:
    """FLOPs per token of forward and backward without recomputation: three times the
    forward pass.
    """
    config = config.resolved(check_folder=False)
    model = config.model
    if not isinstance(model, Qwen3MoeConfig):
        raise SystemExit(
            f"model.type must be qwen3_moe here; the config has {type(model).__name__}."
        )
    heads = model.num_heads * model.head_dim
    projections = model.hidden_dim * (
        2 * heads + 2 * model.num_kv_heads * model.head_dim
    )
    sparse = model.num_layers - len(model.experts.dense_layers)
    active = (
        model.experts.experts_per_token
        * 3
        * model.hidden_dim
        * model.experts.intermediate_dim
    )
    active += model.hidden_dim * model.experts.num_experts
    dense = 3 * model.hidden_dim * model.Mlp.size * len(model.experts.dense_layers)
    attention = 4 * heads * tokens / 2
    layers = model.num_layers * (2 * projections + attention) + 2 * (
        sparse * active + dense
    )
    return 3 * (layers + 2 * model.hidden_dim * config.Vocab.size)


def random_parts(shapes: Any) -> Any:
    """Random arrays of these shapes: normal with standard deviation 0.02; vectors are
    ones.

    Stacks are made a layer at a time, because the random bits of a whole one would be
    the peak of memory.
    """

    def normal(key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.random.normal(key, shape, dtype) * jnp.asarray(0.02, dtype)

    @jax.jit(static_argnums=(1, 2))
    def made(key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        if len(shape) < 3:
            return normal(key, shape, dtype)
        return jax.lax.map(
            lambda key: normal(key, shape[1:], dtype), jax.random.split(key, shape[0])
        )

    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0, impl="rbg"), len(leaves))
    arrays = [
        jnp.ones(leaf.shape, leaf.dtype)
        if leaf.ndim < 3 and leaf.shape[-1] < 10_000 and leaf.size < 10**6
        else made(key, leaf.shape, leaf.dtype)
        for key, leaf in zip(keys, leaves, strict=True)
    ]  # fmt: skip
    return jax.tree.unflatten(structure, arrays)


def gradient_rows(
    given: list[str], tokens: int, policies: tuple[str, ...], documents: int
) -> list[dict[str, Any]]:
    """The relative difference between the gradients of each policy and those in
    float32, by plain loops.

    Raises:
        ArithmeticError: these are zero or not finite.
    """
    config = parse_config(LmRunConfig, given)
    parts = random_parts(forward_and_backward(config, tokens)[1][1])

    def gradients(config: LmRunConfig, name: str) -> list[Any]:
        run, batch = _compiled(config, tokens, name, documents)
        return [
            leaf.astype(jnp.float32) for leaf in jax.tree.leaves(run(batch, parts)[1])
        ]

    with jax.default_matmul_precision("highest"):
        by_loops = [*given, "--model.compute_dtype", "float32", *_LOOPS]
        exact = gradients(parse_config(LmRunConfig, by_loops), "True")
    found = [gradients(config, name) for name in policies]
    return [
        {"policy": name, "off": _off(own, exact), "off_first": _off(own, found[0])}
        for name, own in zip(policies, found, strict=True)
    ]


def _off(found: list[Any], wanted: list[Any]) -> float:
    """The norm of the difference, relative."""
    squares = [
        (jnp.sum((a - b) ** 2), jnp.sum(b**2))
        for a, b in zip(found, wanted, strict=True)
    ]
    off, whole = (float(sum(column)) ** 0.5 for column in zip(*squares, strict=True))
    if not 0 < whole < float("inf"):
        raise ArithmeticError(f"the norm of the gradients to compare with is {whole}")
    return off / whole if off < float("inf") else 1e300  # NaN can't be written as JSON


def _compiled(
    config: LmRunConfig, tokens: int, name: str, documents: int
) -> tuple[Callable[..., Any], TokenBatch]:
    fn, _ = forward_and_backward(config, tokens, documents=documents)
    batch = random_batch(
        1, tokens, config.resolved(check_folder=False).Vocab.size, documents
    )
    return eqx.filter_jit(fn(_policies(config)[name])), batch


def step_rows(
    given: list[str], tokens: int, name: str, rounds: int, profile: bool, documents: int
) -> list[dict[str, Any]]:
    """The time of forward and backward, and with `profile` what it is spent on."""
    config = parse_config(LmRunConfig, given)
    parts = random_parts(forward_and_backward(config, tokens)[1][1])
    run, batch = _compiled(config, tokens, name, documents)
    with backends_taken() as backends:
        first = timed(lambda: run(batch, parts))
    median = statistics.median(timed(lambda: run(batch, parts)) for _ in range(rounds))
    row = {
        "seconds": median,
        "tokens_per_second": tokens / median,
        "peak_bytes": peak_memory_bytes(),
        "first_seconds": first,
        "backends": backends,
    }
    return [row, *(_longest(lambda: run(batch, parts)) if profile else ())]


def _longest(call: Callable[[], Any]) -> Iterator[dict[str, Any]]:
    """The time of a call by kinds of kernels, and those with most of it; of operations
    on a CPU.
    """
    took = profiled(call)
    of_kinds: Counter[str] = Counter()
    for name, spent in took.items():
        found = (kind for kind, pattern in _KINDS.items() if re.search(pattern, name))
        of_kinds[next(found, "others")] += spent
    yield from (
        {"kind": name, "profiled_seconds": spent}
        for name, spent in of_kinds.most_common()
    )
    yield from (
        {"longest": name, "profiled_seconds": spent}
        for name, spent in took.most_common(20)
    )


if __name__ == "__main__":
    main()
