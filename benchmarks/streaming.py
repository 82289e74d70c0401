"""Layers on the host: device memory against depth, and time against layers on the device.

Compiled for a device that need not be attached, and not run:

    python -m benchmarks.streaming --target h200
    python -m benchmarks.streaming --target v5p

Whole training steps of configs, sized the same way, with other lengths of context or targets:

    python -m benchmarks.streaming --target v5p --configs models/configs/qwen3_30b_a3b_65k_streamed_lora.yaml
    python -m benchmarks.streaming --target h200 --configs A.yaml B.yaml --context 65536 1048576

Further options are those of the configs, such as `--model.experts.backend block`.

With `--run`, on the attached device: checks that streamed layers give the gradients and the updates of
resident ones, then times both in turns:

    python -m benchmarks.streaming --run --layers 48 --tokens 65536 --inner 16384
    JAX_PLATFORMS=cpu python -m benchmarks.streaming --run --layers 48 --tokens 512 --width 128 --inner 512

Writes `results/streaming_<target>.json`, `results/streaming_steps_<target>.json`, or
`results/streaming_time_<backend>.json`.
"""

import argparse
import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from models.candidate import Candidate
from models.run_config import LmRunConfig
from stacked_remat import ScanCheckpointPolicy, Stacked, fused_update, memory, streaming
from stacked_remat.training import parse_config

from .record import (
    RESULTS,
    allocate_as_needed,
    allocated_alone,
    memory_row,
    print_allocated,
    timed_in_turn,
    write_results,
)
from .residual_mlp import Sizes, haliax

OFFLOAD = ScanCheckpointPolicy(save_carries="offload")
EXPERTS = (48, 128, 2048, 192)
"""Layers, experts, width and inner width of the mixture of experts: 4.5 GiB."""


class Mlp(eqx.Module):
    """`x + silu(x @ up) @ down`."""

    up: jax.Array
    down: jax.Array

    @staticmethod
    def init(width: int, inner: int, *, key: jax.Array) -> "Mlp":
        """One layer in bfloat16."""
        up, down = jax.random.split(key)
        return Mlp(_normal(up, (width, inner)), _normal(down, (inner, width)))

    def __call__(self, x: jax.Array) -> jax.Array:
        """The next carry."""
        return x + jax.nn.silu(x @ self.up) @ self.down


class Experts(eqx.Module):
    """A mixture of experts that takes `[expert, token, width]`: tokens that a router has dealt out evenly."""

    weight: jax.Array

    @staticmethod
    def init(experts: int, width: int, inner: int, *, key: jax.Array) -> "Experts":
        """One layer in bfloat16."""
        return Experts(_normal(key, (experts, width, inner)))

    def __call__(self, x: jax.Array) -> jax.Array:
        """The next carry."""
        hidden = jax.nn.silu(jnp.einsum("etd,edf->etf", x, self.weight))
        return x + jnp.einsum("etf,edf->etd", hidden, self.weight)


def _normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16) * 0.02


class Build(NamedTuple):
    """How to make a stack.

    Attributes:
        layers: how many.
        block: makes a layer from a key.
        remat: the policy.
        streamed: whether they are on the host.
    """

    layers: int
    block: Callable[..., Any]
    remat: Any
    streamed: bool = False

    def __call__(self, key: jax.Array) -> Stacked:
        """Make it, one layer at a time: those on the host never exist on the device together."""

        def one(_: None, key: jax.Array) -> tuple[None, Any]:
            block = self.block(key=key)
            return None, jax.device_put(block, jax.memory.Space.Host) if self.streamed else block

        _, blocks = lax.scan(one, None, jax.random.split(key, self.layers))
        stack = Stacked(blocks, hax.Axis("layers", self.layers), self.remat)
        return streaming.to_host(stack) if self.streamed else stack


Program = Callable[[Any, jax.Array], Any]
"""Takes a stack and its input."""


def loss(stack: Any, x: jax.Array) -> jax.Array:
    """The mean square of what a stack returns."""
    return jnp.mean(jnp.square(stack.fold(x).astype(jnp.float32)))


def gradient(stack: Any, x: jax.Array) -> jax.Array:
    """The gradient of the input: that of a model whose layers are frozen."""
    return jax.grad(loss, 1)(stack, x)


_STEP = fused_update(loss, optax.sgd(1e-3))


def update(stack: Any, x: jax.Array) -> Any:
    """A step of SGD within the backward pass: the loss and the new weights."""
    result = _STEP(stack, _STEP.init(stack), x)
    return result.value, result.model


def sliced_by_index(stack: Any, x: jax.Array) -> Any:
    """`update` by a scan over indices that takes each layer out of the stack, and its gradient."""

    @jax.checkpoint
    def layer(stacked: Any, x: jax.Array, index: jax.Array) -> jax.Array:
        block = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, 0, False), stacked)
        return block(x)

    def of_indices(stacked: Any) -> jax.Array:
        x_last, _ = lax.scan(
            lambda carry, index: (layer(stacked, carry, index), None), x, jnp.arange(len(stack))
        )
        return jnp.mean(jnp.square(x_last.astype(jnp.float32)))

    value, found = jax.value_and_grad(of_indices)(stack.stacked)
    new = jax.tree.map(lambda leaf, ct: leaf - (1e-3 * ct).astype(leaf.dtype), stack.stacked, found)
    return value, eqx.tree_at(lambda stack: stack.stacked, stack, new)


def read(stack: Any, x: jax.Array) -> jax.Array:
    """A sum over all weights: little more than their transfer."""

    def add(block: Any, total: jax.Array) -> jax.Array:
        return total + sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(block))

    return stack.fold_via(add, remat=False)(x.ravel()[0].astype(jnp.float32))


def main(arguments: list[str] | None = None) -> Path:
    parser = _parser()
    options, altered = parser.parse_known_args(arguments)
    if altered and (options.run or not options.configs):
        parser.error(f"{altered[0]} is an option of --configs alone.")
    if options.run:
        return run(options)
    if options.configs:
        return steps(options, altered)
    rows = [*_depths(options), *_experts(options)]
    path = options.out / f"streaming_{options.target}.json"
    write_results(path, target=options.target, rows=rows)
    print(f"wrote {path}")
    return path


def _depths(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A step of SGD by depth, beside gradients in Haliax."""
    for layers in options.depths:
        block = functools.partial(Mlp.init, options.width, options.inner)
        x = jax.ShapeDtypeStruct((options.tokens, options.width), jnp.bfloat16)
        yield _sized("mlp", "streamed", update, Build(layers, block, OFFLOAD, True), x, options.target)
        yield _sized("mlp", "nested, resident", update, Build(layers, block, "nested"), x, options.target)
        sizes = Sizes(layers, options.tokens, options.width, options.inner)
        for remat in (True, "nested"):
            fn, args = haliax(remat)(sizes)
            name = f"Haliax {remat}, resident"
            try:
                found = memory.report(fn, *args, target=options.target)
            except memory.DoesNotFit as error:
                print(f"mlp {layers:9} layers  gradient         {name}: {error}", flush=True)
                continue
            yield _row("mlp", name, "gradient", layers, found)


def _experts(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """48 layers of 128 experts, 4.5 GiB, with few tokens, so that weights are all that counts."""
    layers, experts, width, inner = EXPERTS
    block = functools.partial(Experts.init, experts, width, inner)
    x = jax.ShapeDtypeStruct((experts, 4, width), jnp.bfloat16)
    programs: list[tuple[str, Program]] = [("resident", program) for program in _PROGRAMS]
    programs += [("scan over indices, resident", sliced_by_index)]
    programs += [("streamed", program) for program in _PROGRAMS]
    for name, program in programs:
        build = Build(layers, block, True, name == "streamed")
        yield _sized("experts", name, program, build, x, options.target)


_PROGRAMS: tuple[Program, ...] = (loss, gradient, update)


def _sized(
    block: str, name: str, program: Program, build: Build, x: jax.ShapeDtypeStruct, target: str
) -> dict[str, Any]:
    """What a program takes on the device."""
    arguments: Any = eqx.filter_eval_shape(build, jax.random.key(0)), x
    if build.streamed:
        # A shape does not say where an array is.
        arguments = memory.arguments_on_host(lambda stack, x: (streaming.to_host(stack), x), arguments)
    donated = ["stack"] if program in (update, sliced_by_index) else []
    found = memory.report(program, *arguments, target=target, donate=donated)
    return _row(block, name, program.__name__, build.layers, found)


def _row(block: str, name: str, program: str, layers: int, found: memory.MemoryReport) -> dict[str, Any]:
    print(
        f"{block:8} {layers:4} layers  {program:16} {name:28} device {found.total / 2**30:7.2f} GiB  "
        f"host {found.host.total / 2**30:6.2f} GiB",
        flush=True,
    )
    return {"block": block, "layers": layers, "program": program, "name": name, **memory_row(found)}


def steps(options: argparse.Namespace, altered: Sequence[str]) -> Path:
    """What a training step of each config takes, altered so, and with each length of context."""
    path = options.out / f"streaming_steps_{options.target}.json"
    rows = []
    for file in options.configs:
        given = parse_config(LmRunConfig, ["--config_path", str(file), *altered]).resolved(check_folder=False)
        for tokens in options.context or [given.data.seq_len]:
            config = dataclasses.replace(given, data=dataclasses.replace(given.data, seq_len=tokens))
            assert config.policy is not None
            found = Candidate(config, options.target).report()
            moved, least = found.flops.bytes_from_host + found.flops.bytes_to_host, found.least_time
            transfers = "-"
            if moved and least is not None:
                bound = config.data.batch_size * tokens / least.transfer
                verdict = "hidden" if least.hidden else f"bound by the link at {bound:,.0f} tokens/s"
                transfers = f"{memory.readable_bytes(moved)}, {verdict}"
            print(
                f"{file.stem:40} {tokens:9,} tokens  device {found.total / 2**30:6.2f} GiB  "
                f"host {found.host.total / 2**30:7.2f} GiB  transfers {transfers}",
                flush=True,
            )
            rows.append({"config": file.stem, "tokens": tokens, "transfers": transfers, **memory_row(found)})
            write_results(path, target=options.target, rows=rows)
    print(f"wrote {path}")
    return path


def run(options: argparse.Namespace) -> Path:
    """Compare results with those of resident layers, then time both in turns."""
    allocate_as_needed()
    device = jax.local_devices()[0]
    if options.alone:
        name, kind = options.alone
        jax.block_until_ready(_call(_TIMED[name], kind == "streamed", options)())
        print_allocated()
        raise SystemExit
    keys = [
        (name, streamed)
        for name in _TIMED
        for streamed in (False, True)
        if name != "sliced_by_index" or not streamed
    ]
    # First, before this process allocates memory on the same device.
    peaks = {key: None if device.platform == "cpu" else _allocated(*key, options) for key in keys}
    calls = {(name, streamed): _call(_TIMED[name], streamed, options) for name, streamed in keys}
    # The second step shows what the first one updated.
    results = {key: (call(), call()) for key, call in calls.items()}
    for (name, streamed), found in results.items():
        _check(f"{name}, {_kind(streamed)}", found, results[_resident(name)])
    seconds = timed_in_turn(calls, options.rounds)
    rows = [{**_timed_row(*key, seconds), "allocated_bytes": peaks[key]} for key in keys]
    for row in rows:
        print(row, flush=True)
    sizes = {name: getattr(options, name) for name in (*_SIZES, "rounds")}
    path = options.out / f"streaming_time_{device.platform}.json"
    write_results(path, device=device.device_kind, sizes=sizes, rows=rows)
    print(f"wrote {path}")
    return path


_TIMED: dict[str, Program] = {
    "gradient": gradient,
    "update": update,
    "sliced_by_index": sliced_by_index,
    "read": read,
}
_SIZES = ("layers", "tokens", "width", "inner", "remat")


def _kind(streamed: bool) -> str:
    return "streamed" if streamed else "resident"


def _resident(name: str) -> tuple[str, bool]:
    return ("update" if name == "sliced_by_index" else name), False


def _call(program: Program, streamed: bool, options: argparse.Namespace) -> Callable[[], Any]:
    """A call of a compiled program, on a stack of its own, which steps of an optimizer update in place."""
    x = jax.random.normal(jax.random.key(1), (options.tokens, options.width), jnp.bfloat16)
    block = functools.partial(Mlp.init, options.width, options.inner)
    held = jax.jit(Build(options.layers, block, options.remat, streamed).__call__)(jax.random.key(0))
    if program not in (update, sliced_by_index):
        return functools.partial(jax.jit(program), held, x)
    compiled = jax.jit(program, donate_argnums=0)

    def step() -> jax.Array:
        nonlocal held
        value, held = compiled(held, x)
        return value

    return step


def _allocated(name: str, streamed: bool, options: argparse.Namespace) -> int | None:
    """Peak of allocated bytes in a process that runs only this."""
    sizes = [f"--{key}={getattr(options, key)}" for key in _SIZES]
    return allocated_alone("benchmarks.streaming", ["--run", *sizes, "--alone", name, _kind(streamed)])


def _check(name: str, found: Any, expected: Any) -> None:
    for leaf, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        leaf, wanted = (np.asarray(each, np.float32) for each in (leaf, wanted))
        error = np.linalg.norm(leaf - wanted) / max(np.linalg.norm(wanted), 1e-30)
        if not error <= 1e-2:
            raise SystemExit(f"{name}: the results are off by {error:.2g} of their norm")


def _timed_row(name: str, streamed: bool, seconds: dict[tuple[str, bool], list[float]]) -> dict[str, Any]:
    """Medians, and those of each round's ratio to resident layers.

    Of the time of the transfers, `hidden` is the share that did not make the step longer. Weights are read by
    the forward and by the backward pass; an update writes them too, taken to last as long as reading.
    """
    own, resident = seconds[name, streamed], seconds[_resident(name)]
    row = {
        "program": name,
        "kind": _kind(streamed),
        "median_seconds": statistics.median(own),
        "to_resident": round(statistics.median(np.divide(own, resident).tolist()), 3),
        "seconds": [round(value, 5) for value in own],
    }
    if streamed and name in ("gradient", "update") and jax.default_backend() != "cpu":
        transfers = (3 if name == "update" else 2) * statistics.median(seconds["read", True])
        row["hidden"] = round(1 - (row["median_seconds"] - statistics.median(resident)) / transfers, 3)
    return row


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="h200", choices=list(memory.TARGETS))
    parser.add_argument("--depths", type=int, nargs="+", default=[24, 48, 96, 192])
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--width", type=int, default=2_048)
    parser.add_argument("--inner", type=int, default=16_384)
    parser.add_argument("--configs", type=Path, nargs="+", default=[], help="size training steps instead")
    parser.add_argument("--context", type=int, nargs="+", default=[], help="tokens, for these steps")
    parser.add_argument("--run", action="store_true", help="run and time on the attached device instead")
    parser.add_argument("--layers", type=int, default=48, help="of the stack that is timed")
    parser.add_argument("--remat", default="offload", help="policy of the stack that is timed")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--alone", nargs=2, help="run one program, `streamed` or `resident`, and print its peak memory"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser


if __name__ == "__main__":
    main()
