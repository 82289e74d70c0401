"""Training on several devices is training on one: the same losses and gradients, and no stack as a whole."""

import math
import re

import numpy as np
import pytest

from models.decoder.config import FULL, SLIDING, AttentionConfig, ExpertsConfig
from models.qwen3 import Qwen3Config, Qwen3MoeConfig
from stacked_remat import ScanCheckpointPolicy, StackedPattern
from stacked_remat.training import MeshConfig
from tests.models.mesh_steps import ROWS, assert_same, compiled_on, on_one_device

LAYERS, POSITIONS = 5, 13  # no other axis has the first's or the last's size
SIZES = {"hidden_dim": 16, "num_layers": LAYERS, "num_heads": 2, "num_kv_heads": 1}
EXPERTS = ExpertsConfig(num_experts=4, experts_per_token=2, intermediate_dim=6)
CONFIGS = {
    "dense": Qwen3Config(**SIZES, mlp_dim=6),
    "experts": Qwen3MoeConfig(**SIZES, experts=EXPERTS),
    # As many layers of each of two kinds, in turn.
    "windows": Qwen3MoeConfig(
        **SIZES | {"num_layers": 2 * LAYERS},
        experts=EXPERTS,
        attention=AttentionConfig(window=4, layer_types=(SLIDING, FULL)),
    ),
}
POLICIES = {
    "nested": "nested",
    "nested, offload": ScanCheckpointPolicy(nested=True, save_carries="offload"),
    "offload internals": ScanCheckpointPolicy(offload_block_internals=["attention_output"]),
}
# Experts with the policy whose program has most parts.
CASES = [("experts", "nested")]
DEEP = [
    ("dense", "nested, offload"),
    ("dense", "offload internals"),
    ("windows", "nested"),
]
CASES += [pytest.param(*case, marks=pytest.mark.deep) for case in DEEP]
MESHES = {
    "data parallel": ("dense", MeshConfig(param_mapping={}), 1),
    "hybrid": ("dense", MeshConfig({"replica": 2, "data": 4}, {"batch": ["replica", "data"]}), 1 / 4),
    "experts first": (
        "experts",
        MeshConfig({"data": 4}, param_mapping={"experts": "data", "embed": "data"}),
        1 / 4,
    ),
}

pytestmark = pytest.mark.usefixtures("standard_promotion")


def on_devices(config, kind, policy, microbatches=1):
    return compiled_on(config, CONFIGS[kind], POLICIES[policy], POSITIONS, microbatches)


def wanted(kind):
    return on_one_device(CONFIGS[kind], POSITIONS)


def share(state):
    """Which part of a weight a device has."""
    layers = state.trained.layers
    stack = layers.stacks["sparse"] if isinstance(layers, StackedPattern) else layers
    weight = stack.stacked.attention.q_proj.weight.array
    return weight.addressable_shards[0].data.size / weight.size


@pytest.mark.parametrize(("kind", "policy"), CASES)
def test_every_policy_gives_the_gradients_of_one_device_and_gathers_no_stack(kind, policy):
    program, found = on_devices(MeshConfig(), kind, policy)
    assert_same(found, wanted(kind))
    gathered = [
        [int(size) for size in shape.split(",")]
        for results in re.findall(r" = (.*?) all-gather(?:-start)?\(", program)
        for shape in re.findall(r"\[([\d,]+)\]", results)
    ]
    assert gathered and not [shape for shape in gathered if LAYERS in shape]
    # Nor is anything of all tokens, but their numbers, for the gradient of the embedding.
    tokens = ROWS * POSITIONS
    assert not [shape for shape in gathered if {POSITIONS, tokens} & {*shape} and math.prod(shape) > tokens]
    assert share(found[0]) == 1 / 8


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param("data parallel", marks=pytest.mark.deep),
        pytest.param("experts first", marks=pytest.mark.deep),
        pytest.param("hybrid", marks=pytest.mark.deep),
    ],
)
def test_other_meshes(mesh):
    kind, config, part = MESHES[mesh]
    _, found = on_devices(config, kind, "nested")
    assert_same(found, wanted(kind))
    assert share(found[0]) == part


@pytest.mark.deep
def test_microbatches_are_divided_too():
    _, (after, metrics) = on_devices(MeshConfig({"data": 4}), "dense", "nested", microbatches=2)
    np.testing.assert_allclose(metrics["loss"], wanted("dense")[1]["loss"], rtol=1e-5)
    assert share(after) == 1 / 4
