"""The benchmark for a GPU also runs, small, where there is none."""

import json

import pytest

from benchmarks.qwen3_context import CONFIG
from benchmarks.qwen3_step import main, model_flops
from models.train_lm import TrainLmConfig
from stacked_remat.training import parse_config

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
SMALL = ["--overrides", "--model.num_layers", "2", "--model.hidden_dim", "16", "--vocab_size", "32"]


@pytest.mark.deep
def test_every_policy_has_a_row_with_its_own_peak(tmp_path):
    path = main([*TINY, "--tokens", "16", "--policies", "nested", "--out", str(tmp_path), *SMALL])
    assert path is not None and path == tmp_path / "qwen3_step_cpu.json"
    found = json.loads(path.read_text())
    (row,) = found["rows"]
    assert (row["tokens"], row["policy"]) == (16, "nested")
    assert found["gradient_differences"] == {"nested": 0.0}
    assert row["seconds"] > 0 and row["peak_bytes"] > 2**26 and row["utilisation_of_matmul_peak"] > 0


def test_a_model_that_it_does_not_know_is_refused(tmp_path):
    dense = tmp_path / "dense.yaml"
    dense.write_text("model:\n  type: qwen3\nvocab_size: 32\n")
    with pytest.raises(SystemExit, match="model.type must be qwen3_moe here; the config has Qwen3Config"):
        main(["--config", str(dense), "--alone", "check"])


def test_no_rounds_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--rounds", "0"])
    assert "0 is not at least 1" in capsys.readouterr().err


def test_the_model_takes_96_gflop_a_token_at_65536():
    config = parse_config(TrainLmConfig, ["--config_path", str(CONFIG)])
    assert model_flops(config, 65_536) == pytest.approx(96e9, rel=0.02)
