"""Functions applied tile by tile: values, gradients, what is refused, and what exists
at a time.
"""

import functools
import gc
import weakref

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from jax.sharding import AxisType, PartitionSpec

from stacked_remat import (
    checkpoint_name,
    internals_are_saved,
    memory,
    shared,
    tiled,
)

from .blocks import assert_close_to_scale, quick_jit
from .jaxprs import equations_of
from .random_arrays import normal

Pos, Embed, Inner, Batch = (
    Axis("position", 13),
    Axis("embed", 6),
    Axis("inner", 10),
    Axis("batch", 2),
)


class Mlp(eqx.Module):
    up: hax.NamedArray
    down: hax.NamedArray
    tiles: int = eqx.field(static=True, default=1)

    @staticmethod
    def init(tiles=1, *, key):
        up, down = jax.random.split(key)
        return Mlp(
            hax.random.normal(up, (Embed, Inner)),
            hax.random.normal(down, (Inner, Embed)),
            tiles,
        )

    def mlp(self, x):
        return hax.dot(
            hax.nn.silu(hax.dot(x, self.up, axis=Embed)), self.down, axis=Inner
        ).rearrange(x.axes)

    def __call__(self, x):
        mlp = Mlp.mlp if self.tiles == 1 else tiled(Mlp.mlp, Pos, tiles=self.tiles)
        return x + 0.1 * mlp(self, x)


def random(*axes):
    return normal(len(axes), *axes)


assert_close = functools.partial(assert_close_to_scale, tolerance=1e-5, least=0.1)


def test_a_dimension_of_plain_arrays_modules_keys_and_sums():
    mlp = eqx.nn.MLP(4, 4, 8, 1, key=jax.random.key(0))
    x, weight = (
        normal(1, 3, 11, 4),
        normal(2, 11, 4),
    )
    keys = jax.random.split(jax.random.key(3), 11)

    def noisy(x, keys, scale):
        return jax.vmap(lambda x, key: mlp(x) + scale * jax.random.normal(key, (4,)))(
            x, keys
        )

    expected = jax.vmap(noisy, (0, None, None))(x, keys, 0.1)
    by_tile = tiled(jax.vmap(noisy, (0, None, None)), 1, tiles=4)
    with pytest.raises(
        ValueError,
        match=r"keys has the shape \(11,\) without it.*stacked_remat.shared\(keys\)",
    ):
        by_tile(x, keys, 0.1)
    tiled_keys = tiled(
        lambda x, keys, scale: jnp.moveaxis(
            jax.vmap(noisy, (1, None, None))(x, keys, scale), 0, 1
        ),
        0,
        tiles=4,
    )
    assert_close(
        tiled_keys(jnp.moveaxis(x, 1, 0), keys, 0.1), jnp.moveaxis(expected, 1, 0)
    )
    again = tiled(
        lambda x, keys: (2 * x, jax.vmap(jax.random.fold_in, (0, None))(keys, 1)),
        0,
        tiles=4,
    )
    assert (
        again(weight, keys)[1] == jax.vmap(jax.random.fold_in, (0, None))(keys, 1)
    ).all()

    def loss(weight, x):
        return {"loss": jnp.sum((x * weight) ** 2), "count": jnp.sum(x > 0)}

    summed = tiled(lambda x, w: loss(w, x), -2, tiles=3, reduce="sum")(x[0], weight)
    assert_close(summed, loss(weight, x[0]))
    fixed = tiled(lambda x, w: {"x": x * w[:2].sum(), "one": 1}, 0, tiles=3)(
        x[0], shared(weight)
    )
    assert_close(fixed["x"], x[0] * weight[:2].sum())
    assert fixed["one"] == 1


def test_gradients_of_shared_arrays_are_added_up_in_float32():
    """In bfloat16 a sum of 512 equal parts stops growing at 256 of them."""
    weight = jnp.ones((), jnp.bfloat16)
    gradient = jax.grad(
        lambda w: tiled(lambda x: x * w, 0, tiles=512)(
            jnp.ones(512, jnp.bfloat16)
        ).sum()
    )
    assert gradient(weight) == 512
    by_sum = tiled(lambda x: jnp.sum(x), 0, tiles=512, reduce="sum")
    assert by_sum(jnp.ones(512, jnp.bfloat16)) == 512


def test_frozen_weights_have_no_gradient_products():
    cut, x = Mlp.init(3, key=jax.random.key(1)), random(Batch, Pos, Embed)
    frozen = equations_of(jax.grad(lambda x: hax.sum(cut(x)).scalar()), x)
    products = [
        equation for equation in frozen if equation.primitive.name == "dot_general"
    ]
    shapes = {equation.outvars[0].aval.shape for equation in products}
    assert shapes and not shapes & {(Embed.size, Inner.size), (Inner.size, Embed.size)}


def test_each_device_cuts_its_own_part():
    """Nothing is gathered where the axis is divided over devices."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    Long = Axis("position", 64)
    model, x = (
        Mlp.init(key=jax.random.key(0)),
        random(Batch, Long, Embed),
    )

    def loss(model, x, apply):
        return hax.sum(apply(lambda x: model.mlp(x))(x) ** 2).scalar()

    expected = quick_jit(
        lambda model, x: jax.grad(loss, (0, 1))(model, x, lambda fn: fn)
    )(model, x)
    odd = random(Pos)
    with jax.set_mesh(mesh), hax.axis_mapping({"position": "data"}):
        sharded = jax.device_put(
            x.array, jax.NamedSharding(mesh, PartitionSpec(None, "data"))
        )
        placed = hax.named(sharded, x.axes)
        run = jax.jit(
            lambda model, x: jax.grad(loss, (0, 1))(
                model, x, lambda fn: tiled(fn, Long, tiles=4)
            )
        )
        text = run.lower(model, placed).compile().as_text() or ""
        assert_close(run(model, placed), expected)
        assert_close(tiled(hax.sin, Pos, tiles=2)(odd), hax.sin(odd))
    assert "all-reduce" in text  # of the gradients of weights
    assert "all-gather" not in text and "all-to-all" not in text


def test_it_works_inside_of_shard_map_and_on_meshes_with_explicit_axes():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    x, w = (
        normal(0, 28, 4),
        normal(1, 4, 4),
    )
    split, whole = PartitionSpec("data"), PartitionSpec()

    def loss(x, w, apply):
        def local(x, w):
            return apply(lambda x, w: jnp.tanh(x @ w))(
                x, shared(w) if apply is cut else w
            )

        run = jax.shard_map(local, mesh=mesh, in_specs=(split, whole), out_specs=split)
        return jnp.sum(run(jax.reshard(x, split), w) ** 2)

    def cut(fn):
        return tiled(fn, 0, tiles=3)

    with jax.set_mesh(mesh):
        found, expected = (
            jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)(x, w, f)
            for f in (cut, lambda f: f)
        )
        assert_close(found, expected)
        closed = jax.jit(
            jax.grad(
                lambda x, w: loss(
                    x, w, lambda fn: lambda x, w: cut(lambda x: fn(x, w))(x)
                ),
                (0, 1),
            )
        )
        assert_close(closed(x, w), expected)
        columns = jax.grad(lambda x: jnp.sum(tiled(jnp.sin, 1, tiles=2)(x)))(
            jax.reshard(x, split)
        )
        assert_close(columns, jnp.cos(x))
        assert jax.typeof(columns).sharding.spec == PartitionSpec("data", None)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_batch_that_is_divided_over_devices(kind):
    """Mapped over examples, models, or both, which share what is not mapped."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    x, w = normal(0, 4, 13, 3), normal(1, 4, 3, 3)
    spmd = "data" if kind == AxisType.Auto else None

    def loss(apply, dims, x, w):
        mapped = jax.vmap(
            apply(lambda x, w: (jnp.sin(x @ w), x**2)), dims, spmd_axis_name=spmd
        )
        return sum(jnp.sum(out**2) for out in mapped(x, w))

    def cut(fn):
        return lambda x, w: tiled(fn, 0, tiles=3)(x, shared(w))

    with jax.set_mesh(mesh):
        of_all, of_one = (
            jax.reshard if kind == AxisType.Explicit else jax.device_put,
            lambda x, _: x[0],
        )
        for dims in ((0, None), (None, 0), (0, 0)):
            args = [
                (of_one if dim is None else of_all)(
                    array, jax.NamedSharding(mesh, PartitionSpec("data"))
                )
                for array, dim in zip((x, w), dims, strict=True)
            ]
            found, expected = (
                jax.jit(jax.value_and_grad(loss, (2, 3)), static_argnums=(0, 1))(
                    apply, dims, *args
                )
                for apply in (cut, lambda fn: fn)
            )
            assert_close(found, expected)


def test_eager_calls_compile_once_and_hold_no_arrays(caplog):
    """Also of a named axis within `jax.vmap`, where Haliax finds no mesh."""
    weights = normal(0, 6, 6)
    held = weakref.ref(weights)
    # `silu` has a rule of its own, and `tanh` none.
    apply = tiled(
        lambda x, w: hax.named(jax.nn.silu(jnp.tanh(x.array @ w)), x.axes), Pos, tiles=3
    )

    def run(x, w):
        return apply(hax.named(x, (Pos, Embed)), shared(w)).array

    ways = [
        run,
        jax.grad(lambda x, w: run(x, w).sum(), (0, 1)),
        lambda x, w: jax.jvp(run, (x, w), (x, w)),
        lambda x, w: jax.jvp(jax.grad(lambda x: run(x, w).sum()), (x,), (x,)),
    ]
    x = normal(1, 13, 6)
    for way in ways:
        way(x, weights)
        others = x + 1, 2 * weights
        with jax.log_compiles(), caplog.at_level("WARNING", logger="jax"):
            way(*others)
    assert not [
        record for record in caplog.records if record.message.startswith("Compiling")
    ]
    jax.vmap(run, (0, None))(jnp.stack([x, x]), weights)
    del weights
    gc.collect()
    assert held() is None


def test_nothing_to_cut():
    assert tiled(jnp.sin, 0, tiles=3)(jnp.ones((0, 2))).shape == (0, 2)
    for axis in (None, True, ("a", "b")):
        with pytest.raises(TypeError, match="axis must be a named axis"):
            tiled(jnp.sin, axis, tiles=2)  # pyright: ignore[reportArgumentType]
    assert tiled(jnp.sin, 0, tiles=np.int64(2))(jnp.ones(4)).shape == (4,)  # pyright: ignore[reportArgumentType]


def test_internals_exist_for_one_tile_and_names_inside_are_not_kept():
    Wide, Many = Axis("inner", 4096), Axis("position", 1024)
    shapes = eqx.filter_eval_shape(
        lambda: (
            hax.zeros((Embed, Wide)),
            hax.zeros((Wide, Embed)),
            hax.zeros((Many, Embed)),
        )
    )

    def gradient(tiles):
        def mlp(x, up, down):
            assert tiles == 1 or not internals_are_saved()
            return hax.dot(
                checkpoint_name(hax.nn.silu(hax.dot(x, up, axis=Embed)), "h"),
                down,
                axis=Wide,
            )

        apply = mlp if tiles == 1 else tiled(mlp, Many, tiles=tiles)
        return jax.grad(
            lambda *args: hax.sum(apply(args[2], *args[:2]) ** 2).scalar(), (0, 1, 2)
        )

    whole, cut = (memory.report(gradient(tiles), *shapes) for tiles in (1, 16))
    assert cut.temporaries < whole.temporaries / 8
    assert cut.flops.matmul <= whole.flops.matmul * 8 / 6  # the forward pass once more


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: tiled(jnp.sin, 0, tiles=2, reduce="mean"),
            'reduce must be "sum" or None',
        ),
        (
            lambda: tiled(lambda a, b: a, 0, tiles=2)(jnp.ones(4), jnp.ones(5)),
            "b has 5",
        ),
        (
            lambda: tiled(lambda a: a, Axis("position", 9), tiles=2)(random(Pos)),
            "a has 13",
        ),
        (
            lambda: tiled(lambda x: hax.sum(x, Pos.name), Pos, tiles=2)(random(Pos)),
            'output is float32.. and lacks the axis of 7.*reduce="sum"',
        ),
        (
            lambda: tiled(lambda x: x[:1], 0, tiles=2)(jnp.ones(4)),
            "is float32.1 of 2. for a tile",
        ),
        (
            lambda: tiled(lambda x: x @ x.T, 0, tiles=4)(jnp.ones((13, 4))),
            r"is float32.n, 4. for a tile, and output is float32.n, 13. for all",
        ),
        (
            lambda: tiled(lambda x: x @ x.T, 0, tiles=2)(jnp.ones((4, 4))),
            "treat positions independently",
        ),
        (
            lambda: tiled(lambda x: x.sum(-1), 0, tiles=4, reduce="sum")(
                jnp.ones((13, 4))
            ),
            r"output is float32.4. for a tile, and output is float32.13. for all",
        ),
        (
            lambda: tiled(lambda x: (x.sum(), x.shape[0]), 0, tiles=4, reduce="sum")(
                jnp.ones(13)
            ),
            r"output\[1\] is 4 for a tile, and output\[1\] is 13 for all positions",
        ),
        (
            lambda: tiled(lambda x: [x] * x.shape[0], 0, tiles=2)(jnp.ones(4)),
            r"None for a tile, and output\[2\] is",
        ),
        (
            lambda: tiled(lambda x, key: x, 0, tiles=2)(jnp.ones(4), jax.random.key(0)),
            "key has the shape .*of a random key: the same numbers",
        ),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
