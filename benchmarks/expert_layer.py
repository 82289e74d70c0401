"""The experts of one layer of Qwen3-30B-A3B, by each backend: memory compiled, or time on a device.

    python -m benchmarks.expert_layer --target h200
    python -m benchmarks.expert_layer --time --rounds 15

The first compiles the forward pass, and the gradients with frozen and with trained weights, and runs nothing.

The second compares gradients with those of the walk over blocks, times every backend beside a dense MLP of as
many rows, interleaved, and writes medians and ratios. It is for a GPU or a TPU; `--tokens 256 --embed 64`
tries it on a CPU.
"""

import argparse
import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis

from stacked_remat import memory
from stacked_remat._placement import platform_of
from stacked_remat.memory._targets import find_target
from stacked_remat.ops import ExpertLinear, apply_linear, grouped_experts

from .record import RESULTS, allocate_as_needed, timed_in_turn, write_results

_TOLERANCE = 0.05  # of the largest gradient, in bfloat16


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of a layer, by default Qwen3-30B-A3B's at 65,536 tokens."""

    tokens: int = 65536
    embed: int = 2048
    inner: int = 768
    experts: int = 128
    chosen: int = 8


def expert(weights: Any, rows: Any, gates: Any, linear: ExpertLinear = apply_linear) -> Any:
    """A gated MLP."""
    gate, up, down = weights
    hidden = jax.nn.silu(linear(gate, rows)) * linear(up, rows)
    return linear(down, hidden * gates[:, None].astype(hidden.dtype))


def programs(sizes: Sizes, backend: str) -> dict[str, Callable[..., Any]]:
    """What is compiled or timed, each of weights, tokens, gates, choices and a cotangent."""

    def forward(weights: Any, x: Any, gates: Any, choices: Any, cotangent: Any) -> Any:
        del cotangent
        return grouped_experts(
            expert, weights, Axis("experts", sizes.experts), x, choices, gates, backend=backend
        )

    def loss(*args: Any) -> Any:
        return jnp.vdot(forward(*args), args[-1], preferred_element_type=jnp.float32)

    return {"forward": forward, "frozen": jax.grad(loss, (1, 2)), "trained": jax.grad(loss, (0, 1, 2))}


def dense(sizes: Sizes) -> Callable[..., Any]:
    """The gradients of one MLP on as many rows as all experts have."""

    def loss(weights: Any, x: Any, cotangent: Any) -> Any:
        gates = jnp.ones(len(x), x.dtype)
        return jnp.vdot(expert(weights, x, gates), cotangent, preferred_element_type=jnp.float32)

    return jax.grad(loss, (0, 1))


def shapes(sizes: Sizes) -> tuple[Any, ...]:
    """The arguments of `programs`."""
    half = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    up, down = (sizes.experts, sizes.embed, sizes.inner), (sizes.experts, sizes.inner, sizes.embed)
    x, pairs = half((sizes.tokens, sizes.embed)), (sizes.tokens, sizes.chosen)
    return (half(up), half(up), half(down)), x, half(pairs), jax.ShapeDtypeStruct(pairs, jnp.int32), x


def compiled_rows(sizes: Sizes, target: str, backends: list[str]) -> Iterator[dict[str, Any]]:
    """Memory of every program."""
    for backend in backends:
        for name, fn in programs(sizes, backend).items():
            report = memory.report(fn, *shapes(sizes), target=target)
            yield {"backend": backend, "program": name, "temporaries": report.temporaries}


def timed_rows(sizes: Sizes, backends: list[str], rounds: int) -> list[dict[str, Any]]:
    """Medians of seconds, and of each round's ratio to forward and backward of the dense MLP.

    Raises:
        SystemExit: gradients differ from those of the walk over blocks.
    """
    rng, key = np.random.default_rng(0), jax.random.key(0)
    leaves, structure = jax.tree.flatten(shapes(sizes))
    filled = [
        _filled(leaf, one) for leaf, one in zip(leaves, jax.random.split(key, len(leaves)), strict=True)
    ]
    weights, x, gates, _, cotangent = jax.tree.unflatten(structure, filled)
    choices = rng.permuted(np.tile(np.arange(sizes.experts, dtype=np.int32), (sizes.tokens, 1)), axis=1)
    args = weights, x, gates, jnp.asarray(choices[:, : sizes.chosen]), cotangent
    runs: dict[tuple[str, str], Callable[[], Any]] = {}
    wanted: Any = None
    for backend in dict.fromkeys(["block", *backends]):
        for name, fn in programs(sizes, backend).items():
            runs[backend, name] = functools.partial(jax.jit(fn), *args)
        found = jax.block_until_ready(runs[backend, "trained"]())
        wanted = found if wanted is None else wanted
        for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            got, want = got.astype(jnp.float32), want.astype(jnp.float32)
            if not float(jnp.max(jnp.abs(got - want))) <= _TOLERANCE * float(jnp.max(jnp.abs(want))):
                raise SystemExit(f"the gradients of {backend} differ from those of the walk over blocks")
    many = [jnp.tile(one, (sizes.chosen, 1)) for one in (x, cotangent)]
    runs["dense", "trained"] = functools.partial(
        jax.jit(dense(sizes)), [one[0] for one in weights], many[0], many[1]
    )
    for run in runs.values():
        jax.block_until_ready(run())
    seconds = timed_in_turn(runs, rounds)
    beside = seconds["dense", "trained"]
    return [
        {
            "backend": backend,
            "program": name,
            "median_seconds": statistics.median(found),
            "to_dense": statistics.median(a / b for a, b in zip(found, beside, strict=True)),
        }
        for (backend, name), found in seconds.items()
    ]


def _filled(leaf: Any, key: Any) -> Any:
    if leaf.dtype == jnp.int32:
        return jnp.zeros(leaf.shape, leaf.dtype)
    return (jax.random.normal(key, leaf.shape) / math.sqrt(leaf.shape[-2])).astype(leaf.dtype)


def main(arguments: list[str] | None = None) -> Path:
    """Write `results/expert_layer_<target or platform>.json`; its path."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--target", help="compile for this device, such as h200 or v5p")
    what.add_argument("--time", action="store_true", help="time on the device of this machine")
    parser.add_argument(
        "--backends", nargs="+", help="by default block, which is always timed, and those of the device"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS)
    for field in dataclasses.fields(Sizes):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    options = parser.parse_args(arguments)
    sizes = Sizes(*(getattr(options, field.name) for field in dataclasses.fields(Sizes)))
    if options.time:
        allocate_as_needed()
        platform = jax.local_devices()[0].platform
        where, device = f"time_{platform}", jax.local_devices()[0].device_kind
    else:
        where, device = options.target, options.target
        platform = find_target(options.target).devices()[0].platform
    backends = options.backends or [
        "block",
        *{"cuda": ["tokamax"], "tpu": ["megablox"]}.get(platform_of(platform), []),
    ]
    if options.time:
        rows = timed_rows(sizes, backends, options.rounds)
    else:
        rows = list(compiled_rows(sizes, options.target, backends))
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    path = options.out / f"expert_layer_{where}.json"
    write_results(path, device=device, sizes=dataclasses.asdict(sizes), rows=rows)
    print(f"wrote {path}")
    return path


if __name__ == "__main__":
    main()
