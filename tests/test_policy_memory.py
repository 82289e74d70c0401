"""The compiled memory of each policy is what its docstring claims."""

import functools

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stacked_remat import BlockSeq, ScanCheckpointPolicy, Stacked, checkpoint_name, fold

from .blocks import Tanh


class Wide(eqx.Module):
    """A block whose internals are 4 times its carry, so that policies differ."""

    weight: jax.Array

    def __call__(self, x):
        h = x[:, None] * self.weight[None, :]
        return x + jnp.mean(jnp.tanh(jnp.sin(h)), axis=1)


CARRY = 1 << 14


@functools.cache
def temporaries(remat, depth, Stack=Stacked):
    """The bytes of temporaries, in carries, of the compiled gradient of a stack."""
    Layers = hax.Axis("layers", depth)
    if Stack is Stacked:
        layers = Stacked(Wide(jnp.ones((depth, 4))), Layers)
    else:
        layers = BlockSeq([Wide(jnp.full(4, i + 1.0)) for i in range(depth)], Layers)
    gradient = jax.jit(jax.grad(lambda layers, x: jnp.sum(layers.fold(x, remat=remat))))
    compiled = gradient.lower(layers, jax.ShapeDtypeStruct((CARRY,), jnp.float32)).compile()
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

    @pytest.mark.remat3
    def test_named_internals_cost_their_size(self):
        assert growth(ScanCheckpointPolicy(save_block_internals=["unknown"])) == pytest.approx(1.0, abs=0.05)

    def test_recompute_costs_no_more_than_true(self):
        assert temporaries("recompute", 64) <= 1.1 * temporaries(True, 64)

    def test_nested_grows_as_the_square_root(self):
        assert temporaries("nested", 64) < 0.45 * temporaries(True, 64)
        assert growth("nested") == pytest.approx(3 / 32, abs=0.01)  # 11 carries in place of 8
        assert growth(ScanCheckpointPolicy(max_carries=4)) == pytest.approx(0, abs=0.01)

    @pytest.mark.parametrize("depth", [47, 61])
    def test_nested_serves_prime_depths(self, depth):
        assert temporaries("nested", depth) < 1.15 * temporaries("nested", depth + 1)

    def test_first_layers_cost_their_internals(self):
        few, many = (temporaries(ScanCheckpointPolicy(nested=True, first_layers=k), 64) for k in (8, 16))
        assert (many - few) / 8 == pytest.approx(growth(False), rel=0.1)

    def test_more_segments_than_the_root_cost_their_boundaries(self):
        assert temporaries(ScanCheckpointPolicy(nested=32), 64) > 1.4 * temporaries("nested", 64)

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
        run = fold(lambda carry: jax.jit(step)(*carry), hax.Axis("t", depth), remat=remat)
        x, same, _ = run((jnp.ones(size), material, 0))
        return jnp.vdot(x, same)

    def closed_over(material):
        run = fold(lambda carry: step(carry[0], material, carry[1])[::2], hax.Axis("t", depth), remat=remat)
        return jnp.vdot(run((jnp.ones(size), 0))[0], material)

    compiled = [
        jax.jit(jax.value_and_grad(f)).lower(jnp.ones(size)).compile() for f in (carried, closed_over)
    ]
    one, other = (program.memory_analysis().temp_size_in_bytes for program in compiled)
    assert one <= other + 8 * size
    (value, gradient), (wanted, expected) = (program(jnp.full(size, 0.9)) for program in compiled)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)


def test_leaves_of_the_carry_that_no_derivative_reads_are_kept_for_each_segment():
    """Where the internals of a segment are kept, which here are one array a step."""
    size, steps, segments = 1 << 10, 400, 20

    def step(carry):
        q, p = carry
        p = p - 0.1 * jnp.sin(q)
        return q + 0.1 * p, p

    def final(remat, q):
        return jnp.sum(fold(step, steps, remat=remat)((q, jnp.zeros(size)))[0])

    policy = ScanCheckpointPolicy(nested=segments, save_block_internals=True)
    gradient = jax.jit(jax.grad(functools.partial(final, policy))).lower(jnp.ones(size)).compile()
    arrays = gradient.memory_analysis().temp_size_in_bytes / (4 * size)
    assert arrays < 2 * segments + steps // segments + 12
    q = jnp.linspace(0, 1, size)
    np.testing.assert_allclose(gradient(q), jax.grad(functools.partial(final, False))(q), rtol=1e-4)


@pytest.mark.parametrize("explicit", [True, False])
def test_a_batch_over_devices_that_is_mapped_shares_its_weights(explicit):
    """`nested` keeps its memory and sums gradients within layers, whatever stands around the fold."""
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((32, 8, 64)), jax.NamedSharding(mesh, jax.P("data")))
        wraps = [
            lambda f: jax.vmap(f, spmd_axis_name=None if explicit else "data"),
            lambda f: jax.vmap(eqx.filter_jit(jax.checkpoint(f))),
            lambda f: jax.vmap(lambda x: jax.lax.cond(True, f, lambda x: x, x)),
        ]

        def temporaries(remat, wrap):
            def loss(weights, x):
                return jnp.sum(
                    wrap(lambda x: Stacked(Tanh(weights), hax.Axis("layers", 16), remat).fold(x))(x)
                )

            compiled = jax.jit(jax.grad(loss)).lower(jnp.zeros((16, 64, 64)), x).compile()
            return compiled.memory_analysis().temp_size_in_bytes

        plain = temporaries(True, lambda f: f)
        assert all(temporaries("nested", wrap) < plain for wrap in wraps)
