"""Time of a gradient of the deep stack under every policy, and with other libraries, on this device.

The gradients are compared first. Then every variant runs once per round, so that a slow machine slows all of
them:

    python -m benchmarks.stack_time --tokens 512 --width 256 --inner 1024 --dtype float32 --rounds 21
    python -m benchmarks.stack_time --tokens 512 --width 256 --inner 1024 --dtype float32 --trace

Writes `results/stack_time_<platform>_<inner>.json` after every round. A variant that does not fit, or whose
gradients differ, is named there and not timed. On an accelerator the file also has the memory that a process
allocates for one variant, beside the compiler's figure.

With `--trace` nothing is run: `results/stack_trace_<platform>.json` has the processor time, of all threads,
of tracing each variant and of compiling it, with JAX's caches cleared before.
"""

import argparse
import dataclasses
import functools
import math
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .record import RESULTS, allocate_as_needed, allocated_alone, print_allocated, write_results
from .residual_mlp import Sizes, Variant, variants

_REFERENCE = "lax.scan + jax.checkpoint"
_TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}  # of the gradient's norm


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A variant, ready to run.

    Attributes:
        name: of the variant.
        run: computes the gradient.
        announced: bytes of device memory of a run, by the compiler.
        seconds: of each run so far.
    """

    name: str
    run: Callable[[], Any]
    announced: int
    seconds: list[float] = dataclasses.field(default_factory=list)

    def timed(self) -> None:
        """Run once more."""
        began = time.perf_counter()
        jax.block_until_ready(self.run())
        self.seconds.append(time.perf_counter() - began)


def main(arguments: list[str] | None = None) -> Path | None:
    options = _parser().parse_args(arguments)
    sizes = Sizes(options.layers, options.tokens, options.width, options.inner, options.dtype)
    allocate_as_needed()
    if options.alone:
        (variant,) = (variant for variant in variants() if variant.name == options.alone)
        jax.block_until_ready(compile_variant(variant, sizes).run())
        print_allocated()
        return None
    chosen = [v for v in variants() if re.search(options.only, v.name) and "frozen" not in v.name]
    chosen = [variant for variant in chosen if variant.missing() is None]
    if options.trace:
        return _trace(chosen, sizes, options)
    device = jax.local_devices()[0]
    # First, before this process allocates memory on the same device.
    on_cpu = device.platform == "cpu"
    alone = {variant.name: None if on_cpu else _allocated(variant.name, options) for variant in chosen}
    ready, refused, wrong = _checked(chosen, sizes)
    path = options.out / f"stack_time_{device.platform}_{sizes.inner}.json"
    found = {"device": device.device_kind, "sizes": dataclasses.asdict(sizes)}
    rows = []
    for done in range(1, options.rounds + 1):
        for one in ready:
            one.timed()
        rows = [_row(one, ready, alone[one.name]) for one in ready]
        write_results(path, **found, rounds=done, rows=rows, refused=refused)
    for row in rows:
        print(f"{row['name']:40} {row['median_seconds']:9.4f} s  {row['to_baselines']}", flush=True)
    print(f"wrote {path}")
    if wrong:
        raise SystemExit(f"wrong gradients, not timed: {', '.join(wrong)}")
    return path


def _trace(chosen: list[Variant], sizes: Sizes, options: argparse.Namespace) -> Path:
    """Trace and compile every variant once per round."""
    seconds: dict[str, list[tuple[float, float]]] = {variant.name: [] for variant in chosen}
    for _ in range(options.rounds):
        for variant in chosen:
            jax.clear_caches()
            began = time.process_time()
            fn, shapes = variant.build(sizes)
            lowered = jax.jit(fn).lower(*shapes)
            traced = time.process_time()
            lowered.compile()
            seconds[variant.name].append((traced - began, time.process_time() - traced))
    rows = []
    for name, found in seconds.items():
        traced, compiled = np.median(found, axis=0).round(3).tolist()
        row = {"name": name, "trace_seconds": traced, "compile_seconds": compiled}
        if _REFERENCE in seconds:
            ratios = np.divide(found, seconds[_REFERENCE])
            row["trace_ratio"], row["compile_ratio"] = np.median(ratios, axis=0).round(2).tolist()
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        rows.append(row)
    path = options.out / f"stack_trace_{jax.local_devices()[0].platform}.json"
    write_results(
        path, sizes=dataclasses.asdict(sizes), rounds=options.rounds, reference=_REFERENCE, rows=rows
    )
    print(f"wrote {path}")
    return path


def _checked(chosen: list[Variant], sizes: Sizes) -> tuple[list[Compiled], dict[str, str], list[str]]:
    """The variants to time, the reasons why others are not timed, and those with wrong gradients."""
    expected = expected_gradients(sizes)
    ready: list[Compiled] = []
    refused: dict[str, str] = {}
    wrong: list[str] = []
    for variant in chosen:
        try:
            one = compile_variant(variant, sizes)
            check_gradients(one, expected, sizes)
            ready.append(one)
        except (ArithmeticError, jax.errors.JaxRuntimeError) as error:
            refused[variant.name] = str(error).splitlines()[0]
            wrong += [variant.name] if isinstance(error, ArithmeticError) else []
            print(f"{variant.name:40} refused: {refused[variant.name][:80]}", flush=True)
    return ready, refused, wrong


def compile_variant(variant: Variant, sizes: Sizes) -> Compiled:
    """Compile a variant for this device, with the same weights and input as all others."""
    fn, shapes = variant.build(sizes)
    compiled = jax.jit(fn).lower(*shapes).compile()
    arguments = jtu.tree_map_with_path(lambda path, leaf: _value(path, leaf, sizes), shapes)
    memory: Any = compiled.memory_analysis()
    size = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return Compiled(variant.name, lambda: compiled(*arguments), size - memory.alias_size_in_bytes)


def expected_gradients(sizes: Sizes) -> dict[str, jax.Array]:
    """The gradients of the plain checkpointed scan."""
    (reference,) = (variant for variant in variants() if variant.name == _REFERENCE)
    return _by_role(compile_variant(reference, sizes).run(), sizes)


def check_gradients(compiled: Compiled, expected: dict[str, jax.Array], sizes: Sizes) -> None:
    """Compare the gradients with those that are expected.

    Raises:
        ArithmeticError: they differ.
    """
    for role, found in _by_role(compiled.run(), sizes).items():
        error = float(_relative_error(found, expected[role]))
        if not error <= _TOLERANCE[sizes.dtype]:
            raise ArithmeticError(
                f"{compiled.name}: the gradient of {role} is off by {error:.2g} of its norm"
            )


@jax.jit
def _relative_error(found: jax.Array, expected: jax.Array) -> jax.Array:
    """In float32, and as one program, so that no float32 copy of the gradients is kept."""
    found, expected = (each.ravel().astype(jnp.float32) for each in (found, expected))
    return jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected)


def _by_role(gradient: Any, sizes: Sizes) -> dict[str, jax.Array]:
    return {_role(path, leaf, sizes): leaf for path, leaf in jtu.tree_leaves_with_path(gradient)}


def _role(path: Any, leaf: Any, sizes: Sizes) -> str:
    """The role of an argument in any library; weights are named `up` and `down`, or in that order."""
    if leaf.size == sizes.tokens * sizes.width and leaf.ndim == 2:
        return "x"
    names = jtu.keystr(path)
    return "up" if "up" in names or ("down" not in names and names.endswith("[0]")) else "down"


def _value(path: Any, leaf: Any, sizes: Sizes) -> jax.Array:
    return _values(_role(path, leaf, sizes), leaf.shape, leaf.dtype)


# Libraries stack weights in three shapes.
@functools.lru_cache(maxsize=8)
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _values(role: str, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    scale = 1.0 if role == "x" else 0.5 * shape[-2] ** -0.5
    key = jax.random.key({"x": 0, "up": 1, "down": 2}[role])
    flat = jax.random.normal(key, (math.prod(shape),), jnp.float32) * scale
    return flat.astype(dtype).reshape(shape)


def _allocated(name: str, options: argparse.Namespace) -> int | None:
    """Peak of allocated bytes in a process that runs only this variant."""
    sizes = [f"--{key}={getattr(options, key)}" for key in ("layers", "tokens", "width", "inner", "dtype")]
    return allocated_alone("benchmarks.stack_time", [*sizes, "--alone", name])


def _row(one: Compiled, ready: list[Compiled], allocated: int | None) -> dict[str, Any]:
    medians = {other.name: statistics.median(other.seconds) for other in ready}
    baselines = ("haliax True", "stacked_remat True")
    return {
        "name": one.name,
        "median_seconds": medians[one.name],
        "to_baselines": {
            # The median of each round's ratio.
            base.name: round(float(np.median(np.divide(one.seconds, base.seconds))), 4)
            for base in ready
            if base.name in baselines
        },
        "seconds": [round(seconds, 5) for seconds in one.seconds],
        "announced_bytes": one.announced,
        "allocated_bytes": allocated,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--width", type=int, default=2_048)
    parser.add_argument("--inner", type=int, default=2_048)
    parser.add_argument("--dtype", default="bfloat16", choices=list(_TOLERANCE))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="regular expression that names of variants must match")
    parser.add_argument("--trace", action="store_true", help="time tracing and compiling, and run nothing")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--alone", default="", help="run one variant once and print what it allocated")
    return parser


if __name__ == "__main__":
    main()
