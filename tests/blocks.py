"""Blocks that the tests stack: one of named arrays, one of plain arrays, with names for their internals."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp

from stacked_remat import checkpoint_name

Hidden = hax.Axis("hidden", 3)


class NamedBlock(eqx.Module):
    weight: hax.NamedArray
    bias: hax.NamedArray

    @staticmethod
    def init(Hidden: hax.Axis, *, key: jax.Array) -> "NamedBlock":
        weight = hax.random.normal(key, (Hidden, Hidden.alias("out"))) * 0.5
        return NamedBlock(weight, hax.zeros(Hidden))

    def __call__(self, x: hax.NamedArray, scale: float | jax.Array = 1.0) -> hax.NamedArray:
        h = checkpoint_name(
            hax.dot(x, self.weight, axis="hidden").rename({"out": "hidden"}) + self.bias, "hidden"
        )
        return x + checkpoint_name(hax.tanh(h), "activation") * scale


class PlainBlock(eqx.Module):
    weight: jax.Array
    bias: jax.Array
    size: int = eqx.field(static=True)

    def __init__(self, size: int, *, key: jax.Array):
        self.weight = jax.random.normal(key, (size, size)) * 0.5
        self.bias = jnp.zeros(size)
        self.size = size

    def __call__(self, x: jax.Array, scale: float | jax.Array = 1.0) -> jax.Array:
        h = checkpoint_name(x @ self.weight + self.bias, "hidden")
        return x + checkpoint_name(jnp.tanh(h), "activation") * scale


class PlainScanBlock(PlainBlock):
    def __call__(self, x: jax.Array, scale: float | jax.Array = 1.0) -> tuple[jax.Array, jax.Array]:
        y = super().__call__(x, scale)
        return y, jnp.sum(y**2)
