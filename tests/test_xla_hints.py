"""Each hint for XLA is in the programs of the platforms that it is for, and in no
others'.

What it saves there, `make memory` compares with what was recorded: comments in
`_xla_hints.py` name the tests.
"""

import haliax as hax
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.core import eval_jaxpr
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from stacked_remat import (
    LayerResult,
    ScanCheckpointPolicy,
    Stacked,
    StackedPattern,
    _xla_hints as xla_hints,
    fold,
    fused_update,
    ghost,
    shared,
    tiled,
)
from stacked_remat._memory_spaces import compiled_for, to_device, to_host

from .blocks import Tanh
from .jaxprs import count

LAYERS, WIDTH = 6, 4
EVERYWHERE = {"cpu", "cuda", "tpu"}
OFFLOADED = ScanCheckpointPolicy(nested=3, save_carries="offload")
WEIGHTS = jnp.linspace(-0.5, 0.5, LAYERS * WIDTH * WIDTH).reshape(LAYERS, WIDTH, WIDTH)
X = jnp.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH)


def step(x, weight):
    return x + jnp.tanh(x @ weight)


def loss(weights, x, remat="nested"):
    return jnp.sum(fold(step, LAYERS, remat=remat)(x, weights) ** 2)


gradient = jax.grad(loss)


def product_with_hessian(weights, x):
    return jax.jvp(lambda weights: gradient(weights, x), (weights,), (weights,))[1]


def halved(visit, state):
    found = visit.vjp()
    gradients = jax.tree.map(lambda leaf: leaf / 2, found.layer)
    return LayerResult(found.carry, gradients)


def visited(remat, *, on_host=False):
    def run(weights, x):
        blocks = Stacked(Tanh(to_host(weights) if on_host else weights), LAYERS)
        y, sweep_back = blocks.fold_vjp(x, remat=remat)
        return to_device(sweep_back(y, halved).layers.stacked.weight)

    return run


def of_two_kinds(weights, x):
    kinds = {"a": Stacked(Tanh(weights), LAYERS), "b": Stacked(Tanh(weights), LAYERS)}
    blocks = StackedPattern(kinds, "ab" * LAYERS, 2 * LAYERS, remat="nested")
    return jnp.sum(blocks.fold(x))


def updated(weights, x):
    update = fused_update(
        lambda blocks, x: jnp.sum(blocks.fold(x, remat="nested")), optax.sgd(0.1)
    )
    blocks = Stacked(Tanh(weights), LAYERS)
    return update(blocks, update.init(blocks), x).model.stacked.weight


def in_tiles(weights, x):
    def product(weight, x):
        return jnp.tanh(x @ weight)

    run = tiled(product, 0, tiles=2)
    return jax.grad(lambda weight: jnp.sum(run(shared(weight), x)))(weights[0])


def scored(weights, x):
    Batch = hax.Axis("batch", 2)

    def losses(layer, x):
        return hax.named(jnp.sum(layer(x.array), axis=-1), x.axes[:1])

    x = hax.named(x, (Batch, "width"))
    layer = Tanh(weights[0])
    return ghost.grad_dot(layer, losses, x, direction=Tanh(weights[1]))[1].total


def gathered(weights, x):
    """Layers that gather their own weights."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    whole = NamedSharding(mesh, PartitionSpec())

    def value(weights):
        def gathering(x, weight):
            return step(x, jax.lax.with_sharding_constraint(weight, whole))

        return jnp.sum(fold(gathering, LAYERS, remat="nested")(x, weights))

    return jax.grad(value)(weights)


def exchanging(weights, x):
    """Layers that gather their own weights, and end with an exchange of rows."""
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    whole = NamedSharding(mesh, PartitionSpec())
    by_rows = PartitionSpec("data")

    def exchange(x):
        columns = jax.lax.all_to_all(x, "data", 1, 0, tiled=True)
        return jax.lax.all_to_all(columns, "data", 0, 1, tiled=True)

    exchanged = jax.shard_map(exchange, mesh=mesh, in_specs=by_rows, out_specs=by_rows)

    def layer(x, weight):
        return exchanged(step(x, jax.lax.with_sharding_constraint(weight, whole)))

    return jnp.sum(fold(layer, LAYERS, remat="nested")(x, weights))


def same(*parts, **_):
    return parts


def first(part, *_, **__):
    return part


def same_on_all_platforms(transpose, cotangent):
    def constrained(cotangent):
        return transpose(cotangent)[0]

    return jax.lax.platform_dependent(cotangent, tpu=constrained, default=constrained)


# The hint, the program without it, a program that has it, and the platforms.
HINTS = [
    ("visit_after_carry_and_cotangents", same, visited(OFFLOADED), {"cuda"}),
    ("gradients_before_writes", first, gradient, {"tpu"}),
    (
        "gradient_for_visitor",
        first,
        visited(OFFLOADED),
        {"cuda", "tpu"},
    ),
    ("gradient_for_visitor", first, visited("nested"), {"tpu"}),
    ("results_before_writes", first, visited("nested"), {"cuda", "tpu"}),
    ("gradients_before_update", first, updated, {"cuda", "tpu"}),
    ("score_after", same, scored, EVERYWHERE),
    ("score_before", same, scored, EVERYWHERE),
    ("eval_product_tangents_apart", eval_jaxpr, product_with_hessian, EVERYWHERE),
    ("zero_after", lambda _, zero: zero, in_tiles, EVERYWHERE),
    # From JAX 0.12 on, a sum that nothing reads is removed as well.
    (
        "unread",
        lambda _, new: new,
        product_with_hessian,
        EVERYWHERE if jax.__version_info__ < (0, 12) else set(),
    ),
    (
        "run_if",
        lambda is_run, body, index, state: jax.lax.cond(
            is_run, lambda state: body(index, state), lambda state: state, state
        ),
        of_two_kinds,
        EVERYWHERE,
    ),
    (
        "read_after",
        same,
        visited("nested", on_host=True),
        {"cuda", "tpu"},
    ),
    (
        "copy_fetched",
        same,
        visited("nested", on_host=True),
        EVERYWHERE,
    ),
    (
        "weight_after_gathers",
        first,
        gathered,
        {"cuda"},
    ),
    # Where layers exchange rows, out of a loop, no weight waits.
    ("weight_after_gathers", first, jax.grad(exchanging), set()),
    ("exchange_after_gathers", first, exchanging, {"cuda"}),
    ("exchange_after_gathers", first, jax.grad(exchanging), {"cuda"}),
    (
        "whole_cotangent",
        same_on_all_platforms,
        gathered,
        {"tpu"},
    ),
    (
        "gradients_after_collectives",
        first,
        gathered,
        {"cuda", "tpu"},
    ),
    (
        "read_before_updates",
        same,
        visited("nested", on_host=True),
        {"cuda"},
    ),
    (
        "apart_from_transfers",
        lambda compute, _: compute(),
        visited("nested", on_host=True),
        EVERYWHERE,
    ),
]


def lowered(program, platform):
    with compiled_for(platform):
        traced = jax.jit(program).trace(WEIGHTS, X)
    return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.usefixtures("standard_promotion")  # optax depends on it
@pytest.mark.parametrize(
    ("name", "without", "program", "platforms"),
    HINTS,
    ids=[f"{name}-{number}" for number, (name, *_) in enumerate(HINTS)],
)
def test_a_hint_is_in_programs_of_its_platforms(
    name, without, program, platforms, monkeypatch
):
    # As a new function each time: JAX keeps what it traced
    before = {
        platform: lowered(lambda *args: program(*args), platform)
        for platform in EVERYWHERE
    }
    jax.clear_caches()
    monkeypatch.setattr(xla_hints, name, without)
    changed = {
        platform
        for platform, text in before.items()
        if lowered(lambda *args: program(*args), platform) != text
    }
    jax.clear_caches()
    assert changed == platforms


def test_values_that_nothing_reads_have_derivatives_of_others():
    tangents = jnp.float32(3), jnp.float32(4)
    values = jnp.float32(1), jnp.float32(2)
    assert jax.jvp(xla_hints.unread, values, tangents) == (1, 4)


def test_only_what_products_take_and_give_has_its_tangent_apart():
    def barriers(fn):
        program = jax.make_jaxpr(fn)(X).jaxpr

        def evaluate(x):
            return xla_hints.eval_product_tangents_apart(program, (), x)

        tangents = jax.make_jaxpr(lambda x: jax.jvp(evaluate, (x,), (x,)))(X)
        return count(tangents, "optimization_barrier")

    assert barriers(lambda x: jnp.tanh(x) + 1.0) == 0
    assert barriers(lambda x: jnp.tanh(x) @ x.T) == 3


def test_segments_are_shorter_where_a_cpu_then_runs_operations_in_order():
    for platform, layers in (("cpu", 8), ("cuda", 10), ("tpu", 10)):
        with compiled_for(platform):
            assert xla_hints.layers_in_order(10, [64, 32]) == layers
            # Not by more than half
            assert xla_hints.layers_in_order(20, [64, 32]) == 20
            assert xla_hints.layers_in_order(5, [64, 32]) == 5


def test_every_hint_is_here_or_decides_by_the_platform_that_traces():
    decisions = {
        "write_takes_long",
        "layers_in_order",
        "needs_checkpoint_barriers",
    }
    refusals = {"refused_offload"}  # see test_policies_at_work.py
    public = set()
    for name, value in vars(xla_hints).items():
        is_own = getattr(value, "__module__", "") == xla_hints.__name__
        if is_own and callable(value) and not name.startswith("_"):
            public.add(name)
    assert public == decisions | refusals | {name for name, *_ in HINTS}
