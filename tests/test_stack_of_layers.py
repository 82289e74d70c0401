"""`Stacked.of`: a list of layers becomes a stack, or an error that names what
differs.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from stacked_remat import BlockSeq, Stacked

Embed = Axis("embed", 3)


class Inner(eqx.Module):
    named: hax.NamedArray
    flag: bool = False


class Layer(eqx.Module):
    """Arrays, numbers, functions, nodes and static fields."""

    weight: jax.Array
    inner: list[Inner]
    rate: float | int | Any = 0.5
    activation: Callable = jnp.tanh
    bias: jax.Array | None = None
    width: int = eqx.field(static=True, default=3)

    def __call__(self, x):
        y = self.activation(x @ self.weight) * self.inner[0].named.array
        return (x + (1 - self.rate) * y).astype(x.dtype)


def layer(i: int, **fields: Any) -> Layer:
    keys = jax.random.split(jax.random.key(i))
    dtype = fields.pop("dtype", jnp.float32)
    inner = Inner(hax.random.normal(keys[1], Embed, dtype), fields.pop("flag", False))
    weight = jax.random.normal(keys[0], (3, 3), dtype)
    return Layer(weight, [inner, *fields.pop("more", [])], **fields)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "rates", [(0.0, 0.1, 0.3), (0, 1, 2), (0, 0.5, 1), (0.5, 0.5, 0.5)]
)
def test_a_stack_is_its_layers(rates: tuple[Any, ...], dtype: Any):
    layers = [layer(i, rate=rate, dtype=dtype) for i, rate in enumerate(rates)]
    stack = Stacked.of(layers, "layers", remat="nested")
    assert Axis("layers", 3) == stack.Layers
    assert stack.remat.nested is True
    # A number that all layers have stays one, for Python control flow
    are_equal = len({*zip(map(type, rates), rates, strict=True)}) == 1
    assert isinstance(stack.stacked.rate, float if are_equal else jax.Array)
    x = jnp.ones(3, dtype)
    expected = BlockSeq(layers, stack.Layers).fold(x)
    np.testing.assert_allclose(
        stack.fold(x).astype(np.float32), expected.astype(np.float32), rtol=2e-2
    )
    again = Stacked.of(stack.unstacked(), stack.Layers, remat="nested")
    assert jax.tree.structure(again) == jax.tree.structure(stack)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(stack), strict=True):
        assert eqx.tree_equal(a, b, typematch=True)


@pytest.mark.parametrize(
    "other, message",
    [
        (layer(1, rate=True), r"layers\[0\].rate is 0.5, and layers\[1\].rate is True"),
        (
            layer(1, activation=jnp.sin),
            r"\.activation is .*tanh.*, and .*\.activation is .*sin",
        ),
        (layer(1, bias=jnp.ones(2)), r"\.bias is None, and .*\.bias is float32\[2\]"),
        (layer(1, width=4), r"\.width is 3, and .*\.width is 4"),
        (
            layer(1, more=[layer(1).inner[0]]),
            r"layers\[0\].inner is .*, and layers\[1\].inner is",
        ),
        (
            eqx.tree_at(
                lambda tree: tree.inner[0].named, layer(1), hax.ones(Axis("other", 3))
            ),
            r"\.inner\[0\].named is .*embed=3.*, and .*\.named is .*other=3",
        ),
        (layer(1).inner[0], r"layers\[0\] is .*Layer.*, and layers\[1\] is .*Inner"),
    ],
)
def test_layers_that_differ(other: Any, message: str):
    with pytest.raises(
        ValueError, match=f"Stacked.of: .*{message}.*BlockSeq.*StackedPattern"
    ):
        Stacked.of([layer(0), other], "layers")


def test_a_module_that_is_stacked_already():
    keys = jax.random.split(jax.random.key(0), 3)

    def build(key):
        return Layer(
            jax.random.normal(key, (3, 3)), [Inner(hax.random.normal(key, Embed))]
        )

    stack, x = Stacked.of(eqx.filter_vmap(build)(keys), 3), jnp.ones(3)
    assert Axis("layers", 3) == stack.Layers
    assert stack.stacked.inner[0].named.axes == (stack.Layers, Embed)
    np.testing.assert_allclose(
        stack.fold(x), Stacked.of([build(key) for key in keys]).fold(x), rtol=1e-6
    )
