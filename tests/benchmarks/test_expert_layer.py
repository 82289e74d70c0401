"""The experts of one layer: what the compiled program moves, and that backends can be timed."""

import json

import jax

from benchmarks.expert_layer import main, moved_bytes
from benchmarks.record import RESULTS
from tests.recorded_on import h200

SMALL = ["--tokens", "64", "--embed", "16", "--inner", "8", "--experts", "4", "--chosen", "2"]


def test_a_small_layer_is_timed_on_this_device(tmp_path):
    path = main(["--time", "--rounds", "2", "--out", str(tmp_path), *SMALL])
    rows = json.loads(path.read_text())["rows"]
    assert [(row["backend"], row["program"]) for row in rows[-2:]] == [
        ("block", "trained"),
        ("dense", "trained"),
    ]
    assert all(row["median_seconds"] > 0 for row in rows)
    assert rows[-1]["to_dense"] == 1


def test_operations_in_loops_count_their_trips_and_slices_what_they_read():
    def run(rows, x):
        return jax.lax.scan(lambda total, row: (total + row, None), x, rows)[0]

    shapes = jax.ShapeDtypeStruct((50, 1024), "float32"), jax.ShapeDtypeStruct((1024,), "float32")
    moved = moved_bytes(jax.jit(run).lower(*shapes).compile().as_text() or "")
    once = 50 * 3 * 1024 * 4  # reads a row and the total, and writes the total
    assert once <= moved < 1.2 * once


def recorded():
    return {
        row["program"]: row
        for row in json.loads((RESULTS / "expert_layer_h200.json").read_text())["rows"]
        if row["backend"] == "triton"
    }


@h200
def test_what_is_moved_is_recorded(tmp_path):
    path = main(["--target", "h200", "--backends", "triton", "--out", str(tmp_path)])
    for row in json.loads(path.read_text())["rows"]:
        assert row["moved"] <= 1.02 * recorded()[row["program"]]["moved"]
