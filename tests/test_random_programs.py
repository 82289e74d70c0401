"""A sample of the random programs of `make attack`, and those that once failed."""

from collections.abc import Iterator

import jax
import pytest

from .random_programs.checking import RUNS, check
from .random_programs.entries import ENTRIES
from .random_programs.parts import PARTS
from .random_programs.programs import ENTRY_NAMES, Spec, draw
from .random_programs.transformations import TRANSFORMS

# JAX warns of what some programs do on purpose
pytestmark = pytest.mark.filterwarnings("ignore")
SMALL = range(24)
LARGE = range(1000, 1012)
FOUND = [
    Spec(
        seed=9952,
        entry="streamed",
        layers=3,
        parts=("mlp",),
        policy={"save_block_internals": ("b",), "save_carries": "offload"},
        transforms=("grad", "jvp", "jvp"),
    ),
    Spec(
        seed=3371,
        entry="bare",
        layers=3,
        parts=("custom_jvp",),
        policy="dots_with_no_batch_dims_saveable",
        transforms=("grad",),
        unroll=True,
        differentiated=("own",),
    ),
    Spec(
        seed=865,
        entry="pattern",
        layers=2,
        parts=("gate",),
        policy={"save_carries": True, "offload_block_internals": ("a",)},
        transforms=("vjp", "jacfwd"),
        unroll=True,
        outputs="none",
        differentiated=("own",),
    ),
    Spec(
        seed=1116,
        entry="streamed",
        layers=1,
        parts=("mlp",),
        transforms=("shard_map", "vjp"),
        reference="scan",
        unroll=True,
        outputs="none",
    ),
    Spec(
        seed=90,
        entry="bare",
        layers=2,
        parts=("tiled_inside", "buffer"),
        policy="recompute",
        transforms=("jacrev",),
        reference="scan",
        unroll=True,
        outputs="none",
        differentiated=("weights", "own"),
    ),
    Spec(
        seed=6,
        entry="streamed",
        layers=3,
        parts=("mlp", "flag"),
        policy="nested",
        transforms=("jacfwd",),
        run="twice",
        reference="scan",
        closure=True,
    ),
    Spec(
        seed=34,
        entry="visitor",
        layers=3,
        parts=("gate", "flag"),
        policy="dots_saveable",
        run="twice",
        reference="scan",
        outputs="none",
    ),
    Spec(
        seed=229,
        entry="visitor",
        layers=2,
        parts=("custom_vjp_with_another_value",),
        policy={"nested": True, "first_layers": 1},
        reference="scan",
        outputs="none",
    ),
    Spec(
        1,
        "bare",
        3,
        ("custom_vjp_with_another_value",),
        "nested",
        ("value_and_grad",),
        reference="scan",
    ),
    Spec(
        2,
        "until",
        6,
        ("edge",),
        "nested",
        ("grad", "vmap"),
        reference="scan",
        outputs="none",
    ),
    Spec(
        3,
        "until",
        6,
        ("edge",),
        "nested",
        ("grad", "grad"),
        reference="scan",
        outputs="none",
    ),
    Spec(
        1,
        "stacked_layers",
        3,
        ("rule_with_closure",),
        "nested",
        ("grad",),
        reference="scan",
        closure=True,
    ),
    Spec(
        seed=1,
        entry="bare",
        layers=4,
        parts=("tiled_inside", "mlp"),
        policy={"save_carries": False, "save_block_internals": ("a",)},
        transforms=("grad", "jvp", "vmap"),
        reference="scan",
        unroll=2,
        closure=True,
    ),
]


@pytest.fixture(autouse=True, scope="module")
def in_float64() -> Iterator[None]:
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def failures(specs: list[Spec]) -> list[str]:
    outcomes = [(spec, check(spec)) for spec in specs]
    return [f"{spec}: {outcome}" for spec, outcome in outcomes if outcome.is_failure]


@pytest.mark.parametrize("start", range(0, len(SMALL), 8))
def test_small_programs(start):
    assert not failures(
        [draw(seed, is_small=True) for seed in SMALL[start : start + 8]]
    )


@pytest.mark.parametrize("spec", FOUND, ids=str)
def test_programs_that_once_failed(spec):
    assert not failures([spec])


@pytest.mark.deep
@pytest.mark.parametrize("seed", LARGE)
def test_programs(seed):
    assert not failures([draw(seed)])


def test_the_seeds_of_a_day_have_every_feature():
    specs = [draw(seed) for seed in range(3000)]
    assert {name for spec in specs for name in spec.parts} == {*PARTS}
    assert {name for spec in specs for name in spec.transforms} == {*TRANSFORMS}
    assert {spec.entry for spec in specs} == {*ENTRIES} == {*ENTRY_NAMES}
    assert {spec.run for spec in specs} == {*RUNS}
