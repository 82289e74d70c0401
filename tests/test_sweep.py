"""The sweep against the Python loop that it stands for."""

import functools
import math
import re
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from stacked_remat._schedule import Schedule, bounded, equal, levels, segmented, shrinking
from stacked_remat._sweep import sweep
from stacked_remat._sweep_forward import forward_sweep
from stacked_remat._sweep_reverse import Replay, reverse_sweep

WIDTH, ROWS = 4, 3

# What is tested is arithmetic, so the compiler need not optimize.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def stack(length: int, dtype=jnp.float32) -> dict:
    """Layers with weights, an integer, a typed key, and nothing."""
    keys = jax.random.split(jax.random.key(length), 3)
    return {
        "w": 0.5 * jax.random.normal(keys[0], (length, WIDTH, WIDTH), dtype),
        "b": jax.random.normal(keys[1], (length, WIDTH), dtype),
        "id": jnp.arange(length),
        "key": jax.random.split(keys[2], length),
        "none": None,
    }


def block(shift, carry, x):
    """One layer: `shift` is shared, the carry has an integer leaf."""
    h, count = carry
    noise = (jax.random.key_data(x["key"])[0] % 7).astype(h.dtype)
    bias = jnp.where(x["id"] % 2 == 0, x["b"], -x["b"])
    h = h + jnp.tanh(h @ x["w"] + jnp.broadcast_to(bias * shift, h.shape) + noise)
    return (h, count + 1), {"mean": jnp.mean(h, 0), "count": count}


def loop(body, init, xs, *, length: int, reverse: bool = False):
    """The Python loop."""
    carry, ys = init, [None] * length
    body = jax.jit(body)
    for i in reversed(range(length)) if reverse else range(length):
        carry, ys[i] = body(
            carry, jax.tree.map(lambda leaf, i=i: lax.dynamic_index_in_dim(leaf, i, 0, False), xs)
        )
    return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *ys)


def loss(run, parameters, frozen, length: int):
    """Uses the carry, the outputs, and a closure over a value that is being differentiated."""
    h, shift, w, b = parameters
    doubled = shift + shift
    xs = {**frozen, "w": w, "b": b}
    (h, count), ys = run(functools.partial(block, doubled), (h, jnp.int32(0)), xs)
    weights = jnp.linspace(0.5, 1.5, length, dtype=h.dtype)[:, None]
    value = jnp.sum(h**2) + jnp.sum(ys["mean"] * jnp.broadcast_to(weights, ys["mean"].shape))
    return value, (h, count, ys["count"])


def inputs(length: int, dtype=jnp.float32):
    xs = stack(length, dtype)
    h = jax.random.normal(jax.random.key(7), (ROWS, WIDTH), dtype)
    shift = jnp.linspace(0.5, 1.0, WIDTH, dtype=dtype)
    frozen = {name: xs[name] for name in ("id", "key", "none")}
    return (h, shift, xs["w"], xs["b"]), frozen


def derivatives(run, length: int, dtype=jnp.float32):
    parameters, frozen = inputs(length, dtype)
    return jax.value_and_grad(lambda p: loss(run, p, frozen, length), has_aux=True)(parameters)


def assert_close(actual, expected, tolerance: float = 2e-5):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1.0, np.abs(b).max()))


@functools.cache
def expected(length: int, reverse: bool = False):
    return derivatives(functools.partial(loop, length=length, reverse=reverse), length)


def check(schedule: Schedule, reverse: bool = False, **kwargs):
    length = schedule.length
    run = functools.partial(sweep, length=length, schedule=schedule, reverse=reverse, **kwargs)
    assert_close(jit(lambda: derivatives(run, length))(), expected(length, reverse))


@pytest.mark.parametrize("length", [1, 2, 7, 12, 13, 48])
def test_every_length(length: int):
    check(shrinking(length))


@pytest.mark.parametrize(
    "schedule",
    [
        shrinking(12),
        equal(12, 3),
        equal(12, 5),
        equal(12, 12),
        equal(12, 1),
        segmented(12, 5),
        levels(12, (2, 2, 3)),
        bounded(12, max_carries=2),
        bounded(12, max_carries=4),
        bounded(12, max_carries=12),
    ],
    ids=str,
)
def test_every_schedule_in_reverse(schedule: Schedule):
    check(schedule, reverse=True)


@pytest.mark.parametrize("unroll", [2, True])
@pytest.mark.parametrize("schedule", [shrinking(7), equal(12, 3)], ids=str)
def test_unroll(schedule: Schedule, unroll: int | bool):
    check(schedule, unroll=unroll)


@pytest.mark.parametrize("schedule", [segmented(7, 3), equal(12, 4), equal(7, 7), shrinking(7)], ids=str)
@pytest.mark.parametrize("reverse", [False, True])
def test_boundaries_on_the_host(schedule: Schedule, reverse: bool):
    check(schedule, reverse=reverse, boundaries="host")


def test_boundaries_on_the_host_unrolled():
    check(segmented(7, 3), unroll=2, boundaries="host")


def test_bfloat16_accumulates_like_scan():
    def scan(body, init, xs):
        return lax.scan(jax.checkpoint(body), init, xs)

    run = functools.partial(sweep, length=7, schedule=shrinking(7))
    actual, wanted = (jit(lambda run=run: derivatives(run, 7, jnp.bfloat16))() for run in (run, scan))
    assert_close(actual, wanted, tolerance=2e-2)


def test_without_jit():
    run = functools.partial(sweep, length=3, schedule=shrinking(3))
    assert_close(derivatives(run, 3), expected(3))


def test_nothing_to_scan_over():
    def value(run, x, a):
        return run(lambda c, _: (jnp.sin(c) * a, None), x, None)[0]

    grad = jax.grad(
        functools.partial(value, functools.partial(sweep, length=5, schedule=shrinking(5))), (0, 1)
    )
    wanted = jax.grad(functools.partial(value, functools.partial(lax.scan, length=5)), (0, 1))
    assert_close(grad(0.3, 1.2), wanted(0.3, 1.2))


def test_weakly_typed_carry():
    def body(carry, x):
        return carry * x, jnp.float32(1.0) * carry

    xs = jnp.arange(1.0, 4.0)
    actual = sweep(body, 1.0, xs, length=3, schedule=shrinking(3))
    assert_close(actual, lax.scan(body, 1.0, xs))
    with pytest.raises(TypeError, match="carry"):
        sweep(lambda c, x: (jnp.stack([c, c]), None), 1.0, xs, length=3, schedule=shrinking(3))


# What is saved and what is computed.


def mlp(carry, x):
    up, down = x
    # Naming tanh's result would not spare its recomputation, for its derivative uses it unnamed.
    h = checkpoint_name(carry @ up, "h")
    return carry + jnp.tanh(h) @ down, None


def mlp_gradients(run, length: int, trained: tuple[int, ...] = (0, 1, 2), hidden: int = 6):
    """Jaxpr of gradients with respect to (up, down, input)."""

    def value(up, down, x):
        return jnp.sum(run(mlp, x, (up, down))[0] ** 2)

    shapes = [(length, WIDTH, hidden), (length, hidden, WIDTH), (ROWS, WIDTH)]
    return jax.make_jaxpr(jax.grad(value, trained))(*(jnp.ones(shape) for shape in shapes)), value


def equations(jaxpr):
    """All equations, with those of inner jaxprs."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(equation.params, is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def shapes_made(jaxpr) -> set[tuple[int, ...]]:
    return {
        var.aval.shape
        for equation in equations(jaxpr)
        for var in equation.outvars
        if hasattr(var.aval, "shape")
    }


def count(jaxpr, name: str) -> int:
    return sum(equation.primitive.name == name for equation in equations(jaxpr))


def nested(length: int, **kwargs):
    return functools.partial(sweep, length=length, schedule=shrinking(length), **kwargs)


def test_carries_are_kept_in_the_slots_of_the_schedule_and_nowhere_else():
    jaxpr, _ = mlp_gradients(nested(48), 48)
    made = shapes_made(jaxpr.jaxpr)
    stacks_of_carries = {
        shape for shape in made if len(shape) == 3 and shape[1:] == (ROWS, WIDTH) and shape[0] > 1
    }
    assert stacks_of_carries == {(10, ROWS, WIDTH)}


def test_no_segment_of_weights_or_gradients_is_copied():
    jaxpr, _ = mlp_gradients(nested(48), 48)
    stacks = {shape[0] for shape in shapes_made(jaxpr.jaxpr) if shape[1:] in ((WIDTH, 6), (6, WIDTH))}
    assert stacks <= {1, 48}


def test_frozen_stacks_cost_nothing():
    trained, frozen = (mlp_gradients(nested(12), 12, which)[0] for which in ((0, 1, 2), (2,)))
    made = shapes_made(frozen.jaxpr)
    assert {(12, WIDTH, 6), (12, 6, WIDTH)}.isdisjoint(made)
    assert {(12, WIDTH, 6), (12, 6, WIDTH)} <= shapes_made(trained.jaxpr)
    assert count(trained.jaxpr, "dot_general") - count(frozen.jaxpr, "dot_general") == 2


def test_frozen_part_of_a_stack_costs_nothing():
    one, _ = mlp_gradients(nested(12), 12, (1,))
    made = shapes_made(one.jaxpr)
    assert (12, 6, WIDTH) in made and (12, WIDTH, 6) not in made


def test_a_carry_that_nothing_perturbs_has_no_cotangent():
    def body(carry, x):
        h, mask = carry
        return (jnp.tanh(h @ x) * jnp.exp(mask), mask), None

    def value(mask, w, h):
        return jnp.sum(sweep(body, (h, mask), w, length=6, schedule=shrinking(6))[0][0])

    args = (jnp.ones((ROWS, WIDTH)), jnp.ones((6, WIDTH, WIDTH)), jnp.ones((ROWS, WIDTH)))
    both, one = (jax.make_jaxpr(jax.grad(value, which))(*args).jaxpr for which in ((0, 1), (1,)))
    assert count(one, "mul") < count(both, "mul")


def test_program_size_does_not_grow_with_the_number_of_layers():
    def lines(length: int) -> int:
        _, value = mlp_gradients(nested(length), length)
        args = (jnp.ones((length, WIDTH, 6)), jnp.ones((length, 6, WIDTH)), jnp.ones((ROWS, WIDTH)))
        return len(jax.jit(jax.grad(value, (0, 1, 2))).lower(*args).as_text().splitlines())

    assert lines(192) <= 1.05 * lines(48)


def test_compiled_memory_is_that_of_the_slots():
    length, rows = 48, 4096

    def temporaries(run) -> int:
        def value(up, down, x):
            return jnp.sum(run(mlp, x, (up, down))[0] ** 2)

        shapes = [(length, WIDTH, 6), (length, 6, WIDTH), (rows, WIDTH)]
        args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        memory = jax.jit(jax.grad(value, (0, 1, 2))).lower(*args).compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes // (rows * WIDTH * 4)

    def scan(body, init, xs):
        return lax.scan(jax.checkpoint(body), init, xs)

    layer = temporaries(scan) - length
    assert temporaries(nested(length)) <= 10 + layer + 2
    six = functools.partial(sweep, length=length, schedule=bounded(length, max_carries=6))
    assert temporaries(six) <= 6 + layer + 2


# Internals saved within the segment being walked.

save_h = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("h"))


@pytest.mark.parametrize(
    ("schedule", "boundaries"),
    [
        (shrinking(7), "device"),
        (equal(12, 4), "device"),
        (bounded(12, max_carries=3), "device"),
        (segmented(7, 3), "host"),
    ],
    ids=str,
)
def test_saved_names(schedule: Schedule, boundaries: Literal["device", "host"]):
    length = schedule.length
    run = functools.partial(sweep, length=length, schedule=schedule, checkpoint=save_h, boundaries=boundaries)
    _, value = mlp_gradients(run, length)
    _, reference = mlp_gradients(lax.scan, length)
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(length, WIDTH, 6), (length, 6, WIDTH), (ROWS, WIDTH)]
    args = [0.5 * jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]
    assert_close(jit(jax.grad(value, (0, 1, 2)))(*args), jax.jit(jax.grad(reference, (0, 1, 2)))(*args))


def test_saved_names_are_kept_for_one_segment_and_not_computed_again():
    plain, _ = mlp_gradients(nested(12), 12)
    saving, _ = mlp_gradients(nested(12, checkpoint=save_h), 12)
    longest = max(shrinking(12).segments)
    assert (longest, ROWS, 6) in shapes_made(saving.jaxpr)
    assert (longest, ROWS, 6) not in shapes_made(plain.jaxpr)

    def flops(run) -> float:
        # Unrolled, so that XLA's count, which takes every loop body once, is right.
        _, value = mlp_gradients(run, 6)
        args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((6, 64, 64), (6, 64, 64), (64, 64))]
        analysis = jax.jit(jax.grad(value, (0, 1, 2))).lower(*args).compile().cost_analysis()
        assert analysis is not None
        return analysis["flops"] / (2 * 64**3)

    schedule = equal(6, 2)
    one, two = (
        flops(functools.partial(sweep, length=6, schedule=schedule, unroll=True, checkpoint=checkpoint))
        for checkpoint in (jax.checkpoint, save_h)
    )
    # Per layer: 2 products forward, 2 in the replay, the first again for the pullback, 4 in the pullback.
    assert math.isclose(one, 6 * 2 + 4 * 2 + 6 * 5, rel_tol=0.05)
    assert math.isclose(two, 6 * 2 + 6 * 2 + 6 * 4 - 2, rel_tol=0.05)


def test_weights_are_not_among_the_saved_residuals():
    saving, _ = mlp_gradients(nested(12, checkpoint=lambda body: body), 12)
    longest = max(shrinking(12).segments)
    assert {(longest, WIDTH, 6), (longest, 6, WIDTH)}.isdisjoint(shapes_made(saving.jaxpr))


# Composition.


def test_gradient_of_gradient():
    parameters, frozen = inputs(5)

    def penalty(run, p):
        gradient = jax.grad(lambda p: loss(run, p, frozen, 5)[0])(p)
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradient))

    for boundaries in ("device", "host"):
        run = functools.partial(sweep, length=5, schedule=segmented(5, 2), boundaries=boundaries)
        actual = jit(jax.grad(functools.partial(penalty, run)))(parameters)
        assert_close(actual, jit(jax.grad(functools.partial(penalty, lax.scan)))(parameters))


def test_gradient_of_gradient_of_gradient():
    def run(scan: Any, x):
        return scan(lambda c, w: (jnp.sin(c * w), None), x, jnp.linspace(0.5, 1.0, 4))[0]

    def third(scan: Any):
        return jit(jax.grad(jax.grad(jax.grad(functools.partial(run, scan)))))(0.7)

    assert_close(third(nested(4)), third(lax.scan))


def test_vmap():
    run, length = nested(5), 5
    (h, *rest), frozen = inputs(length)
    hs = jnp.stack([h, -h])

    def gradients(run, h, w_scale):
        return jax.grad(lambda p: loss(run, (p[0], p[1], p[2] * w_scale, p[3]), frozen, length)[0])(
            (h, *rest)
        )

    scales = jnp.array([1.0, 0.5])
    actual = jit(jax.vmap(functools.partial(gradients, run)))(hs, scales)
    assert_close(actual, jit(jax.vmap(functools.partial(gradients, lax.scan)))(hs, scales))


def test_inside_checkpoint():
    parameters, frozen = inputs(7)
    value = jax.checkpoint(lambda p: loss(nested(7), p, frozen, 7)[0])
    assert_close(jit(jax.grad(value))(parameters), expected(7)[1])


def test_sweep_within_a_sweep():
    def outer(inner, outer):
        def value(w, v, x):
            def layer(carry, v):
                return inner(lambda c, u: (jnp.tanh(c @ u + v * jnp.mean(w)), None), carry, w)[0], None

            return jnp.sum(outer(layer, x, v)[0] ** 2)

        args = (0.3 * jnp.ones((3, WIDTH, WIDTH)), jnp.linspace(0.0, 1.0, 4), jnp.ones((ROWS, WIDTH)))
        return jit(jax.grad(value, (0, 1, 2)))(*args)

    with jax.numpy_rank_promotion("allow"):
        assert_close(outer(nested(3), nested(4)), outer(lax.scan, lax.scan))


def test_vjp_with_integer_outputs_and_unused_outputs():
    def value(run, w):
        (h, _), _ = run(lambda c, u: ((c[0] * u, c[1] + 1), c[1]), (jnp.float32(1.0), jnp.int32(0)), w)
        return h

    w = jnp.linspace(0.5, 1.5, 6)
    assert_close(
        jax.grad(functools.partial(value, nested(6)))(w), jax.grad(functools.partial(value, lax.scan))(w)
    )


def test_only_the_stacked_outputs_are_used():
    def value(run, w):
        return jnp.sum(run(lambda c, u: (jnp.sin(c) * u, c), jnp.float32(1.0), w)[1])

    w = jnp.linspace(0.5, 1.5, 6)
    assert_close(
        jax.grad(functools.partial(value, nested(6)))(w), jax.grad(functools.partial(value, lax.scan))(w)
    )


def test_forward_mode_names_the_policy_to_use():
    def value(x):
        return sweep(lambda c, _: (jnp.sin(c), None), x, None, length=4, schedule=shrinking(4))[0]

    assert_close(jit(value)(0.3), lax.scan(lambda c, _: (jnp.sin(c), None), jnp.float32(0.3), length=4)[0])
    with pytest.raises(TypeError, match="remat=True or remat=False"):
        jax.jvp(value, (0.3,), (1.0,))


def test_sharded_stacks_are_not_gathered():
    devices = jax.devices()
    if len(devices) < 8:
        pytest.skip("needs 8 devices")
    mesh = jax.sharding.Mesh(np.asarray(devices[:8]).reshape(4, 2), ("data", "model"))
    length, width, hidden, rows = 12, 8, 16, 8

    def place(*axes):
        return NamedSharding(mesh, PartitionSpec(*axes))

    shardings = (place(None, None, "model"), place(None, "model", None), place("data", None))
    shapes = ((length, width, hidden), (length, hidden, width), (rows, width))
    keys = jax.random.split(jax.random.key(0), 3)
    args = [
        jax.device_put(0.3 * jax.random.normal(key, shape), sharding)
        for key, shape, sharding in zip(keys, shapes, shardings, strict=True)
    ]

    def compiled(run):
        def value(up, down, x):
            return jnp.mean(run(mlp, x, (up, down))[0] ** 2)

        return jax.jit(jax.value_and_grad(value, (0, 1, 2))).lower(*args).compile()

    ours, plain = compiled(nested(length)), compiled(lax.scan)
    for a, b in zip(jax.tree.leaves(ours(*args)), jax.tree.leaves(plain(*args)), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)
    program = ours.as_text() or ""
    gathers = [line for line in program.splitlines() if re.search(r"all-gather(-start)?\(", line)]
    assert not [line for line in gathers if f"[{length}," in line]


@pytest.mark.parametrize("boundaries", ["device", "host"])
def test_inside_shard_map_and_with_shardings_in_types(boundaries: Literal["device", "host"]):
    length = 4
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((length, WIDTH, 8), (length, 8, WIDTH), (8, WIDTH))
    args = [0.3 * jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]
    ours = functools.partial(sweep, length=length, schedule=segmented(length, 2), boundaries=boundaries)

    def value(run, up, down, x):
        h, ys = run(lambda c, u: (mlp(c, u)[0], jnp.sum(c)), x, (up, down))
        return jnp.sum(h**2) + jnp.sum(ys)

    wanted = jit(jax.grad(functools.partial(value, lax.scan), (0, 1, 2)))(*args)
    rows, whole = PartitionSpec("data"), PartitionSpec()

    def mesh(kind):
        return jax.make_mesh((8,), ("data",), axis_types=(kind,))

    def mapped(up, down, x):
        def part(*args):
            return lax.psum(value(ours, *args), "data")

        specs = {"in_specs": (whole, whole, rows), "out_specs": whole}
        return jax.shard_map(part, mesh=mesh(AxisType.Auto), **specs)(up, down, x)

    assert_close(jit(jax.grad(mapped, (0, 1, 2)))(*args), wanted)
    with jax.set_mesh(mesh(AxisType.Explicit)):
        placed = [jax.device_put(arg, spec) for arg, spec in zip(args, (whole, whole, rows), strict=True)]
        assert_close(jit(jax.grad(functools.partial(value, ours), (0, 1, 2)))(*placed), wanted)


@pytest.mark.parametrize("boundaries", ["device", "host"])
def test_keys_in_the_carry(boundaries: Literal["device", "host"]):
    def body(carry, w):
        h, key = carry
        key, own = jax.random.split(key)
        return (h * w + jax.random.uniform(own, h.shape), key), None

    def value(run, w):
        return jnp.sum(run(body, (jnp.ones(2), jax.random.key(1)), w)[0][0] ** 2)

    w = jnp.linspace(0.5, 1.5, 5)
    ours = functools.partial(sweep, length=5, schedule=segmented(5, 2), boundaries=boundaries)
    assert_close(
        jit(jax.grad(functools.partial(value, ours)))(w), jit(jax.grad(functools.partial(value, lax.scan)))(w)
    )


@pytest.mark.parametrize("schedule", [shrinking(7), equal(6, 2), bounded(9, max_carries=3)], ids=str)
def test_a_visitor_sees_every_layer_once_from_the_last_with_its_input(schedule: Schedule):
    def step(index, carry):
        return [carry[0] + index + 1], None

    def visitor(layer, cotangent, state):
        seen, at = state
        seen = lax.dynamic_update_index_in_dim(seen, jnp.stack([layer.index, layer.carry[0]]), at, 0)
        return [cotangent[0] * 2], (seen, at + 1)

    length = schedule.length
    _, _, kept = forward_sweep(step, [jnp.int32(0)], schedule)
    state = (jnp.zeros((length, 2), jnp.int32), jnp.int32(0))
    replay = Replay(advance=lambda index, carry: step(index, carry)[0])
    cotangent, (seen, _) = reverse_sweep(replay, visitor, kept, [jnp.int32(1)], state, schedule)
    assert cotangent[0] == 2**length
    assert seen.tolist() == [[i, i * (i + 1) // 2] for i in reversed(range(length))]


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"length": 5, "schedule": shrinking(4)}, "schedule is for 4 layers, but there are 5"),
        ({"length": 4, "schedule": shrinking(4)}, r"xs\['w'\] has shape \(5,\).*size 4"),
        ({"length": 5, "schedule": shrinking(5), "boundaries": "disk"}, '"device" or "host", got \'disk\''),
        ({"length": 5, "schedule": bounded(5, max_carries=2), "boundaries": "host"}, "cut once"),
    ],
)
def test_errors(kwargs, match):
    with pytest.raises(ValueError, match=match):
        sweep(lambda c, x: (c, None), jnp.float32(1.0), {"w": jnp.ones(5)}, **kwargs)
