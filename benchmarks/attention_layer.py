"""Attention alone, by each kernel: its gradients beside those of the definition, and its time."""

import functools
import re
import statistics
from collections.abc import Iterator
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from stacked_remat.memory import count_flops
from stacked_remat.ops import UnsupportedCallError, causal_attention
from stacked_remat.ops._attention_backends import BACKENDS
from stacked_remat.training import POSITION_AXIS

from .record import timed_in_turn

KERNELS = tuple(name for name in BACKENDS if name != "exact")
CASES = ("plain", "documents", "window", "sinks")
WINDOW = 128
_TOLERANCE = 2e-2  # of the norm, in bfloat16
_PATIENCE = 2.0  # seconds


class Attention:
    """The output and the gradients of one sequence, whose heads are those of a model.

    Args:
        heads: of keys, query heads for each, and their width.
        tokens: positions.
        case: one of `CASES`; documents are eight, and sinks go with a window.
    """

    def __init__(self, heads: tuple[int, int, int], tokens: int, case: str) -> None:
        self.axes = (Axis(POSITION_AXIS, tokens), Axis("kv_heads", heads[0]), Axis("head_dim", heads[2]))
        position, kv_heads, head_dim = self.axes
        group = Axis("group", heads[1])
        keys = jax.random.split(jax.random.key(0), 5)
        of_query = (position, kv_heads, group, head_dim)
        self.inputs = [
            hax.random.normal(key, axes)
            for key, axes in zip(keys, (of_query, self.axes, self.axes, of_query), strict=False)
        ]
        self.options: dict[str, Any] = {}
        if case == "documents":
            self.options["documents"] = hax.arange(position) // max(1, tokens // 8)
        if case in ("window", "sinks"):
            self.options["window"] = WINDOW
        self.sinks = hax.random.normal(keys[4], (kv_heads, group)) if case == "sinks" else None

    def arguments(self, dtype: Any) -> list[NamedArray]:
        """Query, key, value, cotangent and perhaps sinks, rounded to bfloat16."""
        given = [*self.inputs, *([] if self.sinks is None else [self.sinks])]
        return [each.astype(jnp.bfloat16).astype(dtype) for each in given]

    def run(self, backend: str) -> Any:
        """The output and the gradients, of arguments."""

        def run(
            query: NamedArray, key: NamedArray, value: NamedArray, cotangent: NamedArray, *sinks: Any
        ) -> Any:
            def attend(query: NamedArray, key: NamedArray, value: NamedArray, *sinks: Any) -> NamedArray:
                options = self.options | ({"sinks": sinks[0]} if sinks else {})
                return causal_attention(query, key, value, *self.axes, backend=backend, **options)

            output, pullback = jax.vjp(attend, query, key, value, *sinks)
            return [each.array for each in (output, *pullback(cotangent))]

        return jax.jit(run)


def differences(heads: tuple[int, int, int], tokens: int) -> Iterator[dict[str, Any]]:
    """The errors of attention in bfloat16 and its gradients, against the definition in float32.

    Yields:
        For a case and a kernel the largest relative error and whether that is rounding, or why the kernel
        does not support the call.
    """
    for case in CASES:
        layer = Attention(heads, tokens, case)
        with jax.default_matmul_precision("highest"):
            expected = layer.run("exact")(*layer.arguments(jnp.float32))
        for kernel in KERNELS:
            row = {"case": case, "kernel": kernel}
            try:
                got = layer.run(kernel)(*layer.arguments(jnp.bfloat16))
            except UnsupportedCallError as error:
                yield row | {"refused": _reason(error)}
                continue
            pairs = [(a.astype(jnp.float32), b) for a, b in zip(got, expected, strict=True)]
            off = max(float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in pairs)
            yield row | {"off": off if off < float("inf") else 1e300, "agrees": off <= _TOLERANCE}


def timed_rows(
    heads: tuple[int, int, int], tokens: list[int], rounds: int, peak: float
) -> Iterator[dict[str, Any]]:
    """The median time of forward and backward by each kernel that supports the call.

    A kernel that would take more than two seconds, by what it took at the context before, is left out.

    Args:
        tokens: contexts, the shortest first.
        peak: FLOP/s of matrix products, for the share of it that the products of visible pairs of a query and
            a key take, two forward and five backward. Documents are not taken off.
    """
    last: dict[tuple[str, str], tuple[int, float]] = {}
    for length in tokens:
        for case in CASES:
            layer = Attention(heads, length, case)
            arguments = layer.arguments(jnp.bfloat16)
            seen = min(length // 2, WINDOW if "window" in layer.options else length)
            useful = 14 * heads[0] * heads[1] * heads[2] * length * seen
            for kernel in KERNELS:
                row = {"tokens": length, "case": case, "kernel": kernel}
                before, took = last.get((case, kernel), (length, 0.0))
                if took * (length / before) ** 2 > _PATIENCE:
                    yield row | {"refused": f"it would take more than {_PATIENCE} seconds"}
                    continue
                try:
                    run = layer.run(kernel)
                    counted = count_flops(jax.make_jaxpr(run)(*arguments)).matmul
                    call = functools.partial(run, *arguments)
                    jax.block_until_ready(call())
                    seconds = statistics.median(timed_in_turn({kernel: call}, rounds)[kernel])
                except (UnsupportedCallError, jax.errors.JaxRuntimeError) as error:
                    yield row | {"refused": _reason(error)}
                    continue
                last[case, kernel] = length, seconds
                share = useful / seconds / peak
                yield row | {
                    "milliseconds": 1e3 * seconds,
                    "flops": counted,
                    "utilisation_of_matmul_peak": share,
                }


def _reason(error: Exception) -> str:
    return re.sub(r".* does not support this call: (.*)\. Use 'auto'\.", r"\1", str(error))[:300]
