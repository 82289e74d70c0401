"""Time of one gradient of the deep stack under every policy, beside the other libraries, on this device.

The gradients are compared first, and then every variant runs once a round, so that what slows the machine
down slows down all of them:

    python -m benchmarks.stack_time --tokens 512 --width 256 --inner 1024 --dtype float32 --rounds 21

Writes `results/stack_time_<platform>_<inner>.json`. On an accelerator it also says what a process that runs
one variant alone has allocated, beside what the compiler announced.
"""

import argparse
import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .record import RESULTS, versions
from .residual_mlp import Sizes, Variant, variants

_REFERENCE = "lax.scan + jax.checkpoint"
_TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}  # of the gradient's norm


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A variant, ready to run.

    Attributes:
        name: of the variant.
        run: computes the gradient.
        announced: what the compiler says that a run takes of the device, in bytes.
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
    if options.alone:
        (variant,) = (variant for variant in variants() if variant.name == options.alone)
        jax.block_until_ready(compile_variant(variant, sizes).run())
        print(json.dumps((jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")))
        return None
    chosen = [v for v in variants() if re.search(options.only, v.name) and "frozen" not in v.name]
    chosen = [variant for variant in chosen if variant.missing() is None]
    ready, refused = [], {}
    for variant in chosen:
        try:
            ready.append(compile_variant(variant, sizes))
            check_gradients(ready[-1], sizes)
        except jax.errors.JaxRuntimeError as error:
            refused[variant.name] = str(error).splitlines()[0]
            print(f"{variant.name:40} refused: {refused[variant.name][:80]}", flush=True)
    for _ in range(options.rounds):
        for one in ready:
            one.timed()
    device = jax.local_devices()[0]
    alone = [_allocated(one.name, options) if device.platform != "cpu" else None for one in ready]
    rows = [_row(one, ready, peak) for one, peak in zip(ready, alone, strict=True)]
    for row in rows:
        print(f"{row['name']:40} {row['median_seconds']:9.4f} s  {row['to_baselines']}", flush=True)
    path = options.out / f"stack_time_{device.platform}_{sizes.inner}.json"
    found = {"device": device.device_kind, "sizes": dataclasses.asdict(sizes), "rounds": options.rounds}
    text = json.dumps({**found, "versions": versions(), "rows": rows, "refused": refused}, indent=1)
    path.write_text(text + "\n")
    print(f"wrote {path}")
    return path


def compile_variant(variant: Variant, sizes: Sizes) -> Compiled:
    """Compile a variant for the device at hand, on weights and an input that are the same for all."""
    fn, shapes = variant.build(sizes)
    compiled = jax.jit(fn).lower(*shapes).compile()
    arguments = jtu.tree_map_with_path(lambda path, leaf: _value(path, leaf, sizes), shapes)
    memory: Any = compiled.memory_analysis()
    size = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return Compiled(variant.name, lambda: compiled(*arguments), size - memory.alias_size_in_bytes)


def check_gradients(compiled: Compiled, sizes: Sizes) -> None:
    """Compare the gradient with that of the plain checkpointed scan.

    Raises:
        ArithmeticError: they differ.
    """
    (reference,) = (variant for variant in variants() if variant.name == _REFERENCE)
    expected = _by_role(compile_variant(reference, sizes).run(), sizes)
    for role, found in _by_role(compiled.run(), sizes).items():
        error = np.linalg.norm(found - expected[role]) / np.linalg.norm(expected[role])
        if not error <= _TOLERANCE[sizes.dtype]:
            raise ArithmeticError(
                f"{compiled.name}: the gradient of {role} is off by {error:.2g} of its norm"
            )


def _by_role(gradient: Any, sizes: Sizes) -> dict[str, np.ndarray]:
    leaves = jtu.tree_leaves_with_path(gradient)
    return {_role(path, leaf, sizes): np.asarray(leaf, np.float32).ravel() for path, leaf in leaves}


def _role(path: Any, leaf: Any, sizes: Sizes) -> str:
    """What an argument is, whatever a library calls it; weights are `up` and `down`, or in that order."""
    if leaf.size == sizes.tokens * sizes.width and leaf.ndim == 2:
        return "x"
    names = jtu.keystr(path)
    return "up" if "up" in names or ("down" not in names and names.endswith("[0]")) else "down"


def _value(path: Any, leaf: Any, sizes: Sizes) -> jax.Array:
    role = _role(path, leaf, sizes)
    scale = 1.0 if role == "x" else 0.5 * leaf.shape[-2] ** -0.5
    key = jax.random.key({"x": 0, "up": 1, "down": 2}[role])
    flat = jax.random.normal(key, (leaf.size,), jnp.float32) * scale
    return flat.astype(leaf.dtype).reshape(leaf.shape)


def _allocated(name: str, options: argparse.Namespace) -> int | None:
    """What a process that does nothing else has allocated at its highest, in bytes."""
    sizes = [f"--{key}={getattr(options, key)}" for key in ("layers", "tokens", "width", "inner", "dtype")]
    command = [sys.executable, "-m", "benchmarks.stack_time", *sizes, "--alone", name]
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def _row(one: Compiled, ready: list[Compiled], allocated: int | None) -> dict[str, Any]:
    medians = {other.name: statistics.median(other.seconds) for other in ready}
    baselines = ("haliax True", "stacked_remat True")
    return {
        "name": one.name,
        "median_seconds": medians[one.name],
        "to_baselines": {
            # Of the rounds' ratios: the two ran one after the other in each.
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
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--alone", default="", help="run one variant once and print what it allocated")
    return parser


if __name__ == "__main__":
    main()
