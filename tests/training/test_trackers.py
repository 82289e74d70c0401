import json

import jax.numpy as jnp

from stacked_remat.training import JsonLinesTracker


def test_lines_hold_numbers_arrays_and_null_for_what_is_not_finite(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tracker = JsonLinesTracker(path)
    tracker.log(0, {"loss": jnp.float32(1.5), "per_layer": jnp.array([1.0, 2.0]), "speed": float("nan")})
    on_disk = path.read_text()  # before the tracker is closed
    tracker.log(3, {"loss": 0.5, "tokens": 7})
    tracker.close()
    assert json.loads(on_disk) == {"step": 0, "loss": 1.5, "per_layer": [1.0, 2.0], "speed": None}
    assert json.loads(path.read_text().splitlines()[1]) == {"step": 3, "loss": 0.5, "tokens": 7}


def test_lines_are_added_to_those_that_are_there(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in range(2):
        tracker = JsonLinesTracker(path)
        tracker.log(step, {})
        tracker.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1]
