"""Influence of examples by replay of a training run, against unrolled loops and
retraining.
"""

import functools

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from haliax import Axis

from stacked_remat import (
    ScanCheckpointPolicy,
    ScanCheckpointSpec,
    Stacked,
    fold,
    memory,
)
from stacked_remat.ghost import metasmoothness, replay, weighted_step

from ..blocks import NamedBlock, assert_close

# Optax's Adam raises a float to an integer power
pytestmark = pytest.mark.usefixtures("standard_promotion")

Steps, Examples, Embed, Layers = (
    Axis("steps", 7),
    Axis("batch", 4),
    Axis("hidden", 6),
    Axis("layers", 3),
)


def network(remat: ScanCheckpointSpec = "nested"):
    keys = jax.random.split(jax.random.key(0), Layers.size)
    return Stacked.init(Layers, NamedBlock, remat=remat)(Embed, key=keys)


def losses(model, batch):
    return hax.mean((model.fold(batch["x"]) - batch["y"]) ** 2, Embed)


def held_out(state):
    return hax.mean(losses(state[0], data(1, Axis("batch", 16)))).scalar()


def data(seed, *axes):
    x = hax.random.normal(jax.random.key(seed), (*axes, Embed))
    return {"x": x, "y": hax.roll(x, 1, Embed)}


def unrolled(step, state, batches, weights, per_step):
    """The same run as a loop of Python."""
    for i in range(Steps.size):
        batch = {name: named[Steps, i] for name, named in batches.items()}
        state = step(
            state,
            batch,
            weights[Steps, i],
            **{name: each[i] for name, each in per_step.items()},
        )
    return held_out(state)


@pytest.mark.parametrize(
    "optimizer, per_step",
    [
        (optax.sgd(0.3, momentum=0.8), {}),
        pytest.param(
            optax.inject_hyperparams(optax.adamw)(
                0.05, weight_decay=0.1, eps_root=1e-30
            ),
            {
                "learning_rate": jnp.linspace(0.08, 0.02, 7),
                "weight_decay": jnp.full(7, 0.2),
            },
            marks=pytest.mark.deep,
        ),
    ],
    ids=["momentum", "adamw by step"],
)
def test_derivatives_are_those_of_the_unrolled_run(optimizer, per_step):
    step, model, batches = (
        weighted_step(losses, optimizer),
        network(),
        data(2, Steps, Examples),
    )
    state, ones = (model, optimizer.init(model)), hax.ones((Steps, Examples))
    policies = ("nested", ScanCheckpointPolicy(nested=3, save_carries="offload"))

    @jax.jit
    def every(state, batches, ones):
        def replayed(remat):
            found = replay(
                step,
                state,
                batches,
                held_out,
                Steps,
                Examples,
                per_step=per_step or None,
                remat=remat,
            )
            return found.loss, found.examples, found.per_step, held_out(found.state)

        wanted = jax.value_and_grad(
            lambda *some: unrolled(step, state, batches, *some), argnums=(0, 1)
        )
        loss, (of_examples, of_steps) = wanted(ones, per_step)
        return (loss, of_examples, of_steps, loss), [
            replayed(remat) for remat in policies
        ]

    wanted, found = every(state, batches, ones)
    assert float(jnp.abs(wanted[1].array).min()) > 1e-6
    for one in found:
        assert_close(one, wanted, rtol=2e-3, atol=2e-6)


def test_plain_arrays_and_losses_and_a_number_of_steps():
    plain = lambda model, batch: jnp.mean((batch @ model) ** 2, axis=-1)  # noqa: E731
    optimizer, model = optax.sgd(0.1), jnp.eye(3)
    batches = jax.random.normal(jax.random.key(0), (Steps.size, Examples.size, 3))
    run = functools.partial(
        replay, weighted_step(plain, optimizer), (model, optimizer.init(model)), batches
    )
    found = jax.jit(
        lambda: run(lambda state: jnp.sum(state[0] ** 2), Steps.size, Examples).examples
    )()

    def final(weights):
        model = jnp.eye(3)
        for i in range(Steps.size):
            loss = lambda model, i=i: jnp.mean(weights[i] * plain(model, batches[i]))  # noqa: E731
            model = model - 0.1 * jax.grad(loss)(model)
        return jnp.sum(model**2)

    wanted = jax.grad(final)(jnp.ones((Steps.size, Examples.size)))
    assert found.axes == (Axis("steps", Steps.size), Examples)
    np.testing.assert_allclose(found.array, wanted, rtol=1e-4, atol=1e-6)


def test_python_numbers_of_a_state_stay_as_they_are():
    """A `Dropout` decides by its rate and its flag."""

    class Model(eqx.Module):
        weight: jax.Array
        dropout: eqx.nn.Dropout

        def __call__(self, x):
            return self.dropout(x @ self.weight)

    def losses(model, batch):
        return jnp.mean(model(batch) ** 2, axis=-1)

    optimizer = optax.sgd(0.1)
    batches = jax.random.normal(jax.random.key(0), (Steps.size, Examples.size, 3))

    def influence(step, *counter, **options):
        model = Model(jnp.eye(3), eqx.nn.Dropout(**options))
        start = (model, optimizer.init(eqx.filter(model, eqx.is_inexact_array)))
        held_out = lambda state: losses(state[0], batches[0]).mean()  # noqa: E731
        run = (step, (*start, *counter), batches, held_out, Steps, Examples)
        return replay(*run).examples.array

    step = weighted_step(losses, optimizer)
    plain = influence(step, p=0)
    np.testing.assert_array_equal(influence(step, p=0.5, inference=True), plain)

    def counting(state, batch, weights):
        return (*step(state[:2], batch, weights), state[2] + 1)

    np.testing.assert_array_equal(influence(counting, jnp.array(0), p=0), plain)
    with pytest.raises(
        TypeError, match=r"state\[2\] is the Python number 0, and the s"
    ):
        influence(counting, 0, p=0)


def test_nested_keeps_fewer_states_than_a_plain_scan_for_five_times_the_flops():
    optimizer, Long = optax.sgd(0.1), Axis("steps", 100)
    model, batches = network(), data(2, Long, Examples)
    step = weighted_step(losses, optimizer)

    def trained(model, batches):
        return fold(step, Long)(
            (model, optimizer.init(model)), batches, hax.ones((Long, Examples))
        )

    def replayed(remat, model, batches):
        state = model, optimizer.init(model)
        return replay(
            step, state, batches, held_out, Long, Examples, remat=remat
        ).examples

    def temporaries(remat):
        compiled = (
            jax.jit(functools.partial(replayed, remat)).lower(model, batches).compile()
        )
        return compiled.memory_analysis().temp_size_in_bytes

    def times_of_run(remat, within):
        run = functools.partial(replayed, remat)
        found, plain = (
            jax.make_jaxpr(fn)(network(within), batches) for fn in (run, trained)
        )
        return memory.count_flops(found).matmul / memory.count_flops(plain).matmul

    assert 3 * temporaries("nested") < temporaries(False)
    for remat, within, times in (
        (False, False, 3),
        (True, False, 4),
        ("nested", False, 5),
        (False, "nested", 4.5),
    ):
        assert abs(times_of_run(remat, within) - times) < 0.5


@pytest.mark.parametrize("is_named", [True, False])
def test_microbatches_find_the_same_in_less_memory(is_named):
    Rows, Few = Axis("batch", 64), Axis("steps", 3)

    def plain(model, batch):
        x, target = (batch[name] for name in ("x", "y"))
        for _ in range(3):
            x = jnp.tanh(x @ model)
        return jnp.mean((x - target) ** 2, -1)

    model = network(True) if is_named else 0.5 * jnp.eye(Embed.size)
    of_each = losses if is_named else plain
    batches, held = data(2, Few, Rows), data(1, Rows)
    if not is_named:
        batches, held = (
            {name: named.array for name, named in each.items()}
            for each in (batches, held)
        )
    found, memory_of = [], []
    for count in (1, 8):
        optimizer = optax.sgd(0.3, momentum=0.8)
        step = weighted_step(of_each, optimizer, microbatches=count)

        def run(batches, step=step, optimizer=optimizer):
            def last_loss(state):
                each = of_each(state[0], held)
                return jnp.mean(getattr(each, "array", each))

            start = model, optimizer.init(model)
            return replay(step, start, batches, last_loss, Few, Rows).examples.array

        compiled = jax.jit(run).lower(batches).compile()
        found.append(compiled(batches))
        memory_of.append(compiled.memory_analysis().temp_size_in_bytes)
    assert np.abs(found[0]).max() > 1e-5
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4, atol=1e-8)
    assert memory_of[1] < 0.6 * memory_of[0]


SIGNS = {
    "lion": optax.lion(0.1, weight_decay=0.1),
    "sign sgd": optax.sign_sgd(0.1),
    "signs of momentum": optax.chain(
        optax.trace(0.9), optax.scale_by_sign(), optax.scale(-0.1)
    ),
    "a comparison": optax.stateless(
        lambda g, _: jax.tree.map(lambda x: jnp.where(x > 0, -0.1, 0.1), g)
    ),
}


@pytest.mark.parametrize("name", SIGNS)
def test_an_optimizer_of_signs_is_refused_before_the_work(name):
    ran = []

    def plain(model, batch):
        jax.debug.callback(lambda: ran.append(1))
        return jnp.mean((batch @ model) ** 2, axis=-1)

    batches, optimizer = jnp.ones((Steps.size, Examples.size, 3)), SIGNS[name]
    start = jnp.eye(3), optimizer.init(jnp.eye(3))
    with pytest.raises(
        ValueError, match=r"replay has no influence to find: .*such as Lion"
    ):
        replay(
            weighted_step(plain, optimizer),
            start,
            batches,
            lambda s: jnp.sum(s[0]),
            Steps,
            Examples,
        )
    assert not ran


SATURATED = {
    "divided by its size": optax.stateless(
        lambda g, _: jax.tree.map(lambda x: -0.1 * x / (jnp.abs(x) + 1e-30), g)
    ),
    "adam without memory": optax.adam(0.1, b1=0, b2=0),
    "clip": optax.chain(optax.clip(1e-6), optax.sgd(1e4)),
}


@pytest.mark.parametrize("name", SATURATED)
def test_derivatives_of_only_rounding_are_refused(name):
    plain = lambda model, batch: jnp.mean((batch @ model) ** 2, axis=-1)  # noqa: E731
    optimizer, model = SATURATED[name], jnp.eye(3) + 0.5
    batches = jax.random.normal(jax.random.key(0), (Steps.size, Examples.size, 3))

    def replayed(batches):
        start = model, optimizer.init(model)
        step = weighted_step(plain, optimizer)
        held_out = lambda state: jnp.sum(state[0] ** 2)  # noqa: E731
        return replay(step, start, batches, held_out, Steps, Examples).examples

    for run in (replayed, jax.jit(replayed)):
        with pytest.raises(RuntimeError, match="derivative .* is zero or rounding"):
            run(batches)


def test_steps_that_change_nothing_yet_are_no_signs():
    """A rate of zero, and gradients that are gathered over steps."""
    plain = lambda model, batch: jnp.mean((batch @ model) ** 2, axis=-1)  # noqa: E731
    gathered = optax.MultiSteps(
        optax.sgd(optax.linear_schedule(0.0, 0.1, 4)), 2
    ).gradient_transformation()
    batches, start = (
        jnp.ones((Steps.size, Examples.size, 3)),
        (jnp.eye(3), gathered.init(jnp.eye(3))),
    )
    run = functools.partial(replay, weighted_step(plain, gathered), start, batches)
    found = jax.jit(
        lambda: (
            run(lambda state: jnp.sum(state[0] ** 2), Steps, Examples).examples.array
        )
    )()
    assert not found[:2].any() and found[2:4].all()


def test_mistakes_are_named():
    def attempt(
        *, losses=losses, optimizer=None, held_out=held_out, batches=None, per_step=None
    ):
        optimizer = optax.sgd(0.1) if optimizer is None else optimizer
        model = network()
        batches = data(2, Steps, Examples) if batches is None else batches
        step = weighted_step(losses, optimizer)
        return replay(
            step,
            (model, optimizer.init(model)),
            batches,
            held_out,
            Steps,
            Examples,
            per_step=per_step,
        )

    def of_one_weight(model, batch):  # the others have no gradients
        return losses(model, batch) * 0 + model.stacked.bias["layers", 0]["hidden", 0]

    with pytest.raises(RuntimeError, match="eps_root, such as 1e-30"):
        attempt(losses=of_one_weight, optimizer=optax.adam(0.1))
    with pytest.raises(
        ValueError,
        match="'rate', which is no hyperparameter of the optimizer. It has: none",
    ):
        attempt(per_step={"rate": jnp.ones(7)})
    with pytest.raises(
        TypeError,
        match=r"held_out_loss returns one number; it returned an array \(4,\)",
    ):
        attempt(held_out=lambda state: jnp.ones(4))
    with pytest.raises(ValueError, match="4 examples has no 3 equal microbatches"):
        step = weighted_step(losses, optax.sgd(0.1), microbatches=3)
        step((network(), None), data(2, Examples), hax.ones(Examples))
    # An example would have the weights of others, without an error of JAX
    weights, start = hax.ones(Examples), (jnp.ones(3), None)
    column = lambda model, batch: (batch @ model)[:, None]  # noqa: E731
    other = lambda model, batch: hax.named(batch @ model, "row")  # noqa: E731
    for unlike, shown in ((column, r"float32\[4,1\]"), (other, r"\(row=4\)")):
        step = weighted_step(unlike, optax.sgd(0.1))
        message = rf"losses are .*{shown}.*have the axes \(batch=4\)"
        with pytest.raises(ValueError, match=message):
            step(start, jnp.ones((4, 3)), weights)
    with pytest.raises(TypeError, match="takes a loss function and then an optimizer"):
        weighted_step(optax.sgd(0.1), losses)
    with pytest.raises(TypeError, match=r"the state \(model, optimizer.init\(model"):
        step(start[0], jnp.ones((4, 3)), weights)
    with pytest.raises(
        TypeError, match=r"\(model, optimizer.init\(model\)\); got a tup"
    ):
        step((start[0], optax.sgd(0.1)), jnp.ones((4, 3)), weights)
    with pytest.raises(TypeError, match=r"got float32\[4\]. Write hax.ones"):
        step(start, jnp.ones((4, 3)), jnp.ones(4))
    with pytest.raises(TypeError, match="whole last state, a tuple of 2 .*the first"):
        attempt(held_out=lambda model: model(jnp.ones(3)))
    with pytest.raises(ValueError, match="have `batch` of size 5, and Examples"):
        attempt(batches=data(2, Steps, Examples.resize(5)))
    with pytest.raises(TypeError, match="Examples is the axis of the examples"):
        replay(lambda *_: None, (), {}, held_out, Steps, "batch")
    with pytest.raises(TypeError, match=r'Examples=haliax.Axis\("example", 8\)'):
        metasmoothness(lambda *_: None, (), {}, None, Steps, 8, key=jax.random.key(0))
    with pytest.raises(ValueError, match="`steps` of size 5"):
        attempt(batches=data(2, Axis("steps", 5), Examples))
