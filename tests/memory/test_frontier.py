"""The curve of memory against FLOPs."""

import json

import jax
import jax.numpy as jnp
import pytest

from stacked_remat import ScanCheckpointPolicy, fold, lax_scan
from stacked_remat._policy import resolve_policy
from stacked_remat.memory import frontier, plan

from .test_values import LAYERS, program, step_of


@pytest.fixture(scope="module")
def found():
    of_policy, args = program("gated_mlp")
    return frontier(of_policy, *args, points=5)


def test_more_memory_takes_fewer_flops(found):
    totals = [trial.report.total for trial in found.trials]
    flops = [trial.report.flops.matmul for trial in found.trials]
    assert totals == sorted(totals) and len(totals) >= 4
    assert flops == sorted({*flops}, reverse=True)
    assert {trial.policy for trial in found.trials} <= {
        trial.policy for trial in found.tried.trials
    }
    policies = [resolve_policy(trial.policy) for trial in found.trials]
    assert any(isinstance(one.save_block_internals, tuple) for one in policies)


def test_a_plan_is_on_the_curve(found):
    of_policy, args = program("gated_mlp")
    for trial in found.trials:
        budget = trial.report.total
        planned = plan(of_policy, *args, budget=budget)
        assert planned.report.flops.matmul <= 1.03 * trial.report.flops.matmul


def test_what_is_printed(found):
    rows = json.loads(json.dumps(found.rows()))
    assert [row["total"] for row in rows] == [
        trial.report.total for trial in found.trials
    ]
    text = str(found)
    assert text.startswith("frontier\n")
    bars = [line for line in text.splitlines() if "# " in line]
    assert len(bars) == len(rows)
    ratio = rows[0]["matmul_flops"] / found.tried.flops_of_false
    assert bars[0].endswith(f" {'#' * 40} {ratio:.2f}") and ratio > 1.1


def test_the_number_of_points_is_checked():
    of_policy, args = program("gated_mlp")
    with pytest.raises(ValueError, match="points"):
        frontier(of_policy, *args, points=1)


def test_candidates_on_disk_are_not_varied_by_values():
    of_policy, args = program("gated_mlp")
    on_disk = ScanCheckpointPolicy(save_carries="disk", carries_folder="/tmp")
    candidates = (True, on_disk)
    planned = plan(of_policy, *args, budget="1GiB", candidates=candidates)
    assert planned.policy.save_block_internals


def test_the_error_of_a_program_is_raised():
    of_policy, args = program("gated_mlp")
    # Taken for an argument of the program
    with pytest.raises(TypeError, match="budget"):
        frontier(of_policy, *args, budget="1GiB")


def test_without_products_it_is_of_layers_that_run_again():
    of_policy, args = program("no_products")
    found = frontier(of_policy, *args, points=4)
    totals = [trial.report.total for trial in found.trials]
    assert totals == sorted(totals) and len(totals) >= 3
    assert all(trial.report.flops.matmul == 0 for trial in found.trials)


def test_loops_that_stop_early_or_are_not_read_have_a_curve():
    (weights, x) = program("mlp")[1]

    def until(remat):
        def loss(weights, x):
            end = fold(
                lambda x, w: step_of("mlp")(x, w)[0],
                LAYERS,
                remat=remat,
                until=lambda x: jnp.sum(x) > 9,
            )
            return jnp.sum(end(x, weights))

        return jax.grad(loss)

    def unread(remat):
        def loss(weights, x):
            lax_scan(step_of("mlp"), x, weights, remat=remat)
            return jnp.sum(x)

        return jax.grad(loss)

    for of_policy in (until, unread):
        assert frontier(of_policy, weights, x).trials
