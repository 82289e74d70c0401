"""Loops that stop on their own: equal to the masked loop, and only the steps that run
take time.
"""

import functools

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stacked_remat as sr
from stacked_remat import ScanCheckpointPolicy, shared
from stacked_remat._schedule import bounded, equal, shrinking
from stacked_remat._sweep.trips import trips_of

from . import blocks
from .blocks import derivatives, quick_jit
from .random_arrays import normal

N = 13
Time = hax.Axis("time", N)
POLICIES = {
    "False": False,
    "True": True,
    "nested": "nested",
    "max_carries": ScanCheckpointPolicy(max_carries=3),
    "first layers": ScanCheckpointPolicy(nested=True, first_layers=4),
    "internals": ScanCheckpointPolicy(nested=3, save_block_internals=True),
}


def step(carry, x, w):
    v = carry["v"] + jnp.tanh(carry["v"] @ w) * x
    return {"v": v, "steps": carry["steps"] + 1, "last": carry["last"]}, jnp.sin(v)


def is_over(carry):
    return carry["steps"] >= carry["last"]


def masked(carry, xs, w):
    def one(carry, x):
        new, y = step(carry, x, w)
        done = is_over(carry)
        return jax.tree.map(lambda a, b: jnp.where(done, a, b), carry, new), jnp.where(
            done, 0, y
        )

    return jax.lax.scan(one, carry, xs)


def stopped(remat, **options):
    return lambda carry, xs, w: sr.scan(
        step, Time, remat=remat, until=is_over, **options
    )(carry, xs, shared(w))


def loss(scan, last, v, xs, w):
    carry, ys = scan({"v": v, "steps": jnp.int32(0), "last": last}, xs, w)
    return jnp.sum(carry["v"] ** 2) + jnp.sum(jnp.cos(ys)), (carry, ys)


def random_arguments(seed):
    shapes = (2,), (N, 2), (2, 2)
    return [normal(3 * seed + k, *shape) for k, shape in enumerate(shapes)]


assert_close = functools.partial(blocks.assert_close, rtol=1e-4, atol=1e-5)


def test_values_outputs_and_gradients_are_those_of_the_masked_loop_wherever_it_stops():
    scans = {name: stopped(remat) for name, remat in POLICIES.items()}
    scans |= {"unroll": stopped("nested", unroll=True), "masked": masked}

    @quick_jit
    def of_all(last, *args):
        gradient = jax.value_and_grad(loss, (2, 3, 4), has_aux=True)
        return {name: gradient(scan, last, *args) for name, scan in scans.items()}

    for last in range(N + 2):
        expected = (found := of_all(jnp.int32(last), *random_arguments(last))).pop(
            "masked"
        )
        for name in found:
            assert_close(found[name], expected)


def test_derivatives_in_all_modes_and_of_a_batch_that_stops_at_different_steps():
    lasts, args = jnp.int32([5, 2, 0, N]), random_arguments(0)

    @quick_jit
    def both(lasts):
        def of(scan):
            in_batch = jax.vmap(
                jax.value_and_grad(loss, (2, 4), has_aux=True),
                (None, 0, None, None, None),
            )
            in_all_modes = jax.lax.map(
                lambda last: derivatives(
                    lambda *args: loss(scan, last, *args)[0], *args
                ),
                lasts[::2],
            )
            return in_all_modes, in_batch(scan, lasts, *args)

        return of(stopped("nested")), of(masked)

    assert_close(*both(lasts))


def test_a_step_that_has_no_derivative_where_the_loop_is_over():
    def last(x, remat):
        def root(carry):
            return carry[0] - 1, carry[1] + jnp.sqrt(carry[0])

        return sum(
            sr.fold(root, 6, remat=remat, until=lambda carry: carry[0] <= 0)((x, 0 * x))
        )

    def expected(x):
        left = x - jnp.arange(6.0)
        return (
            jnp.sum(jnp.where(left > 0, jnp.sqrt(jnp.where(left > 0, left, 1)), 0))
            + x
            - jnp.ceil(x)
        )

    @quick_jit
    def both(xs):
        def of(value):
            return (
                jax.lax.map(functools.partial(derivatives, value), xs),
                jax.vmap(jax.value_and_grad(value))(xs),
            )

        return [
            of(functools.partial(last, remat=remat)) for remat in (False, "nested")
        ], of(expected)

    found, want = both(jnp.array([2.0, 4.5]))
    for each in found:
        assert_close(each, want)


def test_a_batch_whose_later_inputs_have_no_derivative_at_a_state_that_is_over():
    """The inputs after a step that is over give NaN where they are taken."""
    levels, rate = jnp.array([8.0, 3.4, 4.0, -jnp.inf]), np.float32(0.5)
    # Which take no step, one, two and three
    starts = np.array([3.5, 2.0, 1.3, 0.5], np.float32)

    def is_over(x):
        return x > 3

    def steps_of(x):
        for step, level in enumerate(np.asarray(levels)):
            if is_over(x):
                return step
            x = x + rate * np.sqrt(level - x)
        return len(levels)

    def looped(steps):
        def run(x, levels, rate):
            path = []
            for level in levels[:steps]:
                x = x + rate * jnp.sqrt(level - x)
                path.append(jnp.sin(x))
            return x, sum(path, jnp.zeros(()))

        return run

    def own(remat, reverse=False):
        def step(x, level, rate):
            x = x + rate * jnp.sqrt(level - x)
            return x, jnp.sin(x)

        def run(x, levels, rate):
            levels = levels[::-1] if reverse else levels
            x, path = sr.scan(step, 4, remat=remat, until=is_over, reverse=reverse)(
                x, levels, shared(rate)
            )
            return x, jnp.sum(path)

        return run

    def derivatives_of(run):
        def value(*args):
            return sum(map(jnp.cos, run(*args)))

        def slopes(*args):
            return sum(jnp.sum(leaf) for leaf in jax.grad(value, (0, 1, 2))(*args))

        def of(x, levels, rate):
            first = jax.value_and_grad(value, (0, 1, 2))(x, levels, rate)
            return first, jax.grad(slopes, (0, 2))(x, levels, rate)

        return of

    steps = [*map(steps_of, starts)]
    assert steps == [0, 1, 2, 3]

    @quick_jit
    def found_and_expected():
        runs = [*map(own, POLICIES.values()), own("nested", reverse=True)]
        in_batch = (jax.vmap(derivatives_of(run), (0, None, None)) for run in runs)
        one_by_one = [
            derivatives_of(looped(count))(x, levels, rate)
            for x, count in zip(starts, steps, strict=True)
        ]
        return [of(starts, levels, rate) for of in in_batch], one_by_one

    found, expected = found_and_expected()
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *expected)
    for each in found:
        assert_close(each, stacked)


@pytest.mark.parametrize("check_vma", [True, False])
def test_devices_that_stop_at_different_steps(check_vma):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.P("d"), jax.P()

    def last(x, scale):
        options = {"remat": "nested", "until": lambda x: x > 2.5}
        given = sr.fold(lambda x, s: 1.3 * x + s, N, **options)(x, shared(scale))
        return given + sr.fold(lambda x: 1.2 * x + scale, N, **options)(x)

    def on_devices(xs, scale):
        def local(x, scale):
            return jax.lax.psum(last(x[0], scale), "d")

        return jax.shard_map(
            local, mesh=mesh, in_specs=spec, out_specs=jax.P(), check_vma=check_vma
        )(xs, scale)

    def on_one(xs, scale):
        return sum(last(x, scale) for x in xs)

    args = jnp.array([0.5, 1.0, 2.0, 3.0]), jnp.float32(0.7)
    assert_close(
        *quick_jit(
            lambda: [jax.value_and_grad(f, (0, 1))(*args) for f in (on_devices, on_one)]
        )()
    )


def test_without_jit_no_step_runs_after_the_last():
    steps = []

    def step(x):
        jax.debug.callback(lambda x: steps.append(float(x)), x)
        return 2 * x, x > 0

    run = sr.scan(step, 6, until=lambda x: x > 3)
    with jax.disable_jit():
        x, ys = run(1.0)
    assert (float(x), ys.tolist(), steps) == (4.0, [True] * 2 + [False] * 4, [1.0, 2.0])
    assert_close(run(1.0), (x, ys))
    assert sr.fold(lambda c: (2 * c[0], c[1]), 6, until=lambda c: c[0] > 3)(
        (1.0, jnp.tanh)
    ) == (
        4.0,
        jnp.tanh,
    )


@pytest.mark.parametrize(
    ("policy", "most"), [(True, 2), ("nested", 3), ("max_carries", 5)]
)
def test_steps_that_do_not_run_cost_nothing(policy, most):
    evaluations = []

    def counted(x):
        jax.debug.callback(lambda: evaluations.append(1))
        return jnp.sin(x) + 1

    remat = ScanCheckpointPolicy(max_carries=20) if policy == "max_carries" else policy
    fold = sr.fold(
        counted, hax.Axis("time", 10_000), remat=remat, until=lambda x: x[1] > 1.9
    )
    x = jnp.array([0.5, 0.9])
    run = quick_jit(jax.value_and_grad(lambda x: jnp.sum(fold(x))))
    expected, steps = x, 0
    while not expected[1] > 1.9:
        expected, steps = jnp.sin(expected) + 1, steps + 1
    value, _ = run(x)
    jax.effects_barrier()
    assert_close(value, jnp.sum(expected))
    assert 0 < steps < len(evaluations) <= most * steps


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize(
    "schedule", [shrinking(11), equal(11, 3), bounded(11, max_carries=3)], ids=str
)
def test_runs_of_layers_that_did_not_run_are_left_out(schedule, saves):
    program = schedule.program(saves=saves)
    held_until = (*program.held_from[1:], len(program.held_layers))
    for ran in range(schedule.length + 1):
        trips = jax.device_get(trips_of(program, jnp.int32(ran)))
        visited = []
        for run, start in enumerate(program.start):
            bottom = program.bottom[run]
            visits = range(bottom, bottom + trips.visits[run])
            visited += reversed(visits)
            # A replay is for the inputs that it holds, up to that of the last layer
            held = program.held_layers[program.held_from[run] : held_until[run]]
            is_of_use = any(layer < ran for layer in held)
            stop = min(start + program.advances[run], ran - 1)
            replayed = range(start, stop) if is_of_use else range(0)
            assert trips.advances[run] == len(replayed)
            layers = [*replayed, *(visits if saves else reversed(visits))]
            if layers:
                assert trips.runs_first[run] == layers[0]
            else:
                assert trips.runs_first[run] == trips.runs_first[run + 1]
        assert visited == [*range(ran)][::-1]
        lowest = [*map(min, program.start, program.bottom)]
        if ran:
            # From the first run with a layer that ran
            assert lowest[trips.skipped] < ran <= min([99, *lowest[: trips.skipped]])


def test_what_cannot_stop_is_refused():
    with pytest.raises(
        ValueError, match="With until=, a policy can neither offload nor drop"
    ):
        sr.fold(lambda x: x * 2, Time, remat="recompute", until=lambda x: x > 3)(1.0)
    with pytest.raises(
        ValueError,
        match=r"The carry\['a'\] goes in as float32\[\] and comes out as float32\[2\]",
    ):
        sr.fold(
            lambda c: {"a": jnp.ones(2)}, Time, until=lambda c: jnp.all(c["a"] > 3)
        )({"a": jnp.ones(())})
    x = jnp.ones(2)
    layers = [blocks.PlainBlock(2, key=jax.random.key(n)) for n in range(2)]
    alike = sr.Stacked.of(layers)
    pattern = sr.StackedPattern({"one": alike}, ("one", "one"), alike.Layers)
    for stack in (sr.BlockSeq.of(layers), pattern):
        with pytest.raises(TypeError, match="takes none. Use a Stacked"):
            stack.fold(x, until=lambda x: x[0] > 3)
    with pytest.raises(TypeError, match="until is a function of the carry"):
        alike.fold(x, until=3)
    norms, state = eqx.nn.make_with_state(sr.Stacked.init(2, eqx.nn.BatchNorm))(
        2, "batch", mode="ema"
    )
    with pytest.raises(ValueError, match="have nothing of the layers that do not run"):
        norms.fold(x, state, until=lambda x: x[0] > 3)
    step = sr.fused_update(
        lambda stack: stack.fold(x, until=lambda x: x[0] > 3)[0], optax.sgd(0.1)
    )
    with pytest.raises(TypeError, match="no until= in fold"):
        step(alike, step.init(alike))


@pytest.mark.parametrize("remat", [False, "nested"])
def test_lax_scan_is_that_of_jax(remat):
    def f(carry, x):
        x = {"a": jnp.float32(1), "b": jnp.ones(2)} if x is None else x
        carry = jnp.sin(carry * x["a"]) + x["b"]
        return carry, {"y": carry[0]}

    xs = {"a": jnp.linspace(0, 1, 7), "b": np.ones((7, 2), np.float32)}
    cases = ((xs, None, False), (xs, 7, True), (None, 5, False))

    def of(scan, **options):
        def value(init, xs, length, reverse):
            carry, ys = scan(f, init, xs, length, reverse, **options)
            return jnp.sum(carry) + jnp.sum(ys["y"] ** 2), (carry, ys)

        return [
            jax.value_and_grad(value, has_aux=True)(jnp.ones(2), *case)
            for case in cases
        ]

    assert_close(
        *quick_jit(lambda: (of(sr.lax_scan, remat=remat, unroll=2), of(jax.lax.scan)))()
    )
    for wrong in (-3, "two"):
        with pytest.raises(
            (TypeError, ValueError), match="length is the number of steps"
        ):
            sr.lax_scan(f, jnp.ones(2), None, wrong)
