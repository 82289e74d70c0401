"""The compiled memory of each policy is what its docstring claims."""

import functools

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from stacked_remat import (
    BlockSeq,
    ScanCheckpointPolicy,
    Stacked,
    checkpoint_name,
    fold,
    scan,
)

from .blocks import Tanh, assert_close, quick_jit
from .random_arrays import normal


class Wide(eqx.Module):
    """A block whose internals are 4 times its carry, so that policies differ."""

    weight: jax.Array

    def __call__(self, x):
        h = x[:, None] * self.weight[None, :]
        return x + jnp.mean(jnp.tanh(jnp.sin(h)), axis=1)


CARRY = 1 << 14


def norm_of_gradient(value, layers, x):
    return jnp.sum(jax.grad(value)(layers, x).stacked.weight ** 2)


@functools.cache
def temporaries(remat, depth, Stack=Stacked, is_second=False):
    """The bytes of temporaries, in carries, of the compiled gradient of a stack, or of
    the gradient of that one's norm.
    """
    Layers = hax.Axis("layers", depth)
    if Stack is Stacked:
        layers = Stacked(Wide(jnp.ones((depth, 4))), Layers)
    else:
        layers = BlockSeq([Wide(jnp.full(4, i + 1.0)) for i in range(depth)], Layers)

    def value(layers, x):
        return jnp.sum(layers.fold(x, remat=remat))

    if is_second:
        value = functools.partial(norm_of_gradient, value)
    x = jax.ShapeDtypeStruct((CARRY,), jnp.float32)
    compiled = jax.jit(jax.grad(value)).lower(layers, x).compile()
    return compiled.memory_analysis().temp_size_in_bytes / (4 * CARRY)


def growth(remat):
    """How many carries one more layer costs."""
    return (temporaries(remat, 64) - temporaries(remat, 32)) / 32


class TestCompiledMemory:
    def test_true_costs_one_carry_a_layer(self):
        assert growth(True) == pytest.approx(1.0, abs=0.05)

    def test_false_costs_the_internals_of_every_layer(self):
        assert growth(False) > 4.0
        assert growth("save_all") == pytest.approx(growth(False), rel=0.05)

    def test_second_derivatives_recompute_too(self):
        def second_growth(remat):
            small, large = (
                temporaries(remat, depth, is_second=True) for depth in (8, 24)
            )
            return (large - small) / 16

        # Of each layer what its gradient's gradient reads, instead of its internals
        for remat in (True, "nested"):
            assert second_growth(remat) < 0.3 * second_growth(False)

    @pytest.mark.remat3
    def test_named_internals_cost_their_size(self):
        assert growth(
            ScanCheckpointPolicy(save_block_internals=["unknown"])
        ) == pytest.approx(1.0, abs=0.05)

    def test_recompute_costs_no_more_than_true(self):
        assert temporaries("recompute", 64) <= 1.1 * temporaries(True, 64)

    def test_nested_grows_as_the_square_root(self):
        assert temporaries("nested", 64) < 0.45 * temporaries(True, 64)
        # 11 carries in place of 8
        assert growth("nested") == pytest.approx(3 / 32, abs=0.01)
        assert growth(ScanCheckpointPolicy(max_carries=4)) == pytest.approx(0, abs=0.01)

    @pytest.mark.parametrize("depth", [47, 61])
    def test_nested_serves_prime_depths(self, depth):
        assert temporaries("nested", depth) < 1.15 * temporaries("nested", depth + 1)

    def test_first_layers_cost_their_internals(self):
        few, many = (
            temporaries(ScanCheckpointPolicy(nested=True, first_layers=k), 64)
            for k in (8, 16)
        )
        assert (many - few) / 8 == pytest.approx(growth(False), rel=0.1)

    def test_more_segments_than_the_root_cost_their_boundaries(self):
        assert temporaries(ScanCheckpointPolicy(nested=32), 64) > 1.4 * temporaries(
            "nested", 64
        )

    @pytest.mark.parametrize("Stack", [Stacked, BlockSeq])
    def test_internals_are_kept_of_one_segment(self, Stack):
        """Of segments of one layer too."""

        def cost(segments, depth):
            remat = ScanCheckpointPolicy(nested=segments, save_block_internals=True)
            return temporaries(remat, depth, Stack)

        carries_alone = temporaries(True, 12, Stack)
        assert cost(12, 12) < carries_alone + 1.1 * temporaries(True, 1, Stack)
        assert cost(8, 12) < cost(6, 12) + 2.5
        assert cost(11, 12) < cost(6, 12) + 5.5

    @pytest.mark.remat3
    def test_offload_is_harmless_on_cpu(self):
        assert temporaries("offload", 64) <= 1.1 * temporaries(True, 64)


@pytest.mark.parametrize("remat", [True, "nested"])
def test_leaves_of_the_carry_that_no_layer_changes_are_kept_once(remat):
    """Also where a layer is compiled by itself, and names them."""
    size, depth = 1 << 14, 50

    def step(x, material, at):
        return jnp.sin(x * material), checkpoint_name(material, "material"), at + 1

    def carried(material):
        run = fold(
            lambda carry: jax.jit(step)(*carry), hax.Axis("t", depth), remat=remat
        )
        x, same, _ = run((jnp.ones(size), material, 0))
        return jnp.vdot(x, same)

    def closed_over(material):
        run = fold(
            lambda carry: step(carry[0], material, carry[1])[::2],
            hax.Axis("t", depth),
            remat=remat,
        )
        return jnp.vdot(run((jnp.ones(size), 0))[0], material)

    compiled = [
        jax.jit(jax.value_and_grad(f)).lower(jnp.ones(size)).compile()
        for f in (carried, closed_over)
    ]
    one, other = (program.memory_analysis().temp_size_in_bytes for program in compiled)
    assert one <= other + 8 * size
    (value, gradient), (wanted, expected) = (
        program(jnp.full(size, 0.9)) for program in compiled
    )
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)


# Of small carries not every input is written on a CPU
@pytest.mark.parametrize(
    ("size", "steps", "segments"), [(1 << 10, 400, 20), (1 << 18, 12, 3)]
)
def test_leaves_of_the_carry_that_no_derivative_reads_are_kept_for_each_segment(
    size, steps, segments
):
    """Where the internals of a segment are kept, which here are one array a step."""

    def step(carry):
        q, p = carry
        p = p - 0.1 * jnp.sin(q)
        return q + 0.1 * p, p

    def final(remat, q):
        return jnp.sum(fold(step, steps, remat=remat)((q, jnp.zeros(size)))[0])

    policy = ScanCheckpointPolicy(nested=segments, save_block_internals=True)
    gradient = (
        jax.jit(jax.grad(functools.partial(final, policy)))
        .lower(jnp.ones(size))
        .compile()
    )
    arrays = gradient.memory_analysis().temp_size_in_bytes / (4 * size)
    assert arrays < 2 * segments + steps // segments + 12
    q = jnp.linspace(0, 1, size)
    np.testing.assert_allclose(
        gradient(q), jax.grad(functools.partial(final, False))(q), rtol=1e-4
    )


STEPS = 12


def writing(carry, x):
    """Write and add to buffers in several ways, at indices that repeat and that depend
    on the carry.
    """
    at, y, (rows, sums, slices, some, many, read, sizes) = carry
    y = jnp.sin(y + x)
    index = jnp.where(y[0] > 0.3, at // 2, 7)
    rows = jax.jit(lambda rows: rows.at[index].set(y))(rows)
    sums = sums.at[index].add(y)
    slices = lax.dynamic_update_slice(
        slices.reshape(-1), 2 * y, (3 * index + 1,)
    ).reshape(slices.shape)
    some = lax.cond(
        at % 3 == 0, lambda some: some.at[at].set(y[:1]), lambda some: 1.1 * some, some
    )
    many, _ = lax.scan(
        lambda many, k: (many.at[(at + k) % 8].set(y + k.astype(y.dtype)), None),
        many,
        jnp.arange(3),
    )
    read = jnp.cos(y[0]) * read.at[at].set(y)
    return (
        at + 1,
        y,
        (rows, sums, slices, some, many, read, sizes.at[at].set(y.size)),
        y[1],
    )


def final(run, last, y, xs, buffers):
    carry, ys = run(
        (jnp.int32(0), y, (*buffers, jnp.zeros(STEPS, jnp.int32))), xs, last
    )
    leaves = [
        leaf.astype(jnp.float32).reshape(-1) for leaf in jax.tree.leaves((carry, ys))
    ]
    return sum(
        jnp.sum(jnp.sin(leaf + jnp.linspace(0, 1, leaf.size))) for leaf in leaves
    )


@pytest.mark.parametrize("reverse", [False, pytest.param(True, marks=pytest.mark.deep)])
def test_buffers_that_steps_write_to_have_the_gradients_of_lax_scan(reverse):
    def step(carry, x):
        *carry, y = writing(carry, x)
        return tuple(carry), y

    def plain(init, xs, last):
        def masked(carry, x):
            new, y = step(carry, x)
            is_over = carry[0] >= last
            return jax.tree.map(
                functools.partial(jnp.where, is_over), carry, new
            ), jnp.where(is_over, 0, y)

        return lax.scan(masked, init, xs, reverse=reverse)

    def cut(remat):
        def run(init, xs, last):
            stops = (
                {} if remat in OFFLOADING else {"until": lambda carry: carry[0] >= last}
            )
            return scan(step, STEPS, remat=remat, reverse=reverse, **stops)(init, xs)

        return run

    lengths = 3, STEPS, 8, STEPS, 10, STEPS, 8, STEPS
    shapes = [(length, 3) for length in lengths]
    shapes[5] = (STEPS, 1)
    ys, xs, *buffers = [normal(seed, *shape) for seed, shape in enumerate(shapes)]

    @quick_jit
    def found_and_expected(lasts, ys, xs, buffers):
        def of(run, last):
            value = jax.value_and_grad(functools.partial(final, run), (1, 2, 3))
            return value(last, ys[0], xs, buffers)

        def batch(run):
            one = functools.partial(final, run)
            gradient = jax.grad(one, (1, 2, 3))

            def product(last, y):
                return jax.jvp(
                    lambda *args: gradient(last, *args),
                    (y, xs, buffers),
                    (y, xs, buffers),
                )

            return jax.vmap(product)(lasts, ys)

        every, stopped = (
            [of(run, lasts[k]) for run in map(cut, which)]
            for k, which in enumerate((OFFLOADING, CUT))
        )
        found = *every, *stopped, batch(cut("nested"))
        expected = (
            *[of(plain, lasts[0])] * len(every),
            *[of(plain, lasts[1])] * len(stopped),
            batch(plain),
        )
        return found, expected

    found, expected = found_and_expected(jnp.int32([STEPS, 7, 0]), ys, xs, buffers)
    for name, pair in zip(
        (*OFFLOADING, *CUT, "batch"), zip(found, expected, strict=True), strict=True
    ):
        assert_close(*pair, rtol=1e-4, atol=1e-5, name=name)


OFFLOADING = (ScanCheckpointPolicy(nested=True, save_carries="offload"), "offload")
CUT = (
    True,
    "nested",
    *(
        ScanCheckpointPolicy(**each)
        for each in (
            {"nested": 4},
            {"max_carries": 2},
            {"nested": True, "first_layers": 3},
            {"nested": 3, "save_block_internals": True},
        )
    ),
)


@pytest.mark.parametrize("stops", [False, True])
def test_a_buffer_that_steps_write_to_is_kept_once(stops):
    steps, size = 200, 64
    until = (lambda carry: carry[0] >= 100) if stops else None

    def step(carry):
        at, y, saved, total = carry
        y = y + 0.1 * jnp.tanh(y)
        return at + 1, y, saved.at[at].set(y), total + jnp.outer(y, y)

    def loss(remat, y):
        init = 0, y, jnp.zeros((steps, size)), jnp.zeros((size, size))
        return sum(
            jnp.sum(leaf**2)
            for leaf in fold(step, steps, remat=remat, until=until)(init)[2:]
        )

    buffers = 4 * size * (steps + size)
    for remat in (*CUT, *(() if stops else OFFLOADING)):
        program = (
            jax.jit(jax.grad(functools.partial(loss, remat)))
            .lower(jnp.ones(size))
            .compile()
        )
        found = program.memory_analysis().temp_size_in_bytes
        carries = 4 * size * (2 * steps if remat in (True, "offload") else steps // 2)
        assert found < 4.1 * buffers + carries, remat


@pytest.mark.parametrize("explicit", [True, False])
def test_a_batch_over_devices_that_is_mapped_shares_its_weights(explicit):
    """`nested` keeps its memory and sums gradients within layers, whatever stands
    around the fold.
    """
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        x = jax.device_put(
            jnp.ones((32, 8, 64)), jax.NamedSharding(mesh, jax.P("data"))
        )
        wraps = [
            lambda f: jax.vmap(f, spmd_axis_name=None if explicit else "data"),
            lambda f: jax.vmap(eqx.filter_jit(jax.checkpoint(f))),
            lambda f: jax.vmap(lambda x: jax.lax.cond(True, f, lambda x: x, x)),
        ]

        def temporaries(remat, wrap):
            def loss(weights, x):
                return jnp.sum(
                    wrap(
                        lambda x: Stacked(
                            Tanh(weights), hax.Axis("layers", 16), remat
                        ).fold(x)
                    )(x)
                )

            compiled = (
                jax.jit(jax.grad(loss)).lower(jnp.zeros((16, 64, 64)), x).compile()
            )
            return compiled.memory_analysis().temp_size_in_bytes

        plain = temporaries(True, lambda f: f)
        assert all(temporaries("nested", wrap) < plain for wrap in wraps)
