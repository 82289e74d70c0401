"""Memory and time of layers that alternate between kinds, in one sweep and without.

Memory, FLOPs and compile time of a residual MLP for a device that need not be attached:

    python -m benchmarks.pattern --target h200
    python -m benchmarks.pattern --target v5p

Time of a gradient on this device, all variants once per round after their gradients are compared:

    python -m benchmarks.pattern time --layers 24 --tokens 512 --width 256 --inner 1024 --dtype float32

Writes `results/pattern_memory_<target>.json` and `results/pattern_time_<platform>.json`.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp

from stacked_remat import BlockSeq, Stacked, StackedPattern, memory

from .command import Rows, benchmark, one_of
from .record import check_close, median_ratio, memory_row, timed_in_turn
from .residual_mlp import Block, Sizes

FULL = Sizes(inner=16_384)


@dataclasses.dataclass(frozen=True)
class Kinds:
    """Layers of several kinds.

    Attributes:
        name: what they are.
        shares: the inner width of each kind, as a part of the widest.
        cycle: the kind of each layer, again and again.
        left_over: how many layers there are above a whole number of cycles.
    """

    name: str
    shares: tuple[int, ...]
    cycle: tuple[int, ...]
    left_over: int = 0

    def pattern(self, layers: int) -> list[str]:
        """The name of the kind of each layer: of the greatest number with `left_over`, up to `layers`."""
        length = layers - (layers - self.left_over) % len(self.cycle)
        return [f"kind_{self.cycle[i % len(self.cycle)]}" for i in range(length)]


KINDS = (
    Kinds("one kind", (1,), (0,)),
    Kinds("two of equal width, 1:1", (1, 1), (0, 1)),
    Kinds("two, the other an eighth as wide, 1:1", (1, 8), (0, 1)),
    Kinds("two, five narrow to a wide one, with remainder", (8, 1), (0, 0, 0, 0, 0, 1), 4),
    Kinds("four of equal width", (1, 1, 1, 1), (0, 1, 2, 3)),
    Kinds("four, three of them an eighth as wide", (1, 8, 8, 8), (0, 1, 2, 3)),
)


LOOP = "Python loop of jax.checkpoint"


def _blocks(kinds: Kinds, sizes: Sizes, form: str, remat: Any) -> Any:
    """The layers as a `StackedPattern`, of one kind a `Stacked`, or as a `BlockSeq`."""
    pattern = kinds.pattern(sizes.layers)
    Layers = hax.Axis("layers", len(pattern))
    inits = {
        f"kind_{i}": functools.partial(Block.init, dataclasses.replace(sizes, inner=sizes.inner // share))
        for i, share in enumerate(kinds.shares)
    }
    keys = jax.random.split(jax.random.key(0), len(pattern))
    if form != "StackedPattern":
        blocks = [inits[name](key=key) for name, key in zip(pattern, keys, strict=True)]
        return BlockSeq(blocks, Layers, remat)
    if len(inits) == 1:
        return Stacked.init(Layers, inits["kind_0"], remat=remat)(key=keys)
    return StackedPattern.init(Layers, inits, pattern, remat=remat)(key=keys)


def _gradient(form: str) -> Callable[..., Any]:
    def loss(blocks: Any, x: hax.NamedArray) -> jax.Array:
        if form == LOOP:
            for block in blocks.blocks:
                x = jax.checkpoint(lambda block, x: block(x))(block, x)
        else:
            x = blocks.fold(x)
        return jnp.sum(x.array.astype(jnp.float32))

    return jax.grad(loss, (0, 1))


@benchmark("pattern_memory_{target}")
def of_memory(sizes: Sizes = FULL, target: str = "local", only: str = "") -> Rows:
    """A row for each of the kinds and policies, and for a `BlockSeq` of two kinds."""
    cases = [(kinds, "StackedPattern", remat) for kinds in KINDS for remat in (True, "nested", "offload")]
    for kinds, form, remat in [*cases, (KINDS[1], "BlockSeq", "nested")]:
        if only not in kinds.name:
            continue
        blocks = eqx.filter_eval_shape(_blocks, kinds, sizes, form, remat)
        x = eqx.filter_eval_shape(lambda: hax.zeros(sizes.axes[1:3], dtype=sizes.dtype))
        found = memory.report(_gradient(form), blocks, x, target=target)
        yield {"name": f"{form}, {kinds.name}, {remat}", **dataclasses.asdict(sizes), **memory_row(found)}


@benchmark("pattern_time_{platform}")
def of_time(sizes: Sizes = FULL, rounds: int = 15) -> Rows:
    """Medians of the seconds of a gradient, and of each round's ratio to the Python loop.

    Raises:
        ArithmeticError: gradients differ.
    """
    x = hax.random.normal(jax.random.key(1), sizes.axes[1:3]).astype(sizes.dtype)
    forms = [("StackedPattern", True), ("StackedPattern", "nested"), ("BlockSeq", True), (LOOP, True)]
    runs, compiled = {}, {}
    for form, remat in forms:
        blocks = _blocks(KINDS[2], sizes, form, remat)
        began = time.perf_counter()
        program = jax.jit(_gradient(form)).lower(blocks, x).compile()
        name = f"{form}, {remat}"
        runs[name], compiled[name] = functools.partial(program, blocks, x), time.perf_counter() - began
    expected = runs[f"{LOOP}, True"]()[1]
    for name, run in runs.items():
        check_close(name, run()[1], expected, 1e-3)
    seconds = timed_in_turn(runs, rounds)
    for name, own in seconds.items():
        yield {
            "name": name,
            "median_seconds": round(statistics.median(own), 5),
            "to_python_loop": round(median_ratio(own, seconds[f"{LOOP}, True"]), 4),
            "compile_seconds": round(compiled[name], 2),
        }


main = one_of(memory=of_memory, time=of_time)


if __name__ == "__main__":
    main()
