"""Tests of the benchmarks of training steps and of attention, at small sizes on the
CPU.
"""

import json

import pytest

import benchmarks.attention_layer as attention_layer
import benchmarks.qwen3_step as qwen3_step
from benchmarks.attention_layer import CASES, Heads, differences
from benchmarks.qwen3_context import CONFIG
from benchmarks.qwen3_step import main, model_flops
from benchmarks.record import matmul_peak
from models.run_config import LmRunConfig
from stacked_remat.ops._attention_backends import BACKENDS
from stacked_remat.ops._attention_blockwise import BLOCKWISE
from stacked_remat.ops._attention_rule import Kernel
from stacked_remat.ops._backends import Backend
from stacked_remat.training import parse_config

TINY = ["--config", str(CONFIG.with_name("qwen3_moe_65k_cpu.yaml")), "--rounds", "1"]
SMALL = ["--model.num_layers", "2", "--model.hidden_dim", "16", "--vocab_size", "260"]


@pytest.fixture(autouse=True)
def in_this_process_beside_small_products(monkeypatch):
    monkeypatch.setattr(qwen3_step, "in_a_process", lambda fn, *args: fn(*args))
    for module in (qwen3_step, attention_layer):
        monkeypatch.setattr(module, "matmul_peak", lambda: matmul_peak(8))


@pytest.mark.deep
def test_a_policy_is_compared_timed_and_profiled(tmp_path, standard_promotion):
    options = "--check 8 --tokens 16 --policies nested --documents 2 --profile".split()
    path = main([*TINY, *options, *SMALL, "--out", str(tmp_path)])
    assert path == tmp_path / "qwen3_step_cpu.json"
    gradients, row, *longest = json.loads(path.read_text())["rows"]
    for one in ("kind", "longest"):
        assert sum(row["profiled_seconds"] for row in longest if one in row) > 0
    assert (row["tokens"], row["policy"], row["num_layers"]) == (16, "nested", 2)
    assert (gradients["policy"], gradients["off_first"]) == ("nested", 0.0)
    assert gradients["off"] < 1e-5  # in float32 too
    assert row["backends"] == {"attention": "blockwise", "experts": "block"}
    assert (
        row["seconds"] > 0
        and row["peak_bytes"] > 2**26
        and row["utilisation_of_matmul_peak"] > 0
    )


@pytest.fixture
def steps(monkeypatch):
    """The gradients that are found, in place of computing them, and the steps that are
    timed.
    """
    off, timed = {"True": 0.030, "nested": 0.031}, []

    def gradient_rows(given, tokens, policies, documents):
        return [{"policy": name, "off": off[name]} for name in policies]

    def step_rows(given, tokens, name, rounds, profile, documents):
        timed.append((name, tokens))
        return [{"seconds": 1.0}]

    monkeypatch.setattr(qwen3_step, "gradient_rows", gradient_rows)
    monkeypatch.setattr(qwen3_step, "step_rows", step_rows)
    return off, timed


def test_a_policy_with_wrong_gradients_is_named_and_not_timed(tmp_path, steps):
    off, timed = steps
    off["offload"] = 0.5
    with pytest.raises(SystemExit, match="gradients differ, not timed: offload"):
        main(["--tokens", "16", "32", "--out", str(tmp_path)])
    assert timed == [("True", 16), ("nested", 16), ("True", 32), ("nested", 32)]
    rows = json.loads((tmp_path / "qwen3_step_cpu.json").read_text())["rows"]
    assert len([row for row in rows if "seconds" in row]) == 4


def test_other_models_are_refused(tmp_path):
    dense = tmp_path / "dense.yaml"
    dense.write_text("model:\n  type: qwen3\nvocab_size: 260\n")
    with pytest.raises(
        SystemExit,
        match="model.type must be qwen3_moe here; the config has Qwen3Config",
    ):
        main(["--config", str(dense)])


def test_policies_are_those_of_the_model(tmp_path, steps):
    _, timed = steps
    main(
        [
            "--check",
            "0",
            "--tokens",
            "8",
            "--policies",
            "attention_saved",
            "--out",
            str(tmp_path),
        ]
    )
    assert timed == [("attention_saved", 8)]
    with pytest.raises(SystemExit, match="'fast' is none of False, True, nested"):
        main(["--policies", "fast"])


def test_the_model_takes_96_gflop_a_token_at_65536():
    config = parse_config(LmRunConfig, ["--config_path", str(CONFIG)])
    assert model_flops(config, 65_536) == pytest.approx(96e9, rel=0.02)


@pytest.mark.deep
def test_kernels_of_attention_are_compared_with_the_definition(monkeypatch, tmp_path):
    def found():
        return {(row["case"], row["kernel"]): row for row in differences(Heads(), 64)}

    rows = found()
    assert list(dict.fromkeys(case for case, _ in rows)) == list(CASES)
    for (_, kernel), row in rows.items():
        if kernel == "blockwise":
            assert 0 < row["off"] < 2e-2 and row["agrees"]
        elif kernel == "cudnn":
            assert (
                row["refused"] == "it runs on NVIDIA GPUs, and the program is for 'cpu'"
            )
    monkeypatch.setattr(attention_layer, "CASES", ("plain",))
    wrong = Kernel(
        lambda query, *rest: BLOCKWISE.forward(1.1 * query, *rest), BLOCKWISE.backward
    )
    monkeypatch.setitem(BACKENDS, "blockwise", Backend(wrong))
    with pytest.raises(
        SystemExit, match="differs from the definition: blockwise, plain: off by 0"
    ):
        attention_layer.main(["--check", "16", "--out", str(tmp_path)])
