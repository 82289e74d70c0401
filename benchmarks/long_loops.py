"""Time and memory of the gradient of a long loop over a small state, with other
libraries, on this device.

The gradients are compared first. Then every variant runs once per round, so that a slow
machine slows all of them. No variant, ours or another's, has a setting that was tuned
for a case. To record the results and draw their chart:

    python -m benchmarks.long_loops --rounds 11 && python -m scripts.charts

Writes `results/long_loops_<platform>.json`: medians, and temporaries by the compiler.
`ratio` is the median, over rounds, of a variant's time to that of the first row of its
case.
"""

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable
from typing import Any

import equinox as eqx
import equinox.internal as eqxi
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np

from stacked_remat import ScanCheckpointPolicy, scan

from .command import Rows, benchmark
from .record import check_close, median_ratio, timed_in_turn

_FEW = 20  # carries


@dataclasses.dataclass(frozen=True)
class Case:
    """A loop: its length, `step(carry, x) -> (carry, y)`, its arguments, and when it
    stops, if it does.
    """

    name: str
    length: int
    step: Callable[[Any, Any], tuple[Any, Any]]
    init: Any
    xs: Any = None
    stop: Callable[[Any], Any] | None = None

    def masked(self, carry: Any, x: Any) -> tuple[Any, Any]:
        """The step, or nothing once the loop has stopped."""
        new, y = self.step(carry, x)
        if self.stop is None:
            return new, y
        done = self.stop(carry)
        return jax.tree.map(
            lambda one, other: jnp.where(done, one, other), carry, new
        ), y


def cases(steps: int, size: int, leaves: int) -> list[Case]:
    """Pendulums, integrated by the symplectic Euler method."""
    q = jnp.linspace(0.1, 1.0, size)
    dt = 0.01
    stop_at = max(1, round(0.08 * steps))
    forces = jnp.asarray(1e-3 * np.sin(np.arange(steps) * 0.1), jnp.float32)
    scalars = [
        (jnp.float32(angle), jnp.float32(0))
        for angle in np.linspace(0.1, 1, leaves // 2)
    ]

    def swing(state: Any, force: Any) -> Any:
        q, p = state
        p = p - dt * jnp.sin(q) + (0 if force is None else force)
        return q + dt * p, p

    def plain(state: Any, force: Any) -> Any:
        return swing(state, force), None

    def recorded(state: Any, force: Any) -> Any:
        state = swing(state, force)
        return state, jnp.mean(state[0] ** 2)

    def many(states: Any, _: Any) -> Any:
        return [swing(state, None) for state in states], None

    def counted(state: Any, _: Any) -> Any:
        return (swing(state[0], None), state[1] + 1), None

    start = q, jnp.zeros_like(q)
    prime = next(
        n for n in range(steps + 1, 2 * steps + 2) if all(n % k for k in range(2, n))
    )
    return [
        Case("small state", steps, plain, start),
        Case("recorded outputs", steps, recorded, start),
        Case("per-step inputs", steps, plain, start, forces),
        Case("prime length", prime, plain, start),
        Case("many scalar leaves", steps, many, scalars),
        Case(
            "early exit at 8%",
            steps,
            counted,
            (start, jnp.int32(0)),
            stop=lambda s: s[1] >= stop_at,
        ),
    ]


Run = Callable[[Any, Any], tuple[Any, Any]]  # (init, xs) -> (carry, ys)


def ours(remat: Any, case: Case) -> Run:
    """This library."""
    return scan(case.step, hax.Axis("steps", case.length), remat=remat, until=case.stop)


def equinox(checkpoints: int | None, case: Case) -> Run:
    """Equinox's checkpointed loops."""
    stop = case.stop
    options = {"kind": "checkpointed", "checkpoints": checkpoints}
    if stop is None:
        return lambda init, xs: eqxi.scan(
            case.step, init, xs, length=case.length, **options
        )
    return lambda init, xs: (
        eqxi.while_loop(
            lambda carry: ~stop(carry),
            lambda carry: case.step(carry, None)[0],
            init,
            max_steps=case.length,
            **options,
        ),
        None,
    )


def plain_scan(case: Case) -> Run:
    """Each step checkpointed."""
    return lambda init, xs: jax.lax.scan(
        jax.checkpoint(case.masked), init, xs, length=case.length
    )


def scan_of_scans(case: Case) -> Run:
    """Two scans of the square root of the length, the outer one checkpointed; with
    dummy steps at the end.
    """
    size = math.isqrt(case.length - 1) + 1
    outer = -(-case.length // size)

    def step(carry: Any, at: Any) -> Any:
        number, x = at
        new, y = case.masked(carry, x)
        if outer * size != case.length:
            new = jax.tree.map(
                lambda a, b: jnp.where(number < case.length, a, b), new, carry
            )
        return new, y

    @jax.checkpoint
    def segment(carry: Any, at: Any) -> Any:
        return jax.lax.scan(step, carry, at)

    def run(init: Any, xs: Any) -> Any:
        numbers = jnp.arange(outer * size).reshape(outer, size)
        cut = jax.tree.map(
            lambda x: jnp.pad(x, (0, outer * size - len(x))).reshape(outer, size), xs
        )
        carry, ys = jax.lax.scan(segment, init, (numbers, cut))
        return carry, jax.tree.map(
            lambda y: y.reshape(-1, *y.shape[2:])[: case.length], ys
        )

    return run


VARIANTS: dict[str, Callable[[Case], Run]] = {
    "nested": functools.partial(ours, "nested"),
    "True": functools.partial(ours, True),
    f"max_carries={_FEW}": functools.partial(
        ours, ScanCheckpointPolicy(max_carries=_FEW)
    ),
    "equinox, checkpointed": functools.partial(equinox, None),
    f"equinox, {_FEW} checkpoints": functools.partial(equinox, _FEW),
    "scan of scans": scan_of_scans,
    "lax.scan + jax.checkpoint": plain_scan,
}


def gradient(case: Case, variant: str) -> Any:
    """The compiled gradient by the floats among the arguments, and a call of it."""
    floats, rest = eqx.partition((case.init, case.xs), eqx.is_inexact_array)
    run = VARIANTS[variant](case)

    def loss(floats: Any) -> jax.Array:
        found = eqx.filter(run(*eqx.combine(floats, rest)), eqx.is_inexact_array)
        return sum((jnp.sum(leaf**2) for leaf in jax.tree.leaves(found)), jnp.zeros(()))

    compiled = jax.jit(jax.grad(loss)).lower(floats).compile()
    return compiled, functools.partial(compiled, floats)


@benchmark("long_loops_{platform}")
def main(
    steps: int = 10_000,
    size: int = 2_048,
    leaves: int = 200,
    rounds: int = 7,
    only: str = "",
) -> Rows:
    """Gradients of loops of `size` pendulums, and of one of that many leaves; `only` is
    a part of names.

    Raises:
        ArithmeticError: gradients differ.
    """
    for case in (case for case in cases(steps, size, leaves) if only in case.name):
        compiled = {name: gradient(case, name) for name in VARIANTS}
        runs = {name: run for name, (_, run) in compiled.items()}
        first = next(iter(runs))
        expected = runs[first]()
        for name, run in runs.items():
            check_close(f"{case.name}, {name}", run(), expected, 1e-2)
        seconds = timed_in_turn(runs, rounds)
        for name, (program, _) in compiled.items():
            yield {
                "case": case.name,
                "name": name,
                "milliseconds": round(1e3 * statistics.median(seconds[name])),
                "ratio": round(median_ratio(seconds[name], seconds[first]), 2),
                "temporary_kib": round(
                    program.memory_analysis().temp_size_in_bytes / 2**10
                ),
            }


if __name__ == "__main__":
    main()
