"""Memory of a deep stack under every policy, and with other libraries; of products of its Hessian too.

Everything is compiled for a device that need not be attached, and nothing is run:

    python -m benchmarks.stack_memory --target h200
    python -m benchmarks.stack_memory --target v5p --inner 2048 --only stacked_remat

Writes `results/stack_memory_<target>.json`, of which `make figures` draws charts. On an attached device,
`--target local --run` also runs `stack_time`: compares gradients, times every policy, and measures the memory
that is allocated.
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from stacked_remat import memory

from . import stack_time
from .record import RESULTS, allocate_as_needed, memory_row, write_results
from .residual_mlp import Sizes, Variant, hessian_products, variants


def main(arguments: list[str] | None = None) -> Path:
    options = _parser().parse_args(arguments)
    if options.run:
        allocate_as_needed()
    every = [*variants(), *hessian_products()]
    chosen = [variant for variant in every if re.search(options.only, variant.name)]
    for notice in filter(None, (variant.missing() for variant in chosen)):
        print(notice)
    chosen = [variant for variant in chosen if variant.missing() is None]
    if not chosen:
        raise SystemExit(f"--only {options.only!r} leaves nothing out of {[v.name for v in every]}")
    rows: list[dict[str, Any]] = []
    for inner in options.inner:
        sizes = Sizes(options.layers, options.tokens, options.width, inner)
        rows += _measure(chosen, sizes, options.target)
    path = options.out / f"stack_memory_{options.target}.json"
    write_results(path, target=options.target, rows=rows)
    print(f"wrote {path}")
    for inner in options.inner if options.run else ():
        sizes = ("layers", "tokens", "width", "only", "out")
        own = [f"--{name}={getattr(options, name)}" for name in sizes]
        stack_time.main([*own, f"--inner={inner}"])
    return path


def _measure(chosen: list[Variant], sizes: Sizes, target: str) -> Iterator[dict[str, Any]]:
    for variant in chosen:
        size = {"layers": sizes.layers, "tokens": sizes.tokens, "width": sizes.width, "inner": sizes.inner}
        try:
            fn, args = variant.build(sizes)
            found = memory.report(fn, *args, target=target)
        except (memory.DoesNotFit, jax.errors.JaxRuntimeError) as error:
            reason = str(error).splitlines()[0]
            print(f"{variant.name:40}  {sizes.inner:6}  refused: {reason[:80]}", flush=True)
            yield {"name": variant.name, **size, "refused": reason}
            continue
        print(
            f"{variant.name:40}  {sizes.inner:6}  temp {found.temporaries / 2**30:7.2f} GiB  "
            f"total {found.total / 2**30:7.2f} GiB  host {found.host.total / 2**30:6.2f} GiB  "
            f"{found.flops.matmul / 1e12:7.0f} TFLOP",
            flush=True,
        )
        yield {"name": variant.name, **size, **memory_row(found)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="local", choices=list(memory.TARGETS))
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--width", type=int, default=2_048)
    parser.add_argument("--inner", type=int, nargs="+", default=[2_048, 16_384])
    parser.add_argument("--only", default="", help="regular expression that names of variants must match")
    parser.add_argument("--run", action="store_true", help="also time every variant on this device")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser


if __name__ == "__main__":
    main()
