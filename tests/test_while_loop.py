"""Loops without a bound beside masked scans, and how often their steps run.

The random loops, in random transformations, are compared in float64.
"""

import functools
import math
import operator
import random

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import stacked_remat as sr
from stacked_remat._while import kept_carries
from stacked_remat._while.written import read_leaves

from . import blocks
from .blocks import quick_jit

BOUND = 16  # of the loops that are compared with
STEPS = (0, 1, 2, 5, BOUND)
assert_close = functools.partial(blocks.assert_close, rtol=1e-9, atol=1e-11)


@pytest.fixture(autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield


def masked(cond_fun, body_fun, init):
    """The same loop with a bound, for which JAX has all derivatives."""

    def step(carry, _):
        runs = cond_fun(carry)
        new = body_fun(carry)
        return jax.tree.map(lambda a, b: jnp.where(runs, a, b), new, carry), None

    return lax.scan(step, init, None, length=BOUND)[0]


def random_loop(seed):
    """A loss `(loop, floats, last)` of a loop with a carry of several types: it reads
    some leaves, only writes to others and passes one on.
    """
    rng = random.Random(seed)
    functions = [jnp.sin, jnp.tanh, jnp.cos, lambda x: x / (1 + x**2)]
    names = ["a", "b", "z"]
    # What each of the leaves becomes
    recipes = {}
    for name in names:
        recipes[name] = rng.choice(functions), rng.choice(names), rng.choice(names)
    reads_counter = rng.random() < 0.5
    is_last_closed_over = rng.random() < 0.5
    writes_first = rng.random() < 0.5

    def loss(loop, floats, last):
        w, start = floats["w"], floats["start"]
        key, other_key = jax.random.wrap_key_data(
            jnp.arange(4, dtype=jnp.uint32).reshape(2, 2)
        )

        def body(carry):
            values = {"a": carry["a"], "b": carry["b"][0], "z": jnp.abs(carry["z"])}
            mixed = {}
            for name, (function, first, second) in recipes.items():
                mixed[name] = function(values[first] * w[0] + values[second] * w[1])
            if reads_counter:
                mixed["a"] = mixed["a"] * (1 + 0.01 * carry["n"].astype(w.dtype))
            of_key = jax.random.key_data(carry["key"])[1] % 3
            is_odd = carry["n"] % 2 == 1
            new = dict(
                carry,
                a=mixed["a"] + 0.1 * of_key.astype(w.dtype) * w[2],
                b=(0.5 * carry["b"][0] + jnp.where(is_odd, mixed["b"], w[3]),),
                z=carry["z"] * lax.complex(jnp.cos(mixed["z"]), jnp.sin(w[0])),
                n=carry["n"] + 1,
                flag=~carry["flag"],
                key=jnp.where(carry["flag"], carry["key"], other_key),
                total=carry["total"] + mixed["a"] ** 2,
            )
            row = mixed["b"] if writes_first else carry["b"][0]
            new["rows"] = carry["rows"].at[carry["n"]].set(row * carry["scale"])
            return new

        init = {
            "a": start,
            "b": (start * w[1],),
            "z": lax.complex(start, w[2]),
            "n": jnp.int32(0),
            "last": last,
            "flag": jnp.bool(False),
            "key": key,
            "total": w[3],
            "rows": w[0] * jnp.ones(BOUND, w.dtype),
            "scale": w[1] * start,
        }
        end = loop(
            lambda carry: carry["n"] < (last if is_last_closed_over else carry["last"]),
            body,
            init,
        )
        total = end["a"] * end["b"][0] + jnp.real(end["z"]) + end["total"]
        return total + jnp.sum(jnp.cos(end["rows"])) * jnp.where(end["flag"], 2, 1)

    return loss


def along(tree):
    """A number that depends on all of a tree's numbers."""
    leaves = jax.tree.leaves(tree)
    return sum(
        jnp.vdot(jnp.cos(jnp.arange(x.size) + i), x.ravel())
        for i, x in enumerate(leaves)
    )


def vmapped(loss, floats, last):
    # Examples that stop apart, and one that is of another start
    lasts = jnp.stack([last, last // 2, jnp.maximum(last - 1, 0)])
    starts = floats["start"] * jnp.array([1, 0.5, -0.7])

    def of_example(start, last):
        return loss({**floats, "start": start}, last)

    return along(jax.vmap(of_example)(starts, lasts))


def scanned(loss, floats, last):
    def step(total, scale):
        return total + loss(jax.tree.map(lambda x: x * scale, floats), last), None

    return lax.scan(step, jnp.zeros(()), jnp.array([1.0, 0.4]))[0]


def direction(floats):
    return jax.tree.map(lambda x: jnp.cos(3 * x), floats)


TRANSFORMATIONS = {
    "grad": lambda loss, floats, last: along(jax.grad(loss)(floats, last)),
    "jvp": lambda loss, floats, last: jax.jvp(
        lambda floats: loss(floats, last), (floats,), (direction(floats),)
    )[1],
    "linearize": lambda loss, floats, last: jax.linearize(
        lambda floats: loss(floats, last), floats
    )[1](direction(floats)),
    "jacrev": lambda loss, floats, last: along(
        jax.jacrev(
            lambda floats: jnp.stack([loss(floats, last), floats["start"] ** 2])
        )(floats)
    ),
    "vmap": vmapped,
    "scan": scanned,
    "checkpoint": lambda loss, floats, last: jax.checkpoint(loss)(floats, last),
    "jit": lambda loss, floats, last: jax.jit(loss)(floats, last),
}


def transformed(loss, names):
    for name in names:
        loss = functools.partial(TRANSFORMATIONS[name], loss)
    return loss


def check_random_loop(seed):
    rng = random.Random(1000 + seed)
    loss = random_loop(seed)
    max_carries = rng.choice([1, 2, 3, 6])
    names = [rng.choice([*TRANSFORMATIONS]) for _ in range(2)]
    floats = {
        "w": jnp.asarray(np.random.default_rng(seed).normal(size=4) * 0.7),
        "start": jnp.float64(0.6),
    }

    def ours(cond_fun, body_fun, init):
        return sr.while_loop(cond_fun, body_fun, init, max_carries=max_carries)

    @quick_jit
    def both(floats, last):
        results = []
        for loop in (ours, masked):
            of_loop = transformed(functools.partial(loss, loop), names)
            results.append(jax.value_and_grad(of_loop)(floats, last))
        return results

    for last in STEPS:
        found, expected = both(floats, jnp.int32(last))
        assert_close(found, expected, name=(seed, max_carries, names, last))


@pytest.mark.parametrize("seed", range(3))
def test_random_loops_under_random_transformations(seed):
    check_random_loop(seed)


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(3, 40))
def test_more_random_loops_under_random_transformations(seed):
    check_random_loop(seed)


def least_runs(steps, slots):
    """`runs` of `kept_carries.py` as it is derived there."""
    if steps <= 1 or slots == 1:
        return steps * (steps - 1) // 2
    repeats = 0
    while math.comb(slots + repeats, repeats) < steps:
        repeats += 1
    return repeats * steps - math.comb(slots + repeats, repeats - 1)


@functools.cache
def searched_runs(steps, slots):
    """The least number of runs, over all places of the next kept carry."""
    if steps <= 1 or slots == 1:
        return steps * (steps - 1) // 2
    return min(
        first + searched_runs(steps - first, slots - 1) + searched_runs(first, slots)
        for first in range(1, steps)
    )


def kept_steps(slots, steps):
    """Of which steps the carries are kept, after each number of steps."""

    def step(kept, number):
        dropped, is_kept = kept_carries.to_drop(kept, number)
        new = kept.replaced(dropped, number)
        kept = jax.tree.map(lambda a, b: jnp.where(is_kept, a, b), new, kept)
        return kept, kept.steps

    start = kept_carries.Kept.at_start(slots)
    numbers = jnp.arange(steps, dtype=jnp.int32)
    return np.asarray(quick_jit(lambda: lax.scan(step, start, numbers)[1])())


def runs_again(kept, steps):
    """How many steps a reversal from these carries runs again."""
    ends = [*kept[1:], steps]
    free = range(len(kept), 0, -1)
    return sum(map(least_runs, map(operator.sub, ends, kept), free))


@pytest.mark.parametrize("slots", [2, 3, 5, 8])
def test_carries_are_kept_where_few_steps_run_again(slots):
    most = 120
    split = quick_jit(
        jax.vmap(lambda n, s: kept_carries.split(n, s, slots), in_axes=(0, None))
    )
    # As many as all numbers of steps take, and at most 64
    most_runs = 1
    while most_runs < 64 and math.comb(slots + most_runs, slots) < 2**31 - 1:
        most_runs += 1
    for free in range(2, slots + 1):
        lengths = np.arange(2, most, dtype=np.int32)
        cuts = np.asarray(split(lengths, jnp.int32(free)))
        for length, cut in zip(lengths.tolist(), cuts.tolist(), strict=True):
            runs = searched_runs(length - cut, free - 1) + searched_runs(cut, free)
            assert cut + runs == searched_runs(length, free) == least_runs(length, free)
        # Around the most steps that each number of runs is enough for
        bounds = [math.comb(free + runs, runs) for runs in range(1, most_runs + 1)]
        around = {bound + more for bound in bounds for more in (-1, 0, 1)}
        known = min(bounds[-1], 2**31 - 1)
        numbers = [number for number in (*around, known) if 2 <= number <= known]
        lengths = np.array(numbers, np.int32)
        cuts = np.asarray(split(lengths, jnp.int32(free)))
        for length, cut in zip(lengths.tolist(), cuts.tolist(), strict=True):
            runs = least_runs(length - cut, free - 1) + least_runs(cut, free)
            assert cut + runs == least_runs(length, free)
    if slots == 2:
        assert int(split(np.array([2146], np.int32), jnp.int32(2))[0]) == 2146 - 65

    steps = 1000
    ratios = []
    for number, kept in enumerate(kept_steps(slots, steps).tolist(), 1):
        # With the forward pass and the visits, beside those of a known number of steps
        every = 2 * number + runs_again(kept, number)
        ratios.append(every / (number + least_runs(number, slots) + 1))
    # Where one step more would need a carry more
    assert max(ratios) <= (1.18 if slots == 2 else 1 + 1 / (2 * slots + 2))
    assert sum(ratios) / steps <= 1.025


def counted_gradient(loop, steps):
    """How often the body of a loop runs for a gradient, and the gradient."""
    runs = []

    def body(carry):
        n, x = carry
        jax.debug.callback(lambda: runs.append(None))
        return n + 1, jnp.sin(x) * 1.01

    def last(x):
        return loop(lambda carry: carry[0] < steps, body, (jnp.int32(0), x))[1]

    gradient = jax.jit(jax.grad(last))(jnp.float64(0.7))
    jax.effects_barrier()
    return len(runs), gradient


@pytest.mark.parametrize(("slots", "steps"), [(1, 9), (3, 40), (6, 25), (6, 100)])
def test_a_gradient_runs_the_planned_steps_and_fewer_than_equinox(slots, steps):
    ours = functools.partial(sr.while_loop, max_carries=slots)
    theirs = functools.partial(eqxi.while_loop, kind="checkpointed", checkpoints=slots)
    runs, gradient = counted_gradient(ours, steps)
    runs_of_equinox, expected = counted_gradient(theirs, steps)
    assert_close(gradient, expected)
    assert runs == 2 * steps + runs_again(kept_steps(slots, steps)[-1].tolist(), steps)
    assert runs <= runs_of_equinox


def test_what_a_step_only_writes_to_is_not_kept():
    size, slots = 5, 3

    def body(carry):
        # A loop within, too
        def inner(state):
            i, rows = state
            return i + 1, rows.at[i + carry["n"]].add(carry["x"])

        _, rows = sr.while_loop(
            lambda state: state[0] < 2, inner, (0, carry["rows"]), max_carries=2
        )
        sums = jax.jit(jnp.add)(carry["sums"], carry["x"])
        table = jnp.where(carry["n"] == 1, carry["table"], carry["table"][::-1])
        x = jnp.sin(carry["x"]) + carry["read"][0]
        read = carry["read"].at[carry["n"]].set(carry["x"])
        return dict(x=x, n=carry["n"] + 1, rows=rows, sums=sums, read=read, table=table)

    def loss(x):
        init = dict(
            x=x,
            n=jnp.int32(0),
            rows=jnp.zeros(7),
            sums=jnp.zeros(()),
            read=jnp.zeros(size),
            table=jnp.ones(9),
        )
        end = sr.while_loop(lambda carry: carry["n"] < 4, body, init, max_carries=slots)
        del end["n"]
        return sum(map(jnp.sum, jax.tree.leaves(end)), jnp.zeros(()))

    def expected(x):
        rows, read = jnp.zeros(7), jnp.zeros(size)
        total = jnp.zeros(())
        for n in range(4):
            rows = rows.at[n].add(x).at[n + 1].add(x)
            total = total + x
            x, read = jnp.sin(x) + read[0], read.at[n].set(x)
        return x + jnp.sum(rows) + total + jnp.sum(read) + 9

    assert_close(jax.value_and_grad(loss)(0.3), jax.value_and_grad(expected)(0.3))
    text = str(jax.make_jaxpr(jax.grad(loss))(0.3))
    assert f"f64[{slots},{size}]" in text
    assert f"f64[{slots},7]" not in text and f"f64[{slots},9]" not in text


def test_examples_that_are_done_have_no_derivative_of_their_last_carry():
    def last(x):
        def root(carry):
            return carry[0] - 1, carry[1] + jnp.sqrt(carry[0])

        return sum(
            sr.while_loop(lambda carry: carry[0] > 0, root, (x, 0 * x), max_carries=2)
        )

    def expected(x):
        left = x - jnp.arange(6.0)
        roots = jnp.where(left > 0, jnp.sqrt(jnp.where(left > 0, left, 1)), 0)
        return jnp.sum(roots) + x - jnp.ceil(x)

    xs = jnp.array([1.5, 4.25, 2.75])
    assert_close(
        quick_jit(jax.vmap(jax.value_and_grad(last)))(xs),
        jax.vmap(jax.value_and_grad(expected))(xs),
    )


def test_examples_that_stop_together_are_not_chosen_between():
    def last(x, steps):
        def body(carry):
            return carry[0] + 1, jnp.sin(carry[1])

        return sr.while_loop(lambda c: c[0] < steps, body, (0, x), max_carries=2)[1]

    xs, steps = jnp.ones(3), jnp.arange(3)
    together = jax.jit(jax.vmap(last, (0, None))).lower(xs, 2).as_text()
    apart = jax.jit(jax.vmap(last)).lower(xs, steps).as_text()
    assert "stablehlo.select" in apart and "stablehlo.select" not in together


def test_loops_in_each_other_and_in_a_fold():
    def power(x, count):
        def step(carry):
            return carry[0] + 1, carry[1] * x

        _, y = sr.while_loop(
            lambda carry: carry[0] < count, step, (0, x), max_carries=2
        )
        return y

    def outer(x):
        def step(carry):
            n, y = carry
            return n + 1, y + jnp.sin(power(y, n))

        return sr.while_loop(lambda carry: carry[0] < 3, step, (0, x), max_carries=1)[1]

    def value(x):
        return sr.fold(outer, 4, remat="nested")(x)

    def expected(x):
        for _ in range(4):
            for n in range(3):
                x = x + jnp.sin(x ** (n + 1))
        return x

    def second(value):
        return jax.jvp(jax.value_and_grad(value), (0.3,), (1.0,))

    assert_close(quick_jit(lambda: second(value))(), second(expected))


def test_it_refuses_what_jax_refuses_and_numbers_of_carries():
    def loop(body, max_carries=2):
        return sr.while_loop(lambda x: x < 3, body, 1.0, max_carries=max_carries)

    with pytest.raises(
        ValueError, match="max_carries is how many .* at least 1; got 0"
    ):
        loop(lambda x: x, 0)
    assert loop(lambda x: x + 1, jnp.int32(2)) == 3  # an integer of JAX is one
    with pytest.raises(TypeError, match=r"max_carries is .*; got 2.0"):
        loop(lambda x: x, 2.0)
    with pytest.raises(TypeError, match="the same pytree structure"):
        loop(lambda x: (x, x))
    with pytest.raises(TypeError, match="boolean scalar"):
        sr.while_loop(lambda x: x, lambda x: x, 1.0, max_carries=1)


def test_results_have_the_types_of_jax():
    def both(init, body):
        for loop in (
            functools.partial(sr.while_loop, max_carries=2),
            lax.while_loop,
        ):
            yield loop(lambda carry: carry["n"] < 3, body, init)

    def body(carry):
        return {"n": carry["n"] + 1, "x": carry["x"] * jnp.float32(2), "s": carry["s"]}

    ours, theirs = both({"n": 0, "x": jnp.float32(1), "s": 2.0}, body)
    assert jax.tree.map(jax.typeof, ours) == jax.tree.map(jax.typeof, theirs)
    with jax.disable_jit():
        assert (
            jax.grad(lambda x: next(both({"n": 0, "x": x, "s": x}, body))["x"])(
                jnp.float32(3)
            )
            == 8
        )


def test_random_keys_in_the_carry_and_closed_over():
    key, other = jax.random.split(jax.random.key(0))

    def body(carry):
        n, x, key = carry
        key, drawn = jax.random.split(key)
        noise = jax.random.normal(drawn) + jax.random.normal(
            jax.random.fold_in(other, n)
        )
        return n + 1, jnp.sin(x) * noise, key

    def last(x, loop):
        return loop(lambda carry: carry[0] < 5, body, (0, x, key))[1]

    def expected(cond, body, init):
        return jax.lax.fori_loop(0, 5, lambda _, carry: body(carry), init)

    # Outside of `jax.jit`, where a key is an array of its own class
    ours = jax.value_and_grad(last)(
        0.7, functools.partial(sr.while_loop, max_carries=2)
    )
    theirs = jax.value_and_grad(last)(0.7, expected)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_devices_stop_apart():
    """Their shared weight is in all gradients, which are summed in each step."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    numbers, x = jnp.array([0, 2, 5, 9]), jnp.linspace(0.1, 2.0, 4)
    rows = jax.P("d")

    def looped(loop, number, x, weight):
        _, (last,) = loop(
            lambda carry: (carry[0] < number).all(),
            lambda carry: (carry[0] + 1, jnp.sin(carry[1] * weight)),
            (jnp.zeros_like(number), x),
        )
        return last

    def on_devices(x, weight):
        ours = functools.partial(sr.while_loop, max_carries=3)
        run = functools.partial(looped, ours)
        divided = jax.shard_map(
            lambda n, x, w: run(n, x, w)[None],
            mesh=mesh,
            in_specs=(rows, rows, jax.P()),
            out_specs=rows,
        )
        return jnp.sum(divided(numbers, x, weight) ** 2)

    def on_one(x, weight):
        ends = [
            looped(masked, n[None], y[None], weight)
            for n, y in zip(numbers, x, strict=True)
        ]
        return jnp.sum(jnp.stack(ends) ** 2)

    def derivatives(loss):
        return quick_jit(
            lambda *args: (
                jax.value_and_grad(loss, (0, 1))(*args),
                jax.jvp(jax.grad(loss, 1), args, args),
            )
        )(x, jnp.float64(1.1))

    assert_close(derivatives(on_devices), derivatives(on_one))


@pytest.mark.parametrize(
    ("new", "is_read"),
    [
        (lambda buffer, x, at: lax.dynamic_update_slice(buffer, x, (at,)), (0, 1, 1)),
        (
            lambda buffer, x, at: lax.dynamic_update_slice(
                buffer, lax.dynamic_slice(buffer, (at,), (1,)), (0,)
            ),
            (0, 0, 1),
        ),
        (lambda buffer, x, at: buffer.at[at].set(x[0]), (0, 1, 1)),
        (lambda buffer, x, at: buffer.at[at].add(x[0]), (0, 1, 1)),
        (lambda buffer, x, at: buffer.at[0].set(buffer[at]), (0, 0, 1)),
        (lambda buffer, x, at: buffer + x, (0, 1, 0)),
        (lambda buffer, x, at: buffer * x, (1, 1, 0)),
        (lambda buffer, x, at: jnp.sin(buffer), (1, 0, 0)),
    ],
)
def test_leaves_that_are_only_written_to_are_not_read(new, is_read):
    def step(buffer, x, at):
        return new(buffer, x, at), x, at + 1

    jaxpr = jax.make_jaxpr(step)(jnp.ones(3), jnp.ones(1), 0).jaxpr
    assert read_leaves(jaxpr, 3) == is_read
