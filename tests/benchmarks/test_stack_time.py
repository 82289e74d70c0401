"""The timing benchmark runs at any size and refuses to time what is wrong."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from benchmarks.residual_mlp import Sizes, variants
from benchmarks.stack_time import check_gradients, compile_variant, main

SIZES = Sizes(layers=4, tokens=32, width=16, inner=24, dtype="float32")
TINY = ["--layers=4", "--tokens=32", "--width=16", "--inner=24", "--dtype=float32", "--rounds=2"]


@pytest.mark.parametrize("variant", list(variants()), ids=lambda variant: variant.name)
def test_every_variant_gives_the_same_gradients(variant, standard_promotion):
    pytest.importorskip(variant.needs)
    if "frozen" in variant.name:
        pytest.skip("has no gradient of the weights")
    check_gradients(compile_variant(variant, SIZES), SIZES)


def test_a_wrong_gradient_is_not_timed():
    (variant,) = (variant for variant in variants() if variant.name == "stacked_remat True")
    right = compile_variant(variant, SIZES)
    wrong = dataclasses.replace(right, run=lambda: jax.tree.map(lambda leaf: 1.01 * leaf, right.run()))
    with pytest.raises(ArithmeticError, match="stacked_remat True: the gradient of .* is off by 0.01"):
        check_gradients(wrong, SIZES)


def test_it_writes_json_with_ratios_to_the_baselines(tmp_path, standard_promotion):
    path = main([*TINY, "--out", str(tmp_path), "--only", "haliax True|stacked_remat (True|nested)$"])
    assert path == tmp_path / "stack_time_cpu_24.json"
    rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    assert list(rows) == ["haliax True", "stacked_remat True", "stacked_remat nested"]
    assert rows["haliax True"]["to_baselines"]["haliax True"] == 1.0
    nested = rows["stacked_remat nested"]
    ratios = np.divide(nested["seconds"], rows["stacked_remat True"]["seconds"])
    np.testing.assert_allclose(nested["to_baselines"]["stacked_remat True"], np.median(ratios), rtol=0.05)
    assert len(nested["seconds"]) == 2 and nested["announced_bytes"] > 0
