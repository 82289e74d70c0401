"""Blocks that the tests stack, policies, quick compilation, and comparison of trees."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stacked_remat import ScanCheckpointPolicy, checkpoint_name

# For tests of values, most of whose time is compilation.
quick_jit = functools.partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    },
)

_NAMES = ["hidden"]
POLICIES = {
    "False": False,
    "True": True,
    "recompute": "recompute",
    "offload": "offload",
    "nested": "nested",
    "nested, offload": ScanCheckpointPolicy(nested=True, save_carries="offload"),
    "segments": ScanCheckpointPolicy(nested=3),
    "max_carries": ScanCheckpointPolicy(max_carries=2),
    "names": ScanCheckpointPolicy(save_block_internals=_NAMES),
    "names offloaded": ScanCheckpointPolicy(
        save_carries="offload", offload_block_internals=_NAMES
    ),
    "nested, names": ScanCheckpointPolicy(nested=True, save_block_internals=_NAMES),
    "nested, internals": ScanCheckpointPolicy(nested=2, save_block_internals=True),
    "nested, offload, names": ScanCheckpointPolicy(
        nested=True, save_carries="offload", save_block_internals=_NAMES
    ),
    "first layers": ScanCheckpointPolicy(nested=True, first_layers=2),
    "first layers, offload": ScanCheckpointPolicy(
        nested=True, first_layers=1, save_carries="offload"
    ),
}


def policies(*names: str) -> dict[str, Any]:
    return {name: POLICIES[name] for name in names}


def assert_close(
    found: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-6, name: Any = ""
) -> None:
    """Trees of the same types and close numbers."""
    for one, other in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        assert one.dtype == other.dtype, name
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol, err_msg=str(name))


def assert_equal(found: Any, expected: Any) -> None:
    """Trees of equal arrays, whatever holds them."""
    for one, other in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def assert_close_to_scale(
    found: Any,
    expected: Any,
    tolerance: float = 2e-5,
    name: Any = "",
    least: float = 1.0,
) -> None:
    """Trees of the same types, and of numbers close beside the largest of their array,
    or `least`.
    """
    for one, other in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        assert one.shape == other.shape, name
        assert_close(
            one,
            other,
            0,
            tolerance * max(least, float(np.abs(other).max(initial=0))),
            name,
        )


def is_by_name(spec: Any) -> bool:
    """Whether a policy saves or offloads values by name, as it offloads carries."""
    policy = spec if isinstance(spec, ScanCheckpointPolicy) else ScanCheckpointPolicy()
    names = (
        policy.save_block_internals not in (False, True)
        or policy.offload_block_internals
    )
    offloads = spec == "offload" or policy.save_carries == "offload"
    return bool(names or offloads)


def with_remat3(policies: Mapping[str, Any]) -> list[Any]:
    """Policies for `parametrize`; those that save or offload values by name are marked
    `remat3`.
    """
    return [
        pytest.param(spec, marks=[pytest.mark.remat3] * is_by_name(spec), id=name)
        for name, spec in policies.items()
    ]


def looped(layers: Iterable[Callable], x: Any, *args: Any) -> Any:
    """The layers one after the other."""
    return functools.reduce(lambda x, layer: layer(x, *args), layers, x)


Hidden = hax.Axis("hidden", 3)


def derivatives(value: Callable, *args: Any) -> tuple:
    """The tangent, the Hessian-vector product both ways, and its derivative along the
    vector.
    """
    direction = jax.tree.map(lambda leaf: jnp.cos(leaf * 3), args)
    gradient = jax.grad(value, tuple(range(len(args))))

    def along(found: Any) -> Any:
        pairs = zip(*map(jax.tree.leaves, (found, direction)), strict=True)
        return sum(jnp.vdot(a, b) for a, b in pairs)

    return (
        jax.jvp(value, args, direction),
        jax.linearize(value, *args)[1](*direction),
        jax.jvp(gradient, args, direction)[1],
        jax.grad(lambda args: along(gradient(*args)))(args),
        jax.grad(lambda vector: along(jax.jvp(gradient, args, vector)[1]))(direction),
    )


class Tanh(eqx.Module):
    weight: jax.Array

    def __call__(self, x: jax.Array, fn: Callable = jnp.tanh) -> jax.Array:
        return x + fn(x @ self.weight)


class NamedBlock(eqx.Module):
    weight: hax.NamedArray
    bias: hax.NamedArray

    @staticmethod
    def init(Hidden: hax.Axis, *, key: jax.Array) -> "NamedBlock":
        weight = hax.random.normal(key, (Hidden, Hidden.alias("out"))) * 0.5
        return NamedBlock(weight, hax.zeros(Hidden))

    def __call__(
        self, x: hax.NamedArray, scale: float | jax.Array = 1.0
    ) -> hax.NamedArray:
        h = checkpoint_name(
            hax.dot(x, self.weight, axis="hidden").rename({"out": "hidden"})
            + self.bias,
            "hidden",
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
    def __call__(
        self, x: jax.Array, scale: float | jax.Array = 1.0
    ) -> tuple[jax.Array, jax.Array]:
        y = super().__call__(x, scale)
        return y, jnp.sum(y**2)


def deep_cases(cases):
    """Cases of `pytest.mark.parametrize` for the longer run."""
    return [pytest.param(*case, marks=pytest.mark.deep) for case in cases]
