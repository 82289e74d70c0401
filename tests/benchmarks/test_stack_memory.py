"""Tests of the memory that the benchmark recorded; `test_stack_time.py` compares its
programs.
"""

import pytest

from benchmarks.residual_mlp import Sizes, hessian_products, variants
from stacked_remat import memory
from tests.recorded_on import ON_H200, ON_V5P, recorded

GIB = 2**30
COMPILED = [
    *(
        (ON_H200, f" {name}", 2_048)
        for name in ("True", "nested=7", "max_carries=6", "offload")
    ),
    *((ON_H200, f" {name}", 16_384) for name in ("nested", "nested, 16 tiles")),
    (ON_V5P, " nested", 16_384),
    (ON_V5P, " offload", 2_048),
    *((target, " nested + offload", 2_048) for target in (ON_H200, ON_V5P)),
    (ON_H200, " nested, frozen weights", 16_384),
    (ON_H200, ".nnx nested", 2_048),
    (ON_H200, " nested, Hessian product", 16_384),
]


@pytest.mark.parametrize(
    ("target", "name", "inner"),
    [
        pytest.param(*target.values, *others, marks=target.marks)
        for target, *others in COMPILED
    ],
)
def test_memory_is_within_a_tenth_of_what_the_benchmark_recorded(target, name, inner):
    fn, args = (variants() | hessian_products())[f"stacked_remat{name}"](
        Sizes(inner=inner)
    )
    found = memory.report(fn, *args, target=target)
    before = recorded(f"stack_memory_{target}", "name", "inner")[
        f"stacked_remat{name}", inner
    ]
    assert found.temporaries <= 1.1 * before["temporaries"]
    assert found.host.temporaries <= 1.1 * before["host_temporaries"]
    assert found.flops.matmul <= 1.01 * before["matmul_flops"]


@pytest.mark.parametrize(
    ("target", "name", "inner", "device", "host"),
    [
        ("h200", "nested", 2_048, 3.7, 0),
        ("h200", "nested", 16_384, 7.3, 0),
        ("h200", "nested, 16 tiles", 16_384, 3.78, 0),
        ("h200", "offload, 16 tiles", 16_384, 1.28, 12.0),
        ("h200", "offload", 16_384, 4.9, 12.0),
        ("h200", "nested + offload", 2_048, 2.6, 2.1),
        ("v5p", "nested", 16_384, 5.5, 0),
        ("h200", "nested, Hessian product", 2_048, 7.18, 0),  # 2.2 times the gradient
        ("h200", "nested, Hessian product", 16_384, 15.1, 0),
    ],
)
def test_recorded_memory_is_within_limits(target, name, inner, device, host):
    row = recorded(f"stack_memory_{target}", "name", "inner")[
        f"stacked_remat {name}", inner
    ]
    assert row["temporaries"] <= device * GIB
    assert row["host_temporaries"] <= host * GIB
