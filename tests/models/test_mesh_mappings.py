"""Weights, rows, positions, experts and heads divided over devices: the step of one,
and what is sent.
"""

import dataclasses
import functools
import math
import re

import equinox as eqx
import haliax as hax
import jax
import numpy as np
import optax
import pytest
from haliax import Axis
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from models.lm import next_token_loss
from models.parts.decoder import Decoder
from models.parts.sections import (
    FULL,
    LINEAR,
    SLIDING,
    AttentionConfig,
    ExpertsConfig,
    LinearAttentionConfig,
)
from models.qwen3 import Qwen3Config
from models.qwen3_moe import Qwen3MoeConfig
from models.run_state import with_adapters
from stacked_remat import ScanCheckpointPolicy, StackedPattern
from stacked_remat.lora import LoraConfig
from stacked_remat.training import (
    MeshConfig,
    Partitioning,
    TokenBatch,
    TrainState,
    TrainStep,
)

from ..jaxprs import equations_of
from .random_weights import random_weights
from .test_hybrid import OLMO
from .test_mixers import CONFIGS as MIXERS

ROWS, VOCAB = 8, 24
LAYERS, POSITIONS, HEAD_DIM = 5, 32, 12
SIZES = {"hidden_dim": 16, "num_layers": LAYERS, "num_heads": 4, "num_kv_heads": 1}
DENSE = Qwen3Config(**SIZES, mlp_dim=6, attention=AttentionConfig(head_dim=HEAD_DIM))
WINDOWS = Qwen3Config(
    **SIZES | {"num_layers": 2 * LAYERS},
    mlp_dim=6,
    attention=AttentionConfig(head_dim=HEAD_DIM, window=7, layer_types=(SLIDING, FULL)),
)
EXPERTS, INNER = 8, 6
SPARSE = Qwen3MoeConfig(
    **SIZES, experts=ExpertsConfig(EXPERTS, 3, INNER, z_loss_weight=0.01)
)
SPARSE_WINDOWS = Qwen3MoeConfig(
    **SIZES | {"num_layers": 2 * LAYERS},
    experts=ExpertsConfig(4, 2, INNER),
    attention=AttentionConfig(window=4, layer_types=(SLIDING, FULL)),
)
LORA = LoraConfig(rank=3, targets=("*.q_proj", "*.experts.*_proj"))
NESTED_OFFLOAD = ScanCheckpointPolicy(nested=True, save_carries="offload")
OFFLOAD_INTERNALS = ScanCheckpointPolicy(offload_block_internals=["attention_output"])
SAVE = ScanCheckpointPolicy(save_block_internals=["attention_output", "attention_lse"])
CONTEXT = {"position": "context"}
TENSOR = {"kv_heads": "model", "mlp": "model"}
MESHES = {
    "context, fsdp": MeshConfig({"context": 4}, CONTEXT, {"embed": "context"}),
    "data, context, fsdp": MeshConfig(
        {"data": 2, "context": 4},
        {"batch": "data"} | CONTEXT,
        {"embed": ["data", "context"]},
    ),
    "data, expert, fsdp": MeshConfig(
        {"data": 2, "expert": 4},
        {"batch": ["data", "expert"], "experts": "expert"},
        {"embed": "data", "experts": "expert"},
    ),
    "context, fsdp, tensor": MeshConfig(
        {"context": 4, "model": 2}, CONTEXT | TENSOR, {"embed": "context"} | TENSOR
    ),
    "tensor": MeshConfig({"model": 2}, TENSOR, TENSOR),
    "expert, tensor": MeshConfig(
        {"expert": 4, "model": 2},
        {"batch": "expert", "experts": "expert"} | TENSOR,
        {"experts": "expert"} | TENSOR,
    ),
    "context, expert": MeshConfig(
        {"data": 2, "context": 4},
        {"batch": "data", "experts": "context"} | CONTEXT,
        {"embed": "data", "experts": "context"},
    ),
}


def deep(*case):
    return pytest.param(*case, marks=pytest.mark.deep)


FSDP_CASES = [  # experts with the policy whose program has most parts
    (SPARSE, "nested"),
    deep(DENSE, NESTED_OFFLOAD),
    deep(DENSE, OFFLOAD_INTERNALS),
    deep(SPARSE_WINDOWS, "nested"),
]

OTHERS = {
    "hybrid": (
        DENSE,
        MeshConfig({"replica": 2, "data": 4}, {"batch": ["replica", "data"]}),
        1,
        1 / 4,
    ),
    "experts first": (
        SPARSE,
        MeshConfig({"data": 4}, param_mapping={"experts": "data", "embed": "data"}),
        1,
        1 / 4,
    ),
    "microbatches": (DENSE, MeshConfig({"data": 4}), 2, 1 / 4),
}

CONTEXT_CASES = [
    (DENSE, "data, context, fsdp", "nested"),
    deep(DENSE, "context, fsdp", "offload"),
    deep(dataclasses.replace(DENSE, num_kv_heads=2), "context, fsdp, tensor", SAVE),
    deep(WINDOWS, "data, context, fsdp", "nested"),
]

TENSOR_CASES = [
    (DENSE, "tensor", True),
    deep(SPARSE, "expert, tensor", "offload"),
]

HYBRID_CASES = {
    "delta net": dataclasses.replace(OLMO, num_layers=2, layer_types=(LINEAR, FULL)),
    "decays of channels": dataclasses.replace(
        MIXERS["decays of channels"], linear=LinearAttentionConfig(4, 4, 5, 5)
    ),
    "mamba": MIXERS["mamba"],
    "convolution": MIXERS["convolution"],
}

EXPERT_CASES = [
    ("data, expert, fsdp", "nested", None),
    deep("context, expert", "offload", LORA),
]

pytestmark = pytest.mark.usefixtures("standard_promotion")


def batch(positions):
    """Eight rows of two documents each, of uneven weights."""
    draws = (
        np.random.default_rng(0)
        .integers(0, VOCAB, (2, ROWS, positions))
        .astype(np.int32)
    )
    first = positions * 5 // 13
    documents = np.array([[1] * first + [2] * (positions - first)], np.int32).repeat(
        ROWS, axis=0
    )
    numbers = np.concatenate([np.arange(first), np.arange(positions - first)]).astype(
        np.int32
    )
    weights = (np.arange(ROWS * positions).reshape(ROWS, positions) % 7 > 1).astype(
        np.float32
    )
    return TokenBatch.of(
        draws[0], draws[1], weights, documents, numbers[None].repeat(ROWS, axis=0)
    )


def first_state(config, remat, lora=None):
    model = random_weights(Decoder.init, config, Axis("vocab", VOCAB), remat=remat)
    model, trainable = with_adapters(model, lora, key=jax.random.key(0))
    state = TrainState.init(model, optax.sgd(-1.0), trainable)
    if lora is None:
        return state
    # One matrix of each adapter starts at zero, and the other's gradient with it.
    trained = jax.tree.map(
        lambda leaf: (
            0.1
            * np.sin(leaf.size + np.arange(leaf.size, dtype=np.float32)).reshape(
                leaf.shape
            )
        ),
        state.trained,
    )
    return eqx.tree_at(lambda state: state.trained, state, trained)


def gradient_step(partitioning, microbatches=1):
    """A step whose change of the weights is the gradient."""
    return TrainStep(
        loss_function=next_token_loss,
        optimizer=optax.sgd(-1.0),
        microbatches=microbatches,
        partitioning=partitioning,
    )


def assert_same(found, wanted):
    (after, metrics), (expected, expected_metrics) = found, wanted
    for a, b in zip(
        jax.tree.leaves(after.trained), jax.tree.leaves(expected.trained), strict=True
    ):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=2e-6)
    assert metrics.keys() == expected_metrics.keys()
    for name, value in metrics.items():
        np.testing.assert_allclose(
            value, expected_metrics[name], rtol=2e-5, err_msg=name
        )


@functools.cache
def on_one_device(config, positions, lora=None):
    return eqx.filter_jit(gradient_step(None))(
        batch(positions), first_state(config, True, lora)
    )


def compiled_on(mesh, config, remat, positions, microbatches=1, lora=None):
    """The text of the program, and its results."""
    partitioning = Partitioning.of(mesh)
    state = first_state(config, remat, lora)
    with partitioning.active():
        state = partitioning.shard_weights(state)
        args = (partitioning.shard_batch(batch(positions)), state)
        compiled = (
            eqx.filter_jit(gradient_step(partitioning, microbatches))
            .lower(*args)
            .compile()
        )
        return compiled.compiled.as_text(), compiled(*args)


def collectives(program):
    """(Kind, shapes, the operation's name or "") of every collective."""
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    found = re.findall(rf" = (.*?) (?:ragged-)?({kinds})(?:-start)?\((.*)", program)
    return [
        (kind, shapes_in(text), "".join(re.findall(r"op_name=\"(.*?)\"", rest)))
        for text, kind, rest in found
    ]


def shapes_in(text):
    """The shapes of all arrays, of any type."""
    arrays = re.findall(r"\b(?:pred|[a-z]+\d+\w*)\[([\d,]*)\]", text)
    return [[int(size) for size in shape.split(",") if size] for shape in arrays]


def share(state):
    """Which part of a weight a device has."""
    layers = state.trained.layers
    stack = layers.stacks["sparse"] if isinstance(layers, StackedPattern) else layers
    weight = stack.stacked.attention.q_proj.weight.array
    return weight.addressable_shards[0].data.size / weight.size


@pytest.mark.parametrize(("config", "policy"), FSDP_CASES)
def test_divided_weights_are_gathered_layer_by_layer(config, policy):
    program, found = compiled_on(MeshConfig(), config, policy, POSITIONS)
    assert_same(found, on_one_device(config, POSITIONS))
    gathers = (
        shapes for kind, shapes, _ in collectives(program) if kind == "all-gather"
    )
    gathered = [shape for shapes in gathers for shape in shapes]
    assert gathered and not [shape for shape in gathered if LAYERS in shape]
    # Nor is anything of all tokens, but their numbers, for the gradient of the
    # embedding.
    tokens = ROWS * POSITIONS
    assert not [
        shape
        for shape in gathered
        if {POSITIONS, tokens} & {*shape} and math.prod(shape) > tokens
    ]
    assert share(found[0]) == 1 / 8


@pytest.mark.deep
@pytest.mark.parametrize("case", OTHERS)
def test_other_meshes_of_rows_and_weights(case):
    config, mesh, microbatches, part = OTHERS[case]
    _, found = compiled_on(mesh, config, "nested", POSITIONS, microbatches)
    wanted = on_one_device(config, POSITIONS)
    if microbatches == 1:
        assert_same(found, wanted)
    np.testing.assert_allclose(found[1]["loss"], wanted[1]["loss"], rtol=1e-5)
    assert share(found[0]) == part


@pytest.mark.deep
@pytest.mark.parametrize(("config", "mesh", "policy"), CONTEXT_CASES)
def test_divided_positions_gather_keys_and_values_of_a_layer(config, mesh, policy):
    program, found = compiled_on(MESHES[mesh], config, policy, POSITIONS)
    assert_same(found, on_one_device(config, POSITIONS))
    gathers = [
        (shapes, name)
        for kind, shapes, name in collectives(program)
        if kind == "all-gather"
    ]
    assert not [shapes for shapes, _ in gathers for shape in shapes if LAYERS in shape]
    rows = ROWS // dict(MESHES[mesh].axes).get("data", 1)
    of_keys, of_documents = [rows, POSITIONS, 1, HEAD_DIM], [rows, POSITIONS]
    in_context = [
        (shapes, name) for shapes, name in gathers if POSITIONS in sum(shapes, [])
    ]
    assert all(shapes in ([of_keys], [of_documents]) for shapes, _ in in_context)
    # In the loop over layers, and not in attention's own loops over blocks.
    assert all(name.endswith("shard_map/all_gather") for _, name in in_context)
    of_layers = [
        "while/body" in name for shapes, name in in_context if shapes == [of_keys]
    ]
    assert of_layers and all(of_layers)
    # Nothing of all positions is larger: no stack of gathered keys is kept for the
    # backward pass.
    assert max(
        math.prod(shape) for shape in shapes_in(program) if POSITIONS in shape
    ) == math.prod(of_keys)


@pytest.mark.deep
@pytest.mark.parametrize(("mesh", "policy", "lora"), EXPERT_CASES)
def test_divided_experts_stay_where_they_are_and_tokens_go_to_them(mesh, policy, lora):
    program, found = compiled_on(MESHES[mesh], SPARSE, policy, POSITIONS, lora=lora)
    assert_same(found, on_one_device(SPARSE, POSITIONS, lora))
    sent = collectives(program)
    assert not [shape for _, shapes, _ in sent for shape in shapes if LAYERS in shape]
    # No device gets the weights of all experts, nor their gradients.
    weights = [shape for _, shapes, _ in sent for shape in shapes if INNER in shape]
    assert not [shape for shape in weights if EXPERTS in shape]
    # Tokens go and come in the loop of rounds within that over layers, and go again in
    # the backward pass.
    swaps = [
        name
        for kind, _, name in sent
        if kind == "all-to-all" and name.count("while/body") > 1
    ]
    assert any("transpose" in name for name in swaps) and any(
        "transpose" not in name for name in swaps
    )


@pytest.mark.parametrize(
    "mesh",
    [
        MeshConfig(),
        MeshConfig(
            {"data": -1},
            {"batch": "data", "experts": "data"},
            {"experts": "data", "embed": "data"},
        ),
    ],
)
def test_loops_over_layers_carry_the_next_router(mesh):
    """Of the weights with an axis of experts, it alone is gathered a layer ahead."""
    partitioning = Partitioning.of(mesh)
    with partitioning.active():
        state = partitioning.shard_weights(first_state(SPARSE, True))
        args = partitioning.shard_batch(batch(POSITIONS)), state
        found = equations_of(gradient_step(partitioning), *args)
    routers = []
    for equation in found:
        if equation.primitive.name in ("scan", "while"):
            shapes = [{*getattr(var.aval, "shape", ())} for var in equation.outvars]
            routers.append(shapes.count({EXPERTS, SIZES["hidden_dim"]}))
    # Forward and backward
    assert routers.count(1) >= 2


@pytest.mark.parametrize(("config", "mesh", "policy"), TENSOR_CASES)
def test_divided_heads_and_inner_widths_sum_activations_in_the_loop_over_layers(
    config, mesh, policy
):
    config = dataclasses.replace(config, num_kv_heads=2)
    program, found = compiled_on(MESHES[mesh], config, policy, POSITIONS)
    assert_same(found, on_one_device(config, POSITIONS))
    sent = collectives(program)
    assert not [shape for _, shapes, _ in sent for shape in shapes if LAYERS in shape]
    sums = [
        name
        for kind, shapes, name in sent
        if kind == "all-reduce" and POSITIONS in sum(shapes, [])
    ]
    assert any("while/body" in name and "transpose" in name for name in sums)
    assert any("while/body" in name and "transpose" not in name for name in sums)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.deep] * (case != "delta net"))
        for case in HYBRID_CASES
    ],
)
def test_positions_and_heads_of_linear_layers_are_divided(case):
    config = HYBRID_CASES[case]
    heads = dict.fromkeys(config.head_axes, "model")
    assert len(heads) == 2
    mesh = MeshConfig(
        {"data": 2, "context": 2, "model": 2},
        {"batch": "data"} | CONTEXT | heads,
        {"embed": ["data", "context"]} | heads,
    )
    _, found = compiled_on(mesh, config, "nested", POSITIONS)
    assert_same(found, on_one_device(config, POSITIONS))
    ours = found[0].trained.layers.stacks
    (linear,) = (stack for kind, stack in ours.items() if "linear" in kind)
    ways = [
        leaf.addressable_shards[0].data.size / leaf.size
        for leaf in jax.tree.leaves(linear.stacked)
    ]
    assert min(ways) == 1 / 8


def test_experts_divided_where_tokens_are_not_are_refused():
    mesh = MeshConfig({"data": 2, "expert": 4}, {"batch": "data", "experts": "expert"})
    with pytest.raises(
        ValueError, match="`experts` is divided over 'expert'.*batch: .data, expert."
    ):
        compiled_on(mesh, SPARSE, True, POSITIONS)


@pytest.mark.deep
def test_a_decoder_takes_a_mesh_with_sharding_in_types():
    tokens, mesh = (
        batch(32),
        jax.make_mesh((4,), ("data",), (AxisType.Explicit,), devices=jax.devices()[:4]),
    )
    model = random_weights(Decoder.init, SPARSE, Axis("vocab", VOCAB), remat="nested")
    weights, static = eqx.partition(model, eqx.is_inexact_array)
    gradient = jax.value_and_grad(
        lambda weights, batch: next_token_loss(eqx.combine(weights, static), batch)[0]
    )
    expected = jax.jit(gradient)(weights, tokens)
    with jax.set_mesh(mesh):
        weights = jax.device_put(weights, NamedSharding(mesh, PartitionSpec()))
        tokens = jax.device_put(tokens, NamedSharding(mesh, PartitionSpec("data")))
        with hax.axis_mapping({"batch": "data"}):
            found = jax.jit(gradient)(weights, tokens)
        with pytest.raises(
            ValueError, match=r"divided over 'data'.*axis_mapping\({'batch': 'data'}\)"
        ):
            gradient(weights, tokens)
    for one, other in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-6)
