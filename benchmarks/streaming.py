"""Layers on the host: device memory against depth, and time against layers on the device.

Compiled for a device that need not be attached, and not run:

    python -m benchmarks.streaming --target h200
    python -m benchmarks.streaming --target v5p

With `time`, on the attached device: checks that streamed layers give the gradients and the updates of
resident ones, then times both in turns:

    python -m benchmarks.streaming time --layers 48 --tokens 65536 --inner 16384
    JAX_PLATFORMS=cpu python -m benchmarks.streaming time --layers 48 --tokens 512 --width 128 --inner 512

Writes `results/streaming_<target>.json` or `results/streaming_time_<platform>.json`.
"""

import functools
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax
from jax import lax

from stacked_remat import ScanCheckpointPolicy, Stacked, fused_update, memory, streaming

from .command import Rows, benchmark, one_of
from .record import (
    allocated_alone,
    check_close,
    median_ratio,
    memory_row,
    timed_in_turn,
)
from .residual_mlp import Sizes, haliax

TIMED = Sizes(inner=16_384)
OFFLOAD = ScanCheckpointPolicy(save_carries="offload")
EXPERTS = (48, 128, 2048, 192)
"""Layers, experts, width and inner width of the mixture of experts: 4.5 GiB."""


class Mlp(eqx.Module):
    """`x + silu(x @ up) @ down`."""

    up: jax.Array
    down: jax.Array

    def __init__(self, width: int, inner: int, *, key: jax.Array):
        up, down = jax.random.split(key)
        self.up, self.down = _normal(up, (width, inner)), _normal(down, (inner, width))

    def __call__(self, x: jax.Array) -> jax.Array:
        """The next carry."""
        return x + jax.nn.silu(x @ self.up) @ self.down


class Experts(eqx.Module):
    """A mixture of experts that takes `[expert, token, width]`: tokens that a router has dealt out evenly."""

    weight: jax.Array

    def __init__(self, experts: int, width: int, inner: int, *, key: jax.Array):
        self.weight = _normal(key, (experts, width, inner))

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


PROGRAMS: dict[str, Program] = {
    each.__name__: each for each in (loss, gradient, update, sliced_by_index, read)
}
UPDATES = ("update", "sliced_by_index")


@benchmark("streaming_{target}")
def of_memory(
    target: str = "h200",
    depths: tuple[int, ...] = (24, 48, 96, 192),
    tokens: int = 65_536,
    width: int = 2_048,
    inner: int = 16_384,
) -> Rows:
    """A step of SGD by depth, beside gradients in Haliax, and 48 layers of 128 experts.

    The experts are 4.5 GiB, with few tokens, so that weights are all that counts.
    """
    for layers in depths:
        block = functools.partial(Mlp, width, inner)
        x = jax.ShapeDtypeStruct((tokens, width), jnp.bfloat16)
        row = {"block": "mlp", "layers": layers}
        for name, build in {
            "streamed": Build(layers, block, OFFLOAD, True),
            "nested, resident": Build(layers, block, "nested"),
        }.items():
            yield row | {"program": "update", "name": name} | _sized("update", build, x, target)
        for remat in (True, "nested"):
            fn, args = haliax(remat)(Sizes(layers, tokens, width, inner))
            try:
                found = memory_row(memory.report(fn, *args, target=target))
            except memory.DoesNotFit as error:
                print(f"Haliax {remat}, {layers} layers: {error}", flush=True)
                continue
            yield row | {"program": "gradient", "name": f"Haliax {remat}, resident"} | found
    layers, experts, width, inner = EXPERTS
    block = functools.partial(Experts, experts, width, inner)
    x = jax.ShapeDtypeStruct((experts, 4, width), jnp.bfloat16)
    programs = [("resident", program) for program in ("loss", "gradient", "update")]
    programs += [("scan over indices, resident", "sliced_by_index")]
    programs += [("streamed", program) for program in ("loss", "gradient", "update")]
    for name, program in programs:
        row = {"block": "experts", "layers": layers, "program": program, "name": name}
        yield row | _sized(program, Build(layers, block, True, name == "streamed"), x, target)


def _sized(program: str, build: Build, x: jax.ShapeDtypeStruct, target: str) -> dict[str, Any]:
    """What a program takes on the device."""
    arguments: Any = eqx.filter_eval_shape(build, jax.random.key(0)), x
    if build.streamed:
        # A shape does not say where an array is.
        arguments = memory.arguments_on_host(lambda stack, x: (streaming.to_host(stack), x), arguments)
    donated = ["stack"] if program in UPDATES else []
    return memory_row(memory.report(PROGRAMS[program], *arguments, target=target, donate=donated))


@benchmark("streaming_time_{platform}")
def of_time(sizes: Sizes = TIMED, remat: str = "offload", rounds: int = 9) -> Rows:
    """The times of programs on layers on the host and on the device, after their results are compared.

    Of the time of the transfers, `hidden` is the share that did not make the step longer. Weights are read by
    the forward and by the backward pass; an update writes them too, taken to last as long as reading.

    Raises:
        ArithmeticError: results differ from those of layers on the device.
    """
    names = ("gradient", "update", "sliced_by_index", "read")
    keys = [(name, kind) for name in names for kind in ("resident", "streamed")]
    keys.remove(("sliced_by_index", "streamed"))
    # First, before this process allocates memory on the same device.
    peaks = {key: allocated_alone(run_alone, *key, sizes, remat) for key in keys}
    calls = {key: _call(*key, sizes, remat) for key in keys}
    # The second step shows what the first one updated.
    results = {key: (call(), call()) for key, call in calls.items()}
    for key, found in results.items():
        check_close(", ".join(key), found, results[_resident(key)], 1e-2)
    seconds = timed_in_turn(calls, rounds)
    medians = {key: statistics.median(own) for key, own in seconds.items()}
    for (name, kind), own in seconds.items():
        resident = _resident((name, kind))
        row = {
            "program": name,
            "kind": kind,
            "median_seconds": medians[name, kind],
            "to_resident": round(median_ratio(own, seconds[resident]), 3),
            "seconds": [round(value, 5) for value in own],
        }
        if kind == "streamed" and name != "read" and jax.default_backend() != "cpu":
            transfers = (3 if name == "update" else 2) * medians["read", "streamed"]
            row["hidden"] = round(1 - (medians[name, kind] - medians[resident]) / transfers, 3)
        yield row | {"allocated_bytes": peaks[name, kind]}


main = one_of(memory=of_memory, time=of_time)


def _resident(key: tuple[str, str]) -> tuple[str, str]:
    return ("update" if key[0] == "sliced_by_index" else key[0]), "resident"


def run_alone(program: str, kind: str, sizes: Sizes, remat: str) -> Any:
    """The result of a program."""
    return _call(program, kind, sizes, remat)()


def _call(program: str, kind: str, sizes: Sizes, remat: str) -> Callable[[], Any]:
    """A call of a compiled program, on a stack of its own, which steps of an optimizer update in place."""
    x = jax.random.normal(jax.random.key(1), (sizes.tokens, sizes.width), jnp.bfloat16)
    block = functools.partial(Mlp, sizes.width, sizes.inner)
    held = jax.jit(Build(sizes.layers, block, remat, kind == "streamed").__call__)(jax.random.key(0))
    if program not in UPDATES:
        return functools.partial(jax.jit(PROGRAMS[program]), held, x)
    compiled = jax.jit(PROGRAMS[program], donate_argnums=0)

    def step() -> jax.Array:
        nonlocal held
        value, held = compiled(held, x)
        return value

    return step


if __name__ == "__main__":
    main()
