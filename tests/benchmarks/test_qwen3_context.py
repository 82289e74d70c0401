"""Tests of the recorded memory of Qwen3-30B-A3B at long context: its limits."""

import pytest

from benchmarks.gathered_ahead import of_weights
from benchmarks.qwen3_context import (
    CONFIG,
    POLICIES,
    WITH_EXPERTS,
    compiled_on,
    forward_and_backward,
)
from models.run_config import LmRunConfig
from stacked_remat import memory
from stacked_remat.ops._cudnn import cudnn_is_installed
from stacked_remat.training import parse_config
from tests.recorded_on import h200, recorded

NEEDS_CUDNN = pytest.mark.skipif(not cudnn_is_installed(), reason="JAX finds no cuDNN")
GIB = 2**30


@pytest.mark.parametrize(
    ("tokens", "limit"), [(65_536, 7.0), (131_072, 12.5), (262_144, 24.5)]
)
def test_temporaries_are_within_the_limits_and_offloading_takes_less(tokens, limit):
    rows = recorded("qwen3_context_h200", "tokens", "policy")
    found = {name: rows[tokens, name] for name in POLICIES}
    assert found["nested"]["temporaries"] <= limit * GIB
    for name in ("nested, offload", "offload"):
        assert found[name]["temporaries"] < found["nested"]["temporaries"]
        assert found[name]["host"] > 0
    assert found["nested"]["matmul_flops"] < 4 / 3 * found["True"]["matmul_flops"]
    # 56.9 GiB of weights, 3.1 of adapters
    assert found["nested"]["arguments"] == pytest.approx(60 * GIB, rel=0.01)


def test_kernels_of_documents_and_of_experts_are_within_the_limits():
    documents = recorded("qwen3_documents_h200", "policy")
    assert documents[("True",)]["temporaries"] <= 16.8 * GIB
    assert documents[("nested",)]["temporaries"] <= 6.3 * GIB
    for name, limits in {
        "qwen3_experts_h200": {"block": 6.9, "tokamax": 8.3},
        "qwen3_experts_v5p": {"block": 11, "megablox": 11},
    }.items():
        rows = recorded(name, "backend", "policy")
        assert {
            backend for backend, policy in rows if policy == "nested"
        } == limits.keys()
        assert all(
            rows[key, "nested"]["temporaries"] <= limits[key] * GIB for key in limits
        )


def test_a_million_tokens_fit_with_offloading():
    found = recorded("qwen3_longest_h200", "budget", "policy")
    assert found["80GiB", "nested"]["tokens"] >= 131_072
    assert found["80GiB", "offload"]["tokens"] >= 262_144
    assert found["139GiB", "nested"]["tokens"] >= 524_288
    assert found["139GiB", "offload"]["tokens"] >= 2**20
    assert all(
        row["total"] <= int(budget.removesuffix("GiB")) * GIB
        for (budget, _), row in found.items()
    )


def test_a_million_tokens_take_a_quarter_of_each_of_eight_gpus():
    rows = recorded("qwen3_context_h200_8_positions", "tokens", "policy")
    assert rows[2**20, "nested"]["total"] < 141e9 / 3
    assert rows[2**20, "offload"]["temporaries"] < rows[2**20, "nested"]["temporaries"]


SMALLER = [
    "--model.num_layers",
    "10",
    "--model.experts.num_experts",
    "16",
    "--vocab_size",
    "1024",
]
# Others have chunks of half a GiB, which are not full here
SMALLER += [
    "--model.experts.backend",
    "block",
]


@h200
@pytest.mark.parametrize(
    ("backend", "policy", "whole", "a_token"),
    [
        pytest.param("cudnn", "nested", 950e6, 66, marks=NEEDS_CUDNN),
        pytest.param("cudnn", "offload", 850e6, 54, marks=NEEDS_CUDNN),
        ("blockwise", "nested", 937e6, 77),
    ],
)
def test_memory_of_a_shallower_model_is_proportional_to_tokens(
    backend, policy, whole, a_token
):
    """10 layers of full width: `nested` keeps 4 carries of 4 KiB per token, `offload`
    one or two.
    """
    smaller = [*SMALLER, "--model.attention.backend", backend]
    config = parse_config(LmRunConfig, ["--config_path", str(CONFIG), *smaller])
    found = []
    for tokens in (8_192, 16_384):
        fn, args = forward_and_backward(config, tokens)
        found.append(
            memory.report(fn(POLICIES[policy]), *args, target="h200").temporaries
        )
    assert found[0] <= 1.05 * whole
    assert (found[1] - found[0]) / 8_192 <= 1.05 * a_token * 1024


@h200
def test_devices_wait_for_no_more_gathers_beside_divided_experts():
    options = ["--model.num_layers", "8", "--model.attention.backend", "blockwise"]
    config = parse_config(LmRunConfig, ["--config_path", str(CONFIG), *options])
    _, text = compiled_on(WITH_EXPERTS, config, "h200", 8, 16_384, POLICIES["nested"])
    in_loops = of_weights(text)
    row = recorded("qwen3_gathers_h200_8", "policy")[("nested",)]
    assert 0 < len(in_loops) <= row["collectives in loops"]
    waited_for = [one for one in in_loops if not one.products]
    assert len(waited_for) <= row["waited for"]
