"""Fused updates on meshes, against the gradient and the update as two steps there."""

import functools
from collections.abc import Callable

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding, PartitionSpec as P

from stacked_remat import (
    LayerResult,
    Stacked,
    StackedPattern,
    fused_update,
    shared,
)

from .blocks import assert_close_to_scale as assert_close, quick_jit as jit
from .random_arrays import normal
from .test_gathered_ahead import MESHES, mesh_and_gather

LAYERS, WIDTH, INNER, ROWS = 4, 8, 16, 8
Layers = hax.Axis("layers", LAYERS)
pytestmark = pytest.mark.usefixtures("standard_promotion", "compiled_anew")


@pytest.fixture
def compiled_anew():
    """Programs that a file of compiled ones has are run by XLA for CPUs with other
    numbers each time (jaxlib 0.10.2, several loops with collectives).
    """
    option = "jax_compilation_cache_dir"
    folder = getattr(jax.config, option)
    jax.config.update(option, None)
    compilation_cache.reset_cache()
    yield
    jax.config.update(option, folder)
    compilation_cache.reset_cache()


class Block(eqx.Module):
    """Weights that are divided, which it gathers, and one that all devices have."""

    up: jax.Array
    down: jax.Array
    gain: jax.Array
    gather: Callable = eqx.field(static=True)

    def __call__(self, x, offset):
        up, down = self.gather(self.up, 1), self.gather(self.down, 0)
        return x * self.gain + jnp.tanh(x @ up + jnp.mean(offset)) @ down


class Scaled(Block):
    """Another kind."""

    def __call__(self, x, offset):
        return super().__call__(0.9 * x, offset)


class Model(eqx.Module):
    """What is outside of the stack is on all devices; the first carry too."""

    start: jax.Array
    table: jax.Array
    blocks: Stacked | StackedPattern


def loss(has_start, model, x):
    first = x * model.start
    if has_start:
        first = jnp.broadcast_to(model.start, (1, WIDTH))
    y = model.blocks.fold(first, shared(x @ model.table))
    return jnp.sum((y @ model.table) ** 2)


def model_of(gather, remat, pattern="aaaa"):
    stacks = {}
    for name, kind in {"a": Block, "b": Scaled}.items():
        count = pattern.count(name)
        up, down = normal(0, count, WIDTH, INNER), normal(1, count, INNER, WIDTH)
        gain = 1 + 0.1 * normal(2, count, WIDTH)
        block = kind(0.3 * up, 0.3 * down, gain, gather)
        stacks[name] = Stacked(block, Layers.resize(count), remat)
    blocks = stacks["a"]
    if "b" in pattern:
        blocks = StackedPattern(stacks, pattern, Layers, remat)
    return Model(1 + 0.1 * normal(3, WIDTH), normal(4, WIDTH, WIDTH), blocks)


# Of two steps
X = normal(5, 2, ROWS, WIDTH)
OF_X = P(None, "data")


def specs_of(model):
    def spec(path, leaf):
        name = path[-1].name
        return {"up": P(None, None, "data"), "down": P(None, "data")}.get(name, P())

    return jax.tree_util.tree_map_with_path(spec, model)


def on_mesh(mesh_kind, mesh, run, model):
    """`run(model, x)`, which returns a model and rows of numbers, those of each device
    in `jax.shard_map`.
    """
    of_model = specs_of(model)
    specs = of_model, OF_X
    if mesh_kind == "shard_map":
        run = jax.shard_map(
            run, mesh=mesh, in_specs=specs, out_specs=(of_model, P("data"))
        )
    placed = jax.tree.map(functools.partial(NamedSharding, mesh), specs)
    with jax.set_mesh(mesh):
        return jax.device_get(jit(run)(*jax.device_put((model, X), placed)))


# Smooth near gradients of zero
OPTIMIZER = optax.adam(0.01, eps=1.0)


def in_two(value, trainable, max_norm):
    """The step of `fused_update`, without it."""

    def step(model, state, x):
        trained, frozen = eqx.partition(model, trainable)

        def of_trained(trained):
            return value(eqx.combine(trained, frozen), x)

        result, gradients = jax.value_and_grad(of_trained)(trained)
        norm = optax.tree.norm(gradients)
        if max_norm is not None:
            clip = optax.clip_by_global_norm(max_norm)
            gradients, _ = clip.update(gradients, clip.init(trained))
        updates, state = OPTIMIZER.update(gradients, state, trained)
        return eqx.apply_updates(model, updates), state, result, norm

    return step, lambda model: OPTIMIZER.init(eqx.filter(model, trainable))


def fused(value, trainable, max_norm):
    step = fused_update(value, OPTIMIZER, trainable=trainable, max_grad_norm=max_norm)
    return step, step.init


def after_steps(step, init, model, xs):
    """The model, and value and norm of each step."""
    state = init(model)
    numbers = []
    for x in xs:
        model, state, *of_step = step(model, state, x)
        numbers += of_step
    return model, jnp.stack(numbers)[None]


def of_examples(step, init, model, xs):
    """The sum of the models that each example makes."""
    run = jax.vmap(lambda x: step(model, init(model), x))
    models, _, *of_steps = run(xs)
    model = jax.tree.map(lambda leaf: leaf.sum(0), models)
    return model, jnp.concatenate(of_steps)[None]


# How a model is made, whether its first carry is one of its weights, and what is done
CASES = {
    "nested": (("nested",), False, after_steps),
    "first carry": (("nested",), True, after_steps),
    "offload": (("offload",), True, after_steps),
    "two kinds": ((True, "abba"), True, after_steps),
    "examples": (("nested",), True, of_examples),
}


def is_divided(model):
    """Which arrays of a model are divided; no others, whatever norm a device has."""
    return jax.tree.map(lambda spec: spec != P(), specs_of(model))


@pytest.mark.parametrize("max_norm", [None, 0.5], ids=["", "clipped"])
@pytest.mark.parametrize("mesh_kind", MESHES, ids=str)
def test_updates_are_those_of_two_steps(mesh_kind, max_norm):
    mesh, gather = mesh_and_gather(mesh_kind)
    cases = CASES
    if max_norm is not None:
        cases = {name: CASES[name] for name in ("nested", "two kinds")}
    models = {name: model_of(gather, *how) for name, (how, *_) in cases.items()}

    def run(way, models, xs):
        found = {}
        numbers = {}
        for name, (_, has_start, follow) in cases.items():
            model = models[name]
            trainable = True if max_norm is None else is_divided(model)
            value = functools.partial(loss, has_start)
            found[name], numbers[name] = follow(
                *way(value, trainable, max_norm), model, xs
            )
        return found, numbers

    wanted = on_mesh(mesh_kind, mesh, functools.partial(run, in_two), models)
    found = on_mesh(mesh_kind, mesh, functools.partial(run, fused), models)
    for name in cases:
        of_case = [
            jax.tree.leaves((part[0][name], part[1][name])) for part in (found, wanted)
        ]
        assert_close(*of_case, name=name)


def test_what_devices_share_is_not_scaled_by_what_each_has():
    mesh, gather = mesh_and_gather("shard_map")
    step = fused_update(functools.partial(loss, True), OPTIMIZER, max_grad_norm=0.5)

    def run(model, xs):
        return after_steps(step, step.init, model, xs)

    with pytest.raises(ValueError, match=r"differs over \['data'\], and model\.start"):
        on_mesh("shard_map", mesh, run, model_of(gather, "nested"))


def test_layers_that_devices_share_stay_the_same_on_all():
    mesh, gather = mesh_and_gather("shard_map")

    def run(model, xs):
        def visitor(visit, _):
            number = jax.lax.axis_index("data")
            gain = visit.layer.gain * number.astype(jnp.float32)
            layer = eqx.tree_at(lambda layer: layer.gain, visit.layer, gain)
            return LayerResult(visit.vjp().carry, layer)

        y, sweep_back = model.blocks.fold_vjp(xs[0], shared(xs[0]))
        layers = sweep_back(y, visitor).layers
        return eqx.tree_at(lambda model: model.blocks, model, layers), y

    with pytest.raises(ValueError, match=r"layer\.gain that the visitor .*\['data'\]"):
        on_mesh("shard_map", mesh, run, model_of(gather, "nested"))
