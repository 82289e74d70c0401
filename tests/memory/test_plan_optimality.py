"""The planner's answers against the optimum of a homogeneous chain."""

import dataclasses
import functools
from types import SimpleNamespace

import numpy as np
import pytest

from stacked_remat import ScanCheckpointPolicy
from stacked_remat._policy import resolve_policy
from stacked_remat._remat import EVERYTHING
from stacked_remat._schedule import shrinking
from stacked_remat.memory import CANDIDATES, Flops, LocalTarget, _search
from stacked_remat.memory._model import Model, StackFigures, Variant
from stacked_remat.memory._search import Search
from stacked_remat.memory._values import LayerValues, Operation

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


class Chain:
    """A program whose memory and FLOPs are those of a chain."""

    def __init__(self, internals):
        self.internals = internals

    def traced(self, policy):
        flops, carries = cost(resolve_policy(policy), self.internals)
        report = SimpleNamespace(
            total=1000 * carries,
            devices=1,
            arguments=0,
            host=SimpleNamespace(total=0),
            flops=Flops(flops),
        )
        return SimpleNamespace(
            flops=Flops(flops),
            report=lambda cache: report,
            target=LocalTarget(),
        )


class ChainFigures(StackFigures):
    """Those of such a chain, in which a layer that is visited has its internals."""

    def cost(self, remat):
        found = super().cost(remat)
        (layer,) = self.layers
        visited = 0 if remat.kept == EVERYTHING else layer.residual_bytes
        return dataclasses.replace(found, device=found.device + visited)


def model_of(internals):
    """The planner's model of such a chain."""
    # What is kept of a layer has its carry; else the whole layer runs again.
    whole = Operation(1, frozenset(), is_data=True, reads_carry=True)
    layer = LayerValues(
        count=LAYERS,
        operations=(whole,),
        residuals=frozenset([0]),
        carry_is_residual=False,
        residual_bytes=1000 * internals,
        forward_flops=1,
    )
    before = np.arange(LAYERS + 1)[:, None]
    stack = ChainFigures(carry=1000, layers=(layer,), before=before)
    variant = Variant((stack,), 3 * LAYERS)
    nested = ScanCheckpointPolicy(nested=True)
    return Model((variant,), nested, variant.cost(nested))


ON_DEVICE = [policy for policy in CANDIDATES if not resolve_policy(policy).offloads]


def planned(internals, budget):
    search = Search(Chain(internals).traced, budget=1000 * budget)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_search, "traced_model", lambda _: model_of(internals))
        found = search.least(ON_DEVICE)
    fitting = [
        trial.report
        for trial in search.compiled.values()
        if trial.report.total <= 1000 * budget
    ]
    assert found.report.flops.matmul == min(report.flops.matmul for report in fitting)
    return cost(resolve_policy(found.policy), internals)[0], len(search.compiled)


@pytest.mark.parametrize("internals", [2, 18])
def test_below_nested_as_many_carries_are_kept_as_fit(internals):
    carries = [
        ScanCheckpointPolicy(max_carries=count)
        for count in range(2, shrinking(LAYERS).slots)
    ]
    for budget in range(2 + internals, shrinking(LAYERS).slots + internals):
        fitting = (
            flops
            for flops, size in (cost(policy, internals) for policy in carries)
            if size <= budget
        )
        assert planned(internals, budget)[0] == min(fitting)


@pytest.mark.parametrize(
    "internals", [2, *(pytest.param(k, marks=pytest.mark.deep) for k in (4, 18))]
)
def test_plans_take_hardly_more_flops_than_the_optimum(internals):
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
    found = []
    budgets = [least + (k + 1) * (most - least) // 20 for k in range(20)]
    for budget in sorted({*range(least, kept + 4), *budgets}):
        flops, trials = planned(internals, budget)
        found.append(flops)
        if budget >= kept:
            assert flops <= 1.05 * best[budget]
        else:
            places = range(1, (budget - 1) // internals + 1)
            of_loops = min(
                optimum_of_loops(LAYERS, budget - k * internals - 1, k) for k in places
            )
            assert of_loops <= flops <= 1.2 * best[budget]
            assert budget not in budgets or 1.05 * best[budget] < of_loops
        assert trials <= 40
    assert found == sorted(found, reverse=True)  # a larger budget never plans more
