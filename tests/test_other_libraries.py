"""What `docs/port-a-loop.md` shows of Haiku and Diffrax, and Diffrax's adjoint."""

import functools

import diffrax
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from haiku.experimental import layer_stack

from stacked_remat import fold, scan, shared
from stacked_remat.diffrax import RematAdjoint

from .blocks import assert_close, quick_jit

pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),
    pytest.mark.filterwarnings("ignore"),
]
LAYERS, WIDTH = 6, 8


def test_layers_of_haiku_are_folded_with_the_parameters_of_layer_stack():
    def block(x):
        return x + jax.nn.relu(hk.Linear(WIDTH)(x))

    stack = hk.transform(layer_stack(LAYERS)(block))
    x = jnp.ones((2, WIDTH))
    params = stack.init(jax.random.key(0), x)
    ((name, of_layers),) = params.items()

    layer = hk.transform(block)

    def apply(x, of_layer):
        return layer.apply({name.rpartition("/")[2]: of_layer}, None, x)

    def loss(of_layers):
        return jnp.sum(fold(apply, LAYERS, remat="nested")(x, of_layers))

    def expected(of_layers):
        return jnp.sum(stack.apply({name: of_layers}, None, x))

    assert_close(
        jax.value_and_grad(loss)(of_layers), jax.value_and_grad(expected)(of_layers)
    )


def test_layers_of_haiku_have_keys_and_state():
    def block(x):
        count = hk.get_state("count", (), init=jnp.zeros)
        hk.set_state("count", count + 1)
        return hk.dropout(hk.next_rng_key(), 0.1, x + hk.Linear(WIDTH)(x))

    layer = hk.transform_with_state(block)
    x = jnp.ones((2, WIDTH))
    keys = jax.random.split(jax.random.key(0), LAYERS)
    params, states = jax.vmap(layer.init, (0, None))(keys, x)

    def apply(x, params, state, key):
        return layer.apply(params, state, key, x)

    y, new_states = scan(apply, LAYERS, remat="nested")(x, params, states, keys)
    expected = x

    def row(tree, index):
        return jax.tree.map(lambda leaf: leaf[index], tree)

    for index in range(LAYERS):
        of_layer = row((params, states), index)
        expected, state = layer.apply(*of_layer, keys[index], expected)
        assert_close(row(new_states, index), state)
    assert_close(y, expected)


def test_steps_of_a_solver_of_diffrax_have_its_gradient():
    steps, start, end = 50, 0.0, 1.0
    step_size = (end - start) / steps

    def field(t, y, rate):
        return -rate * y * (1 + 0.1 * jnp.sin(t))

    solver, term = diffrax.Tsit5(), diffrax.ODETerm(field)

    def step(y, number, rate):
        t = start + step_size * number
        next_t = start + step_size * (number + 1)
        state = solver.init(term, t, next_t, y, rate)
        y, _, _, _, _ = solver.step(term, t, next_t, y, rate, state, made_jump=False)
        return y

    def solved(y, rate):
        numbers = jnp.arange(steps, dtype=jnp.float32)
        return fold(step, steps, remat="nested")(y, numbers, shared(rate)).sum()

    def expected(y, rate):
        adjoint = diffrax.RecursiveCheckpointAdjoint()
        solution = diffrax.diffeqsolve(
            term, solver, start, end, step_size, y, rate, adjoint=adjoint
        )
        return solution.ys.sum()

    y, rate = jnp.array([1.0, 2.0]), jnp.float32(0.7)
    assert_close(
        jax.value_and_grad(solved, (0, 1))(y, rate),
        jax.value_and_grad(expected, (0, 1))(y, rate),
        rtol=1e-4,
    )


@pytest.mark.parametrize("save", ["ts", "dense"])
def test_the_adjoint_has_the_derivatives_of_diffrax_in_both_modes(save):
    def field(t, y, args):
        rate, push = args
        return {"q": y["p"], "p": -rate * jnp.sin(y["q"]) + push * jnp.cos(t)}

    saveat = diffrax.SaveAt(dense=True)
    options = {"max_steps": 64}
    if save == "ts":
        saveat = diffrax.SaveAt(ts=jnp.linspace(0.2, 1.9, 4))
        event = diffrax.Event(lambda t, y, args, **_: y["q"] - 0.9)
        options = {"event": event, "max_steps": None}

    def last(adjoint, q, args):
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(field),
            diffrax.Heun(),
            0.0,
            2.0,
            0.1,
            {"q": q, "p": jnp.zeros_like(q)},
            args,
            saveat=saveat,
            stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-4),
            adjoint=adjoint,
            **options,
        )
        if save == "dense":
            return solution.evaluate(0.7)["q"] + solution.evaluate(1.6)["p"]
        found = jnp.stack([solution.ys["q"], solution.ys["p"]])
        return jnp.sum(jnp.where(jnp.isfinite(found), found, 0))

    # In float32 the sizes of steps depend on how their errors are rounded.
    with jax.enable_x64(True):
        args = jnp.float64(0.3), (jnp.float64(0.4), jnp.float64(1.2))
        ours = functools.partial(last, RematAdjoint(max_carries=3))
        # Equinox's loop asks for a number where there is no bound.
        theirs = functools.partial(last, diffrax.RecursiveCheckpointAdjoint(3))
        ones = jax.tree.map(jnp.ones_like, args)
        found = quick_jit(jax.value_and_grad(ours, (0, 1)))(*args)
        tangents = quick_jit(lambda *args: jax.jvp(ours, args, ones))(*args)
        expected = quick_jit(jax.value_and_grad(theirs, (0, 1)))(*args)
        value, gradient = expected
        along_ones = sum(jax.tree.leaves(gradient))
    assert_close(found, expected, rtol=1e-6)
    assert_close(tangents, (value, along_ones), rtol=1e-6)


def test_the_adjoint_refuses_paths_whose_numbers_change_and_numbers_of_carries():
    path = diffrax.UnsafeBrownianPath((), jax.random.key(0))
    drift = diffrax.ODETerm(lambda t, y, args: -y)
    terms = diffrax.MultiTerm(drift, diffrax.ControlTerm(lambda t, y, args: 0.1, path))
    with pytest.raises(ValueError, match="Use a VirtualBrownianTree"):
        diffrax.diffeqsolve(
            terms, diffrax.Euler(), 0.0, 1.0, 0.1, 1.0, adjoint=RematAdjoint()
        )
    with pytest.raises(ValueError, match="at least 1; got 0"):
        RematAdjoint(0)
