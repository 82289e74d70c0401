"""Tests of `plan` and `compare`: candidates are compiled in order up to the first that
fits.
"""

import dataclasses
import functools

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from stacked_remat import (
    ScanCheckpointPolicy,
    Stacked,
    fused_update,
    lax_scan,
    streaming,
)
from stacked_remat._policy import resolve_policy
from stacked_remat.memory import (
    CANDIDATES,
    TARGETS,
    BudgetError,
    Comparison,
    DoesNotFit,
    HostBytes,
    TimeBound,
    _plan,
    compare,
    parse_bytes,
    plan,
)
from stacked_remat.memory._call import TracedCall
from stacked_remat.memory._plan import Search, tracer

from ..blocks import NamedBlock

Layers, Width = hax.Axis("layers", 16), hax.Axis("hidden", 64)
Tokens = hax.Axis("tokens", 512)
LAYERS = Layers.size


def blocks_and_input():
    keys = jax.random.split(jax.random.key(0), Layers.size)
    blocks = eqx.filter_eval_shape(
        lambda: Stacked.init(Layers, NamedBlock)(Width, key=keys)
    )
    return blocks, eqx.filter_eval_shape(lambda: hax.zeros((Tokens, Width)))


class Counting:
    """Makes the gradient of a fold under a policy, and remembers which were asked
    for.
    """

    def __init__(self):
        self.asked = []

    def __call__(self, remat):
        self.asked.append(remat)

        def gradient(blocks, x):
            return eqx.filter_grad(
                lambda blocks: hax.sum(blocks.fold(x, remat=remat)).scalar()
            )(blocks)

        gradient.policy = repr(remat)
        return gradient


@pytest.fixture(scope="module", autouse=True)
def one_report_for_each_policy():
    """The tests of this file ask for reports of the same program: each policy is
    compiled once.
    """
    traced, reports, trace, report = {}, {}, _plan.trace_call, TracedCall.report

    def trace_once(call, *rest):
        key = getattr(call[0], "policy", call[0]), str(call[1]), str(rest)
        if key not in traced:
            traced[key] = trace(call, *rest)
        return traced[key]

    def report_once(call, cache=None):
        if id(call) not in reports:
            reports[id(call)] = report(call, cache)
        return reports[id(call)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_plan, "trace_call", trace_once)
        patch.setattr(TracedCall, "report", report_once)
        yield


@pytest.fixture(scope="module")
def comparison():
    return compare(Counting(), *blocks_and_input())


def test_every_candidate_is_compared(comparison):
    assert [trial.policy for trial in comparison.trials] == list(CANDIDATES)
    totals = {repr(trial.policy): trial.report.total for trial in comparison.trials}
    assert totals["False"] > totals["True"] > totals["'nested'"]
    flops = [trial.report.flops.matmul for trial in comparison.trials]
    assert flops[0] == min(flops)
    first, *others = comparison.trials
    host, least_time = HostBytes(temporaries=2**20), TimeBound(1.0, 2.0)
    report = dataclasses.replace(first.report, host=host, least_time=least_time)
    text = str(Comparison((dataclasses.replace(first, report=report), *others)))
    assert all(
        f"\n{trial.name} " in text
        for trial in comparison.trials
        if len(trial.name) < 20
    )
    assert "\nsave_carries='offload', " in text and "\nnested=True\n" in text
    assert "\nmoved: between device and host\n" in text
    assert "\nlink: seconds that it takes, or hidden behind compute" in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_table_says_once_why_arithmetic_is_not_exact(comparison):
    report = comparison.trials[0].report
    flops = dataclasses.replace(
        report.flops, too_low=("a loop is counted once",), too_high=("most",)
    )
    report = dataclasses.replace(report, flops=flops)
    shown = str(
        Comparison(
            tuple(
                dataclasses.replace(trial, report=report) for trial in comparison.trials
            )
        )
    )
    assert (
        shown.count("\n?: FLOP at least: a loop is counted once\n?: FLOP at most: most")
        == 1
    )


def test_flops_are_relative_to_false_where_it_can_be_traced(comparison):
    of_false, of_true, *_ = (one.report.flops.matmul for one in comparison.trials)
    found = compare(Counting(), *blocks_and_input(), candidates=[True])
    assert found.base == comparison.base == ("False", of_false)
    (row,) = (line for line in str(found).splitlines() if line.startswith("True"))
    assert row.split()[4] == f"{of_true / of_false:.2f}" != "1.00"

    def not_false(remat):
        assert remat is not False
        return Counting()(remat)

    without = compare(not_false, *blocks_and_input(), candidates=["nested", True])
    assert without.base == ("True", of_true)
    assert "\nFLOPs / True: " in str(without)


def test_each_row_has_its_own_unit(comparison):
    first, second, *_ = comparison.trials
    report = dataclasses.replace(second.report, temporaries=2**40)
    shown = str(Comparison((first, dataclasses.replace(second, report=report))))
    (of_first,) = (line for line in shown.splitlines() if line.startswith("False"))
    (of_second,) = (line for line in shown.splitlines() if line.startswith("True"))
    assert of_first.split()[1] == "MiB" and of_second.split()[1:3] == ["TiB", "1.00"]


def test_names_that_no_value_has_are_said_with_those_that_there_are():
    policies = [
        ScanCheckpointPolicy(save_block_internals=["hiden", "hidden"]),
        ScanCheckpointPolicy(offload_block_internals=["hidden"]),
    ]
    shown = str(compare(Counting(), *blocks_and_input(), candidates=policies))
    remark = "no value is named 'hiden'; the program has: 'activation', 'hidden'"
    assert " ".join(shown.split()).count(remark) == 1
    assert shown.count("no value is named") == 1
    # Also of a candidate that is not compiled
    found = plan(
        Counting(), *blocks_and_input(), budget="1GiB", candidates=[False, policies[0]]
    )
    assert [trial.name for trial in found.tried.trials][-1] == "False"
    assert " ".join(str(found).split()).count(remark) == 1


def test_a_program_that_ignores_its_policy_is_said(comparison):
    remark = (
        "all policies have the same figures: the program has too few layers for them"
        " to differ, or does not pass remat=remat to its fold or scan"
    )
    program = Counting()
    ignoring = compare(
        lambda remat: program(True), *blocks_and_input(), candidates=[True, "nested"]
    )
    assert remark in " ".join(str(ignoring).split())
    assert remark not in " ".join(str(comparison).split())


def planned(fn_of_policy=None, vary=False, **options):
    """A plan of the candidates alone, unless it is to vary them."""
    fn_of_policy = fn_of_policy or Counting()
    return plan(fn_of_policy, *blocks_and_input(), vary=vary, **options)


def test_nothing_is_traced_or_compiled_after_a_policy_that_recomputes_nothing(
    comparison,
):
    fn_of_policy = Counting()
    budget = comparison.trials[0].report.total
    told = []
    shows = {"begin": told.append, "show": lambda trial: told.append(trial.policy)}
    found = planned(fn_of_policy, budget=budget, **shows)
    assert told == ["False", False]
    assert found.policy == resolve_policy(False) and fn_of_policy.asked == [False]
    assert "fits " in str(found)
    assert planned(budget=budget, vary=True).policy == resolve_policy(False)


def test_the_least_arithmetic_of_what_fits_is_taken(comparison):
    for budget in {trial.report.total for trial in comparison.trials}:
        fitting = [
            trial.report for trial in comparison.trials if trial.report.total <= budget
        ]
        for candidates in (CANDIDATES, CANDIDATES[::-1]):
            found = planned(budget=budget, candidates=candidates)
            assert found.policy in [*map(resolve_policy, CANDIDATES)]
            assert found.report.total <= budget
            assert found.report.flops.matmul == min(
                report.flops.matmul for report in fitting
            )


def without_internals(remat):
    if resolve_policy(remat).save_block_internals:
        raise ValueError("internals are on the host")
    return Counting()(remat)


def test_the_rest_of_the_budget_is_spent_on_carries(comparison):
    _, carries, nested = (trial.report.total for trial in comparison.trials[:3])
    budget = (nested + carries) // 2
    found = planned(without_internals, budget=budget, candidates=["nested"], vary=True)
    policy = resolve_policy(found.policy)
    assert (
        policy.max_carries
        and policy.max_carries >= int(0.6 * LAYERS)
        and found.report.total <= budget
    )
    more = ScanCheckpointPolicy(max_carries=policy.max_carries + 1)
    (with_more,) = compare(
        without_internals, *blocks_and_input(), candidates=[more]
    ).trials
    assert with_more.report.total > budget
    with_internals = planned(budget=budget, candidates=["nested"], vary=True)
    assert with_internals.report.flops.matmul <= found.report.flops.matmul
    # Halving 16 layers, for first layers, carries and kept segments.
    assert len(with_internals.tried.trials) <= 1 + 2 * 4 + 3 + 5


@pytest.mark.parametrize("vary", [False, True])
def test_candidates_that_the_program_does_not_take_are_left_out(vary):
    refused = {*map(resolve_policy, (False, "nested"))}

    def refusing(remat):
        if resolve_policy(remat) in refused:
            raise ValueError("not this policy")
        return Counting()(remat)

    options = {"budget": "1GiB", "vary": vary}
    found = planned(refusing, candidates=[False, "nested", True], **options)
    assert found.policy == resolve_policy(True)
    for name in ("False", "'nested'"):
        assert f"\nleft out, {name}: ValueError: not this policy" in str(found)
    with pytest.raises(ValueError, match="not this policy"):
        planned(refusing, candidates=[False, "nested"], **options)


def test_fused_updates_are_planned_as_gradients_are():
    def fused(remat):
        def loss(blocks, x):
            return hax.sum(blocks.fold(x, remat=remat)).scalar()

        step = fused_update(loss, optax.sgd(0.1))
        return lambda blocks, x: step(blocks, step.init(blocks), x)

    ladders = []
    for fn_of_policy in (fused, Counting()):
        traced = tracer(fn_of_policy, blocks_and_input(), {}, "local", ())
        ladder = Search(traced).ladder(CANDIDATES)
        ladders.append([step.policy for step in ladder])
    assert ladders[0] == ladders[1] != []


def test_cuts_that_the_program_does_not_take_are_left_out():
    found = planned(without_internals, budget="1GiB", candidates=["nested"], vary=True)
    assert resolve_policy(found.policy).first_layers == LAYERS - 1


def test_products_are_kept_where_all_carries_are_offloaded():
    found = planned(budget="1GiB", candidates=["offload"], vary=True)
    assert found.policy == ScanCheckpointPolicy(
        save_carries="offload", save_block_internals=["hidden"]
    )
    without = planned(
        without_internals, budget="1GiB", candidates=["offload"], vary=True
    )
    assert without.policy == ScanCheckpointPolicy(
        save_carries="offload", first_layers=LAYERS - 1
    )


def test_a_policy_that_has_no_first_layers_is_left_as_it_is():
    for policy in (False, "recompute"):
        found = planned(budget="1GiB", candidates=[policy], vary=True)
        assert found.policy == resolve_policy(policy) and len(found.tried.trials) == 1


def test_no_candidate_fits(comparison):
    smallest = comparison.trials[1].report.total
    with pytest.raises(BudgetError) as caught:
        planned(budget=smallest - 1, candidates=[False, True])
    message = str(caught.value)
    assert "no candidate fits" in message
    assert "The smallest found is True" in message
    with pytest.raises(BudgetError, match="B of it arguments, too much alone"):
        planned(budget=1, candidates=[False, True])
    assert "\nFalse " in message and "\nTrue " in message


def test_what_takes_twice_the_budget_by_the_model_is_not_compiled():
    def gradient(policy):
        def loss(weights, x):
            def layer(carry, weight):
                return jnp.sin(carry @ weight), None

            return lax_scan(layer, x, weights, remat=policy)[0].sum()

        return jax.grad(loss)

    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 4, 4), (4096, 4))
    ]
    (nested,) = compare(gradient, *shapes, candidates=["nested"]).trials
    compiled = []
    with pytest.raises(BudgetError, match="The smallest found is max_carries=2 with"):
        plan(
            gradient,
            *shapes,
            budget=nested.report.total // 3,
            show=lambda trial: compiled.append(trial.name),
        )
    assert compiled == ["'nested'", "max_carries=2"]


def test_the_host_has_a_budget_too(monkeypatch):
    real = TracedCall.report

    def with_host(call, cache=None):
        return dataclasses.replace(real(call, cache), host=HostBytes(temporaries=100))

    monkeypatch.setattr(TracedCall, "report", with_host)
    planned(budget="1GiB", host_budget=100, candidates=[True])
    with pytest.raises(BudgetError, match="and 99 B on the host"):
        planned(budget="1GiB", host_budget=99, candidates=[True])


@pytest.mark.parametrize(
    "search", [compare, functools.partial(plan, budget="1GiB", vary=False)]
)
def test_an_error_of_the_compiler_is_a_reason_and_raised_where_no_policy_compiles(
    search, monkeypatch
):
    def fail(call, cache=None):
        raise jax.errors.JaxRuntimeError("INTERNAL: a bug")

    with monkeypatch.context() as patched:
        patched.setattr(TracedCall, "report", fail)
        with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL") as raised:
            search(Counting(), *blocks_and_input(), candidates=["nested"])
    assert raised.value.__notes__ == ["while compiling the policy 'nested'"]

    computed, errors = TracedCall.report, []

    def report(call, cache=None):
        if errors:
            raise errors.pop()
        return computed(call, cache)

    monkeypatch.setattr(TracedCall, "report", report)
    for error in (DoesNotFit("ran out of memory"), raised.value):
        errors.append(error)
        shown = str(
            search(Counting(), *blocks_and_input(), candidates=["nested", True])
        )
        assert f": {error}" in shown and "refused" in shown


@pytest.mark.parametrize(
    "search", [compare, functools.partial(plan, budget="1GiB", vary=False)]
)
def test_a_policy_in_place_of_a_list(search):
    with pytest.raises(
        TypeError, match=r"list of policies; got 'nested'. For one write \[policy\]"
    ):
        search(Counting(), *blocks_and_input(), candidates="nested")


def test_budgets_are_integers_or_texts():
    sizes = {
        0: 0,
        "80GiB": 80 * 2**30,
        "80GB": 80 * 10**9,
        " 1.5 TiB ": 3 * 2**39,
        "3kB": 3000,
        "3KB": 3000,
        np.int64(7): 7,
    }
    assert [*map(parse_bytes, sizes)] == [*sizes.values()] and parse_bytes("17B") == 17
    for wrong in ("80", "80G", "GiB", "-1GiB", -1, True, 1.5, None):
        with pytest.raises(
            ValueError, match="expected a non-negative integer or text such as '80GiB'"
        ):
            parse_bytes(wrong)


@pytest.fixture
def offloading_costs_the_host(comparison, monkeypatch):
    """The CPU has one memory: pretend that offloading policies use the host, and less
    of the device.
    """

    def moved(trial):
        if not resolve_policy(trial.policy).offloads:
            return trial
        report = dataclasses.replace(
            trial.report, temporaries=0, host=HostBytes(temporaries=100)
        )
        return dataclasses.replace(trial, report=report)

    trials = {trial.policy: moved(trial) for trial in comparison.trials}

    def trial(search, policy):
        search.compiled[resolve_policy(policy)] = trials[policy]
        return trials[policy]

    monkeypatch.setattr(Search, "trial", trial)
    return {policy: trial.report.total for policy, trial in trials.items()}


def test_fewer_carries_where_the_host_is_too_small(offloading_costs_the_host):
    leanest = ScanCheckpointPolicy(max_carries=2)
    budget = offloading_costs_the_host[leanest]
    assert budget < offloading_costs_the_host["nested"]
    found = planned(budget=budget, host_budget=99)
    assert (
        resolve_policy(found.policy).max_carries is not None
        and found.report.total <= budget
    )
    assert resolve_policy(planned(budget=budget).policy).offloads
    with pytest.raises(
        BudgetError,
        match="The smallest found is max_carries=2 with .* and 0 B on the host",
    ):
        planned(budget=budget - 1, host_budget=99)


@pytest.fixture
def the_host_has_memory_of_its_own(monkeypatch):
    """The CPU has one memory: pretend that arguments on the host are not on the
    device.
    """
    real = TracedCall.report

    def report(call, cache=None):
        found = real(call, cache)
        if not call.flops.bytes_from_host:
            return found
        weights = LAYERS * 4 * Width.size**2
        return dataclasses.replace(
            found,
            arguments=found.arguments - weights,
            host=HostBytes(arguments=weights),
        )

    monkeypatch.setattr(TracedCall, "report", report)


def test_candidates_are_tried_with_weights_on_the_host_where_none_fits(
    the_host_has_memory_of_its_own,
):
    target = dataclasses.replace(TARGETS["local"], flops=1e12, link=1e9)
    options = {"candidates": ["nested"], "target": target}

    blocks, x = blocks_and_input()
    streamed = streaming.to_host(blocks), x
    (resident,) = compare(Counting(), *blocks_and_input(), **options).trials
    budget = resident.report.total - 1
    found = planned(budget=budget, streamed=streamed, **options)
    on_host = found.tried.trials[-1]
    assert on_host.streamed and on_host.name == "'nested', streamed"
    assert resident.report.flops.bytes_from_host == 0
    assert on_host.report.flops.bytes_from_host > 2 * LAYERS * 4 * Width.size**2
    assert found.streamed and found.report.total <= budget
    seconds = found.report.least_time.transfer
    (row,) = (
        line
        for line in str(found).splitlines()
        if line.startswith("'nested', streamed  ")
    )
    assert f"  {seconds:.3g}  " in row
    assert "'nested', streamed fits" in str(found)
    fits = planned(budget=budget + 1, streamed=streamed, **options)
    assert not fits.streamed and len(fits.tried.trials) == 1
    with pytest.raises(BudgetError, match="The smallest found is .*, streamed with"):
        planned(budget=1, streamed=streamed, **options)
