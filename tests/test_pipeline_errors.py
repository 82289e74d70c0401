"""`pipeline`: what it refuses, and collectives that it takes."""

from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from stacked_remat import BlockSeq, Stacked, StackedPattern, pipeline, streaming
from tests.blocks import assert_close_to_scale as assert_close, quick_jit
from tests.random_arrays import normal
from tests.test_pipeline import ROWS, Layers, mesh_of, plain_model


def prints_on_the_way(model, x):
    @jax.jit
    def printed(x):
        jax.debug.print("{}", x)
        return x

    return jnp.sum(model.blocks.fold(printed(x)))


def named_aux(model, x):
    return jnp.sum(model.blocks.fold(x)), {"x": hax.named(x, ("a", "b"))}


def twice(model, x):
    return jnp.sum(model.blocks.fold(model.blocks.fold(x)))


def backwards(model, x):
    return jnp.sum(model.blocks.fold(x, reverse=True))


def weights_of(model, x):
    return jnp.sum(model.blocks.fold(x) * jnp.sum(model.blocks.stacked.weight))


def pair(model, x):
    return jnp.sum(model.blocks.fold(x)), None


def folds(model, x):
    return jnp.sum(model.blocks.fold(x))


def pattern(_):
    layer = plain_model().blocks
    return {"blocks": StackedPattern({"a": layer}, "a" * 8, Layers)}


def no_stack(_):
    return {"blocks": BlockSeq.of([*plain_model().blocks])}


@pytest.mark.parametrize(
    "text, changes",
    {
        "axes are: 'stage', 'data'. Call it within": {"axis": "stages"},
        "x has 32 rows (shape (32, 6)), which don't divide into 5": {"microbatches": 5},
        "microbatches": {"microbatches": 0},
        "schedule is '1f1b' or 'zero_bubble'; got 'gpipe'": {"schedule": "gpipe"},
        "The loss folds model.blocks 2 times. A pipeline needs one": {"loss": twice},
        "from the first to the last": {"loss": backwards},
        "each device has the weights of some layers alone": {"loss": weights_of},
        "returns a scalar, of real floating point; got a tuple": {"loss": pair},
        "of real floating point; got complex64[]": {
            "loss": lambda model, x: folds(model, x).astype(jnp.complex64)
        },
        # It folds nothing either
        "of real floating point; got None": {"loss": lambda model, x: None},
        "aux['x'] of the loss is a NamedArray": {"loss": named_aux, "has_aux": True},
        "depends on `jit`, which has effects": {"loss": prints_on_the_way},
        "returns a pair (scalar, aux), with has_aux": {"has_aux": True},
        "is not a floating-point array": {"trainable": eqx.is_array},
        "divides a Stacked, whose layers are all of one kind": {"change": pattern},
        "pipeline divides one stack of the model; found none": {"change": no_stack},
        "found model['a'], model['b']": {
            "change": lambda m: {"a": m.blocks, "b": m.blocks}
        },
        "is in host memory": {"change": streaming.to_host},
        'model.blocks have the policy ScanCheckpointPolicy(save_carries=False) ("recomp'
        'ute"), which keeps no carry': {"remat": "recompute"},
        'Use "nested", "offload", True or': {
            "loss": lambda model, x: jnp.sum(model.blocks.fold(x, remat="recompute"))
        },
        "x is a single random key": {"x": jax.random.key(0)},
        "key is a single random key": {
            "x": jax.random.PRNGKey(0),
            "loss": lambda model, key: folds(model, key),
            "microbatches": 2,
        },
        "model.blocks has no layers": {"change": lambda _: plain_model(0)},
        "stack finds float32[6,3], which is no Stacked of the model; it has: model.b": {
            "stack": lambda model: model.head
        },
        "stack is a function that finds the stack": {"stack": "blocks"},
        "trainable is a function of leaves, or a tree": {"trainable": {"a": True}},
        "gradient_dtype is a real floating-point type; got 'single": {
            "gradient_dtype": "single precision"
        },
        "gradient_dtype is a real floating-point type; got <": {
            "gradient_dtype": jnp.int32
        },
        "takes a loss function first": {"loss": "mean"},
        "takes the name of an axis": {"axis": 4},
    }.items(),
)
def test_errors(text, changes):
    model = plain_model(remat=changes.get("remat", "nested"))
    model = eqx.tree_at(lambda model: model.unused, model, jnp.ones(2, jnp.int32))
    model = changes.get("change", lambda model: model)(model)
    x = changes.get("x", np.ones((ROWS, 6), np.float32))
    with (
        pytest.raises((ValueError, TypeError, AttributeError)) as error,
        jax.set_mesh(mesh_of(changes.get("stages", 4))),
    ):
        run = pipeline(
            changes.get("loss", folds),
            changes.get("axis", "stage"),
            microbatches=changes.get("microbatches", 4),
            schedule=changes.get("schedule", "1f1b"),
            has_aux=changes.get("has_aux", False),
            trainable=changes.get("trainable", eqx.is_inexact_array),
            stack=changes.get("stack"),
            gradient_dtype=changes.get("gradient_dtype"),
        )
        jax.eval_shape(run.value_and_grad, model, x)
    assert text in str(error.value)


def test_axes_of_other_kinds():
    run = pipeline(folds, "stage", microbatches=4)
    model, x = plain_model(), np.ones((ROWS, 6), np.float32)
    with pytest.raises(ValueError, match="none is set"):
        run.value_and_grad(model, x)
    with (
        jax.set_mesh(jax.make_mesh((4,), ("stage",), (AxisType.Explicit,))),
        pytest.raises(ValueError, match="takes an axis with AxisType.Auto"),
    ):
        run.value_and_grad(model, x)


class Collective(eqx.Module):
    weight: jax.Array
    run: Any = eqx.field(static=True)

    def __call__(self, x):
        spec = P("data")
        run = jax.shard_map(
            self.run,
            in_specs=spec,
            out_specs=spec,
            axis_names={"data"},
            check_vma=False,
        )
        return x + jnp.tanh(run(x) @ self.weight)


def swapped(x):
    return jax.lax.ppermute(x, "data", [(0, 1), (1, 0)])


@jax.custom_vjp
def swapped_back(x):
    return x


swapped_back.defvjp(lambda x: (x, None), lambda _, cotangent: (swapped(cotangent),))


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (
            swapped,
            r"`ppermute` over 'data' \(.*errors.py.*swapped\)\), in which",
        ),
        (swapped_back, "`ppermute` over 'data'"),
        (lambda x: jax.lax.psum(x, "stage"), "`psum` over 'stage'"),
        (lambda x: jax.lax.all_gather(x, "stage")[0], "over 'stage'"),
        (lambda x: jax.lax.all_gather(x, "data")[0], None),
        (lambda x: x * jax.lax.axis_index("stage").astype(x.dtype), None),
    ],
)
def test_collectives_that_would_wait_forever_are_refused(run, message):
    blocks = Stacked(Collective(normal(0, 8, 6, 6), run), Layers)
    model = {"blocks": blocks}

    def loss(model, x):
        return jnp.mean(model["blocks"].fold(x) ** 2)

    x = np.ones((ROWS, 6), np.float32)
    run = pipeline(loss, "stage", microbatches=4).value_and_grad
    with jax.set_mesh(mesh_of()):
        if message is None:
            jax.eval_shape(run, model, x)
            return
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(run, model, x)


def of_all_rows(x):
    """Gathers, sums, scatters and exchanges over `data`."""
    rows = jax.lax.all_gather(x, "data", tiled=True)
    parts = jax.lax.psum_scatter(jnp.sin(rows), "data", tiled=True)
    columns = jax.lax.all_to_all(x, "data", 1, 0, tiled=True)
    before = jnp.cumsum(columns, 0)
    before = jax.lax.all_to_all(before, "data", 0, 1, tiled=True)
    return parts + before + jax.lax.psum(jnp.sum(x, 0, keepdims=True), "data")


def of_all_rows_on_one_device(x):
    return 2 * jnp.sin(x) + jnp.cumsum(x, 0) + jnp.sum(x, 0, keepdims=True)


def test_collectives_of_the_devices_of_a_stage_give_the_numbers_of_one_device():
    class OnOneDevice(Collective):
        def __call__(self, x):
            return x + jnp.tanh(of_all_rows_on_one_device(x) @ self.weight)

    def loss(model, x):
        return jnp.mean(model["blocks"].fold(x) ** 2)

    def model_of(kind):
        return {"blocks": Stacked(kind(0.1 * normal(0, 8, 6, 6), of_all_rows), Layers)}

    x = normal(1, ROWS, 6)

    def on_one_device(model):
        # Microbatches are rows 0, 4, ..., rows 1, 5, ...
        return jnp.mean(jnp.stack([loss(model, x[n::4]) for n in range(4)]))

    @quick_jit
    def on_mesh(model):
        found = []
        for schedule in ("1f1b", "zero_bubble"):
            run = pipeline(loss, "stage", microbatches=4, schedule=schedule)
            found.append(run.value_and_grad(model, x))
        return found

    wanted = quick_jit(jax.value_and_grad(on_one_device))(model_of(OnOneDevice))
    with jax.set_mesh(mesh_of()):
        found = on_mesh(model_of(Collective))
    for of_schedule in found:
        assert_close(of_schedule, wanted)


@pytest.mark.parametrize("derivative", [jax.grad, jax.jacfwd])
def test_results_have_no_derivatives(derivative):
    run = pipeline(folds, "stage", microbatches=4)
    model, x = plain_model(), np.ones((ROWS, 6), np.float32)

    def value(bias):
        changed = eqx.tree_at(lambda model: model.blocks.stacked.bias, model, bias)
        return run.value_and_grad(changed, x)[0]

    bias = model.blocks.stacked.bias
    with (
        jax.set_mesh(mesh_of()),
        pytest.raises(TypeError, match="value_and_grad have no derivatives"),
    ):
        jax.eval_shape(derivative(value), bias)

    def stopped(bias):
        return value(jax.lax.stop_gradient(bias)) * jnp.sum(bias)

    with jax.set_mesh(mesh_of()):
        jax.eval_shape(derivative(stopped), bias)


def test_sums_of_complex_gradients_are_complex():
    """`gradient_dtype` is for real weights."""
    model = plain_model(4, 6)
    blocks = jax.tree.map(lambda leaf: leaf.astype(jnp.complex64), model.blocks)
    model = eqx.tree_at(lambda model: model.blocks, model, blocks)

    def loss(model, x):
        x = model.blocks.fold(x.astype(jnp.complex64))
        return jnp.mean(jnp.real(x) @ model.head)

    run = pipeline(loss, "stage", microbatches=4, gradient_dtype=jnp.float16)
    with jax.set_mesh(mesh_of()):
        _, gradients = jax.eval_shape(
            run.value_and_grad, model, np.ones((ROWS, 6), np.float32)
        )
    assert gradients.blocks.stacked.weight.dtype == jnp.complex64
    assert gradients.head.dtype == jnp.float16
