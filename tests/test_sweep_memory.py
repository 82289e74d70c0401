"""What the sweep keeps and computes, and that frozen parts cost nothing."""

import functools

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from stacked_remat import ScanCheckpointPolicy, fold, scan

from .jaxprs import count, equations, inner_equations

WIDTH, ROWS = 4, 3


def nested(length: int, **settings):
    """`lax.scan` as a nested sweep of this many layers."""
    remat = ScanCheckpointPolicy(**{"nested": True, **settings})
    return lambda body, init, xs: scan(body, hax.Axis("layers", length), remat=remat)(
        init, xs
    )


def mlp(carry, x):
    up, down = x
    # The derivative of tanh uses its unnamed result, so naming that would not save its
    # recomputation.
    return carry + jnp.tanh(checkpoint_name(carry @ up, "h")) @ down, None


def mlp_gradients(run, length: int, trained: tuple[int, ...] = (0, 1, 2)):
    """Jaxpr of gradients with respect to (up, down, input)."""

    def value(up, down, x):
        return jnp.sum(run(mlp, x, (up, down))[0] ** 2)

    shapes = [(length, WIDTH, 6), (length, 6, WIDTH), (ROWS, WIDTH)]
    return jax.make_jaxpr(jax.grad(value, trained))(
        *(jnp.ones(shape) for shape in shapes)
    )


def shapes_made(jaxpr) -> set[tuple[int, ...]]:
    return {
        var.aval.shape
        for equation in equations(jaxpr)
        if equation.primitive.name != "reverse_mode_only"  # returns its arguments
        for var in equation.outvars
        if hasattr(var.aval, "shape")
    }


def test_no_segment_of_weights_or_gradients_is_copied():
    jaxpr = mlp_gradients(nested(48), 48)
    stacks = {
        shape[0]
        for shape in shapes_made(jaxpr.jaxpr)
        if shape[1:] in ((WIDTH, 6), (6, WIDTH))
    }
    assert stacks <= {1, 48}


@pytest.mark.parametrize("first_layers", [0, 5])
def test_gradients_are_written_in_place(first_layers: int):
    """Inside the loops, only writes to one layer make a whole stack; other operations
    pass it through.
    """
    jaxpr = mlp_gradients(nested(48, first_layers=first_layers), 48)
    whole = {(48, WIDTH, 6), (48, 6, WIDTH)}
    loops = [
        equation
        for equation in equations(jaxpr.jaxpr)
        if equation.primitive.name in ("while", "scan")
    ]
    makers = {
        equation.primitive.name
        for loop in loops
        for equation in inner_equations(loop)
        if any(getattr(var.aval, "shape", None) in whole for var in equation.outvars)
    }
    assert "dynamic_update_slice" in makers
    # The last two pass it through
    assert makers <= {
        "dynamic_update_slice",
        "while",
        "jit",
    }


def test_examples_of_vmap_have_no_gradients_of_their_own():
    def each(body, x, xs):
        def one(x, rates):
            return nested(12)(lambda carry, x: body(carry * x[1], x[0]), x, (xs, rates))

        # With rates of each example: less than the weights that all share
        inner = jax.vmap(one)
        return jax.vmap(inner, (0, None))(
            jnp.broadcast_to(x, (11, 7, *x.shape)), jnp.ones((7, 12))
        )

    jaxpr = mlp_gradients(each, 12)
    assert {(12, WIDTH, 6), (12, 6, WIDTH)} <= (made := shapes_made(jaxpr.jaxpr))
    assert not [
        shape for shape in made if {7, 11} & {*shape} and {12, 6, WIDTH} <= {*shape}
    ]


def test_frozen_stacks_and_parts_of_them_cost_nothing():
    trained, frozen, one = (
        mlp_gradients(nested(12), 12, which) for which in ((0, 1, 2), (2,), (1,))
    )
    up, down = (12, WIDTH, 6), (12, 6, WIDTH)
    for jaxpr, expected in ((trained, {up, down}), (frozen, set()), (one, {down})):
        assert {up, down} & shapes_made(jaxpr.jaxpr) == expected
    assert count(trained.jaxpr, "dot_general") - count(frozen.jaxpr, "dot_general") == 2
    run = nested(12, first_layers=5)
    frozen, trained = (
        count(mlp_gradients(run, 12, which), "dot_general")
        for which in ((2,), (0, 1, 2))
    )
    # Two products in the body of each of the two loops that visit
    assert trained - frozen == 4


def test_a_carry_that_nothing_perturbs_has_no_cotangent():
    def body(carry, x):
        h, mask = carry
        return (jnp.tanh(h @ x) * jnp.exp(mask), mask), None

    def value(mask, w, h):
        return jnp.sum(nested(6)(body, (h, mask), w)[0][0])

    args = (
        jnp.ones((ROWS, WIDTH)),
        jnp.ones((6, WIDTH, WIDTH)),
        jnp.ones((ROWS, WIDTH)),
    )
    both, one = (
        jax.make_jaxpr(jax.grad(value, which))(*args).jaxpr for which in ((0, 1), (1,))
    )
    assert count(one, "mul") < count(both, "mul")


def test_the_first_layers_are_evaluated_once_and_the_rest_by_the_schedule():
    def evaluations(**settings) -> int:
        calls = []

        def body(c, w):
            shape = jax.ShapeDtypeStruct((), jnp.float32)
            zero = jax.pure_callback(
                lambda x: calls.append(1) or 0 * x, shape, lax.stop_gradient(c * w)
            )
            return jnp.tanh(c * w + zero), None

        gradient = jax.jit(jax.grad(lambda w: nested(7, **settings)(body, 0.5, w)[0]))
        jax.block_until_ready(gradient(jnp.ones(7)))
        return len(calls)

    # Forward 7; then each of the last 4 once more at its visit, and what the schedule
    # replays.
    assert evaluations(first_layers=3, nested=4) == 7 + 4
    assert (
        evaluations(first_layers=3)
        == 7 + 4 + ScanCheckpointPolicy(nested=True).schedule(4).replays
    )
    assert evaluations(nested=7) == 7 + 7


@pytest.mark.parametrize(
    ("nested", "steps", "small"),
    [(True, 9, True), (True, 9, False), (2, 3, True)],
)
def test_nested_keeps_the_internals_of_a_segment_that_take_at_most_half_of_its_carries(
    nested: bool | int, steps: int, small: bool
):
    """Then it evaluates no step a third time; not with a number of segments, though
    two of three steps are those of `nested=True`.
    """
    calls = []
    remat = ScanCheckpointPolicy(nested=nested)

    def swing(carry):
        q, p = carry
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        zero = jax.pure_callback(
            lambda x: calls.append(1) or 0 * x, shape, lax.stop_gradient(q[0])
        )
        p = p - 0.1 * jnp.sin(q + zero)  # of which a derivative reads one array of q
        return q + 0.1 * (p if small else jnp.tanh(p)), p  # and of tanh another

    def value(run, q):
        return jnp.sum(run((q, q))[0] ** 2)

    def looped(carry):
        return functools.reduce(lambda carry, _: swing(carry), range(steps), carry)

    q = jnp.linspace(0, 1, 16)
    expected = jax.grad(functools.partial(value, looped))(q)
    calls.clear()
    found = jax.jit(
        jax.grad(functools.partial(value, fold(swing, steps, remat=remat)))
    )(q)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    keeps_internals = small and nested is True
    replays = 0 if keeps_internals else remat.schedule(steps).replays
    assert len(calls) == 2 * steps + replays


def over(carry):
    return carry > 3


@pytest.mark.parametrize(
    ("settings", "until", "loops"),
    [
        # The layers, and their visits
        ({"save_carries": "offload"}, None, 2),
        # And one over segments: those of one layer need no loop of their own
        ({"nested": 4}, None, 3),
        ({"nested": 4, "save_carries": "offload"}, None, 3),
        ({"nested": 4, "save_carries": "disk", "carries_folder": "/tmp"}, None, 3),
        ({"nested": 4}, over, 3),
        ({}, over, 3),
        # Within it the layers that run forward, again, and their visits
        ({"max_carries": 3}, None, 5),
        ({"max_carries": 3}, over, 5),
    ],
)
def test_no_more_loops_than_the_segments_need(settings, until, loops):
    remat = ScanCheckpointPolicy(**settings)
    run = fold(lambda x, factor: jnp.sin(x) * factor, 4, remat=remat, until=until)
    gradient = jax.make_jaxpr(jax.grad(lambda xs: run(jnp.float32(1), xs)))(jnp.ones(4))
    assert count(gradient.jaxpr, "while") + count(gradient.jaxpr, "scan") == loops
    # As indices that may be negative have
    is_without_choices = count(gradient.jaxpr, "select_n") == 0
    assert is_without_choices or until is not None


def test_weights_are_not_among_the_saved_residuals():
    saving = mlp_gradients(nested(12, save_block_internals=True), 12)
    longest = 5  # of segments
    assert {(longest, WIDTH, 6), (longest, 6, WIDTH)}.isdisjoint(
        shapes_made(saving.jaxpr)
    )


def test_the_forward_pass_writes_the_first_input_of_a_segment_alone():
    """On a CPU, where a write takes as long as a small step."""
    jaxpr = mlp_gradients(nested(12), 12)
    loops = [
        each
        for each in equations(jaxpr.jaxpr)
        if each.primitive.name in ("while", "scan")
    ]
    bodies = [[each.primitive.name for each in inner_equations(loop)] for loop in loops]
    innermost = [
        names
        for names in bodies
        if "tanh" in names and not {"while", "scan"} & {*names}
    ]
    assert [("dynamic_update_slice" in names) for names in innermost] == [
        False,
        True,
        True,
    ]
