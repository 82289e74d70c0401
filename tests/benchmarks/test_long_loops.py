"""Tests of the benchmark of long loops."""

import json

import jax

from benchmarks.long_loops import VARIANTS, cases, main


def test_gradients_agree_and_every_variant_of_every_case_has_a_row(tmp_path):
    with jax.numpy_dtype_promotion("standard"):
        path = main(
            ["--steps", "30", "--size", "3", "--leaves", "4", "--rounds", "1", "--out", str(tmp_path)]
        )
    found = json.loads(path.read_text())
    every = {(case.name, name) for case in cases(30, 3, 4) for name in VARIANTS}
    assert {(row["case"], row["name"]) for row in found["rows"]} == every
    assert len(found["rows"]) == len(every) and "--steps 30" in found["command"]
    assert all(row["milliseconds"] >= 0 < row["temporary_kib"] for row in found["rows"])
