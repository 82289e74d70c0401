"""Memory of a deep stack under every policy, and with other libraries; of products of
its Hessian too.

Everything is compiled for a device that need not be attached, and nothing is run:

    python -m benchmarks.stack_memory --target h200
    python -m benchmarks.stack_memory --target v5p --inner 2048 --only stacked_remat

Levanter's `ArrayStacked` is among them after `pip install --pre --no-deps
marin-levanter`, on Python 3.12.

`--only` is a regular expression that names of variants match. Writes
`results/stack_memory_<target>.json`, of which `make figures` draws a chart.
"""

import dataclasses
import re

from .command import Rows, benchmark
from .record import compiled_row
from .residual_mlp import Sizes, hessian_products, variants


@benchmark("stack_memory_{target}")
def main(
    target: str = "local",
    layers: int = 48,
    tokens: int = 65_536,
    width: int = 2_048,
    inner: tuple[int, ...] = (2_048, 16_384),
    only: str = "",
) -> Rows:
    every = variants() | hessian_products()
    for sizes in (Sizes(layers, tokens, width, size) for size in inner):
        for name in (name for name in every if re.search(only, name)):
            row = {"name": name, **dataclasses.asdict(sizes)}
            fn, args = every[name](sizes)
            yield row | compiled_row(fn, args, target)


if __name__ == "__main__":
    main()
