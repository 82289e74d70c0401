"""Tests of the memory of layers that alternate, which the benchmark recorded."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import pytest

from benchmarks.pattern import FULL, KINDS, main
from stacked_remat import (
    ScanCheckpointPolicy,
    Stacked,
    StackedPattern,
    checkpoint_name,
    memory,
)
from tests.recorded_on import ON_H200, ON_V5P, on_both, recorded

MIXED = [kinds for kinds in KINDS if len(kinds.shares) > 1]


def of(target, name):
    return recorded(f"pattern_memory_{target}", "name")[(name,)]


@pytest.mark.parametrize("remat", [True, "nested", "offload"])
@pytest.mark.parametrize("kinds", MIXED, ids=lambda kinds: kinds.name)
def test_kinds_take_the_memory_of_the_widest_and_the_arithmetic_of_all(kinds, remat):
    carry = 2 * FULL.tokens * FULL.width
    for target, times, more in (("h200", 1, 0.01), ("v5p", 1.05, 0)):
        found, alone = (
            of(target, f"StackedPattern, {one.name}, {remat}")
            for one in (kinds, KINDS[0])
        )
        assert found["flops_exact"]
        assert found["temporaries"] <= times * alone["temporaries"] + more * carry
        if set(kinds.shares) == {1}:
            assert found["matmul_flops"] == alone["matmul_flops"]
        else:
            assert found["matmul_flops"] < alone["matmul_flops"]


@pytest.mark.parametrize(
    ("target", "remat"), on_both(("True", "nested", "offload"), ("nested",))
)
def test_memory_is_within_a_twentieth_of_what_the_benchmark_recorded(target, remat):
    (row,) = main.rows(FULL, target, f"{KINDS[3].name}, {remat}")
    assert row["temporaries"] <= 1.05 * of(target, row["name"])["temporaries"]


@pytest.mark.parametrize("target", [ON_H200, ON_V5P])
def test_names_that_are_offloaded_leave_the_device(target):
    """With layers of two kinds: near recomputation, and far from what is saved on the
    device.
    """

    class Block(eqx.Module):
        weight: jax.Array

        def __call__(self, x):
            return x + checkpoint_name(jnp.tanh(x @ self.weight), "act") @ self.weight.T

    stack = Stacked(Block(jnp.zeros((8, 256, 256))), hax.Axis("layers", 8))
    blocks = StackedPattern(
        {"a": stack, "b": stack}, ("a", "b") * 8, hax.Axis("layers", 16)
    )

    def temporaries(remat):
        def loss(blocks, x):
            return blocks.fold(x, remat=remat).sum()

        return memory.report(
            jax.grad(loss), blocks, jnp.zeros((4096, 256)), target=target
        ).temporaries

    recomputed, saved = (
        temporaries(True),
        temporaries(ScanCheckpointPolicy(save_block_internals=["act"])),
    )
    offloaded = temporaries(ScanCheckpointPolicy(offload_block_internals=["act"]))
    both = temporaries(
        ScanCheckpointPolicy(save_carries="offload", offload_block_internals=["act"])
    )
    assert offloaded <= 1.1 * recomputed < saved and both <= 0.4 * recomputed
