"""The time of the experts of one layer of Qwen3-30B-A3B, by each backend, on a GPU or a
TPU.

    python -m benchmarks.expert_layer --rounds 15

Gradients are compared with those of rows in blocks of one expert each. Then every
backend runs in turn beside a dense MLP of as many rows: medians, and the median of each
round's ratio to it. `--tokens 256 --embed 64` tries it on a CPU.
"""

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis

from stacked_remat._memory_spaces import platform
from stacked_remat.ops import ExpertLinear, apply_linear, grouped_experts

from .command import Rows, benchmark
from .record import check_close, median_ratio, timed_in_turn

_TOLERANCE = 0.02  # of the norm of a gradient, in bfloat16


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of a layer: Qwen3-30B-A3B's at 65,536 tokens."""

    tokens: int = 65536
    embed: int = 2048
    inner: int = 768
    experts: int = 128
    chosen: int = 8


SIZES = Sizes()


def expert(
    weights: Any, rows: Any, gates: Any, linear: ExpertLinear = apply_linear
) -> Any:
    """A gated MLP."""
    gate, up, down = weights
    hidden = jax.nn.silu(linear(gate, rows)) * linear(up, rows)
    return linear(down, hidden * gates[:, None].astype(hidden.dtype))


def programs(sizes: Sizes, backend: str) -> dict[str, Callable[..., Any]]:
    """What is compiled or timed, each of weights, tokens, gates, choices and a
    cotangent.
    """

    def forward(weights: Any, x: Any, gates: Any, choices: Any, cotangent: Any) -> Any:
        del cotangent
        return grouped_experts(
            expert,
            weights,
            Axis("experts", sizes.experts),
            x,
            choices,
            gates,
            backend=backend,
        )

    def loss(*args: Any) -> Any:
        return jnp.vdot(forward(*args), args[-1], preferred_element_type=jnp.float32)

    return {
        "forward": forward,
        "frozen": jax.grad(loss, (1, 2)),
        "trained": jax.grad(loss, (0, 1, 2)),
    }


def dense(sizes: Sizes) -> Callable[..., Any]:
    """The gradients of one MLP on as many rows as all experts have."""

    def loss(weights: Any, x: Any, cotangent: Any) -> Any:
        gates = jnp.ones(len(x), x.dtype)
        return jnp.vdot(
            expert(weights, x, gates), cotangent, preferred_element_type=jnp.float32
        )

    return jax.grad(loss, (0, 1))


def shapes(sizes: Sizes) -> tuple[Any, ...]:
    """The arguments of `programs`."""
    half = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    up = (sizes.experts, sizes.embed, sizes.inner)
    down = (sizes.experts, sizes.inner, sizes.embed)
    x = half((sizes.tokens, sizes.embed))
    pairs = (sizes.tokens, sizes.chosen)
    return (
        (half(up), half(up), half(down)),
        x,
        half(pairs),
        jax.ShapeDtypeStruct(pairs, jnp.int32),
        x,
    )


@benchmark("expert_layer_{device}")
def main(
    sizes: Sizes = SIZES, backends: tuple[str, ...] = (), rounds: int = 15
) -> Rows:
    """The times of each program; by default of `block`, which always runs, and the
    backend of the device.

    Raises:
        ArithmeticError: gradients differ from those of rows in blocks of one expert
            each.
    """
    of_device = {"cuda": ("tokamax",), "tpu": ("megablox",)}.get(platform(), ())
    rng = np.random.default_rng(0)
    leaves, structure = jax.tree.flatten(shapes(sizes))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    weights, x, gates, _, cotangent = jax.tree.unflatten(
        structure, map(_filled, leaves, keys)
    )
    choices = rng.permuted(
        np.tile(np.arange(sizes.experts, dtype=np.int32), (sizes.tokens, 1)), axis=1
    )
    args = weights, x, gates, jnp.asarray(choices[:, : sizes.chosen]), cotangent
    runs: dict[tuple[str, str], Callable[[], Any]] = {}
    for backend in dict.fromkeys(["block", *(backends or of_device)]):
        for name, fn in programs(sizes, backend).items():
            runs[backend, name] = functools.partial(jax.jit(fn), *args)
        expected = runs["block", "trained"]()
        check_close(
            f"gradients of {backend}", runs[backend, "trained"](), expected, _TOLERANCE
        )
    many = [jnp.tile(one, (sizes.chosen, 1)) for one in (x, cotangent)]
    runs["dense", "trained"] = functools.partial(
        jax.jit(dense(sizes)), [one[0] for one in weights], *many
    )
    timed_in_turn(runs, 1)  # compiles
    seconds = timed_in_turn(runs, rounds)
    for (backend, name), found in seconds.items():
        of = {
            "backend": backend,
            "program": name,
            "median_seconds": statistics.median(found),
        }
        yield of | {"to_dense": median_ratio(found, seconds["dense", "trained"])}


def _filled(leaf: Any, key: Any) -> Any:
    if leaf.dtype == jnp.int32:
        return jnp.zeros(leaf.shape, leaf.dtype)
    return (jax.random.normal(key, leaf.shape) / math.sqrt(leaf.shape[-2])).astype(
        leaf.dtype
    )


if __name__ == "__main__":
    main()
