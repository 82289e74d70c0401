"""Tests of adding, applying, selecting and merging adapters."""

from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from stacked_remat import BlockSeq, Stacked
from stacked_remat.lora import (
    LoraConfig,
    LoraLinear,
    apply_lora,
    lora_filter,
    lora_linears,
    merge_lora,
)
from stacked_remat.lora._adapter import _DONATING

from ..blocks import assert_close, assert_equal, quick_jit
from .stacks import (
    ALL,
    Block,
    Dim,
    Embed,
    Experts,
    Heads,
    Hidden,
    Layers,
    adapted,
    filled,
    inputs,
    model,
    new_model,
    with_trained_adapters,
)

Rank = Axis("lora_rank", 2)
POLICIES = (False, "nested", "offload")


def paths_adapted(tree, *targets):
    """The linears of the tree that get an adapter, by JAX's paths."""
    config = LoraConfig(2, 1.0, targets)
    make = tree if callable(tree) and not isinstance(tree, eqx.Module) else lambda: tree
    made = eqx.filter_eval_shape(
        lambda: apply_lora(make(), config, key=jax.random.key(0))
    )
    nodes = jax.tree_util.tree_leaves_with_path(
        made, is_leaf=lambda node: isinstance(node, LoraLinear)
    )
    return {
        jax.tree_util.keystr(path)
        for path, node in nodes
        if isinstance(node, LoraLinear)
    }


def untrained(node):
    if not isinstance(node, LoraLinear):
        return node
    return eqx.tree_at(lambda node: node.b, node, jax.tree.map(jnp.zeros_like, node.b))


def test_an_adapter_whose_b_is_zero_changes_no_bit():
    tree = jax.tree.map(
        untrained, adapted(), is_leaf=lambda node: isinstance(node, LoraLinear)
    )
    assert_equal(
        *quick_jit(lambda trees, x: [of(x) for of in trees])((tree, model()), inputs())
    )


def test_adapters_have_the_axes_of_the_stacks():
    block: Any = eqx.filter_eval_shape(
        lambda: apply_lora(model(), ALL, key=jax.random.key(1))
    ).layers.stacked
    assert block.q_proj.a.axes == (Layers, Embed, Rank)
    assert block.q_proj.b.axes == (Layers, Rank, Heads, Dim)
    assert block.o_proj.a.axes == (Layers, Heads, Dim, Rank)
    assert block.experts.stacked.up.a.axes == (Layers, Experts, Embed, Rank)
    assert block.experts.stacked.up.b.axes == (Layers, Experts, Rank, Hidden)
    assert block.q_proj.scale == 1.5 and block.q_proj.a.dtype == jnp.float32


def test_a_is_normal_with_a_variance_of_one_over_the_inputs_and_b_is_zero():
    In, Out = Axis("in", 400), Axis("out", 3)
    tree: Any = {"linear": hnn.Linear.init(In, Out, key=jax.random.key(0))}
    made = apply_lora(tree, LoraConfig(50, 1.0, ("linear",)), key=jax.random.key(1))[
        "linear"
    ]
    np.testing.assert_allclose(np.std(made.a.array), 400**-0.5, rtol=0.02)
    assert not np.any(made.b.array)


def test_the_adapter_of_a_path_does_not_depend_on_the_other_targets():
    linears = {"up": model().head, "gate": model().head}
    some: Any = apply_lora(
        linears, LoraConfig(2, 3.0, ("gate",)), key=jax.random.key(1)
    )
    both: Any = apply_lora(linears, LoraConfig(2, 3.0, ("*",)), key=jax.random.key(1))
    np.testing.assert_array_equal(some["gate"].a.array, both["gate"].a.array)
    assert not np.allclose(both["up"].a.array, both["gate"].a.array)


def test_under_every_policy_outputs_and_gradients_are_those_of_the_merged_weights():
    trained, frozen = eqx.partition(adapted(), lora_filter(adapted()))

    def gradients(trained, remat, change=lambda tree: tree):
        def loss(trained):
            out = change(eqx.combine(trained, frozen))(inputs(), remat=remat)
            return hax.mean(out * out).scalar()

        return jax.value_and_grad(loss)(trained)

    @jax.jit
    def run(trained):
        return gradients(trained, True, merge_lora), [
            gradients(trained, remat) for remat in POLICIES
        ]

    expected, found = run(trained)
    for value, gradient in found:
        np.testing.assert_allclose(value, expected[0], rtol=1e-5)
        assert_close(gradient, expected[1], rtol=1e-4)
        assert len(jax.tree.leaves(gradient)) == 2 * 4 and all(
            map(np.any, jax.tree.leaves(gradient))
        )


def test_merging_gives_plain_linears_of_the_old_dtype_and_shape():
    merged, linear = merge_lora(adapted()), adapted().layers.stacked.o_proj
    assert jax.tree.structure(merged) == jax.tree.structure(model())
    product = np.einsum("lhdr,lre->lhde", linear.a.array, linear.b.array)
    weight = merged.layers.stacked.o_proj.weight
    assert weight.axes == linear.wrapped.weight.axes
    assert_close(weight.array, linear.wrapped.weight.array + 1.5 * product)


def test_merging_sums_in_float32_and_rounds_once():
    narrow = jax.tree.map(
        lambda leaf: leaf.astype(jnp.bfloat16), adapted().layers.stacked.q_proj
    )
    weight = merge_lora(narrow).weight
    wide = merge_lora(
        jax.tree.map(lambda leaf: leaf.astype(jnp.float32), narrow)
    ).weight
    assert weight.dtype == jnp.bfloat16
    np.testing.assert_array_equal(weight.array, wide.array.astype(jnp.bfloat16))


def plain_adapted():
    return with_trained_adapters(plain_layers(), LoraConfig(2, 3.0, ("*.linear",)))


@pytest.mark.parametrize("make", [adapted, plain_adapted])
def test_donated_weights_are_merged_in_place(make):
    expected, given = merge_lora(make()), jax.tree.map(jnp.copy, make())
    linears = [
        linear
        for linear in lora_linears(given).values()
        if isinstance(linear, LoraLinear)
    ]
    before = jax.tree.leaves([linear.wrapped.weight for linear in linears])
    assert_equal(merge_lora(given, donate=True), expected)
    assert before and all(leaf.is_deleted() for leaf in before)


def test_merging_in_place_takes_a_layer_and_not_the_weights():
    Layer, In, Out, Rank = hax.make_axes(layer=64, In=48, Out=32, lora_rank=2)
    all_axes = ((Layer, Out, In), (Layer, In, Rank), (Layer, Rank, Out))
    arrays = eqx.filter_eval_shape(lambda: [hax.zeros(axes) for axes in all_axes])
    whole = 64 * 32 * 48 * 4
    found = (
        _DONATING.lower(*arrays, factor=2.0, outermost=(Layer,))
        .compile()
        .memory_analysis()
    )
    assert found.alias_size_in_bytes == whole
    assert found.temp_size_in_bytes < whole / 8


def test_a_reparametrised_weight_is_merged_so_that_it_acts_the_same():
    linear = hnn.Linear.init(
        Embed, Hidden, key=jax.random.key(0), reparam_cls=hnn.Linear.output_reparam()
    )
    assert linear.reparam.active_scale != 1
    tree = with_trained_adapters({"head": linear}, LoraConfig(2, 3.0, ("head",)))[
        "head"
    ]
    assert_close(merge_lora(tree)(inputs()), tree(inputs()), rtol=2e-5, atol=2e-6)


def test_a_frozen_bfloat16_base_keeps_the_stream_in_bfloat16_and_adapters_in_float32():
    base = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model())
    tree = with_trained_adapters(base, ALL)
    x = inputs().astype(jnp.bfloat16)
    trained, frozen = eqx.partition(tree, lora_filter(tree))

    def loss(trained):
        out = eqx.combine(trained, frozen)(x)
        assert out.dtype == jnp.bfloat16
        return hax.sum(out.astype(jnp.float32)).scalar()

    for leaf in jax.tree.leaves(jax.jit(jax.grad(loss))(trained)):
        assert leaf.dtype == jnp.float32 and np.any(leaf)


class Plain(eqx.Module):
    linear: eqx.nn.Linear

    def __init__(self, key):
        self.linear = eqx.nn.Linear(4, 4, key=key)

    def __call__(self, x):
        return x + jnp.tanh(self.linear(x))


def plain_layers(**options):
    def make():
        return Stacked.init(Layers, Plain, **options)(
            jax.random.split(jax.random.key(0), Layers.size)
        )

    return filled(eqx.filter_eval_shape(make), 0)


def test_linears_of_plain_arrays_in_a_stack():
    layers = plain_layers(remat="nested")
    tree: Any = with_trained_adapters(layers, LoraConfig(2, 3.0, ("*.linear",)))
    assert tree.stacked.linear.a.shape == (5, 4, 2) and tree.stacked.linear.b.shape == (
        5,
        2,
        4,
    )
    x = jnp.arange(4, dtype=jnp.float32)
    assert_close(tree.fold(x), merge_lora(tree).fold(x), rtol=2e-5, atol=2e-6)
    assert not np.allclose(tree.fold(x), layers.fold(x))
    first = merge_lora(
        with_trained_adapters(Plain(jax.random.key(4)), LoraConfig(2, 3.0, ("linear",)))
    )
    assert isinstance(first.linear, eqx.nn.Linear)


def test_patterns_choose_by_path():
    block = ".layers.stacked"
    assert paths_adapted(new_model, "*.q_proj") == {f"{block}.q_proj"}
    assert paths_adapted(new_model, "layers.*.o_proj", "head") == {
        f"{block}.o_proj",
        ".head",
    }
    experts = {f"{block}.experts.stacked.up", f"{block}.experts.stacked.down"}
    assert paths_adapted(new_model, "*experts*") == experts
    assert paths_adapted(new_model, "layers.*.experts.*.up") == {
        f"{block}.experts.stacked.up"
    }
    assert paths_adapted(new_model, "layers.[*].[qo]_proj") == {
        f"{block}.q_proj",
        f"{block}.o_proj",
    }


def test_the_layers_of_a_block_seq_have_numbers_and_containers_their_keys():
    def layers():
        return BlockSeq.init(Layers, Block)(
            key=jax.random.split(jax.random.key(0), Layers.size)
        )

    assert paths_adapted(layers, "3.q_proj") == {".blocks[3].q_proj"}
    assert len(paths_adapted(layers, "*.q_proj")) == 5
    tree = {"first": [model().head], "second": (model().head,)}
    assert paths_adapted(tree, "first.0") == {"['first'][0]"}


def test_a_pattern_that_matches_nothing_is_an_error_with_the_nearest_paths():
    with pytest.raises(
        ValueError,
        match=r"'\*.qproj' matches no linear. Nearest of 5: layers.\*.q_proj, ",
    ):
        apply_lora(
            model(), LoraConfig(2, 1.0, ("*.o_proj", "*.qproj")), key=jax.random.key(0)
        )
    with pytest.raises(ValueError, match="the model has no linear"):
        apply_lora({}, ALL, key=jax.random.key(0))


def test_a_linear_is_adapted_once_and_then_merged():
    with pytest.raises(ValueError, match=r"layers.\*.q_proj has an adapter already"):
        apply_lora(adapted(), ALL, key=jax.random.key(0))
    head = LoraConfig(2, 1.0, ("head",))
    others: Any = eqx.filter_eval_shape(
        lambda: apply_lora(adapted(), head, key=jax.random.key(0))
    )
    assert isinstance(others.head, LoraLinear)
    again: Any = eqx.filter_eval_shape(
        lambda: apply_lora(merge_lora(adapted()), ALL, key=jax.random.key(0))
    )
    assert isinstance(again.layers.stacked.q_proj, LoraLinear)


def test_linears_that_cannot_be_adapted_are_refused():
    with pytest.raises(ValueError, match="maps scalars"):
        scalar = eqx.nn.Linear("scalar", 2, key=jax.random.key(0))
        apply_lora([scalar], LoraConfig(targets=("0",)), key=jax.random.key(0))
    with pytest.raises(AttributeError, match="has no single weight"):
        _ = adapted().layers.stacked.q_proj.weight
    with pytest.raises(ValueError, match="no adapters"):
        lora_filter(model())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"alpha": 0.0}, "lora.alpha must be positive and finite, got 0.0"),
        ({"targets": "q_proj"}, "must be a list of patterns .*, got 'q_proj'"),
    ],
)
def test_a_bad_config_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        LoraConfig(**fields)
