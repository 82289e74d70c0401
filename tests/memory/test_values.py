"""Which values inside layers the planner keeps, beside every other choice."""

import dataclasses
import functools
import itertools
import operator
import os
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import pytest

from stacked_remat import ScanCheckpointPolicy, Stacked, StackedPattern, lax_scan
from stacked_remat._places import is_place
from stacked_remat._policy import resolve_policy
from stacked_remat.memory import CANDIDATES, TARGETS, _search, count_flops
from stacked_remat.memory._model import traced_model
from stacked_remat.memory._plan import Search, tracer
from stacked_remat.memory._values import ProgramValues
from stacked_remat.memory._variations import variations

from .small_blocks import BLOCKS, ROWS, WEIGHTS, WIDTH

LAYERS = 6
# Larger sets of names are not tried one by one.
MOST_NAMES = 10
BUDGETS = 10


def step_of(name):
    """A block as the step of a scan."""
    return lambda x, w: (BLOCKS[name](w, x), None)


def program(name):
    """The gradient of a stack of blocks by policy, and its arguments."""
    weights = {
        key: jax.ShapeDtypeStruct((LAYERS, *shape), jnp.float32)
        for key, shape in WEIGHTS[name].items()
    }

    def of_policy(remat):
        def loss(weights, x):
            return jnp.sum(lax_scan(step_of(name), x, weights, remat=remat)[0] ** 2)

        return jax.grad(loss, (0, 1))

    return of_policy, (weights, jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32))


@functools.cache
def traced(name, policy):
    of_policy, args = program(name)
    return jax.make_jaxpr(of_policy(policy))(*args)


@functools.cache
def values_of(name):
    nested = ScanCheckpointPolicy(nested=True)
    return ProgramValues.of(traced(name, nested), nested)


def size_of(values, names):
    (stack,) = values.stacks
    return LAYERS * sum(stack.layers[0].kept(names).sizes.values())


@functools.cache
def all_choices(name):
    """Every set of names that takes fewer bytes than all with fewer FLOPs."""
    values = values_of(name)
    # An operation without FLOPs whose operands are no larger, and can be kept, adds
    # nothing; a few names are left.
    names = [*values.sizes]
    while len(names) > MOST_NAMES:
        without = [[*names[:i], *names[i + 1 :]] for i in range(len(names))]
        names = min(without, key=lambda some: least_flops(values, some))
    sets = itertools.chain.from_iterable(
        itertools.combinations(names, count) for count in range(len(names) + 1)
    )
    found = sorted(
        (values.again_flops(chosen), size_of(values, chosen), chosen) for chosen in sets
    )
    choices = []
    for _, size, chosen in found:
        if not choices or size < size_of(values, choices[-1]):
            choices.append(chosen)
    return choices


def least_flops(values, names):
    return values.again_flops(names), size_of(values, names)


@pytest.mark.parametrize("name", BLOCKS)
def test_flops_are_those_of_the_traced_program(name):
    values = values_of(name)
    nothing = count_flops(traced(name, True)).matmul
    for names in values.choices()[::3]:
        kept = ScanCheckpointPolicy(save_block_internals=names)
        expected = nothing - count_flops(traced(name, kept)).matmul
        assert values.again_flops(()) - values.again_flops(names) == expected


@pytest.mark.parametrize("name", BLOCKS)
def test_no_other_values_are_better(name):
    values = values_of(name)
    total = count_flops(traced(name, True)).matmul
    found = [(size_of(values, names), names) for names in values.choices()]
    largest = max(size_of(values, names) for names in all_choices(name))
    for budget in range(0, largest + 1, max(1, largest // (BUDGETS - 1))):
        fewest = min(
            values.again_flops(names)
            for names in all_choices(name)
            if size_of(values, names) <= budget
        )
        fitting = [names for size, names in found if size <= budget]
        planned = min(map(values.again_flops, fitting))
        rest = total - values.again_flops(())
        assert rest + planned <= 1.03 * (rest + fewest)


# Blocks whose plans were the furthest from the best; the others, which take minutes,
# are slow tests.
OFTEN = ("attention", "mixer", "region", "shared_product")


def planned_beside_all(name, budgets, cache):
    """Plans beside all policies that may be best, each compiled."""
    of_policy, args = program(name)
    traced = tracer(of_policy, args, {}, "local", ())
    search = Search(traced, cache=cache)
    model = traced_model(search._trace)
    variants = []
    for variant in model.variants:
        variants.append(dataclasses.replace(variant, choices=(*all_choices(name),)))
    exhaustive = dataclasses.replace(model, variants=tuple(variants))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_search, "traced_model", lambda _: exhaustive)
        ladder = search.ladder(CANDIDATES)
    for policy in (*CANDIDATES, *(step.policy for step in ladder)):
        search.trial(policy)
    found = []
    for trial in search.compiled.values():
        found.append((trial.report.total, trial.report.flops.matmul))
    least = min(found)[0]
    most = min(total for total, flops in found if flops == min(found, key=FLOPS)[1])
    # Where policies begin to fit
    sizes = sorted({total for total, _ in found if least <= total <= most})
    for number in range(budgets):
        budget = sizes[(len(sizes) - 1) * number // (budgets - 1)]
        best = min(flops for total, flops in found if total <= budget)
        own = Search(traced, budget=budget, cache=cache)
        own.traced = search.traced
        planned = own.least(CANDIDATES)
        assert planned.report.total <= budget
        flops = planned.report.flops.matmul
        assert flops <= 1.03 * best, (budget, planned.policy)


FLOPS = operator.itemgetter(1)


def test_plans_beside_all_policies(tmp_path):
    planned_beside_all("gated_mlp", 4, tmp_path)


def test_values_go_to_the_host_where_that_takes_no_time(monkeypatch):
    # As a GPU has
    monkeypatch.setattr(Search, "_has_host", True)
    of_policy, args = program("gated_mlp")

    def some_offload(link, host_budget):
        peak = 1e12
        target = dataclasses.replace(TARGETS["local"], flops=peak, link=link)
        traced = tracer(of_policy, args, {}, target, ())
        search = Search(traced, host_budget=host_budget)
        policies = [resolve_policy(step.policy) for step in search.ladder(CANDIDATES)]
        offloading = [policy for policy in policies if policy.offload_block_internals]
        for policy in offloading:
            # To the host in a third of the time: two products of each are transposed.
            moved = traced(policy).flops.bytes_to_host
            assert moved / link <= traced(False).flops.matmul / 3 / peak
        return bool(offloading)

    assert some_offload(1e12, 2**30)
    # Some of their values take as long as all layers, forward and backward
    assert some_offload(1e11, 2**30)
    assert not some_offload(1.0, 2**30)
    assert not some_offload(1e12, 0)


@pytest.mark.deep
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in OFTEN else pytest.mark.slow) for n in BLOCKS],
)
def test_plans_beside_all_policies_at_more_budgets(name, tmp_path):
    planned_beside_all(name, BUDGETS, tmp_path)


class Narrow(eqx.Module):
    weight: jax.Array

    def __call__(self, x):
        return x + jnp.tanh(x @ self.weight)


class Wide(eqx.Module):
    up: jax.Array
    down: jax.Array

    def __call__(self, x):
        return x + jax.nn.silu(x @ self.up) @ self.down


class OfMeans(eqx.Module):
    """A layer whose internals are small beside a carry."""

    weight: jax.Array

    def __call__(self, x):
        return x + jnp.tanh(x.mean(0, keepdims=True) @ self.weight)


SIZE = 8
SQUARE = jnp.ones((SIZE, SIZE))
WIDE = jnp.ones((SIZE, 8 * SIZE))
KINDS = {
    "n": lambda: Narrow(SQUARE),
    "w": lambda: Wide(WIDE, WIDE.T),
    "m": lambda: OfMeans(SQUARE),
}


@pytest.mark.parametrize("table", ["nnwnnnnn", "wnmmnw", "mmmmmmmmm"])
def test_flops_of_the_model_are_those_of_the_traced_program(table):
    kinds = {kind: KINDS[kind] for kind in {*table}}
    if len(kinds) == 1:
        stack = Stacked.init(len(table), *kinds.values())()
    else:
        stack = StackedPattern.init(hax.Axis("layers", len(table)), kinds, [*table])()

    def of_policy(remat):
        def loss(stack_and_x):
            stack, x = stack_and_x
            return jnp.sum(stack.fold(x, remat=remat) ** 2)

        return lambda stack, x: eqx.filter_grad(loss)((stack, x))

    traced = tracer(of_policy, (stack, jnp.ones((3, SIZE))), {}, "local", ())
    model = traced_model(traced)
    policies = {}
    for candidate in map(resolve_policy, CANDIDATES):
        policies |= dict.fromkeys(variations(candidate, model))
    for policy in [*policies][::21]:
        assert model.cost(policy).flops == traced(policy).flops.matmul, policy


def test_the_model_of_a_gradient_of_many_examples_is_that_of_one():
    of_policy, (weights, x) = program("gated_mlp")
    examples = jax.ShapeDtypeStruct((3, *x.shape), x.dtype)

    def mapped(remat):
        return jax.vmap(of_policy(remat), (None, 0))

    def ladder_of(of_policy, *args):
        traced = tracer(of_policy, args, {}, "local", ())
        return Search(traced).ladder(CANDIDATES)

    of_one = ladder_of(of_policy, weights, x)
    of_three = ladder_of(mapped, weights, examples)
    assert [step.policy for step in of_three] == [step.policy for step in of_one]
    for three, one in zip(of_three, of_one, strict=True):
        assert three.cost == dataclasses.replace(
            one.cost, flops=3 * one.cost.flops, device=3 * one.cost.device
        )


def test_layers_with_a_policy_of_their_own_have_no_model():
    of_policy, args = program("mlp")
    traced = tracer(lambda remat: of_policy("nested"), args, {}, "local", ())
    assert Search(traced).ladder(CANDIDATES) == []


@pytest.mark.deep
def test_choices_are_the_same_in_every_process():
    code = "from tests.memory.test_values import values_of;"
    code += "print(values_of('gated_mlp').choices())"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONHASHSEED": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == str(values_of("gated_mlp").choices())


def test_values_have_the_names_that_the_block_gives():
    choices = values_of("with_names").choices()
    assert choices[-1] == ("hidden",)
    assert all(map(is_place, values_of("mlp").sizes))
    assert "product" in values_of("custom_rule").sizes


def test_leaves_that_are_not_differentiated_cost_nothing():
    # No gradient of the frozen weights reads what goes into their products.
    assert values_of("adapter").choices()[-1] == ("add 1/2", "dot_general 2/4")


def test_places_are_those_that_every_stack_has():
    weights, x = program("gated_mlp")[1]
    others = program("attention")[1][0]

    def of_policy(remat):
        def loss(weights, others, x):
            x, _ = lax_scan(step_of("gated_mlp"), x, weights, remat=remat)
            x, _ = lax_scan(step_of("attention"), x, others, remat=remat)
            # Its own policy says what this keeps.
            x, _ = lax_scan(step_of("mlp"), x, weights, remat=True)
            return jnp.sum(x**2)

        return jax.grad(loss, (0, 1))

    args = weights, others, x
    traced = tracer(of_policy, args, {}, "local", ())
    nested = ScanCheckpointPolicy(nested=True)
    values = ProgramValues.of(traced(nested).traced.jaxpr, nested)
    assert len(values.stacks) == 2
    places = [*filter(is_place, values.sizes)]
    assert places and not any("dot_general" in place for place in places)
    for step in Search(traced).ladder(CANDIDATES):
        assert traced(step.policy).flops.matmul
