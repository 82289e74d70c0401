"""The policies that a plan chooses between, against the optimum of a homogeneous
chain.
"""

import functools
from types import SimpleNamespace

import pytest

from stacked_remat import ScanCheckpointPolicy
from stacked_remat._policy import resolve_policy
from stacked_remat._schedule import shrinking
from stacked_remat.memory import CANDIDATES
from stacked_remat.memory._search import variations

LAYERS = 48


def optimum(layers, internals, most):
    """The least FLOPs of a gradient in forward evaluations of a layer, for each memory
    in carries.

    A layer's internals are kept when it runs (3 evaluations in all), its input among
    them if its derivative reads that; or the carry runs ahead to a layer whose input is
    kept, and what follows is reversed first. What is reversed frees its memory.
    """
    never = 10**9
    # By layers, and by what is free beside the first one's input.
    table = [[0] * most, [3 if free >= internals else never for free in range(most)]]
    for length in range(2, layers + 1):
        row = [
            3 + table[length - 1][free - internals] for free in range(internals, most)
        ]
        row = [never] * internals + row
        for free in range(1, most):
            ahead = (
                k + table[length - k][free - 1] + table[k][free]
                for k in range(1, length)
            )
            row[free] = min(row[free], *ahead)
        table.append(row)
    return {free + 1: found for free, found in enumerate(table[layers])}


@functools.cache
def optimum_of_loops(layers, inputs, internals):
    """`optimum` with that many places free for inputs of layers and for internals, none
    for either of both.

    Loops whose bodies are compiled once have a buffer of a fixed size for each.
    """
    if layers == 1:
        return 3 if internals else 10**9
    ahead = [
        k
        + optimum_of_loops(layers - k, inputs - 1, internals)
        + optimum_of_loops(k, inputs, internals)
        for k in range(1, layers)
        if inputs
    ]
    kept = (
        [3 + optimum_of_loops(layers - 1, inputs, internals - 1)]
        if internals > 1
        else []
    )
    return min(ahead + kept, default=10**9)


@functools.cache
def cost(policy, internals):
    """FLOPs, and memory in carries, of a gradient under a policy."""
    first = policy.first_layers
    rest = LAYERS - first
    if policy.saves_everything and not policy.has_cut:
        return 3 * LAYERS, LAYERS * internals
    schedule = policy.schedule(rest)
    again, carries, held = schedule.replays, schedule.slots, 1
    if policy.save_block_internals:
        # The layers of a segment run to be visited, and others before.
        program = schedule.program(saves=True)
        again = sum(program.advances)
        carries, held = program.sources, max(program.visits)
    return 3 * first + 4 * rest + again, carries + (first + held) * internals


def planned(internals):
    """FLOPs and memory of all policies that a plan chooses between."""
    layers = SimpleNamespace(layers=LAYERS, choices=[], keeps_values=True)
    policies = set()
    for candidate in map(resolve_policy, CANDIDATES):
        if not candidate.offloads:
            policies |= {*variations(candidate, layers)}
    return [cost(policy, internals) for policy in policies]


@pytest.mark.parametrize(
    "internals", [2, *(pytest.param(k, marks=pytest.mark.deep) for k in (4, 18))]
)
def test_policies_take_hardly_more_flops_than_the_optimum(internals):
    policies = planned(internals)
    least = shrinking(LAYERS).slots + internals
    most = LAYERS * internals
    best = optimum(LAYERS, internals, most)
    # Below this, the optimum shares memory between the inputs of segments and
    # internals: at the least of the 20 budgets, no order with a buffer for each comes
    # within 1.05 times its FLOPs.
    cuts = [
        ScanCheckpointPolicy(nested=k, save_block_internals=True)
        for k in range(1, LAYERS + 1)
    ]
    kept = min(cost(policy, internals)[1] for policy in cuts)
    budgets = [least + (k + 1) * (most - least) // 20 for k in range(20)]
    for budget in sorted({*range(least, kept + 4), *budgets}):
        flops = min(flops for flops, size in policies if size <= budget)
        if budget >= kept:
            assert flops <= 1.05 * best[budget]
        else:
            places = range(1, (budget - 1) // internals + 1)
            of_loops = min(
                optimum_of_loops(LAYERS, budget - k * internals - 1, k) for k in places
            )
            assert of_loops <= flops <= 1.2 * best[budget]
            assert budget not in budgets or 1.05 * best[budget] < of_loops
