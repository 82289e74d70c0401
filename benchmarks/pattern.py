"""Memory and time of layers that alternate between kinds, in one sweep and without.

Memory, arithmetic and compile time of a residual MLP for a device that need not be attached:

    python -m benchmarks.pattern --target h200
    python -m benchmarks.pattern --target v5p

Time of a gradient on this device, all variants once per round after their gradients are compared:

    python -m benchmarks.pattern --run --layers 24 --tokens 512 --width 256 --inner 1024 --dtype float32

Writes `results/pattern_memory_<target>.json` and `results/pattern_time_<platform>.json`.
"""

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np

from stacked_remat import BlockSeq, Stacked, StackedPattern, memory

from .record import RESULTS, memory_row, timed_in_turn, write_results
from .residual_mlp import Block, Sizes

_POLICIES = (True, "nested", "offload")


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


def _blocks(kinds: Kinds, sizes: Sizes, form: str, remat: Any) -> Any:
    """The layers in one of the forms of `_FORMS`."""
    pattern = kinds.pattern(sizes.layers)
    Layers = hax.Axis("layers", len(pattern))
    inits = {
        f"kind_{i}": functools.partial(Block.init, dataclasses.replace(sizes, inner=sizes.inner // share))
        for i, share in enumerate(kinds.shares)
    }
    keys = jax.random.split(jax.random.key(0), len(pattern))
    if form == "StackedPattern" and len(inits) > 1:
        return StackedPattern.init(Layers, inits, pattern, remat=remat)(key=keys)
    if form == "StackedPattern":
        return Stacked.init(Layers, inits["kind_0"], remat=remat)(key=keys)
    return BlockSeq([inits[name](key=key) for name, key in zip(pattern, keys, strict=True)], Layers, remat)


def _gradient(form: str) -> Callable[..., Any]:
    def loss(blocks: Any, x: hax.NamedArray) -> jax.Array:
        if form == "Python loop of jax.checkpoint":
            for block in blocks.blocks:
                x = jax.checkpoint(lambda block, x: block(x))(block, x)
            return jnp.sum(x.array.astype(jnp.float32))
        return jnp.sum(blocks.fold(x).array.astype(jnp.float32))

    return jax.grad(loss, (0, 1))


def measure_memory(sizes: Sizes, target: str, only: Sequence[Kinds] = KINDS) -> list[dict[str, Any]]:
    """A row for each of the kinds and policies, and for a `BlockSeq` of two kinds."""
    cases = [(kinds, "StackedPattern", remat) for kinds in only for remat in _POLICIES]
    cases += [(kinds, "BlockSeq", "nested") for kinds in only if kinds.name == KINDS[1].name]
    rows = []
    for kinds, form, remat in cases:
        blocks = eqx.filter_eval_shape(_blocks, kinds, sizes, form, remat)
        x = eqx.filter_eval_shape(lambda: hax.zeros(sizes.axes[1:3], dtype=sizes.dtype))
        found = memory.report(_gradient(form), blocks, x, target=target)
        name = f"{form}, {kinds.name}, {remat}"
        rows.append({"name": name, **dataclasses.asdict(sizes), **memory_row(found)})
        print(
            f"{name:70}  temp {found.temporaries / 2**30:6.2f} GiB  "
            f"{found.flops.matmul / 1e12:6.0f} TFLOP  compiled in {found.compile_seconds:5.1f} s",
            flush=True,
        )
    return rows


def measure_time(sizes: Sizes, rounds: int) -> list[dict[str, Any]]:
    """Medians of the seconds of a gradient, and of each round's ratio to the Python loop."""
    kinds = KINDS[2]
    x = hax.random.normal(jax.random.key(1), sizes.axes[1:3]).astype(sizes.dtype)
    forms = [("StackedPattern", remat) for remat in (True, "nested")]
    forms += [("BlockSeq", True), ("Python loop of jax.checkpoint", True)]
    compiled, expected = {}, None
    for form, remat in forms:
        name = f"{form}, {remat}"
        blocks = _blocks(kinds, sizes, form, remat)
        began = time.perf_counter()
        program = jax.jit(_gradient(form)).lower(blocks, x).compile()
        compiled[name] = functools.partial(program, blocks, x), round(time.perf_counter() - began, 2)
        of_x = compiled[name][0]()[1].array
        expected = of_x if expected is None else expected
        np.testing.assert_allclose(of_x, expected, rtol=1e-3, atol=1e-3)
    seconds = timed_in_turn({name: run for name, (run, _) in compiled.items()}, rounds)
    baseline = seconds["Python loop of jax.checkpoint, True"]
    rows = []
    for name, own in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(own, baseline, strict=True))
        row = {"name": name, "median_seconds": round(statistics.median(own), 5)}
        rows.append(
            {**row, "to_python_loop": round(ratio, 4), "compile_seconds": round(compiled[name][1], 2)}
        )
        print(f"{name:45} {rows[-1]}", flush=True)
    return rows


def main(arguments: list[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="local", help="a target of stacked_remat.memory")
    parser.add_argument("--run", action="store_true", help="measure time in place of memory")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--width", type=int, default=2_048)
    parser.add_argument("--inner", type=int, default=16_384)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    sizes = Sizes(options.layers, options.tokens, options.width, options.inner, options.dtype)
    if options.run:
        path = options.out / f"pattern_time_{jax.default_backend()}.json"
        rows = measure_time(sizes, options.rounds)
        write_results(path, sizes=dataclasses.asdict(sizes), rounds=options.rounds, rows=rows)
    else:
        path = options.out / f"pattern_memory_{options.target}.json"
        write_results(path, target=options.target, rows=measure_memory(sizes, options.target))
    print(f"wrote {path}")
    return path


if __name__ == "__main__":
    main()
