"""A model for the tests of adapters: linears over one axis and several, with a bias,
and in experts.
"""

import functools
from typing import TypeVar

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np

from stacked_remat import Stacked
from stacked_remat.lora import LoraConfig, apply_lora, lora_filter

Layers, Experts = hax.make_axes(layers=5, experts=3)
Embed, Heads, Dim, Hidden, Pos = hax.make_axes(
    embed=6, heads=2, dim=4, hidden=8, position=7
)

T = TypeVar("T")


class Expert(eqx.Module):
    up: hnn.Linear
    down: hnn.Linear

    @staticmethod
    def init(Embed=Embed, Hidden=Hidden, *, key):
        up, down = jax.random.split(key)
        return Expert(
            hnn.Linear.init(Embed, Hidden, key=up, use_bias=False),
            hnn.Linear.init(Hidden, Embed, key=down, use_bias=False),
        )

    def __call__(self, x):
        return self.down(hnn.silu(self.up(x)))


class Block(eqx.Module):
    """A residual map over two axes and back, then the mean of the experts."""

    q_proj: hnn.Linear
    o_proj: hnn.Linear
    experts: Stacked

    @staticmethod
    def init(*, key):
        q, o, e = jax.random.split(key, 3)
        experts = Stacked.init(Experts, Expert, remat=False)
        return Block(
            hnn.Linear.init(Embed, (Heads, Dim), key=q),
            hnn.Linear.init(
                (Heads, Dim), Embed, key=o, use_bias=False, out_first=False
            ),
            experts(key=jax.random.split(e, Experts.size)),
        )

    def __call__(self, x):
        x = x + self.o_proj(hax.tanh(self.q_proj(x)))
        return x + hax.mean(self.experts.vmap(x), axis=Experts)


class Model(eqx.Module):
    layers: Stacked
    head: hnn.Linear

    def __call__(self, x, remat=None):
        return self.head(self.layers.fold(x, remat=remat))


ALL = LoraConfig(rank=2, alpha=3.0, targets=("layers.*",))


def new_model() -> Model:
    layers_key, head_key = jax.random.split(jax.random.key(0))
    layers = Stacked.init(Layers, Block)(key=jax.random.split(layers_key, Layers.size))
    return Model(layers, hnn.Linear.init(Embed, Hidden, key=head_key))


@functools.cache
def model() -> Model:
    return filled(eqx.filter_eval_shape(new_model), 0)


@functools.cache
def adapted() -> Model:
    return with_trained_adapters(model(), ALL)


def with_trained_adapters(of: T, config: LoraConfig) -> T:
    """The tree with adapters whose B is not zero, as after training."""
    shapes = eqx.filter_eval_shape(
        lambda: apply_lora(of, config, key=jax.random.key(1))
    )
    base, _ = eqx.partition(of, eqx.is_array)
    places = iter(jax.tree.leaves(base))
    marks = lora_filter(shapes)
    own = jax.tree.map(
        lambda leaf, mark: (
            leaf if mark or not isinstance(leaf, jax.ShapeDtypeStruct) else next(places)
        ),
        shapes,
        marks,
    )
    return filled(own, 1)


def filled(shapes: T, seed: int) -> T:
    """Normal numbers in place of shapes, from NumPy, because compiling a generator for
    each shape is slow.
    """
    rng = np.random.default_rng(seed)

    def fill(leaf):
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        return jnp.asarray(0.3 * rng.normal(size=leaf.shape), leaf.dtype)

    return jax.tree.map(fill, shapes)


def inputs():
    return hax.named(
        jnp.asarray(np.random.default_rng(3).normal(size=(7, 6)), jnp.float32),
        (Pos, Embed),
    )
