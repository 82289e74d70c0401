"""Fused updates against the gradient and the update as two steps: optimizers, policies,
clipping, errors.
"""

import functools
from collections.abc import Callable

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

from stacked_remat import (
    LayerStack,
    ScanCheckpointPolicy,
    Stacked,
    fold,
    fused_update,
    per_layer,
    shared,
    unsliced,
)
from stacked_remat.training.precision import in_float32

from .blocks import Tanh, assert_close
from .random_arrays import normal

N = 5
Layers, Few = hax.Axis("layers", N), hax.Axis("layers", 2)
Embed, Out = hax.Axis("embed", 6), hax.Axis("out", 6)
TOKENS = jnp.array([[1, 4, 2, 0], [3, 3, 6, 5]])
pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax depends on it
trained_arrays = functools.partial(eqx.filter, filter_spec=eqx.is_inexact_array)


class Named(eqx.Module):
    """Named arrays, one of them read from the stack, and an integer; takes an array
    that all layers share.
    """

    weight: hax.NamedArray
    gain: hax.NamedArray
    number: jax.Array
    experts: hax.NamedArray = unsliced()

    def __call__(self, x, offset):
        x, experts = x + offset * self.number, LayerStack.of(self.experts)
        chosen = hax.named(
            experts.stack.array[experts.layer_index, self.number % 2], Embed
        )
        h = hax.dot(x, self.weight, axis=Embed).rename({"out": "embed"}) + chosen
        return x + hax.tanh(h) * self.gain


class Plain(eqx.Module):
    """A layer of plain arrays with an output for each layer."""

    weight: jax.Array
    bias: jax.Array

    def __call__(self, carry, rate, *, scale):
        x, count = carry
        h = jnp.tanh(x @ self.weight + self.bias) * rate.astype(x.dtype)
        return (x + h * scale, count + 1), jnp.mean(h**2)


class Model(eqx.Module):
    """An embedding that is also the head, a stack that is folded and one that is
    scanned.
    """

    embedding: hax.NamedArray
    scale: jax.Array
    named: Stacked
    plain: Stacked

    def __call__(self, tokens):
        x = self.embedding["vocab", hax.named(tokens, ("batch", "position"))]
        offset = hax.mean(x, ("batch", "position"))
        x = self.named.fold(x, offset)
        rates = jnp.linspace(1, 0.5, len(self.plain))
        (y, count), outputs = self.plain.scan(
            (x.array, jnp.int32(0)),
            per_layer(rates * self.scale[0]),
            scale=shared(self.scale),
            reverse=True,
        )
        return y @ self.embedding.array.T, jnp.sum(outputs), count


def model(remat=True, dtype=jnp.float32):
    def random(i, *axes):
        return (normal(i, *axes) * 0.3).astype(dtype)

    experts = random(5, Layers, hax.Axis("expert", 2), Embed)
    named = Named(
        random(0, Layers, Embed, Out), random(1, Layers, Embed), jnp.arange(N), experts
    )
    weight, bias = random(2, Few, Embed, Out).array, random(3, Few, Out).array
    return Model(
        random(4, hax.Axis("vocab", 7), Embed),
        jnp.ones(6, dtype),
        Stacked(named, Layers, remat),
        Stacked(Plain(weight, bias), Few),
    )


def loss(model, tokens):
    logits, auxiliary, count = model(tokens)
    of_tokens = optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), tokens
    )
    return jnp.mean(of_tokens) + 0.1 * auxiliary.astype(jnp.float32), {"count": count}


@functools.cache
def gradient_of(loss):
    """Compiled once for all optimizers."""

    @eqx.filter_jit
    def gradient(trained, frozen):
        def of_trained(trained):
            return loss(eqx.combine(trained, frozen), TOKENS)

        return eqx.filter_value_and_grad(of_trained, has_aux=True)(trained)

    return gradient


def plain_steps(optimizer, model, steps=3, loss=loss, trainable=eqx.is_inexact_array):
    """Gradient and update as two steps: the last model, and the value and the norm of
    each step.
    """
    trained, frozen = eqx.partition(model, trainable)

    @jax.jit
    def update(gradient, state, trained):
        updates, state = optimizer.update(gradient, state, trained)
        return optax.apply_updates(trained, updates), state, optax.tree.norm(gradient)

    state, found = optimizer.init(trained), []
    for _ in range(steps):
        value, gradient = gradient_of(loss)(trained, frozen)
        trained, state, norm = update(gradient, state, trained)
        found.append([value, norm])
    return eqx.combine(trained, frozen), found


def fused_steps(optimizer, model, steps=3, loss=loss, **options):
    fused = fused_update(loss, optimizer, has_aux=True, **options)
    step = jax.jit(fused, donate_argnums=(0, 1))
    model = jax.tree.map(jnp.copy, model)
    state, found = jax.jit(fused.init)(model), []
    for _ in range(steps):
        before = model
        model, state, *values = step(model, state, TOKENS)
        found.append(values)
        assert before.named.stacked.weight.array.is_deleted()
    return model, found


def by_path(tree):
    def label(path, _):
        return "matrix" if "weight" in jax.tree_util.keystr(path) else "rest"

    return jax.tree_util.tree_map_with_path(label, tree)


SCHEDULE = optax.linear_schedule(0.1, 0.01, 3)
MASK = jax.tree.map(  # a tree, where labels are a function
    lambda leaf: leaf.ndim > 1,
    model(),
    is_leaf=lambda leaf: isinstance(leaf, hax.NamedArray),
)
# With larger epsilons than usual, steps do not follow the rounding of the smallest
# gradients.
OPTIMIZERS = {
    "momentum": (
        optax.sgd(SCHEDULE, momentum=0.9, nesterov=True),
        ScanCheckpointPolicy(max_carries=3),
    ),
    "adamw": (optax.adamw(SCHEDULE, eps=1e-3, weight_decay=0.1, mask=MASK), True),
    "every second step": (
        optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
        True,
    ),
    "adafactor": (
        optax.adafactor(
            0.1,
            min_dim_size_to_factor=6,
            clipping_threshold=None,
            multiply_by_parameter_scale=False,
            eps=1e-4,
        ),
        ScanCheckpointPolicy(nested=True, first_layers=1),
    ),
    "by label": (
        optax.multi_transform(
            {
                "matrix": optax.sgd(0.1),
                "rest": optax.inject_hyperparams(optax.adam)(SCHEDULE, eps=1e-3),
            },
            by_path,
        ),
        ScanCheckpointPolicy(nested=True, save_carries="offload"),
    ),
}


@pytest.mark.parametrize(("optimizer", "remat"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_fused_step_equals_gradient_and_update(optimizer, remat):
    assert_close(fused_steps(optimizer, model(remat)), plain_steps(optimizer, model()))


def test_bfloat16_is_the_same_to_the_bit():
    optimizer = optax.sgd(0.1, momentum=0.9)
    before = model("nested", jnp.bfloat16)
    (found, _), (expected, _) = (
        run(optimizer, before) for run in (fused_steps, plain_steps)
    )
    assert_close(found, expected, 0, 0)


@pytest.mark.parametrize(
    "optimizer",
    [optax.adafactor(0.1, min_dim_size_to_factor=4), optax.novograd(0.1)],
    ids=["rows", "norm"],
)
def test_what_an_optimizer_computes_of_an_array_it_computes_of_a_layers_array(
    optimizer,
):
    before = model()
    found, _ = fused_steps(optimizer, before, steps=1)
    _, gradient = gradient_of(loss)(*eqx.partition(before, eqx.is_inexact_array))
    weights, gradients = (
        before.named.stacked.weight.array,
        gradient.named.stacked.weight.array,
    )
    update = jax.jit(
        jax.vmap(
            lambda of, weight: optimizer.update(of, optimizer.init(weight), weight)[0]
        )
    )
    assert_close(found.named.stacked.weight.array, weights + update(gradients, weights))


def test_clipping_by_the_global_norm_is_exact():
    optimizer, most = optax.adam(0.01, eps=1e-3), 0.5
    clipped = optax.chain(optax.clip_by_global_norm(most), optimizer)
    assert_close(
        fused_steps(optimizer, model("offload"), max_grad_norm=most),
        plain_steps(clipped, model()),
    )


def test_only_what_is_trainable_is_updated_and_frozen_stacks_are_free():
    before = model()
    mask = jax.tree.map(lambda _: False, before)
    mask = eqx.tree_at(
        lambda model: (model.scale, model.named.stacked.gain.array), mask, (True, True)
    )
    optimizer = optax.adamw(0.1)
    fused = fused_update(used_twice, optimizer, trainable=mask, has_aux=True)
    state = fused.init(before)
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) == 2 * (6 + N * 6) + 1 + N
    result = jax.jit(fused)(before, state, TOKENS)
    expected, ((value, norm),) = plain_steps(optimizer, before, 1, used_twice, mask)
    assert_close(result.model, expected)
    assert_close((result.value, result.grad_norm), (value, norm))
    assert jnp.array_equal(
        result.model.plain.stacked.weight, before.plain.stacked.weight
    )
    assert not jnp.array_equal(result.model.scale, before.scale)


def used_twice(model, tokens):
    """The loss, and a use of the second stack beside its scan, which is allowed where
    it is frozen.
    """
    value, aux = loss(model, tokens)
    return value + jnp.sum(model.plain.stacked.bias), aux


class Experts(eqx.Module):
    """Reads one of its experts without a copy of the others."""

    weight: jax.Array = unsliced()

    def __call__(self, x, choice):
        weight = LayerStack.of(self.weight)
        return x + jnp.tanh(x @ weight.stack[weight.layer_index, choice])


def test_fields_that_are_not_sliced_reverse_order_and_gradients_in_float32():
    weight = (jax.random.normal(jax.random.key(0), (4, 3, 6, 6)) / 6).astype(
        jnp.bfloat16
    )
    stack = Stacked(Experts(weight), hax.Axis("layers", 4))
    x, choices = jnp.ones((2, 6), jnp.bfloat16), jnp.array([0, 2, 1, 1])

    def of_stack(stack, x):
        return jnp.sum(
            stack.fold(x, choices, reverse=True, remat="nested").astype(jnp.float32)
        )

    optimizer = in_float32(optax.adam(0.01))
    fused = fused_update(of_stack, optimizer, gradient_dtype=jnp.float32)
    result = jax.jit(fused)(stack, fused.init(stack), x)
    gradient = jax.jit(jax.grad(of_stack))(stack, x)
    (update,) = jax.tree.leaves(
        optimizer.update(gradient, optimizer.init(stack), stack)[0]
    )
    want = (stack.stacked.weight + update).astype(jnp.bfloat16)
    assert jnp.array_equal(result.model.stacked.weight, want)
    # Which no token chose
    assert jnp.array_equal(want[0, 1:], stack.stacked.weight[0, 1:])
    assert not jnp.array_equal(want[0, 0], stack.stacked.weight[0, 0])


class Noisy(eqx.Module):
    """A layer with a function among its leaves, and a random key in its carry."""

    weight: jax.Array
    activation: Callable

    def __call__(self, carry):
        x, key = carry
        key, own = jax.random.split(key)
        return x + self.activation(x @ self.weight) * jax.random.uniform(
            own, x.shape
        ), key


def test_functions_and_random_keys():
    weight = jax.random.normal(jax.random.key(0), (4, 6, 6)) / 6
    stack, x = (
        Stacked(Noisy(weight, jnp.tanh), Few.resize(4), "nested"),
        jnp.ones((2, 6)),
    )

    def of_stack(stack, key):
        return jnp.mean(stack.fold((x, key))[0] ** 2)

    fused = fused_update(of_stack, optax.sgd(0.1))
    key = jax.random.key(3)
    result = eqx.filter_jit(fused)(stack, fused.init(stack), key)
    gradient = eqx.filter_jit(eqx.filter_grad(of_stack))(stack, key)
    assert_close(result.model.stacked.weight, weight - 0.1 * gradient.stacked.weight)
    assert result.model.stacked.activation is jnp.tanh


def weights(layers=6, size=8, remat="nested"):
    value = jax.random.normal(jax.random.key(1), (layers, size, size)) / size
    return Stacked(Tanh(value), hax.Axis("layers", layers), remat)


def mean_square(stack, x):
    return jnp.mean(stack.fold(x) ** 2)


def test_folds_inside_of_jit_and_beside_checkpoints_and_loops():
    @eqx.filter_jit
    def inner(model, tokens):
        return jax.checkpoint(lambda x: jnp.sin(x))(model(tokens)[0]), model.scale * 2

    def nested_loss(model, tokens):
        @jax.jit
        def outer(scale):
            logits, scales = inner(model, tokens)
            return logits * scale, scales

        logits, scales = outer(jax.jit(lambda model: model.scale[0])(model))
        total, _ = jax.lax.scan(
            lambda total, row: (total + jnp.mean(row**2), None), jnp.zeros(()), logits
        )
        return total + jnp.sum(scales), None

    optimizer = optax.adam(0.01, eps=1e-3)
    found = fused_steps(optimizer, model(), loss=nested_loss)
    assert_close(found, plain_steps(optimizer, model(), loss=nested_loss))


def test_stacks_on_which_the_loss_does_not_depend_are_updated_by_zeros():
    def independent(model, tokens):
        logits, outputs, count = model(tokens)
        return jnp.sum(model.scale**2) + lax.stop_gradient(
            jnp.sum(logits) + outputs
        ), count

    optimizer = optax.adamw(0.1, weight_decay=0.1)
    for options in ({}, {"max_grad_norm": 100.0}):
        found = fused_steps(optimizer, model(), steps=1, loss=independent, **options)
        assert_close(found, plain_steps(optimizer, model(), steps=1, loss=independent))


class TestRefused:
    def refuses(self, message, loss=mean_square, stack=None, optimizer=None, **options):
        stack = weights() if stack is None else stack
        fused = fused_update(loss, optimizer or optax.sgd(0.1), **options)
        with pytest.raises((TypeError, ValueError, AttributeError), match=message):
            jax.eval_shape(
                lambda stack, x: fused(stack, fused.init(stack), x),
                stack,
                jnp.ones((3, 8)),
            )

    @pytest.mark.parametrize(
        ("of_loss", "message"),
        [
            (lambda m, x: jnp.mean(m.fold(m.fold(x))), "folds model 2 times"),
            (lambda m, x: jnp.mean(x), "folds model 0 times"),
            (
                lambda m, x: jnp.mean(
                    jax.lax.scan(lambda x, _: (m.fold(x), None), x, length=2)[0]
                ),
                "model is folded inside of `scan`",
            ),
            (
                lambda m, x: jnp.mean(
                    fold(lambda x, _: m.fold(x), Layers, remat="nested")(x, jnp.ones(N))
                ),
                "model is folded inside of `Sweep`",
            ),
            (
                lambda m, x: jnp.mean(jax.checkpoint(lambda m, x: m.fold(x))(m, x)),
                "model is folded inside of `(checkpoint|remat)",
            ),
            (
                lambda m, x: jnp.mean((run := jax.jit(lambda x: m.fold(x)))(run(x))),
                "folds model 2 times",
            ),
            (lambda m, x: jnp.mean(jax.vmap(m.fold)(x)), "inside of jax.vmap"),
            (
                lambda m, x: jnp.mean(jax.grad(lambda x: jnp.sum(m.fold(x)))(x)),
                "a derivative that",
            ),
            (
                lambda m, x: jnp.mean(jax.tree.map(lambda a: 2 * a, m).fold(x)),
                "uses \\(in `mul`\\) the weights of model outside",
            ),
            (
                lambda m, x: jnp.mean(m.fold(x)) + m.stacked.weight.sum(),
                "model has fold and scan, and no .stacked",
            ),
            (lambda m, x: jnp.mean(m[:2].fold(x)), "model .* no single layers"),
            (lambda m, x: jnp.mean([block(x) for block in m][0]), "no single layers"),
            (
                lambda m, x: jnp.mean(m.fold(x, lambda h: h * x)),
                "model.fold uses arrays of the loss",
            ),
            (
                lambda m, x: m.fold(x),
                "The loss returns a scalar of floating point; got .*3, ?8",
            ),
            (
                lambda m, x: (jnp.mean(m.fold(x)), 3),
                "The loss returns a scalar .* has_aux=True",
            ),
            # It lacks its `return`.
            (
                lambda m, x: print(jnp.mean(m.fold(x)).shape),
                "The loss returns a scalar of floating point; got None",
            ),
        ],
    )
    def test_losses(self, of_loss, message):
        self.refuses(message, of_loss)

    @pytest.mark.parametrize(
        "optimizer",
        [
            optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
            optax.apply_if_finite(optax.adam(0.1), 3),
            optax.contrib.prodigy(),
        ],
        ids=["clip", "finite", "prodigy"],
    )
    def test_optimizers_that_need_several_layers_at_once(self, optimizer):
        fused = fused_update(loss, optimizer)
        with pytest.raises(
            ValueError, match="update of .named.* depends on the gradient of .embedding"
        ):
            fused.init(model())
        alone = fused_update(lambda blocks, x: jnp.mean(blocks.fold(x)), optimizer)
        with pytest.raises(
            ValueError, match=r"update of .*\[1\] depends on the gradient of .*\[0\]"
        ):
            alone.init(weights())

    def test_models_states_and_options(self):
        before = model()
        of = before.named.stacked
        gain = Stacked(Named(of.weight, hax.ones(Embed), of.number, of.experts), Layers)
        self.refuses(
            "model.stacked.gain \\(.*embed=6.* is shared by all layers", stack=gain
        )
        one = eqx.tree_at(lambda stack: stack.stacked.weight, weights(), jnp.ones(()))
        self.refuses(
            "model.stacked.weight \\(float32\\[\\]\\) is shared by all layers",
            stack=one,
        )
        self.refuses(
            "number.* can't be trained: .* is not a floating",
            stack=before,
            trainable=eqx.is_array,
        )
        with pytest.raises(
            ValueError,
            match="state that its init makes for this model; got a FusedState",
        ):
            fused_update(loss, optax.sgd(0.1))(
                before, fused_update(loss, optax.sgd(0.1)).init(weights())
            )
        half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), weights())
        with pytest.raises(
            ValueError, match=r"state at .*mu.* is bfloat16\[8, 8\] .* and float32"
        ):
            fused_update(mean_square, optax.adam(0.1), gradient_dtype=jnp.float32).init(
                half
            )
        growing = optax.GradientTransformation(
            lambda model: [],
            lambda updates, state, model=None: (updates, [jnp.ones(1)]),
        )
        with pytest.raises(ValueError, match="0 arrays before an update and 1 after"):
            fused_update(loss, growing).init(weights())
        with pytest.raises(ValueError, match="max_grad_norm must be positive"):
            fused_update(loss, optax.sgd(0.1), max_grad_norm=0.0)
