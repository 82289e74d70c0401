"""Tests of the benchmark of time at small sizes: gradients are compared, and wrong ones
are not timed.
"""

import json
import re

import jax
import numpy as np
import pytest

import benchmarks.stack_time as stack_time
from benchmarks.stack_time import main

TINY = ["--layers=4", "--tokens=32", "--width=16", "--inner=24", "--dtype=float32"]


def rows_of(path):
    return {row["name"]: row for row in json.loads(path.read_text())["rows"]}


@pytest.mark.deep
def test_every_variant_gives_the_same_gradients(tmp_path, standard_promotion):
    rows = rows_of(main([*TINY, "--rounds=2", "--out", str(tmp_path)]))
    assert len(rows) >= 20 and not any("refused" in row for row in rows.values())
    assert rows["haliax True"]["to_baselines"]["haliax True"] == 1.0
    nested = rows["stacked_remat nested"]
    ratios = np.divide(nested["seconds"], rows["stacked_remat True"]["seconds"])
    np.testing.assert_allclose(
        nested["to_baselines"]["stacked_remat True"], np.median(ratios), rtol=0.05
    )
    assert len(nested["seconds"]) == 2


def _wrong(right):
    return jax.tree.map(lambda leaf: 1.01 * leaf, right())


def _too_large(right):
    raise jax.errors.JaxRuntimeError(
        "RESOURCE_EXHAUSTED: Out of memory\nwhile trying to allocate"
    )


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (_wrong, "stacked_remat True.*: off by 0.01 of its norm"),
        (_too_large, "RESOURCE_EXHAUSTED"),
    ],
)
def test_a_variant_that_is_wrong_or_does_not_fit_is_not_timed(
    run, reason, tmp_path, monkeypatch
):
    compiled = stack_time.compiled

    def broken(name, sizes):
        right = compiled(name, sizes)
        return (lambda: run(right)) if name == "stacked_remat True" else right

    monkeypatch.setattr(stack_time, "compiled", broken)
    arguments = [
        *TINY,
        "--out",
        str(tmp_path),
        "--only",
        "stacked_remat (True|nested)$",
        "--rounds",
        "1",
    ]
    if run is _wrong:
        with pytest.raises(
            SystemExit, match="wrong gradients, not timed: stacked_remat True"
        ):
            main(arguments)
    else:
        main(arguments)
    found = rows_of(tmp_path / "stack_time_cpu_24.json")
    assert [name for name, row in found.items() if "seconds" in row] == [
        "stacked_remat nested"
    ]
    assert re.match(reason, found["stacked_remat True"]["refused"])
