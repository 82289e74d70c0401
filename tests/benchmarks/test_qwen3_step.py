"""Tests of the benchmark of training steps, at small sizes on the CPU."""

import argparse
import json

import jax
import jax.numpy as jnp
import pytest

import benchmarks.qwen3_step as qwen3_step
from benchmarks.attention_layer import CASES, differences
from benchmarks.qwen3_context import CONFIG
from benchmarks.qwen3_step import JOBS, heads_of, main, model_flops, random_parts
from models.train_lm import LmRunConfig
from stacked_remat.ops._attention_backends import BACKENDS
from stacked_remat.ops._attention_blockwise import BLOCKWISE
from stacked_remat.ops._attention_rule import Kernel
from stacked_remat.ops._backends import Backend
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
def test_every_policy_has_a_row_with_its_own_peak(tmp_path, monkeypatch, standard_promotion):
    apart = qwen3_step._in_a_process

    def run(options, job, policies, tokens, seconds):
        """The first job in a process of its own, the others here."""
        if job == "device":
            return apart(options, job, policies, tokens, seconds)
        own = argparse.Namespace(**vars(options) | {"policies": policies, "tokens": tokens})
        config = parse_config(LmRunConfig, ["--config_path", str(options.config), *options.overrides])
        return json.loads(json.dumps([*JOBS[job](config, own)]))

    monkeypatch.setattr(qwen3_step, "_in_a_process", run)
    path = main(
        [
            *TINY,
            "--tokens",
            "16",
            "--layers",
            "16",
            "--policies",
            "nested",
            "--profile",
            "--out",
            str(tmp_path),
            *SMALL,
        ]
    )
    assert path is not None and path == tmp_path / "qwen3_step_cpu.json"
    found = json.loads(path.read_text())
    of = {job: [row for row in found["rows"] if row["job"] == job] for job in JOBS}
    (row, *profiled), (gradients,) = of["step"], of["gradients"]
    for one in ("kind", "longest"):
        assert sum(row["profiled_seconds"] for row in profiled if one in row) > 0
    assert (row["tokens"], row["policy"]) == (16, "nested")
    assert (gradients["policy"], gradients["off_first"], found["offload_check"]) == ("nested", 0.0, "passed")
    assert gradients["off"] < 1e-5  # in float32 too
    compared = [row["kernel"] for row in of["kernels"] if row["case"] == "sinks"]
    assert compared == ["cudnn", "tokamax", "splash", "blockwise"]
    timed = [row for row in of["attention"] if "milliseconds" in row]
    assert [row["case"] for row in timed] == list(CASES)
    assert all(row["kernel"] == "blockwise" and row["milliseconds"] > 0 for row in timed)
    assert {row["backend"] for row in of["experts"]} == {"block", "dense"}
    assert row["backends"] == {"attention": "blockwise", "experts": "block"}
    assert row["seconds"] > 0 and row["peak_bytes"] > 2**26 and row["utilisation_of_matmul_peak"] > 0


@pytest.fixture
def jobs(monkeypatch):
    """What jobs find, by name, in place of running them; and the steps that are timed."""
    found = {
        "device": [{"device": "gpu", "matmul_peak": 1e12, "offload_check": "passed"}],
        "kernels": [{"case": "plain", "kernel": "cudnn", "off": 1e-3, "agrees": True}],
        "gradients": [{"policy": name, "off": off} for name, off in (("True", 0.030), ("nested", 0.031))],
    }
    timed = []

    def in_a_process(options, job, policies, tokens, seconds):
        if job == "step":
            timed.append((*policies, *tokens))
            return [{"seconds": 1.0}]
        return [dict(row) for row in found.get(job, [])]

    monkeypatch.setattr("benchmarks.qwen3_step._in_a_process", in_a_process)
    return found, timed


def test_a_policy_with_wrong_gradients_is_named_and_not_timed(tmp_path, jobs):
    found, timed = jobs
    found["gradients"].append({"policy": "offload", "off": 0.5})
    with pytest.raises(SystemExit, match="differ or are missing, not timed: offload"):
        main(["--tokens", "16", "32", "--out", str(tmp_path)])
    assert timed == [("True", 16), ("nested", 16), ("True", 32), ("nested", 32)]
    rows = json.loads((tmp_path / "qwen3_step_gpu.json").read_text())["rows"]
    assert len([row for row in rows if row["job"] == "step"]) == 4


def test_a_wrong_kernel_of_attention_is_named_and_what_was_found_is_kept(tmp_path, jobs):
    found, _ = jobs
    found["kernels"].append({"case": "window", "kernel": "tokamax", "off": 10.5, "agrees": False})
    with pytest.raises(SystemExit, match="attention by tokamax, window: off by 10 of its norm"):
        main(["--tokens", "16", "--policies", "nested", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "qwen3_step_gpu.json").read_text())["rows"]
    assert len([row for row in rows if row["job"] == "kernels"]) == 2


def test_jobs_that_time_is_not_left_for_end_with_what_they_have_found(tmp_path):
    config = ["--config", str(CONFIG.with_name("qwen3_moe_65k_cpu.yaml")), "--out", str(tmp_path)]
    with pytest.raises(SystemExit, match="nothing runs here: no time was left"):
        main([*config, "--minutes", "0"])


def test_other_models_are_refused(tmp_path):
    dense = tmp_path / "dense.yaml"
    dense.write_text("model:\n  type: qwen3\nvocab_size: 260\n")
    with pytest.raises(SystemExit, match="model.type must be qwen3_moe here; the config has Qwen3Config"):
        main(["--config", str(dense), "--alone", "device"])


def test_policies_are_those_of_the_model(tmp_path, jobs):
    _, timed = jobs
    main(["--jobs", "step", "--tokens", "8", "--policies", "attention_saved", "--out", str(tmp_path)])
    assert timed == [("attention_saved", 8)]
    with pytest.raises(SystemExit, match="'fast' is none of False, True, nested"):
        main(["--policies", "fast"])


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


def test_kernels_of_attention_are_compared_with_the_definition(config, monkeypatch):
    def found():
        return {(row["case"], row["kernel"]): row for row in differences(heads_of(config), 16)}

    rows = found()
    assert list(dict.fromkeys(case for case, _ in rows)) == ["plain", "documents", "window", "sinks"]
    for (_, kernel), row in rows.items():
        if kernel == "blockwise":
            assert 0 < row["off"] < 2e-2 and row["agrees"]
        elif kernel == "cudnn":
            assert row["refused"] == "it runs on NVIDIA GPUs, and the program is for 'cpu'"
    monkeypatch.setattr("benchmarks.attention_layer.CASES", ("plain",))
    wrong = Kernel(lambda query, *rest: BLOCKWISE.forward(1.1 * query, *rest), BLOCKWISE.backward)
    monkeypatch.setitem(BACKENDS, "blockwise", Backend(wrong))
    assert not any(row["agrees"] for row in found().values() if "off" in row)
