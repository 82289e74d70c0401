"""`checkpoint` wherever it stands: derivatives, what is kept, and compiled memory."""

import functools

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from stacked_remat import Stacked, checkpoint, checkpoint_name, memory

from .blocks import quick_jit
from .random_arrays import normal

close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)
MESH = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
X, W = normal(0, 8, 4), normal(1, 4, 6) / 2


def layer(x, w):
    hidden = checkpoint_name(jnp.sin(x @ w), "hidden")
    return x + checkpoint_name(jnp.tanh(hidden), "activation") @ w.T


def product(x, w):
    return x @ w @ w.T


@jax.custom_vjp
def doubled_backward(x):
    return jnp.cos(x)


doubled_backward.defvjp(
    lambda x: (jnp.cos(x), x), lambda x, ct: (-2 * ct * jnp.sin(x),)
)

# Ways to put a checkpointed region somewhere: functions of (what checkpoints, x, w).
PLACES = {
    "jit": lambda ck, x, w: jax.jit(ck(layer))(x, w),
    "vmap": lambda ck, x, w: jax.vmap(ck(layer), (0, None))(x, w),
    "mapped inside": lambda ck, x, w: ck(jax.vmap(layer, (0, None)))(x, w),
    "scan": lambda ck, x, w: lax.scan(
        lambda x, w: (ck(layer)(x, w), None), x, jnp.stack([w, 2 * w])
    )[0],
    "fori_loop": lambda ck, x, w: lax.fori_loop(0, 3, lambda _, x: ck(layer)(x, w), x),
    "cond": lambda ck, x, w: lax.cond(jnp.sum(x) > 0, ck(layer), ck(product), x, w),
    "switch": lambda ck, x, w: lax.switch(
        jnp.int32(2), [ck(product), lambda x, w: x, ck(layer)], x, w
    ),
    "branches inside": lambda ck, x, w: ck(
        lambda x: lax.cond(jnp.sum(x) > 0, layer, product, x, w)
    )(x),
    "gradient in a while_loop": lambda ck, x, w: (
        x * _descend(ck, *lax.stop_gradient((x, w)))
    ),
    "nested": lambda ck, x, w: ck(lambda x: ck(layer)(ck(layer)(x, w), w))(x),
    "around custom_vjp": lambda ck, x, w: ck(lambda x: doubled_backward(layer(x, w)))(
        x
    ),
    "closure": lambda ck, x, w: ck(lambda: layer(x, w) * jnp.sum(X))(),
    "inside custom_vjp": lambda ck, x, w: _with_its_own_pullback(ck)(x, w),
    "around a fold": lambda ck, x, w: _fold(ck, x, w, "nested"),
    "around a fold that saves": lambda ck, x, w: _fold(ck, x, w, False),
    "shard_map": lambda ck, x, w: jax.shard_map(
        ck(layer),
        mesh=MESH,
        in_specs=(PartitionSpec("d"), PartitionSpec()),
        out_specs=PartitionSpec("d"),
    )(x, w),
    "around shard_map": lambda ck, x, w: ck(
        jax.shard_map(
            lambda x, w: layer(x, lax.pmean(w * jnp.mean(x), "d")),
            mesh=MESH,
            in_specs=(PartitionSpec("d"), PartitionSpec()),
            out_specs=PartitionSpec("d"),
        )
    )(x, w),
}


def _descend(ck, x, w):
    def step(state):
        i, x = state
        return i + 1, x - 0.1 * jax.grad(
            lambda x: jnp.sum(ck(layer)(ck(layer)(x, w), w) ** 2)
        )(x)

    return lax.while_loop(
        lambda state: state[0] < jnp.int32(jnp.sum(x) % 2 + 1), step, (0, x)
    )[1]


def _with_its_own_pullback(ck):
    @jax.custom_vjp
    def run(x, w):
        return ck(layer)(x, w)

    run.defvjp(lambda x, w: jax.vjp(ck(layer), x, w), lambda pullback, ct: pullback(ct))
    return run


class Layer(eqx.Module):
    w: hax.NamedArray

    def __call__(self, x):
        return layer(x, self.w.array)


def _fold(ck, x, w, remat):
    Layers = hax.Axis("layers", 5)
    blocks = Stacked(
        Layer(hax.named(jnp.stack([w] * 5), (Layers, "width", "inner"))), Layers, remat
    )
    return ck(lambda blocks, x: blocks.fold(x))(blocks, x)


def derivatives(ck, places):
    """Values, gradients, Hessian-vector products and tangents of every place, in one
    program.
    """

    def reverse(place, x, w):
        def loss(x, w):
            y = place(ck, x, w)
            return jnp.sum(
                y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)
            ), y

        def of_gradient(x, w):
            gradient, y = jax.grad(loss, (0, 1), has_aux=True)(x, w)
            return sum(jnp.sum(jnp.sin(leaf)) for leaf in gradient), (gradient, y)

        return jax.grad(of_gradient, (0, 1), has_aux=True)(x, w)

    def forward(place, x, w):
        return jax.jvp(functools.partial(place, ck), (x, w), (jnp.cos(x), jnp.sin(w)))[
            1
        ]

    @quick_jit
    def run(x, w):
        return {
            name: (
                reverse(place, x, w),
                None if name in REVERSE_ONLY else forward(place, x, w),
            )
            for name, place in places.items()
        }

    return run(X, W)


REVERSE_ONLY = ("around custom_vjp", "inside custom_vjp", "around a fold")
FEW = ("cond", "nested", "closure")  # the others take most of a minute to compile


@functools.cache
def expected(names):
    return derivatives(lambda fun: fun, {name: PLACES[name] for name in names})


@pytest.mark.parametrize(
    "options, names",
    [
        pytest.param({}, FEW, id="default"),
        pytest.param(
            {"save": jax.checkpoint_policies.dots_saveable, "offload": ["activation"]},
            ("closure",),
            id="operations, offloaded",
        ),
        pytest.param(
            {"save": ["hidden"]}, tuple(PLACES), id="names", marks=pytest.mark.deep
        ),
    ],
)
def test_derivatives_wherever_it_stands(options, names):
    places = {name: PLACES[name] for name in names}
    found = derivatives(lambda fun: checkpoint(fun, **options), places)
    jax.tree.map(close, found, expected(names))


# Shapes whose internals, [ROWS, INNER], are 16 times as large as the boundaries. A
# layer has at least two that neither JAX nor XLA computes again by itself: those that
# the derivatives of the sine and of tanh read.
ROWS, INNER, CHAIN = 4096, 256, 3
MEASURED = {
    **PLACES,
    "second derivative": lambda ck, x, w: jax.grad(
        lambda x: jnp.sum(ck(layer)(x, w) ** 2)
    )(x),
}
# How many layers a place has. A nested fold saves carries only: here two of them, an
# eighth of an internal.
LAYERS = {
    "scan": 2,
    "fori_loop": 3,
    "nested": 2,
    "around a fold that saves": 5,
    "around a fold": 1 / 16,
}


def with_and_without(measure, name):
    """Bytes without and with `checkpoint`, in arrays of [ROWS, INNER]."""
    sharded = "shard_map" in name
    x, w = (
        jax.ShapeDtypeStruct(
            shape, jnp.float32, sharding=NamedSharding(MESH, spec) if sharded else None
        )
        for shape, spec in (
            ((ROWS, 16), PartitionSpec("d")),
            ((16, INNER), PartitionSpec()),
        )
    )
    unit = 4 * ROWS * INNER
    return [
        measure(functools.partial(MEASURED[name], ck), x, w) / unit
        for ck in (lambda f: f, checkpoint)
    ]


def bytes_kept(place, x, w):
    pullback = jax.eval_shape(lambda x, w: jax.vjp(place, x, w)[1], x, w)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pullback))


def test_no_internals_are_kept_wherever_it_stands():
    for name in MEASURED:
        before, after = with_and_without(bytes_kept, name)
        if (
            name == "gradient in a while_loop"
        ):  # has no reverse mode, so nothing of it is kept in any case
            assert after == before < 1, name
            continue
        assert after <= before - 2 * LAYERS.get(name, 1), name
        # JAX does not compute the forward pass of the inner derivative again for the
        # outer one.
        assert after < (5 if name == "second derivative" else 1), name


def temporaries(place, x, w):
    """Of the gradient of a chain: a region alone has all its internals when it is
    reversed.
    """

    def loss(x, w):
        for _ in range(CHAIN):
            x = place(x, w)
        return jnp.sum(x**2)

    return memory.report(jax.grad(loss, (0, 1)), x, w).temporaries


@pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="XLA for CPUs drops the barriers"
)
@pytest.mark.parametrize(
    "name", [*FEW, "scan", "around a fold", "shard_map", "second derivative"]
)
def test_compiled_memory_wherever_it_stands(name):
    before, after = with_and_without(temporaries, name)
    if "fold" in name:
        # XLA drops the barriers before it orders operations, and starts the loops of
        # all regions early.
        assert after <= before + CHAIN / 16  # an input of each region
    else:
        saved = 2 * LAYERS.get(name, 1)
        assert after <= before - saved / (8 if "shard_map" in name else 1)


def test_on_a_mesh_of_explicit_axes():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x, w = jax.device_put(X, PartitionSpec("d")), jax.device_put(W, PartitionSpec())
        run = checkpoint(lambda x: checkpoint(layer)(layer(x, w), w))
        gradient = quick_jit(jax.grad(lambda x: jnp.sum(run(x) ** 2)))(x)
        assert jax.typeof(gradient).sharding.spec == PartitionSpec("d", None)
    close(gradient, jax.grad(lambda x: jnp.sum(layer(layer(x, W), W) ** 2))(X))
