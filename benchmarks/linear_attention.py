"""Linear attention alone: its gradients beside those of the recurrence, and its time.

    python -m benchmarks.linear_attention

At `--check` tokens output and gradients of bfloat16 arguments are compared with those
of the recurrence in float32, one position at a time: with a decay for each head, with
one for each channel of the keys, of eight documents, and without the erasing term. Then
a forward pass, and one with its gradient, are timed at each context.
"""

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from stacked_remat import scan
from stacked_remat.memory import count_flops
from stacked_remat.ops import linear_attention, linear_attention_step
from stacked_remat.training import POSITION_AXIS

from .command import Rows, agreeing, benchmark
from .record import timed

CASES = ("by_head", "by_channel", "documents", "nothing_erased")
_DOCUMENTS = 8
_TOLERANCE = 2e-2  # of the norm, in bfloat16


@dataclasses.dataclass(frozen=True)
class Heads:
    """Heads of keys, value heads for each, and their widths: Qwen3-Next's."""

    key_heads: int = 16
    group: int = 2
    key_dim: int = 128
    value_dim: int = 128


QWEN3_NEXT = Heads()


class LinearAttention:
    """The output and the gradients of one sequence.

    Args:
        heads: of a model.
        tokens: positions.
        case: one of `CASES`.
    """

    def __init__(self, heads: Heads, tokens: int, case: str) -> None:
        self.Pos = Axis(POSITION_AXIS, tokens)
        self.Key = Axis("key_dim", heads.key_dim)
        self.Value = Axis("value_dim", heads.value_dim)
        key_heads = Axis("key_heads", heads.key_heads)
        group = Axis("group", heads.group)
        by_head = (self.Pos, key_heads, group)
        of_keys = (self.Pos, key_heads, self.Key)
        of_values = (*by_head, self.Value)
        by_channel = (self.Key,) if case == "by_channel" else ()
        keys = jax.random.split(jax.random.key(0), 6)
        query = _unit_vectors(keys[0], of_keys, self.Key)
        key = _unit_vectors(keys[1], of_keys, self.Key)
        value, self.cotangent = (
            hax.random.normal(seed, of_values).astype(jnp.bfloat16)
            for seed in keys[2:4]
        )
        decay = hax.random.normal(keys[4], (*by_head, *by_channel))
        log_decay = -0.1 * hax.nn.softplus(decay)
        self.arrays = [query, key, value, log_decay]
        if case != "nothing_erased":
            self.arrays.append(hax.nn.sigmoid(hax.random.normal(keys[5], by_head)))
        self.documents = None
        if case == "documents":
            self.documents = hax.arange(self.Pos) // max(1, tokens // _DOCUMENTS)

    def forward(self) -> Callable[..., NamedArray]:
        """The output, of arrays."""

        def attend(
            query: NamedArray,
            key: NamedArray,
            value: NamedArray,
            log_decay: NamedArray,
            beta: NamedArray | None = None,
        ) -> NamedArray:
            output, _ = linear_attention(
                *(query, key, value, log_decay, beta),
                *(self.Pos, self.Key, self.Value),
                documents=self.documents,
            )
            return output

        return attend

    def recurrence(self) -> Callable[..., NamedArray]:
        """The output of the same arrays, one position at a time."""
        documents = hax.zeros(self.Pos) if self.documents is None else self.documents
        begins = documents != hax.roll(documents, 1, self.Pos)

        def attend(*arrays: NamedArray) -> NamedArray:
            _, _, value, *_ = arrays

            def step(
                state: NamedArray, begins: NamedArray, *arrays: NamedArray
            ) -> tuple[NamedArray, NamedArray]:
                query, key, value, log_decay, *rest = arrays
                output, after = linear_attention_step(
                    *(query, key, value, log_decay, rest[0] if rest else None),
                    *(self.Key, self.Value),
                    state=hax.where(begins, 0.0, state),
                )
                return after, output

            heads = [one for one in value.axes if one not in (self.Pos, self.Value)]
            state = hax.zeros((*heads, self.Key, self.Value))
            _, output = scan(step, self.Pos, remat="nested")(state, begins, *arrays)
            return output

        return attend

    def with_gradients(self, attend: Callable[..., NamedArray]) -> Callable[..., Any]:
        """The output and the gradients, of a cotangent and arrays."""

        def run(cotangent: NamedArray, *arrays: NamedArray) -> list[Any]:
            output, pullback = jax.vjp(attend, *arrays)
            return [x.array for x in (output, *pullback(cotangent))]

        return jax.jit(run)


def _unit_vectors(seed: Any, axes: tuple[Axis, ...], Dim: Axis) -> NamedArray:
    x = hax.random.normal(seed, axes)
    norm = hax.sqrt(hax.sum(x * x, Dim))
    return (x / norm).astype(jnp.bfloat16)


@benchmark("linear_attention_{device}")
def main(
    heads: Heads = QWEN3_NEXT,
    tokens: tuple[int, ...] = (8_192, 65_536, 262_144),
    check: int = 1_024,
    rounds: int = 3,
) -> Rows:
    """What `differences` and `times` find.

    Raises:
        SystemExit: a gradient is wrong.
    """
    problem = "linear attention differs from the recurrence"
    yield from agreeing(differences(heads, check), problem)
    yield from times(heads, tokens, rounds)


def differences(heads: Heads, tokens: int) -> Rows:
    """For each case the largest relative error, and whether that is rounding."""
    for case in CASES:
        layer = LinearAttention(heads, tokens, case)
        arguments = layer.cotangent, *layer.arrays
        found = layer.with_gradients(layer.forward())(*arguments)
        exact = [x.astype(jnp.float32) for x in arguments]
        with jax.default_matmul_precision("highest"):
            expected = layer.with_gradients(layer.recurrence())(*exact)
        off = 0.0
        for one, other in zip(found, expected, strict=True):
            difference = jnp.linalg.norm(one.astype(jnp.float32) - other)
            off = max(off, float(difference / jnp.linalg.norm(other)))
        off = off if off < float("inf") else 1e300
        yield {"case": case, "off": off, "agrees": off <= _TOLERANCE}


def times(heads: Heads, tokens: tuple[int, ...], rounds: int) -> Rows:
    """The median time of each case, of a forward pass and with the gradient."""
    for length, case in itertools.product(sorted(tokens), CASES):
        row: dict[str, Any] = {"tokens": length, "case": case}
        layer = LinearAttention(heads, length, case)
        gradient = layer.with_gradients(layer.forward())
        arguments = layer.cotangent, *layer.arrays
        forward = functools.partial(jax.jit(layer.forward()), *layer.arrays)
        both = functools.partial(gradient, *arguments)
        try:
            for name, call in (("forward", forward), ("with_gradient", both)):
                timed(call)
                seconds = statistics.median(timed(call) for _ in range(rounds))
                row[f"{name}_milliseconds"] = 1e3 * seconds
        except jax.errors.JaxRuntimeError as error:
            yield row | {"refused": str(error)[:300]}
            continue
        flops = count_flops(jax.make_jaxpr(gradient)(*arguments)).matmul
        seconds = row["with_gradient_milliseconds"] / 1e3
        yield row | {"flops": flops, "teraflops_a_second": flops / seconds / 1e12}


if __name__ == "__main__":
    main()
