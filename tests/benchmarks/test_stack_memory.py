"""The benchmark runs at any size, and the memory it claims for the large one does not regress."""

import importlib.util
import json

import jax
import pytest

from benchmarks.residual_mlp import Sizes, Variant, variants
from benchmarks.stack_memory import main
from stacked_remat import memory

TINY = ["--layers", "8", "--tokens", "64", "--width", "16", "--inner", "16"]
NO_CUDA = not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
GIB = 2**30


@pytest.mark.parametrize("variant", list(variants()), ids=lambda variant: variant.name)
def test_every_variant_is_the_same_program(variant, standard_promotion):
    """Forward two products a layer, backward four, and at most four more for what is recomputed."""
    pytest.importorskip(variant.needs)
    fn, args = variant.build(Sizes(layers=8, tokens=64, width=16, inner=16))
    layer = 2 * 64 * 16 * 16
    found = memory.count_flops(jax.make_jaxpr(fn)(*args))
    assert found.exact
    frozen = "frozen" in variant.name
    least = 8 * (4 if frozen else 6) * layer
    assert least <= found.matmul <= least + 8 * 4 * layer
    expected = {"lax.scan": 6, "haliax True": 7, "stacked_remat False": 6, "stacked_remat True": 7}
    assert found.matmul == expected.get(variant.name, found.matmul / (8 * layer)) * 8 * layer
    sizes = sorted(leaf.size for leaf in jax.tree.leaves(args))
    assert sizes == [64 * 16, 8 * 16 * 16, 8 * 16 * 16]


def test_it_writes_json_and_a_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = main([*TINY, "--out", str(tmp_path), "--only", "^lax.scan|stacked_remat True"])
    assert path == tmp_path / "stack_memory_local.json"
    rows = json.loads(path.read_text())["rows"]
    assert [row["name"] for row in rows] == ["lax.scan", "lax.scan + jax.checkpoint", "stacked_remat True"]
    assert rows[0]["temporaries"] > rows[1]["temporaries"] > 0
    assert (tmp_path / "stack_memory_local_16.png").exists()
    assert "stacked_remat True" in capsys.readouterr().out


def test_a_peer_that_is_not_installed_is_named():
    missing = Variant("a peer", lambda sizes: (lambda: None, ()), "no_such_peer.scan").missing()
    assert missing == "a peer is left out: pip install no_such_peer"


def test_a_choice_that_leaves_nothing(tmp_path):
    with pytest.raises(SystemExit, match="leaves nothing"):
        main([*TINY, "--out", str(tmp_path), "--only", "no such thing"])


@pytest.mark.skipif(NO_CUDA, reason="JAX's CUDA plugin is not installed")
@pytest.mark.parametrize(
    ("name", "inner", "gib"),
    [
        ("True", 2_048, 12.8),
        ("nested", 2_048, 3.3),
        ("nested=7", 2_048, 3.8),
        ("offload", 2_048, 1.05),
        ("nested", 16_384, 6.9),
        ("nested=7", 16_384, 7.4),
    ],
)
def test_temporaries_on_an_h200_are_within_a_tenth_of_what_was_measured(name, inner, gib):
    (variant,) = (variant for variant in variants() if variant.name == f"stacked_remat {name}")
    fn, args = variant.build(Sizes(inner=inner))
    assert memory.report(fn, *args, target="h200").temporaries <= 1.1 * gib * GIB


@pytest.mark.skipif(NO_CUDA, reason="JAX's CUDA plugin is not installed")
def test_frozen_weights_get_no_gradient_buffer():
    (variant,) = (variant for variant in variants() if "frozen" in variant.name)
    fn, args = variant.build(Sizes(inner=16_384))
    assert memory.report(fn, *args, target="h200").total <= 14 * GIB
