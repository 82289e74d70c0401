"""Devices wait for no weights that layers gather, in the programs of the benchmark."""

import itertools

import pytest

from benchmarks.gathered_ahead import (
    EXCHANGES,
    POLICIES,
    SIZES,
    collectives,
    compiled,
    of_weights,
)
from tests.recorded_on import ON_H200, on_both, recorded

# Of a layer, in bfloat16
LAYER = 2 * SIZES.width * SIZES.inner * 2


@pytest.mark.parametrize(("target", "policy"), on_both(POLICIES, ("nested", "fused")))
def test_collectives_of_weights_and_gradients_run_beside_products(target, policy):
    found, text = compiled(target, policy)
    in_loops = of_weights(text)
    kinds = {one.kind for one in in_loops}
    assert "all-gather" in kinds and "all-reduce" not in kinds
    assert all(one.products for one in in_loops), in_loops
    # A gathered layer more, and the part of one that a device has
    rows = recorded(f"gathered_ahead_{target}_8", "policy", "weights gathered")
    of_layer = rows[policy, "by the layer"]["temporaries"]
    most = of_layer + LAYER * 9 / 8
    if target == "v5p":
        # And buffers of products that go round, and of what SparseCores gather
        most = 1.02 * rows[policy, "ahead"]["temporaries"]
    assert found.memory_analysis().temp_size_in_bytes <= most


@pytest.mark.parametrize("target", [ON_H200])
def test_nor_do_layers_of_two_kinds_wait(target):
    found, text = compiled(target, "nested", kinds=2)
    in_loops = of_weights(text)
    assert in_loops and all(one.products for one in in_loops), in_loops
    # A gathered layer of each kind
    rows = recorded(f"gathered_ahead_kinds_{target}_8", "policy", "weights gathered")
    of_layer = rows["nested", "by the layer"]["temporaries"]
    most = of_layer + 2 * LAYER * 9 / 8
    assert found.memory_analysis().temp_size_in_bytes <= most


@pytest.mark.parametrize("policy", ["offload", "fused"])
@pytest.mark.parametrize(
    ("exchange", "place"),
    [*itertools.product(EXCHANGES, [""]), ("all_to_all", "first_")],
)
@pytest.mark.parametrize("target", [ON_H200])
def test_nor_do_layers_with_an_exchange_of_experts(target, policy, exchange, place):
    """At the end of a layer, or at its beginning."""
    first = bool(place)
    found, text = compiled(target, policy, experts=exchange, experts_first=first)
    in_loops = of_weights(text)
    assert in_loops and all(one.products for one in in_loops), in_loops
    columns = "experts", "policy", "weights gathered"
    rows = recorded(f"gathered_ahead_experts_{place}{target}_8", *columns)
    of_layer = rows[exchange, policy, "by the layer"]["temporaries"]
    most = of_layer + LAYER * 9 / 8
    assert found.memory_analysis().temp_size_in_bytes <= most


PROGRAM = """
%fused (a: bf16[8,8]) -> bf16[8,8] {
  ROOT %dot.1 = bf16[8,8]{1,0} dot(%a, %a), lhs_contracting_dims={1}
}

%gathers (p: bf16[1,8]) -> bf16[8,8] {
  ROOT %all-gather.3 = bf16[8,8]{1,0} all-gather(%p), dimensions={0}
}

%body (state: (s32[], bf16[8,8])) -> (s32[], bf16[8,8]) {
  %start = (bf16[1,8]{1,0}, bf16[8,8]{1,0}) all-gather-start(%part), dimensions={0}
  %one = bf16[8,8]{1,0} fusion(%x), kind=kCustom, calls=%fused
  %two = bf16[8,8]{1,0} fusion(%x), kind=kCustom, calls=%fused
  %done = bf16[8,8]{1,0} all-gather-done(%start)
  %call-start = ((), bf16[8,8]{1,0}) async-start(), calls=%gathers
  %three = bf16[8,8]{1,0} fusion(%x), kind=kCustom, calls=%fused
  %call-update = ((), bf16[8,8]{1,0}) async-update(%call-start, %part)
  %call-done = bf16[8,8]{1,0} async-done(%call-update)
  %sum = f32[] all-reduce(%scalar), to_apply=%add
  ROOT %all-reduce.1 = bf16[8,8]{1,0} all-reduce(%one), to_apply=%add
}

%branch.1 (p: bf16[1,8]) -> bf16[8,8] {
  %start.1 = (bf16[1,8]{1,0}, bf16[8,8]{1,0}) all-gather-start(%p), dimensions={0}
  %four = bf16[8,8]{1,0} fusion(%x), kind=kCustom, calls=%fused
  ROOT %done.1 = bf16[8,8]{1,0} all-gather-done(%start.1)
}

%branch.2 (p: bf16[1,8]) -> bf16[8,8] {
  ROOT %all-gather.4 = bf16[8,8]{1,0} all-gather(%p), dimensions={0}
}

%branching (state: (s32[], bf16[8,8])) -> (s32[], bf16[8,8]) {
  %start.2 = (bf16[1,8]{1,0}, bf16[8,8]{1,0}) all-gather-start(%part), dimensions={0}
  %five = bf16[8,8] conditional(%n, %x), branch_computations={%branch.1, %branch.2}
  %done.2 = bf16[8,8]{1,0} all-gather-done(%start.2)
  ROOT %six = bf16[8,8] conditional(%is), true_computation=%x.1, false_computation=%x.2
}

%x.1 (p: bf16[1,8]) -> bf16[8,8] {
  ROOT %all-gather.5 = bf16[8,8]{1,0} all-gather(%p), dimensions={0}
}

%x.2 (p: bf16[1,8]) -> bf16[8,8] {
  ROOT %all-reduce.2 = bf16[8,8]{1,0} all-reduce(%p), to_apply=%add
}

ENTRY %main (x: bf16[8,8]) -> bf16[8,8] {
  %first = (bf16[1,8]{1,0}, bf16[8,8]{1,0}) all-gather-start(%part), dimensions={0}
  %while = (s32[], bf16[8,8]) while(%state), condition=%condition, body=%body
  %other = (s32[], bf16[8,8]) while(%state), condition=%condition, body=%branching
  ROOT %last = bf16[8,8]{1,0} all-gather-done(%first)
}
"""


def test_products_are_counted_between_the_start_and_the_end_of_a_collective():
    assert [tuple(one) for one in collectives(PROGRAM)] == [
        ("all-gather", "bf16[8,8]", True, 2),
        # It begins with what its second instruction is given.
        ("all-gather", "bf16[8,8]", True, 0),
        ("all-reduce", "bf16[8,8]", True, None),
        # In branches of a loop, and beside a conditional with products
        ("all-gather", "bf16[8,8]", True, 1),
        ("all-gather", "bf16[8,8]", True, None),
        ("all-gather", "bf16[8,8]", True, 1),
        ("all-gather", "bf16[8,8]", True, None),
        ("all-reduce", "bf16[8,8]", True, None),
        # Beside two loops
        ("all-gather", "bf16[8,8]", False, 2),
    ]
