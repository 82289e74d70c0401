"""Layers on the host: device memory against depth.

Compiled for a device that need not be attached, and not run.

    python -m benchmarks.streaming --target h200
    python -m benchmarks.streaming --target v5p
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax
from jax import lax

from stacked_remat import ScanCheckpointPolicy, Stacked, fused_update, memory, streaming

from .command import Rows, benchmark
from .record import memory_row
from .residual_mlp import Sizes, haliax

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


PROGRAMS: dict[str, Program] = {each.__name__: each for each in (loss, gradient, update, sliced_by_index)}
UPDATES = ("update", "sliced_by_index")


@benchmark("streaming_{target}")
def main(
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


if __name__ == "__main__":
    main()
