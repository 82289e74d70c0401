"""Tests of the benchmark of training steps, at small sizes on the CPU."""

import json

import jax
import jax.numpy as jnp
import pytest

from benchmarks.attention_layer import CASES, differences
from benchmarks.qwen3_context import CONFIG
from benchmarks.qwen3_step import heads_of, main, model_flops, random_parts
from models.train_lm import LmRunConfig
from stacked_remat.ops._attention_backends import BACKENDS, Backend
from stacked_remat.ops._attention_blockwise import BLOCKWISE
from stacked_remat.ops._attention_rule import Kernel
from stacked_remat.training import parse_config

from ..jaxprs import equations_of

TINY = [
    "--config",
    str(CONFIG.with_name("qwen3_moe_65k_cpu.yaml")),
    "--check",
    "8",
    "--rounds",
    "1",
    "--matmul",
    "8",
]
SMALL = ["--overrides", "--model.num_layers", "2", "--model.hidden_dim", "16", "--vocab_size", "260"]


@pytest.mark.deep
def test_every_policy_has_a_row_with_its_own_peak(tmp_path):
    path = main(
        [*TINY, "--tokens", "16", "--layers", "16", "--policies", "nested", "--out", str(tmp_path), *SMALL]
    )
    assert path is not None and path == tmp_path / "qwen3_step_cpu.json"
    found = json.loads(path.read_text())
    (row,) = found["rows"]
    assert (row["tokens"], row["policy"]) == (16, "nested")
    assert found["gradient_differences"] == {"nested": 0.0} and found["offload_check"] == "passed"
    assert list(found["attention_differences"]["sinks"]) == ["cudnn", "tokamax", "splash", "blockwise"]
    timed = [row for row in found["layers"]["attention"] if "seconds" in row]
    assert [row["case"] for row in timed] == list(CASES)
    assert all(row["kernel"] == "blockwise" and row["seconds"] > 0 for row in timed)
    assert {row["backend"] for row in found["layers"]["experts"]} == {"block", "dense"}
    assert row["seconds"] > 0 and row["peak_bytes"] > 2**26 and row["utilisation_of_matmul_peak"] > 0


def test_a_policy_with_wrong_gradients_is_named_and_not_timed(tmp_path, monkeypatch):
    check = {"device": "gpu", "matmul_peak": 1e12, "attention_differences": {}, "offload_check": "passed"}
    check["gradient_differences"] = {"True": 0.0, "nested": 1e-3, "offload": 0.5}
    timed = []

    def in_a_process(options, job, policies, tokens):
        if job != "time":
            return dict(check) if job == "check" else {}
        timed.append((*policies, *tokens))
        return {"seconds": 1.0}

    monkeypatch.setattr("benchmarks.qwen3_step._in_a_process", in_a_process)
    with pytest.raises(SystemExit, match="wrong gradients, not timed: offload"):
        main(["--tokens", "16", "32", "--out", str(tmp_path)])
    assert timed == [("True", 16), ("nested", 16), ("True", 32), ("nested", 32)]
    assert len(json.loads((tmp_path / "qwen3_step_gpu.json").read_text())["rows"]) == 4


def test_other_models_are_refused(tmp_path):
    dense = tmp_path / "dense.yaml"
    dense.write_text("model:\n  type: qwen3\nvocab_size: 260\n")
    with pytest.raises(SystemExit, match="model.type must be qwen3_moe here; the config has Qwen3Config"):
        main(["--config", str(dense), "--alone", "check"])


def test_no_rounds_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--rounds", "0"])
    assert "0 is not at least 1" in capsys.readouterr().err


def test_the_model_takes_96_gflop_a_token_at_65536():
    config = parse_config(LmRunConfig, ["--config_path", str(CONFIG)])
    assert model_flops(config, 65_536) == pytest.approx(96e9, rel=0.02)


def test_a_stack_of_weights_is_made_a_layer_at_a_time():
    stack = jax.ShapeDtypeStruct((16, 64, 128), jnp.bfloat16)
    made = random_parts([stack])[0]
    assert (made.shape, made.dtype) == (stack.shape, stack.dtype) and made.std() > 0.01
    assert not jnp.array_equal(made[0], made[1])
    # A GPU's compiler keeps the random bits, which are twice as large.
    bits = [one for one in equations_of(lambda: random_parts([stack])) if one.primitive.name == "random_bits"]
    assert [one.params["shape"] for one in bits] == [(64, 128)]


@pytest.fixture
def config():
    return parse_config(LmRunConfig, ["--config_path", str(CONFIG)])


def test_kernels_of_attention_are_compared_with_the_definition(config):
    found = differences(heads_of(config), 16)
    assert list(found) == ["plain", "documents", "window", "sinks"]
    for kernels in found.values():
        assert isinstance(kernels["blockwise"], float) and 0 < kernels["blockwise"] < 2e-2
        assert kernels["cudnn"] == "it runs on NVIDIA GPUs, and the program is for 'cpu'"


def test_a_wrong_kernel_of_attention_ends_the_benchmark(config, monkeypatch):
    wrong = Kernel(lambda query, *rest: BLOCKWISE.forward(1.1 * query, *rest), BLOCKWISE.backward)
    monkeypatch.setitem(BACKENDS, "blockwise", Backend(wrong))
    with pytest.raises(ArithmeticError, match=r"attention by blockwise, plain: off by 0\.\d+ of its norm"):
        differences(heads_of(config), 16)
