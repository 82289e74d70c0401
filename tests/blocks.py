"""Blocks that the tests stack, quick compilation, and which policies are tested with `JAX_REMAT3=1` too."""

import functools
from collections.abc import Collection, Mapping
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import pytest

from stacked_remat import ScanCheckpointPolicy, checkpoint_name

# For tests of values, most of whose time is compilation.
quick_jit = functools.partial(
    jax.jit,
    compiler_options={"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True},
)


def with_remat3(policies: Mapping[str, Any], quick: Collection[str] | None = None) -> list[Any]:
    """Policies for `parametrize`; those that save or offload values by name are marked `remat3`.

    Those that are not `quick` are marked `deep`.
    """

    def marks(spec: Any) -> tuple:
        policy = spec if isinstance(spec, ScanCheckpointPolicy) else ScanCheckpointPolicy()
        names = policy.save_block_internals not in (False, True) or policy.offload_block_internals
        offloads = spec == "offload" or policy.save_carries == "offload"
        within_first = isinstance(policy.first_policy, ScanCheckpointPolicy)
        return (pytest.mark.remat3,) if names or offloads or within_first else ()

    def depth(name: str) -> tuple:
        return () if quick is None or name in quick else (pytest.mark.deep,)

    return [
        pytest.param(spec, marks=(*marks(spec), *depth(name)), id=name) for name, spec in policies.items()
    ]


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


def deep_cases(cases):
    """Cases of `pytest.mark.parametrize` for the longer run."""
    return [pytest.param(*case, marks=pytest.mark.deep) for case in cases]
