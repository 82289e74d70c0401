"""Tests of the benchmark of time at small sizes: wrong gradients are not timed."""

import dataclasses
import functools
import json
import re

import jax
import numpy as np
import pytest

from benchmarks.residual_mlp import Sizes, variants
from benchmarks.stack_time import Compiled, check_gradients, compile_variant, expected_gradients, main

SIZES = Sizes(layers=4, tokens=32, width=16, inner=24, dtype="float32")
VARIANTS = list(variants())
TINY = ["--layers=4", "--tokens=32", "--width=16", "--inner=24", "--dtype=float32", "--rounds=2"]


_compiled = functools.cache(compile_variant)


@pytest.fixture(scope="module", autouse=True)
def each_variant_is_compiled_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.stack_time.compile_variant", compiled_once)
        yield
    _compiled.cache_clear()


def compiled_once(variant, sizes):
    (same,) = (one for one in VARIANTS if one.name == variant.name)
    return dataclasses.replace(_compiled(same, sizes), seconds=[])


@pytest.mark.deep
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_every_variant_gives_the_same_gradients(variant, standard_promotion):
    pytest.importorskip(variant.needs)
    if "frozen" in variant.name:
        pytest.skip("has no gradient of the weights")
    check_gradients(compiled_once(variant, SIZES), expected_gradients(SIZES), SIZES)


def _wrong(right: Compiled):
    return jax.tree.map(lambda leaf: 1.01 * leaf, right.run())


def _too_large(right: Compiled):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nwhile trying to allocate")


@pytest.mark.parametrize(
    ("run", "reason"),
    [(_wrong, "stacked_remat True: the gradient of .* is off by 0.01"), (_too_large, "RESOURCE_EXHAUSTED")],
)
def test_a_variant_that_is_wrong_or_does_not_fit_is_not_timed(run, reason, tmp_path, monkeypatch):
    def compiled(variant, sizes):
        right = compiled_once(variant, sizes)
        bad = variant.name == "stacked_remat True"
        return dataclasses.replace(right, run=lambda: run(right)) if bad else right

    monkeypatch.setattr("benchmarks.stack_time.compile_variant", compiled)
    arguments = [*TINY, "--out", str(tmp_path), "--only", "stacked_remat (True|nested)$"]
    if run is _wrong:
        with pytest.raises(SystemExit, match="wrong gradients, not timed: stacked_remat True"):
            main(arguments)
    else:
        main(arguments)
    found = json.loads((tmp_path / "stack_time_cpu_24.json").read_text())
    assert [row["name"] for row in found["rows"]] == ["stacked_remat nested"]
    assert re.match(reason, found["refused"]["stacked_remat True"])


def test_tracing_and_compiling_are_timed_beside_the_checkpointed_scan(tmp_path, standard_promotion):
    only = "stacked_remat nested$|lax.scan . jax.checkpoint"
    path = main([*TINY, "--trace", "--out", str(tmp_path), "--only", only])
    rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    assert rows.keys() == {"stacked_remat nested", "lax.scan + jax.checkpoint"}
    assert rows["lax.scan + jax.checkpoint"]["trace_ratio"] == 1
    for row in rows.values():
        assert row["trace_seconds"] > 0 and row["compile_seconds"] > 0


def test_an_interrupted_run_leaves_the_rounds_before(tmp_path, monkeypatch):
    timed, calls = Compiled.timed, []

    def cut_short(self):
        calls.append(self.name)
        if len(calls) > 3:  # in the second round
            raise KeyboardInterrupt
        timed(self)

    monkeypatch.setattr(Compiled, "timed", cut_short)
    with pytest.raises(KeyboardInterrupt):
        main([*TINY, "--out", str(tmp_path), "--only", "stacked_remat (True|nested)$"])
    rows = json.loads((tmp_path / "stack_time_cpu_24.json").read_text())["rows"]
    assert [len(row["seconds"]) for row in rows] == [1, 1]


def test_variants_share_their_weights():
    sizes = dataclasses.replace(SIZES, inner=25)  # of no other test
    named = {variant.name: variant for variant in variants()}
    ready = [compiled_once(named[name], sizes) for name in ("lax.scan", "haliax True", "stacked_remat True")]
    assert len(ready) == 3
    assert sum(array.size == 4 * 16 * 25 for array in jax.live_arrays()) == 2


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
