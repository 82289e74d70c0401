"""Runs with their layers in host memory that are killed in the middle of a step."""

import json

import pytest

from benchmarks.fault_cases import _CONFIG
from benchmarks.faults import main


@pytest.mark.deep
def test_a_killed_streamed_run_ends_like_an_uninterrupted_one(tmp_path, monkeypatch):
    config = _CONFIG.replace("num_steps: 150", "num_steps: 20")
    monkeypatch.setattr("benchmarks.fault_cases._CONFIG", config)
    path = main(["--kills", "1", "--streamed", "--out", str(tmp_path)])
    assert path.name == "faults_streamed.json"
    found = json.loads(path.read_text())
    assert found["kills"] >= 1 and found["lines"] >= 20 * found["runs"] and found["differing"] == []
