"""Tests of the benchmark of a long context on the CPU."""

import json

import pytest

from benchmarks.long_context_cpu import main


@pytest.mark.slow
def test_a_step_of_65536_tokens_runs_and_nesting_takes_less_memory(tmp_path):
    path = main(["--out", str(tmp_path), "--overrides", "--model.num_layers", "6"])
    plain, nested = json.loads(path.read_text())["rows"]
    assert plain["tokens"] == nested["tokens"] == 65_536
    assert plain["loss"] == pytest.approx(nested["loss"], rel=1e-5)
    # 6 carries of 128 MiB against 3.
    assert nested["peak_resident_bytes"] < plain["peak_resident_bytes"] - 250 * 2**20


@pytest.mark.deep
def test_the_benchmark_runs_small(tmp_path):
    small = ["--data.seq_len", "128", "--model.num_layers", "2", "--model.hidden_dim", "32"]
    path = main(["--out", str(tmp_path), "--policies", "nested", "--overrides", *small])
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["policy"], row["layers"], row["tokens"]) == ("nested", 2, 128)
    assert row["loss"] > 0 and row["grad_norm"] > 0 and row["peak_resident_bytes"] > 2**27
