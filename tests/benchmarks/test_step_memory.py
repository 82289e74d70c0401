"""Tests of the recorded memory of whole steps on several devices."""

import json

import pytest

from benchmarks.record import RESULTS

GIB = 2**30
WEIGHTS, EMBEDDINGS = 56.9, 1.2


def recorded(name):
    return json.loads((RESULTS / f"{name}.json").read_text())["rows"]


@pytest.mark.parametrize(("where", "devices", "memory"), [("h100_8", 8, 79), ("v5p_16", 16, 95)])
def test_all_parameters_fit_and_depth_adds_weights_and_carries(where, devices, memory):
    rows = {
        (row["layers"], row["update"]): row
        for row in recorded(f"qwen3_30b_a3b_65k_fsdp_{where}")
        if row["policy"] == "nested"
    }
    whole, half = rows[48, "after"], rows[24, "after"]
    assert whole["total"] <= memory * GIB
    # Weights in bfloat16 and two moments in float32; depth adds gradients and a few carries to temporaries.
    assert whole["arguments"] == pytest.approx(5 * WEIGHTS * GIB / devices, rel=0.02)
    assert whole["temporaries"] - half["temporaries"] <= (WEIGHTS / 2 / devices + 5 * 0.25 + 3) * GIB
    # Each layer's weights once forward, at most once for the replay, once backward; gradients at most twice.
    assert 3 * WEIGHTS - EMBEDDINGS <= whole["sent"] / GIB <= 5 * WEIGHTS
    assert whole["sent"] / half["sent"] == pytest.approx(2, rel=0.05)


def test_with_fused_updates_depth_adds_a_few_carries_alone():
    """Half a layer's input is 0.125 GiB; `shrinking` keeps 3 more of them for twice the layers."""
    for where in ("h100_8", "v5p_16"):
        rows = recorded(f"qwen3_30b_a3b_65k_fsdp_{where}")
        grown = {
            policy: found[48] - found[24]
            for policy in {row["policy"] for row in rows}
            if (
                found := {
                    row["layers"]: row["temporaries"] / GIB
                    for row in rows
                    if (row["policy"], row["update"]) == (policy, "fused")
                }
            )
        }
        assert grown["nested"] < 2 and grown.get("offload", 0) < 0.5


def test_a_model_of_235_billion_parameters_fits_with_carries_on_the_host():
    found = {row["policy"]: row for row in recorded("qwen3_235b_a22b_131k_fsdp_lora_h200_8")}
    assert found["offload"]["total"] < found["nested, offload"]["total"] <= 139 * GIB
    assert found["offload"]["host"] == 94 * GIB
