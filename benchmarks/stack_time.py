"""Time of a gradient of the deep stack under every policy, and with other libraries, on
this device.

The gradients are compared first. Then every variant runs once per round, so that a slow
machine slows all of them:

    python -m benchmarks.stack_time --tokens 512 --width 256 --inner 1024 --dtype
    float32 --rounds 21

`--only` is a regular expression that names of variants match. Writes
`results/stack_time_<platform>_<inner>.json`. A variant that does not fit, or whose
gradients differ, is named there and not timed.
"""

import functools
import math
import re
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .command import Rows, benchmark
from .record import check_close, median_ratio, timed_in_turn
from .residual_mlp import DEEP, Sizes, variants

REFERENCE = "lax.scan + jax.checkpoint"
_BASELINES = ("haliax True", "stacked_remat True")
_TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}  # of the gradient's norm


@benchmark("stack_time_{platform}_{inner}")
def main(sizes: Sizes = DEEP, rounds: int = 9, only: str = "") -> Rows:
    """The time of every variant whose gradients are right.

    Raises:
        SystemExit: the gradients of some are wrong.
    """
    expected = by_role(compiled(REFERENCE, sizes)())
    ready: dict[str, Callable[[], Any]] = {}
    wrong = []
    for name in (
        name for name in variants() if "frozen" not in name and re.search(only, name)
    ):
        try:
            one = compiled(name, sizes)
            check_close(name, by_role(one()), expected, _TOLERANCE[sizes.dtype])
            ready[name] = one
        except (ArithmeticError, jax.errors.JaxRuntimeError) as error:
            yield {"name": name, "refused": str(error).splitlines()[0]}
            wrong += [name] if isinstance(error, ArithmeticError) else []
    seconds = timed_in_turn(ready, rounds)
    for name, own in seconds.items():
        bases = [base for base in seconds if base in _BASELINES]
        yield {
            "name": name,
            "median_seconds": statistics.median(own),
            "to_baselines": {
                base: round(median_ratio(own, seconds[base]), 4) for base in bases
            },
            "seconds": [round(each, 5) for each in own],
        }
    if wrong:
        raise SystemExit(f"wrong gradients, not timed: {', '.join(wrong)}")


def compiled(name: str, sizes: Sizes) -> Callable[[], Any]:
    """A variant's gradient, compiled for this device, with the same weights and input
    as all others.
    """
    fn, shapes = variants()[name](sizes)
    program = jax.jit(fn).lower(*shapes).compile()
    values = jtu.tree_map_with_path(
        lambda path, leaf: _values(_role(path), leaf.shape, leaf.dtype), shapes
    )
    return functools.partial(program, *values)


def by_role(tree: Any) -> dict[str, Any]:
    """Arrays by what they are in every library, without the shapes that it stacks them
    in.
    """
    return {_role(path): leaf.ravel() for path, leaf in jtu.tree_leaves_with_path(tree)}


def _role(path: Any) -> str:
    names = jtu.keystr(path)
    return next((role for role in ("up", "down") if role in names), "x")


# Libraries stack weights in three shapes.
@functools.lru_cache(maxsize=8)
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _values(role: str, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    scale = 1.0 if role == "x" else 0.5 * shape[-2] ** -0.5
    key = jax.random.key({"x": 0, "up": 1, "down": 2}[role])
    flat = jax.random.normal(key, (math.prod(shape),), jnp.float32) * scale
    return flat.astype(dtype).reshape(shape)


if __name__ == "__main__":
    main()
