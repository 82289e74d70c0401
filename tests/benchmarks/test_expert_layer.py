"""The experts of one layer: that backends can be timed."""

import json

from benchmarks.expert_layer import main

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
