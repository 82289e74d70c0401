"""Memory of layers that alternate between kinds, in one sweep and without.

Memory, FLOPs and compile time of a residual MLP for a device that need not be attached:

    python -m benchmarks.pattern --target h200
    python -m benchmarks.pattern --target v5p

Writes `results/pattern_memory_<target>.json`.
"""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp

from stacked_remat import BlockSeq, Stacked, StackedPattern, memory

from .command import Rows, benchmark
from .record import memory_row
from .residual_mlp import Block, Sizes

FULL = Sizes(inner=16_384)


@dataclasses.dataclass(frozen=True)
class Kinds:
    """Layers of several kinds, whose inner widths are shares of the widest one, in a
    cycle.

    There are `left_over` layers above a whole number of cycles.
    """

    name: str
    shares: tuple[int, ...]
    cycle: tuple[int, ...]
    left_over: int = 0

    def pattern(self, layers: int) -> list[str]:
        """The name of the kind of each layer: of the greatest number with `left_over`,
        up to `layers`.
        """
        length = layers - (layers - self.left_over) % len(self.cycle)
        return [f"kind_{self.cycle[i % len(self.cycle)]}" for i in range(length)]


KINDS = (
    Kinds("one kind", (1,), (0,)),
    Kinds("two of equal width, 1:1", (1, 1), (0, 1)),
    Kinds("two, the other an eighth as wide, 1:1", (1, 8), (0, 1)),
    Kinds(
        "two, five narrow to a wide one, with remainder", (8, 1), (0, 0, 0, 0, 0, 1), 4
    ),
    Kinds("four of equal width", (1, 1, 1, 1), (0, 1, 2, 3)),
    Kinds("four, three of them an eighth as wide", (1, 8, 8, 8), (0, 1, 2, 3)),
)


def _blocks(kinds: Kinds, sizes: Sizes, form: str, remat: Any) -> Any:
    """The layers as a `StackedPattern`, of one kind a `Stacked`, or as a `BlockSeq`."""
    pattern = kinds.pattern(sizes.layers)
    Layers = hax.Axis("layers", len(pattern))
    inits = {
        f"kind_{i}": functools.partial(
            Block.init, dataclasses.replace(sizes, inner=sizes.inner // share)
        )
        for i, share in enumerate(kinds.shares)
    }
    keys = jax.random.split(jax.random.key(0), len(pattern))
    if form != "StackedPattern":
        blocks = [inits[name](key=key) for name, key in zip(pattern, keys, strict=True)]
        return BlockSeq(blocks, Layers, remat)
    if len(inits) == 1:
        return Stacked.init(Layers, inits["kind_0"], remat=remat)(key=keys)
    return StackedPattern.init(Layers, inits, pattern, remat=remat)(key=keys)


def loss(blocks: Any, x: hax.NamedArray) -> jax.Array:
    """The sum of what the layers return."""
    return jnp.sum(blocks.fold(x).array.astype(jnp.float32))


@benchmark("pattern_memory_{target}")
def main(sizes: Sizes = FULL, target: str = "local", only: str = "") -> Rows:
    """A row for each of the kinds and policies, and for a `BlockSeq` of two kinds."""
    cases = [
        (kinds, "StackedPattern", remat)
        for kinds in KINDS
        for remat in (True, "nested", "offload")
    ]
    for kinds, form, remat in [*cases, (KINDS[1], "BlockSeq", "nested")]:
        name = f"{form}, {kinds.name}, {remat}"
        if only not in name:
            continue
        blocks = eqx.filter_eval_shape(_blocks, kinds, sizes, form, remat)
        x = eqx.filter_eval_shape(lambda: hax.zeros(sizes.axes[1:3], dtype=sizes.dtype))
        found = memory.report(jax.grad(loss, (0, 1)), blocks, x, target=target)
        yield {
            "name": name,
            **dataclasses.asdict(sizes),
            **memory_row(found),
        }


if __name__ == "__main__":
    main()
