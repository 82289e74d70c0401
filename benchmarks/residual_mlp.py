"""A stack of `x + silu(x @ up) @ down` in every library that can recompute it.

Each variant is the gradient of the same function with respect to the same weights and
input; they differ only in what a library keeps and copies.
"""

import dataclasses
import functools
import importlib.util
import itertools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from flax import linen as nn, nnx

from stacked_remat import ScanCheckpointPolicy, ScanCheckpointSpec, Stacked, tiled
from stacked_remat.nnx import remat_scan


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Layers, tokens, width of the carry, width inside the block, and the type of all
    of it.
    """

    layers: int = 48
    tokens: int = 65_536
    width: int = 2_048
    inner: int = 2_048
    dtype: str = "bfloat16"

    @property
    def axes(self) -> tuple[hax.Axis, hax.Axis, hax.Axis, hax.Axis]:
        """Layers, tokens, width and inner as named axes."""
        names = (
            ("layers", self.layers),
            ("tokens", self.tokens),
            ("width", self.width),
            ("inner", self.inner),
        )
        layers, tokens, width, inner = (hax.Axis(name, size) for name, size in names)
        return layers, tokens, width, inner


DEEP = Sizes()

Program = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function to compile, and the shapes of its arguments, whose weights are named `up`
and `down`.
"""
Build = Callable[[Sizes], Program]


class Block(eqx.Module):
    """The block with named axes, for this library and for Haliax."""

    up: hax.NamedArray
    down: hax.NamedArray
    tiles: int = eqx.field(static=True, default=1)

    @staticmethod
    def init(sizes: Sizes, *, key: jax.Array, tiles: int = 1) -> "Block":
        """One layer's weights; `tiles` of its tokens have internals one after the
        other.
        """
        _, _, width, inner = sizes.axes
        up, down = jax.random.split(key)
        return Block(
            hax.random.normal(up, (width, inner)).astype(sizes.dtype) * 0.02,
            hax.random.normal(down, (inner, width)).astype(sizes.dtype) * 0.02,
            tiles,
        )

    def __call__(self, x: hax.NamedArray) -> hax.NamedArray:
        """The next carry."""
        mlp = (
            Block._mlp
            if self.tiles == 1
            else tiled(Block._mlp, "tokens", tiles=self.tiles)
        )
        return x + mlp(self, x)

    def _mlp(self, x: hax.NamedArray) -> hax.NamedArray:
        hidden = hax.nn.silu(hax.dot(x, self.up, axis="width"))
        return hax.dot(hidden, self.down, axis="inner")


def named(
    stacked: Callable[[hax.Axis], Any], *, frozen: bool = False, **options: Any
) -> Build:
    """A stack of `Block`; `stacked(axis)` makes it, and `frozen` weights have no
    gradient.
    """

    def build(sizes: Sizes) -> Program:
        layers, tokens, width, _ = sizes.axes
        keys = jax.random.split(jax.random.key(0), sizes.layers)
        blocks = eqx.filter_eval_shape(
            lambda keys: stacked(layers)(sizes, key=keys, **options), keys
        )
        x = eqx.filter_eval_shape(lambda: hax.zeros((tokens, width), dtype=sizes.dtype))

        def loss(blocks: Any, x: hax.NamedArray) -> jax.Array:
            return jnp.sum(blocks.fold(x).array.astype(jnp.float32))

        return jax.grad(loss, 1 if frozen else (0, 1)), (blocks, x)

    return build


def ours(remat: ScanCheckpointSpec, **options: Any) -> Build:
    """The stack with this library's `Stacked`."""
    return named(lambda axis: Stacked.init(axis, Block, remat=remat), **options)


def haliax(remat: Any) -> Build:
    """The stack with Haliax's own `Stacked`."""
    return named(
        lambda axis: hax.nn.Stacked.init(axis, Block, gradient_checkpointing=remat)
    )


class ArrayBlock(eqx.Module):
    """The block with plain arrays."""

    up: jax.Array
    down: jax.Array

    @staticmethod
    def init(sizes: Sizes, *, key: jax.Array) -> "ArrayBlock":
        """One layer's weights."""
        block = Block.init(sizes, key=key)
        return ArrayBlock(block.up.array, block.down.array)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The next carry."""
        return x + jax.nn.silu(x @ self.up) @ self.down


def levanter(remat: Any) -> Build:
    """Levanter's `ArrayStacked`, where `marin-levanter` is installed."""

    def build(sizes: Sizes) -> Program:
        from levanter.layers.stacked import (  # pyright: ignore[reportMissingImports]
            ArrayStacked,
        )

        init = ArrayStacked.init(sizes.layers, ArrayBlock, gradient_checkpointing=remat)
        keys = jax.random.split(jax.random.key(0), sizes.layers)
        blocks = eqx.filter_eval_shape(lambda keys: init(sizes, key=keys), keys)

        def loss(blocks: Any, x: jax.Array) -> jax.Array:
            return jnp.sum(blocks.fold(x).astype(jnp.float32))

        return jax.grad(loss, (0, 1)), (blocks, _input(sizes))

    return build


def plain(remat: bool) -> Build:
    """`lax.scan`, with `jax.checkpoint` around the layer or without."""

    def layer(x: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        return x + jax.nn.silu(x @ weights["up"]) @ weights["down"], None

    def loss(x: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
        x, _ = jax.lax.scan(
            jax.checkpoint(layer, prevent_cse=False) if remat else layer, x, weights
        )
        return jnp.sum(x.astype(jnp.float32))

    def build(sizes: Sizes) -> Program:
        up = jax.ShapeDtypeStruct((sizes.layers, sizes.width, sizes.inner), sizes.dtype)
        down = jax.ShapeDtypeStruct(
            (sizes.layers, sizes.inner, sizes.width), sizes.dtype
        )
        return jax.grad(loss, (0, 1)), (_input(sizes), {"up": up, "down": down})

    return build


def linen(levels: int) -> Build:
    """Flax Linen's `remat_scan`: scans inside scans, one for each level."""

    def build(sizes: Sizes) -> Program:
        class LinenBlock(nn.Module):
            @nn.compact
            def __call__(self, x: jax.Array) -> jax.Array:
                init = nn.initializers.normal(0.02)
                up = self.param("up", init, (sizes.width, sizes.inner), sizes.dtype)
                down = self.param("down", init, (sizes.inner, sizes.width), sizes.dtype)
                return x + jax.nn.silu(x @ up) @ down

        model: Any = nn.remat_scan(LinenBlock, lengths=_lengths(sizes.layers, levels))()
        parameters = jax.eval_shape(model.init, jax.random.key(0), _input(sizes))

        def loss(parameters: Any, x: jax.Array) -> jax.Array:
            return jnp.sum(model.apply(parameters, x).astype(jnp.float32))

        return jax.grad(loss, (0, 1)), (parameters, _input(sizes))

    return build


def of_nnx(scan: Callable[..., Any]) -> Build:
    """Flax NNX, where `scan` is `nnx.scan` or what has its arguments."""

    def build(sizes: Sizes) -> Program:
        class NnxBlock(nnx.Module):
            def __init__(self, rngs: nnx.Rngs):
                init = nnx.initializers.normal(0.02)
                self.up = nnx.Param(
                    init(rngs.params(), (sizes.width, sizes.inner), sizes.dtype)
                )
                self.down = nnx.Param(
                    init(rngs.params(), (sizes.inner, sizes.width), sizes.dtype)
                )

            def __call__(self, x: jax.Array) -> jax.Array:
                return x + jax.nn.silu(x @ self.up[...]) @ self.down[...]

        @nnx.split_rngs(splits=sizes.layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def create(rngs: nnx.Rngs) -> NnxBlock:
            return NnxBlock(rngs)

        graph, weights = nnx.split(nnx.eval_shape(lambda: create(nnx.Rngs(0))))
        forward = scan(
            lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
        )

        def loss(weights: Any, x: jax.Array) -> jax.Array:
            return jnp.sum(forward(x, nnx.merge(graph, weights)).astype(jnp.float32))

        return jax.grad(loss, (0, 1)), (weights, _input(sizes))

    return build


def _input(sizes: Sizes) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((sizes.tokens, sizes.width), sizes.dtype)


def _lengths(layers: int, levels: int) -> tuple[int, ...]:
    """The closest factors of a number, the largest outermost, which costs less
    memory.
    """
    if levels == 1:
        return (layers,)
    inner = max(
        n for n in range(1, layers + 1) if layers % n == 0 and n**levels <= layers
    )
    return *_lengths(layers // inner, levels - 1), inner


def variants() -> dict[str, Build]:
    """The stack in every library with every setting, other libraries first."""
    found = {"lax.scan": plain(False), "lax.scan + jax.checkpoint": plain(True)}
    found |= {
        f"haliax {remat}": haliax(remat) for remat in (False, True, "nested", "offload")
    }
    if importlib.util.find_spec("levanter"):
        found |= {
            f"levanter ArrayStacked {remat}": levanter(remat)
            for remat in (True, "nested")
        }
    found |= {
        f"flax linen remat_scan, {levels} levels": linen(levels) for levels in (2, 3)
    }
    found |= {
        "flax nnx.scan": of_nnx(nnx.scan),
        "flax nnx.scan + nnx.remat": of_nnx(
            lambda f, **axes: nnx.scan(nnx.remat(f), **axes)
        ),
        "flax nnx.remat of nnx.scan": of_nnx(
            lambda f, **axes: nnx.remat(nnx.scan(f, **axes))
        ),
        "stacked_remat.nnx nested": of_nnx(remat_scan),
        "stacked_remat.nnx offload": of_nnx(
            functools.partial(remat_scan, remat="offload")
        ),
    }
    policies = {
        "False": False,
        "True": True,
        "nested": "nested",
        "nested=7": ScanCheckpointPolicy(nested=7),
        "max_carries=6": ScanCheckpointPolicy(max_carries=6),
        "offload": "offload",
        "nested + offload": ScanCheckpointPolicy(nested=True, save_carries="offload"),
    }
    found |= {f"stacked_remat {name}": ours(remat) for name, remat in policies.items()}
    for tiles, remat in itertools.product((4, 16), (True, "nested", "offload")):
        found[f"stacked_remat {remat}, {tiles} tiles"] = ours(remat, tiles=tiles)
    return found | {"stacked_remat nested, frozen weights": ours("nested", frozen=True)}


def hessian_products() -> dict[str, Build]:
    """The Hessian of some of them times a vector: `jax.jvp` of the gradient."""
    names = (
        "lax.scan",
        "lax.scan + jax.checkpoint",
        "stacked_remat True",
        "stacked_remat nested",
    )
    every = variants()
    return {
        f"{name}, Hessian product": functools.partial(_hessian_product, every[name])
        for name in names
    }


def _hessian_product(build: Build, sizes: Sizes) -> Program:
    gradient, args = build(sizes)
    return lambda args, vector: jax.jvp(gradient, args, vector)[1], (args, args)
