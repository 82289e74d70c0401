"""Tests of the memory that the benchmark recorded; `test_stack_time.py` compares its programs."""

import functools
import json

import pytest

from benchmarks.record import RESULTS
from benchmarks.residual_mlp import Sizes, variants
from stacked_remat import memory
from tests.recorded_on import ON_H200, ON_V5P, h200

GIB = 2**30


def measured(name, target, **sizes):
    fn, args = variants()[f"stacked_remat {name}"](Sizes(**sizes))
    return memory.report(fn, *args, target=target)


@functools.cache
def recorded(target):
    """The recorded rows, by name and inner width."""
    rows = json.loads((RESULTS / f"stack_memory_{target}.json").read_text())["rows"]
    return {(row["name"], row["inner"]): row for row in rows if "refused" not in row}


COMPILED = [
    *((ON_H200, name, 2_048) for name in ("True", "nested=7", "max_carries=6", "offload")),
    *((ON_H200, name, 16_384) for name in ("nested", "nested, 8 keep carries", "nested, 16 tiles")),
    *((ON_V5P, name, 2_048) for name in ("nested", "offload")),
    *((target, "nested + offload", 2_048) for target in (ON_H200, ON_V5P)),
]


@pytest.mark.parametrize(
    ("target", "name", "inner"),
    [pytest.param(*target.values, *others, marks=target.marks) for target, *others in COMPILED],
)
def test_memory_is_within_a_tenth_of_what_the_benchmark_recorded(target, name, inner):
    found, before = measured(name, target, inner=inner), recorded(target)[f"stacked_remat {name}", inner]
    assert found.temporaries <= 1.1 * before["temporaries"]
    assert found.host.temporaries <= 1.1 * before["host_temporaries"]
    assert found.flops.matmul <= 1.01 * before["matmul_flops"]


@pytest.mark.parametrize(
    ("target", "name", "inner", "device", "host"),
    [
        ("h200", "nested", 2_048, 3.7, 0),
        ("h200", "nested", 16_384, 7.3, 0),
        ("h200", "nested=7", 2_048, 4.4, 0),
        ("h200", "nested=7", 16_384, 8.0, 0),
        ("h200", "nested, 4 tiles", 16_384, 4.63, 0),
        ("h200", "nested, 16 tiles", 16_384, 3.78, 0),
        ("h200", "offload, 16 tiles", 16_384, 1.28, 12.0),
        ("h200", "offload", 2_048, 1.1, 12.0),
        ("h200", "offload", 16_384, 4.9, 12.0),
        ("h200", "nested + offload", 2_048, 2.6, 2.1),
        ("v5p", "nested", 2_048, 3.7, 0),
        ("v5p", "nested", 16_384, 5.5, 0),
        ("v5p", "nested + offload", 2_048, 2.6, 2.1),
    ],
)
def test_recorded_memory_is_within_limits(target, name, inner, device, host):
    row = recorded(target)[f"stacked_remat {name}", inner]
    assert row["temporaries"] <= device * GIB
    assert row["host_temporaries"] <= host * GIB


@h200
def test_memory_of_nnx_is_what_the_benchmark_recorded():
    fn, args = variants()["stacked_remat.nnx nested"](Sizes())
    found = memory.report(fn, *args, target="h200").temporaries
    assert found <= 1.1 * recorded("h200")["stacked_remat.nnx nested", 2_048]["temporaries"]


@h200
def test_a_prime_number_of_layers_costs_no_more():
    prime = measured("nested", "h200", layers=47).temporaries
    assert prime == pytest.approx(recorded("h200")["stacked_remat nested", 2_048]["temporaries"], rel=0.03)


@h200
def test_frozen_weights_get_no_gradient_buffer():
    assert measured("nested, frozen weights", "h200", inner=16_384).total <= 14 * GIB
