"""Attention alone, by each kernel: its gradients beside those of the definition, and
its time.

    python -m benchmarks.attention_layer

At `--check` tokens output and gradients in bfloat16 are compared with the definition in
float32: for one document, for eight, with a window of 128 positions, without sinks and
with, and for what one of eight devices computes of positions that are divided over
them. Then forward and backward are timed at each context.
"""

import dataclasses
import functools
import itertools
import re
import statistics
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray

from stacked_remat.memory import count_flops
from stacked_remat.ops import UnsupportedCallError, causal_attention
from stacked_remat.ops._attention_backends import (
    BACKENDS,
    AttentionCall,
    exact_attention,
)
from stacked_remat.ops._attention_rule import Blocks, Sight, attend_by
from stacked_remat.ops._backends import choose_backend
from stacked_remat.training import POSITION_AXIS

from .command import Rows, agreeing, benchmark
from .record import matmul_peak, timed

KERNELS = tuple(name for name in BACKENDS if name != "exact")
CASES = ("plain", "documents", "window", "sinks", "divided")
WINDOW = 128
_DEVICES = 8
_BLOCK = 512
_TOLERANCE = 2e-2  # of the norm, in bfloat16
_PATIENCE = 2.0  # seconds


@dataclasses.dataclass(frozen=True)
class Heads:
    """Heads of keys, query heads for each, and their width: Qwen3-30B-A3B's."""

    kv_heads: int = 4
    group: int = 8
    head_dim: int = 128


QWEN3 = Heads()


class Attention:
    """The output and the gradients of one sequence.

    Args:
        heads: of a model.
        tokens: positions; a multiple of 64 where they are divided.
        case: one of `CASES`; documents are eight, and sinks go with a window.
    """

    def __init__(self, heads: Heads, tokens: int, case: str) -> None:
        self.is_divided = case == "divided"
        self.axes = (
            Axis(POSITION_AXIS, tokens),
            Axis("kv_heads", heads.kv_heads),
            Axis("head_dim", heads.head_dim),
        )
        position, kv_heads, head_dim = self.axes
        group = Axis("group", heads.group)
        keys = jax.random.split(jax.random.key(0), 5)
        rows = position.resize(tokens // _DEVICES if self.is_divided else tokens)
        of_query = (rows, kv_heads, group, head_dim)
        self.inputs = [
            hax.random.normal(key, axes)
            for key, axes in zip(
                keys, (of_query, self.axes, self.axes, of_query), strict=False
            )
        ]
        self.options: dict[str, Any] = {}
        if case == "documents":
            self.options["documents"] = hax.arange(position) // max(1, tokens // 8)
        if case in ("window", "sinks"):
            self.options["window"] = WINDOW
        self.sinks = (
            hax.random.normal(keys[4], (kv_heads, group)) if case == "sinks" else None
        )

    def arguments(self, dtype: Any) -> list[NamedArray]:
        """Query, key, value, cotangent and perhaps sinks, rounded to bfloat16."""
        given = [*self.inputs, *([] if self.sinks is None else [self.sinks])]
        return [each.astype(jnp.bfloat16).astype(dtype) for each in given]

    def run(self, backend: str) -> Any:
        """The output and the gradients, of arguments."""

        def run(
            query: NamedArray,
            key: NamedArray,
            value: NamedArray,
            cotangent: NamedArray,
            *sinks: Any,
        ) -> Any:
            def attend(
                query: NamedArray, key: NamedArray, value: NamedArray, *sinks: Any
            ) -> NamedArray:
                if self.is_divided:
                    return _attend_of_one_device(backend, query, key, value)
                options = self.options | ({"sinks": sinks[0]} if sinks else {})
                return causal_attention(
                    query, key, value, *self.axes, backend=backend, **options
                )

            output, pullback = jax.vjp(attend, query, key, value, *sinks)
            return [each.array for each in (output, *pullback(cotangent))]

        return jax.jit(run)


def _attend_of_one_device(
    backend: str, query: NamedArray, key: NamedArray, value: NamedArray
) -> NamedArray:
    """Of eight, over which positions are divided: the last eighth of each of their
    parts, and all keys.
    """
    arrays: Any = [each.array[None] for each in (query, key, value)]
    position, *_, head_dim = key.axes
    parts = np.arange(position.size, dtype=np.int32).reshape(_DEVICES, _DEVICES, -1)
    blocks = Blocks(head_dim.size**-0.5, _BLOCK, strips=_DEVICES)
    call = AttentionCall(
        dtype=query.dtype,
        position=parts[0].size,
        head_dim=head_dim.size,
        value_dim=head_dim.size,
        has_documents=False,
        blocks=blocks,
        among=_DEVICES,
    )
    kernel = choose_backend("attention", BACKENDS, backend, call)
    attend: Any = (
        exact_attention if kernel is None else functools.partial(attend_by, kernel)
    )
    return NamedArray(
        attend(*arrays, Sight(jnp.asarray(parts[:, -1].ravel())), blocks)[0], query.axes
    )


@benchmark("attention_layer_{device}")
def main(
    heads: Heads = QWEN3,
    tokens: tuple[int, ...] = (8_192, 65_536, 262_144),
    check: int = 4_096,
    rounds: int = 3,
) -> Rows:
    """What `differences` and `times` find.

    Raises:
        SystemExit: a kernel is wrong.
    """
    problem = "attention differs from the definition"
    yield from agreeing(differences(heads, check), problem)
    yield from times(heads, tokens, rounds)


def differences(heads: Heads, tokens: int) -> Rows:
    """For each case and kernel the largest relative error, whether that is rounding, or
    why it is refused.
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
            pairs = [
                (a.astype(jnp.float32), b) for a, b in zip(got, expected, strict=True)
            ]
            off = max(
                float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in pairs
            )
            yield row | {
                "off": off if off < float("inf") else 1e300,
                "agrees": off <= _TOLERANCE,
            }


def times(heads: Heads, tokens: tuple[int, ...], rounds: int) -> Rows:
    """The median time of each case and kernel, but of one that would take more than two
    seconds.

    Its share of the peak counts the products of visible pairs of a query and a key, two
    forward and five backward. Documents are not taken off.
    """
    last: dict[tuple[str, str], tuple[int, float]] = {}
    peak = matmul_peak()
    for length, case in itertools.product(sorted(tokens), CASES):
        layer = Attention(heads, length, case)
        arguments = layer.arguments(jnp.bfloat16)
        seen = min(length // 2, WINDOW if "window" in layer.options else length)
        useful = 14 * layer.inputs[0].size * seen
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
                timed(call)
                seconds = statistics.median(timed(call) for _ in range(rounds))
            except (UnsupportedCallError, jax.errors.JaxRuntimeError) as error:
                yield row | {"refused": _reason(error)}
                continue
            last[case, kernel] = length, seconds
            share = {"utilisation_of_matmul_peak": useful / seconds / peak}
            yield row | {"milliseconds": 1e3 * seconds, "flops": counted, **share}


def _reason(error: Exception) -> str:
    return re.sub(
        r".* does not support this call: (.*)\. Use 'auto'\.", r"\1", str(error)
    )[:300]


if __name__ == "__main__":
    main()
