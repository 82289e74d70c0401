"""What Haliax does layer by layer with its own `Stacked`, it does with this one."""

from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax.quantization import QuantizationConfig, quantize_linear_layers
from haliax.state_dict import (
    flatten_modules_for_export,
    from_torch_compatible_state_dict,
    to_torch_compatible_state_dict,
    unflatten_modules_from_export,
)
from haliax.tree_util import scan_aware_tree_map

from stacked_remat import BlockSeq, Stacked, StackedPattern

from .blocks import assert_close

Groups, Layers, Embed, Out = hax.make_axes(groups=2, layers=3, embed=4, out=4)


class Block(eqx.Module):
    linear: hnn.Linear

    @staticmethod
    def init(key):
        return Block(hnn.Linear.init(Embed, Out, key=key))

    def __call__(self, x):
        return x + self.linear(x).rename({"out": "embed"})


def blocks(kind: type, key) -> Any:
    return kind.init(Layers, Block)(key=jax.random.split(key, Layers.size))


class Group(eqx.Module):
    blocks: hnn.Stacked

    def __call__(self, x):
        return self.blocks.fold(x)


def stacks(kind: type) -> dict[str, Any]:
    """A stack, and a stack of stacks."""
    inner = [
        blocks(kind, key) for key in jax.random.split(jax.random.key(0), Groups.size)
    ]
    stacked = jax.tree.map(
        lambda *leaves: hax.stack(Groups, leaves), *inner, is_leaf=hax.is_named_array
    )
    of_stacks = kind(
        Group(stacked),
        Groups,
        *([stacked.gradient_checkpointing] if kind is hnn.Stacked else []),
    )
    return {"one": inner[0], "of stacks": of_stacks}


def centered(leaf):
    return leaf - hax.mean(leaf) if isinstance(leaf, hax.NamedArray) else leaf


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: scan_aware_tree_map(centered, tree),
        lambda tree: scan_aware_tree_map(lambda a, b: centered(a) + b, tree, tree),
        flatten_modules_for_export,
        lambda tree: unflatten_modules_from_export(
            flatten_modules_for_export(tree), tree
        ),
        lambda tree: quantize_linear_layers(tree, QuantizationConfig(int8=True)),
        lambda tree: quantize_linear_layers(
            tree["one"], QuantizationConfig(fp8=True, amax_history_length=5)
        ),
    ],
    ids=["map", "map of two", "export", "export and back", "int8", "fp8"],
)
def test_trees_are_changed_layer_by_layer(change):
    theirs, ours = change(stacks(hnn.Stacked)), change(stacks(Stacked))
    jax.tree.map(
        np.testing.assert_array_equal, jax.tree.leaves(theirs), jax.tree.leaves(ours)
    )


@pytest.mark.parametrize("kind", [Stacked, StackedPattern, BlockSeq])
def test_state_dicts_of_torch_are_written_and_read(kind):
    """Haliax's `Linear` computes with its weight when its entries are made."""
    what = {"a": hnn.Linear, "b": hnn.Linear} if kind is StackedPattern else hnn.Linear
    pattern = [["a", "b", "a"]] if kind is StackedPattern else []
    keys = jax.random.split(jax.random.key(0), Layers.size)
    layers = kind.init(Layers, what, *pattern)(Embed, (Groups, Out), key=keys)
    model = {"blocks": layers}
    written = to_torch_compatible_state_dict(model)
    shapes = {key: value.shape for key, value in written.items()}
    assert shapes["blocks.2.weight"] == (8, Embed.size) and len(written) == 6
    empty = jax.tree.map(jnp.zeros_like, model)
    read = from_torch_compatible_state_dict(empty, written)
    assert eqx.tree_equal(read, model)


def test_gradients_of_quantized_layers():
    config = QuantizationConfig(fp8=True, amax_history_length=5)

    def gradient(stack):
        quantized = quantize_linear_layers(stack, config)
        return eqx.filter_jit(
            eqx.filter_grad(lambda stack: hax.sum(stack.fold(x)).scalar())
        )(quantized)

    x = hax.random.normal(jax.random.key(1), Embed)
    expected = gradient(blocks(hnn.Stacked, jax.random.key(0)))
    for remat in (False, True, "nested"):
        assert_close(
            gradient(blocks(Stacked, jax.random.key(0)).with_remat(remat)), expected
        )


def test_a_pattern_too():
    kinds = {"a": Block, "b": Block}
    pattern = StackedPattern.init(Layers, kinds, ("a", "b", "a"))(
        key=jax.random.split(jax.random.key(0), 3)
    )
    mapped = scan_aware_tree_map(centered, pattern)
    for layer, expected in zip(mapped, pattern, strict=True):
        weight = centered(expected.linear.weight)
        assert jnp.allclose(layer.linear.weight.array, weight.array, atol=1e-6)
