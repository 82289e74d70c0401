"""Carries on disk: a simulation whose states take more than memory, and its gradient.

A field of `width` × `width` float32 (4 MiB by default) follows the Allen–Cahn equation
for 10,000 steps, and the gradient by its initial state and by the coefficient of each
step is taken: 40 GiB of states in a file of `--folder`, by default the current folder.

    python -m benchmarks.disk_carries --folder /scratch

A copy with fewer steps has the gradients of `remat=True` to the bit, or the command
fails. Then the whole loop runs, and a row says how many bytes were written and read,
the seconds, the share of them in which the program waited for the disk, the temporaries
by the compiler, and the peak of resident memory of the process, Python and JAX
included. A row of `"nested"` has as many seconds for the same steps.
"""

import os
import resource
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stacked_remat import ScanCheckpointPolicy, lax_scan
from stacked_remat._carry_files import traffic

from .command import Rows, benchmark

_TIME_STEP = 0.1


def step(field: jax.Array, diffusion: jax.Array) -> tuple[jax.Array, None]:
    """A step of the Allen-Cahn equation on a torus, by an explicit Euler method."""
    neighbours = jnp.zeros_like(field)
    for axis in (0, 1):
        for shift in (1, -1):
            neighbours += jnp.roll(field, shift, axis)
    change = diffusion * (neighbours - 4 * field) + field - field**3
    return field + _TIME_STEP * change, None


def gradient(steps: int, width: int, remat: Any) -> tuple[Any, Any]:
    """The compiled gradient of a loop, and its arguments."""

    def loss(field: jax.Array, diffusion: jax.Array) -> jax.Array:
        last, _ = lax_scan(step, field, diffusion, remat=remat)
        return jnp.mean(last**2)

    points = jnp.arange(width * width, dtype=jnp.float32)
    field = 0.1 * jnp.sin(points).reshape(width, width)
    arguments = field, jnp.linspace(0.5, 1, steps)
    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*arguments).compile()
    return compiled, arguments


def timed(compiled: Any, arguments: Any) -> tuple[Any, float]:
    """The results of a call, and its seconds."""
    start = time.perf_counter()
    results = jax.block_until_ready(compiled(*arguments))
    return results, time.perf_counter() - start


@benchmark("disk_carries_{platform}")
def main(
    steps: int = 10_000,
    width: int = 1_024,
    checked_steps: int = 20,
    folder: str = ".",
) -> Rows:
    """The gradient of a loop over states of `width` × `width`, with carries on disk.

    Raises:
        ArithmeticError: gradients differ from those of carries in memory.
    """
    folder = os.path.abspath(folder)
    policies: dict[str, Any] = {
        "disk": ScanCheckpointPolicy(save_carries="disk", carries_folder=folder),
        "nested": "nested",
    }
    found, expected = (
        timed(*gradient(checked_steps, width, remat))[0]
        for remat in (policies["disk"], True)
    )
    for one, other in zip(found, expected, strict=True):
        if not np.array_equal(one, other):
            raise ArithmeticError("gradients with carries on disk differ from True's")
    del found, expected
    for name, remat in policies.items():
        compiled, arguments = gradient(steps, width, remat)
        written = traffic.written
        read = traffic.read
        waited = traffic.waited
        _, seconds = timed(compiled, arguments)
        kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        row = {
            "policy": name,
            "seconds": round(seconds, 3),
            "temporaries": compiled.memory_analysis().temp_size_in_bytes,
            "resident": kibibytes * 2**10,
        }
        if name == "disk":
            row |= {
                "written": traffic.written - written,
                "read": traffic.read - read,
                "waiting": round((traffic.waited - waited) / seconds, 3),
            }
        yield row


if __name__ == "__main__":
    main()
