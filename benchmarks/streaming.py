"""Layers on the host: device memory against depth, or the time of a step.

    python -m benchmarks.streaming --target h200
    python -m benchmarks.streaming --target v5p
    python -m benchmarks.streaming time

Memory is of programs compiled for a device that need not be attached, and not run;
`time` is of the device at hand.
"""

import dataclasses
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
from .record import check_close, memory_row, timed_in_turn
from .residual_mlp import ArrayBlock, Sizes

OFFLOAD = ScanCheckpointPolicy(save_carries="offload")
DEEP = Sizes(layers=24, inner=16_384)
EXPERTS = (48, 128, 2048, 192)
"""Layers, experts, width and inner width of the mixture of experts: 4.5 GiB."""


class Experts(eqx.Module):
    """A mixture of experts that takes `[expert, token, width]`: tokens that a router
    has dealt out evenly.
    """

    weight: jax.Array

    def __init__(self, experts: int, width: int, inner: int, *, key: jax.Array):
        self.weight = (
            jax.random.normal(key, (experts, width, inner), jnp.bfloat16) * 0.02
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """The next carry."""
        hidden = jax.nn.silu(jnp.einsum("etd,edf->etf", x, self.weight))
        return x + jnp.einsum("etf,edf->etd", hidden, self.weight)


class Build(NamedTuple):
    """How to make a stack of so many layers, each from a key; `streamed` ones are on
    the host.
    """

    layers: int
    block: Callable[..., Any]
    remat: Any
    streamed: bool = False

    def __call__(self, key: jax.Array) -> Stacked:
        """Make it, one layer at a time: those on the host never exist on the device
        together.
        """

        def one(_: None, key: jax.Array) -> tuple[None, Any]:
            block = self.block(key=key)
            return None, jax.device_put(
                block, jax.memory.Space.Host
            ) if self.streamed else block

        _, blocks = lax.scan(one, None, jax.random.split(key, self.layers))
        stack = Stacked(blocks, hax.Axis("layers", self.layers), self.remat)
        return streaming.to_host(stack) if self.streamed else stack


def loss(stack: Any, x: jax.Array) -> jax.Array:
    """The mean square of what a stack returns."""
    return jnp.mean(jnp.square(stack.fold(x).astype(jnp.float32)))


_STEP = fused_update(loss, optax.sgd(1e-3))


def update(stack: Any, x: jax.Array) -> Any:
    """A step of SGD within the backward pass: the loss and the new weights."""
    result = _STEP(stack, _STEP.init(stack), x)
    return result.value, result.model


def _builds(sizes: Sizes) -> dict[str, Build]:
    block = functools.partial(ArrayBlock.init, sizes)
    return {
        "streamed": Build(sizes.layers, block, OFFLOAD, True),
        "nested, resident": Build(sizes.layers, block, "nested"),
    }


@benchmark("streaming_{target}")
def depth(
    target: str = "h200",
    depths: tuple[int, ...] = (24, 48, 96, 192),
    tokens: int = 65_536,
    width: int = 2_048,
    inner: int = 16_384,
) -> Rows:
    """A step of SGD by depth, and of 48 layers of 128 experts.

    The experts are 4.5 GiB, with few tokens, so that weights are all that counts.
    """
    for layers in depths:
        x = jax.ShapeDtypeStruct((tokens, width), jnp.bfloat16)
        row = {"block": "mlp", "layers": layers}
        for name, build in _builds(Sizes(layers, tokens, width, inner)).items():
            yield row | {"name": name} | _sized(build, x, target)
    layers, experts, width, inner = EXPERTS
    block = functools.partial(Experts, experts, width, inner)
    x = jax.ShapeDtypeStruct((experts, 4, width), jnp.bfloat16)
    for name in ("resident", "streamed"):
        row = {"block": "experts", "layers": layers, "name": name}
        yield row | _sized(Build(layers, block, True, name == "streamed"), x, target)


def _sized(build: Build, x: jax.ShapeDtypeStruct, target: str) -> dict[str, Any]:
    """What a step takes on the device."""
    stack = eqx.filter_eval_shape(build, jax.random.key(0))
    if build.streamed:
        stack = streaming.to_host(stack)  # a shape does not say where an array is
    return memory_row(memory.report(update, stack, x, target=target, donate=["stack"]))


@benchmark("streaming_time_{device}")
def time(sizes: Sizes = DEEP, rounds: int = 5) -> Rows:
    """The time of a step of SGD, each once per round, with layers on the host and on
    the device.

    Raises:
        ArithmeticError: the gradients of the first four layers differ.
    """
    x = jax.random.normal(
        jax.random.key(1), (sizes.tokens, sizes.width), jnp.dtype(sizes.dtype)
    )
    stacks: dict[str, Any] = {}

    def make(name: str, sizes: Sizes) -> Stacked:
        build = _builds(sizes)[name]
        return jax.jit(lambda key: build(key))(jax.random.key(0))

    def step(name: str, run: Callable[..., Any]) -> Any:
        value, stacks[name] = run(stacks.pop(name), x)
        return value

    few = dataclasses.replace(sizes, layers=4)
    streamed, resident = (
        jax.jit(jax.grad(loss))(make(name, few), x).stacked for name in _builds(few)
    )
    check_close("gradients", streamed, resident, 0.02)
    runs = {}
    for name in _builds(sizes):
        stacks[name] = make(name, sizes)
        runs[name] = functools.partial(step, name, jax.jit(update, donate_argnums=0))
    timed_in_turn(runs, 1)  # compiles
    for name, found in timed_in_turn(runs, rounds).items():
        yield {
            "name": name,
            "median_seconds": statistics.median(found),
            "seconds": found,
        }


main = one_of(depth=depth, time=time)


if __name__ == "__main__":
    main()
