"""How often steps of loops without a bound run for a gradient, and its memory, beside
Equinox's loop.

To record the results, which don't depend on the machine's speed:

    python -m benchmarks.unbounded_loops

Writes `results/unbounded_loops.json`: how often a step runs, the forward pass and the
steps that are differentiated with it, as counted by a callback; and temporaries by the
compiler, for a state of `size` pendulums.
"""

import functools
from collections.abc import Callable
from typing import Any

import equinox.internal as eqxi
import jax
import jax.numpy as jnp

from stacked_remat import while_loop

from .command import Rows, benchmark
from .record import check_close

Loop = Callable[..., Any]  # (cond_fun, body_fun, init)


def last_angles(loop: Loop, on_step: Callable[[], None], q: Any, steps: Any) -> Any:
    """The state after so many steps of pendulums, by the symplectic Euler method."""
    dt = 0.01

    def swing(state: Any) -> Any:
        number, q, p = state
        on_step()
        p = p - dt * jnp.sin(q)
        return number + 1, q + dt * p, p

    def runs(state: Any) -> Any:
        return state[0] < steps

    _, q, p = loop(runs, swing, (jnp.int32(0), q, jnp.zeros_like(q)))
    return jnp.sum(q**2) + jnp.sum(p**2)


def measured(loop: Loop, steps: int, size: int) -> tuple[Any, int, int]:
    """The gradient by the first angles, how often a step ran for it, and bytes of
    temporaries, without the callback.
    """
    ran = []

    def count() -> None:
        jax.debug.callback(lambda: ran.append(None))

    q = jnp.linspace(0.1, 1.0, size)
    number = jnp.int32(steps)
    counted = functools.partial(last_angles, loop, count)
    gradient = jax.block_until_ready(jax.jit(jax.grad(counted))(q, number))
    jax.effects_barrier()
    silent = functools.partial(last_angles, loop, lambda: None)
    compiled: Any = jax.jit(jax.grad(silent)).lower(q, number).compile()
    return gradient, len(ran), compiled.memory_analysis().temp_size_in_bytes


@benchmark("unbounded_loops")
def main(
    steps: tuple[int, ...] = (100, 1_000, 4_000),
    carries: tuple[int, ...] = (4, 16, 64),
    size: int = 2_048,
) -> Rows:
    """Gradients of loops of so many steps, with so many kept carries.

    Raises:
        ArithmeticError: gradients differ.
    """
    for count in steps:
        for kept in carries:
            equinox = {"kind": "checkpointed", "checkpoints": kept}
            variants = {
                "while_loop": functools.partial(while_loop, max_carries=kept),
                "equinox": functools.partial(eqxi.while_loop, **equinox),
            }
            expected = None
            for name, loop in variants.items():
                gradient, ran, temporary = measured(loop, count, size)
                if expected is None:
                    expected = gradient
                check_close(f"{name}, {count} steps", gradient, expected, 1e-4)
                yield {
                    "steps": count,
                    "carries": kept,
                    "name": name,
                    "step_runs": ran,
                    "temporary_kib": round(temporary / 2**10),
                }


if __name__ == "__main__":
    main()
