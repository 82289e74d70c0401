"""Weights in 8 and 4 bits against NumPy, one entry at a time."""

from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from stacked_remat import Stacked
from stacked_remat.lora import (
    LoraConfig,
    QuantizedWeight,
    apply_lora,
    dequantize_linears,
    has_quantized,
    quantize_linears,
)

from ..random_arrays import normal

# As published with bitsandbytes and in the paper's appendix
NF4 = [-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343]
NF4 += [-0.091050036, 0.0, 0.0795803, 0.1609302, 0.2461123, 0.33791524]
NF4 += [0.44070983, 0.562617, 0.72295684, 1.0]
Layers, Out, Heads = hax.make_axes(layers=3, out=4, heads=2)


def values_of(form):
    return np.array(NF4) if form == "nf4" else np.arange(-127, 128) / 127


def rounded(weight, form):
    """The nearest value times the largest magnitude of its 64 entries."""
    rows = np.asarray(weight, np.float32).reshape(-1, weight.shape[-1])
    found = np.zeros_like(rows)
    for row, first in np.ndindex(len(rows), -(-rows.shape[1] // 64)):
        at = np.s_[row, 64 * first : 64 * (first + 1)]
        scale = np.abs(rows[at]).max()
        if scale > 0:
            distances = np.abs(rows[at][:, None] / scale - values_of(form))
            found[at] = values_of(form)[distances.argmin(axis=1)] * scale
    return found.reshape(weight.shape)


class Block(eqx.Module):
    first: hnn.Linear
    router: hnn.Linear

    @staticmethod
    def init(In, *, key):
        first, second = jax.random.split(key)
        return Block(
            hnn.Linear.init(In, Out, key=first), hnn.Linear.init(In, Out, key=second)
        )


@pytest.mark.parametrize("form", ["int8", "nf4"])
@pytest.mark.parametrize("size", [128, 70, 5, 1])
def test_weights_are_the_nearest_values_times_the_scale_of_a_block(form, size):
    In = Axis("in", size)
    weight = normal(0, Layers, Out, Heads, In)
    weight = weight * hax.named([1.0, 0.0, 0.01], Layers)  # a layer of zeros
    linear = hnn.Linear(weight.astype(jnp.bfloat16), None, (Heads, In), Out)
    quantized: Any = quantize_linears({"map": linear}, form)["map"].weight
    assert quantized.axes == weight.axes
    found = quantized.cast_to(jnp.float32)
    assert found.axes == weight.axes
    # Of two values that are as near, either is right.
    given = np.asarray(linear.weight.array, np.float32)
    error = np.abs(found.array - given)
    least = np.abs(rounded(given, form) - given)
    np.testing.assert_allclose(error, least, atol=1e-6)
    np.testing.assert_allclose(rounded(found.array, form), found.array, rtol=1e-5)
    numbers = 3 * 4 * 2 * (size if form == "int8" else -(-size // 2))
    assert quantized.codes.array.nbytes == numbers
    assert quantized.scales.array.size == 3 * 4 * 2 * -(-size // 64)


def test_a_stack_with_adapters_is_quantized_by_path_and_restored():
    In = Axis("in", 6)

    keys = jax.random.split(jax.random.key(0), Layers.size)
    model = Stacked.init(Layers, Block.init)(In, key=keys)
    quantized = quantize_linears(
        model, "nf4", where=lambda path: not path.endswith("router")
    )
    adapted = apply_lora(quantized, LoraConfig(2, 2.0, ("*",)), key=jax.random.key(1))
    assert has_quantized(adapted) and not has_quantized(model)
    again = quantize_linears(adapted, "nf4", where=lambda path: "first" in path)
    assert jax.tree.structure(again) == jax.tree.structure(adapted)
    restored: Any = dequantize_linears(adapted, jnp.float32)
    assert not has_quantized(restored)
    first, router = (restored.stacked.first.wrapped, restored.stacked.router.wrapped)
    np.testing.assert_array_equal(
        router.weight.array, model.stacked.router.weight.array
    )
    expected = rounded(model.stacked.first.weight.array, "nf4")
    np.testing.assert_allclose(first.weight.array, expected, rtol=1e-6)

    with pytest.raises(ValueError, match="form must be 'int8' or 'nf4'; got 'fp4'"):
        quantize_linears(model, "fp4")


def test_donated_weights_are_freed():
    linear = hnn.Linear.init(Axis("in", 6), Out, key=jax.random.key(0))
    quantized = quantize_linears(linear, "int8", donate=True)
    assert isinstance(quantized.weight, QuantizedWeight)
    assert linear.weight.array.is_deleted()
