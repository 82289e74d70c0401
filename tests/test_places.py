"""Places: names of operations that a policy keeps by their place in a layer."""

import functools

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import pytest

from stacked_remat import (
    BlockSeq,
    ScanCheckpointPolicy,
    Stacked,
    StackedPattern,
    checkpoint,
    checkpoint_name,
    lax_scan,
)
from stacked_remat._places import Places, operation_counts
from stacked_remat.memory import count_flops

from .blocks import assert_close, looped
from .jaxprs import equations_of

Layers = hax.Axis("layers", 6)
ROWS, WIDTH, INNER = 5, 4, 8
# FLOPs of a product of one layer.
PRODUCT = 2 * ROWS * WIDTH * INNER


class Mlp(eqx.Module):
    up: jax.Array
    down: jax.Array

    @staticmethod
    def init(key):
        keys = jax.random.split(key)
        return Mlp(
            jax.random.normal(keys[0], (WIDTH, INNER)),
            jax.random.normal(keys[1], (INNER, WIDTH)),
        )

    def __call__(self, x):
        return x + jax.nn.silu(x @ self.up) @ self.down


class Other(Mlp):
    """A block with one more product."""

    @staticmethod
    def init(key):
        return Other(*jax.tree.leaves(Mlp.init(key)))

    def __call__(self, x):
        return super().__call__(x) @ self.up @ self.down


KEYS = jax.random.split(jax.random.key(0), Layers.size)
X = jnp.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)
UP = "dot_general 1/2"


def stack(block=Mlp):
    return Stacked.init(Layers, block)(KEYS)


def gradient(remat):
    return jax.grad(lambda blocks, x: jnp.sum(blocks.fold(x, remat=remat)), (0, 1))


def flops(remat, blocks):
    return count_flops(jax.make_jaxpr(gradient(remat))(blocks, X)).matmul


@pytest.mark.remat3
@pytest.mark.parametrize(
    "settings",
    [
        {"save_block_internals": [UP]},
        {"save_block_internals": [UP, "logistic 1/1"]},
        {"save_block_internals": [UP], "save_carries": "offload"},
        {"save_block_internals": [UP], "nested": 2},
        {"save_block_internals": [UP], "nested": True, "first_layers": 2},
        {"offload_block_internals": [UP]},
    ],
    ids=str,
)
def test_gradients_are_those_of_the_loop(settings):
    blocks, remat = stack(), ScanCheckpointPolicy(**settings)

    def loop(blocks, x):
        return jnp.sum(looped(blocks.unstacked(), x))

    assert_close(gradient(remat)(blocks, X), jax.grad(loop, (0, 1))(blocks, X))


@pytest.mark.remat3
def test_what_is_kept_is_not_computed_again():
    blocks = stack()
    everything, nothing = flops(False, blocks), flops(True, blocks)
    assert nothing - everything == Layers.size * PRODUCT
    kept = ScanCheckpointPolicy(save_block_internals=[UP])
    assert flops(kept, blocks) == everything
    useless = ScanCheckpointPolicy(save_block_internals=["dot_general 2/2"])
    assert flops(useless, blocks) == nothing


def test_each_kind_of_loop_names_places():
    remat = ScanCheckpointPolicy(save_block_internals=[UP])
    blocks = stack()
    layers = blocks.unstacked()

    def unrolled(x):
        sequence = BlockSeq(layers, Layers, remat)
        return jnp.sum(sequence.fold(x))

    def of_kinds(x):
        kinds = {"mlp": Mlp, "other": Other}
        pattern = StackedPattern.init(Layers, kinds, ["mlp", "other"] * 3, remat=remat)(
            KEYS
        )
        return jnp.sum(pattern.fold(x))

    def scanned(x):
        xs = blocks.stacked
        last, _ = lax_scan(lambda x, block: (block(x), None), x, xs, remat=remat)
        return jnp.sum(last)

    def regions(x):
        apply = checkpoint(lambda block, x: block(x), save=[UP])
        return jnp.sum(functools.reduce(lambda x, block: apply(block, x), layers, x))

    for value in (unrolled, of_kinds, scanned, regions):
        names = {
            equation.params["name"]
            for equation in equations_of(jax.grad(value), X)
            if equation.primitive.name == "name"
        }
        assert UP in names, value


def test_other_lines_of_a_block_may_change():
    def changed(block, x):
        x = x + jnp.sin(x) * 0
        return Mlp.__call__(block, x)

    block_class = type("Changed", (Mlp,), {"__call__": changed})
    blocks = stack(lambda key: block_class(*jax.tree.leaves(Mlp.init(key))))
    kept = ScanCheckpointPolicy(save_block_internals=[UP])
    assert flops(kept, blocks) == flops(False, blocks)


def test_another_number_of_operations_is_refused():
    remat = ScanCheckpointPolicy(save_block_internals=[UP])
    message = r"keeps 'dot_general 1/2', but the layer has 4 'dot_general'"
    with pytest.raises(ValueError, match=message):
        gradient(remat)(stack(Other), X)
    with pytest.raises(ValueError, match=message):
        BlockSeq(stack(Other).unstacked(), Layers, remat).fold(X)
    with pytest.raises(ValueError, match="the layer has no 'conv'"):
        jax.grad(checkpoint(jnp.sin, save=["conv 1/1"]))(1.0)


@pytest.mark.remat3
def test_an_author_may_give_a_name_of_this_form():
    def fn(x):
        return jnp.sin(jax.jit(lambda x: checkpoint_name(x, "half 1/2"))(jnp.sin(x)))

    expected = jnp.cos(jnp.sin(1.0)) * jnp.cos(1.0)
    gradient = jax.grad(checkpoint(fn, save=["half 1/2"]))(1.0)
    assert jnp.allclose(gradient, expected)


def test_operations_within_calls_count_and_custom_derivatives_have_names():
    @jax.custom_vjp
    def halved(x):
        return jnp.sin(jnp.sin(x))

    halved.defvjp(lambda x: (halved(x), x), lambda x, ct: (ct / 2,))

    def block(x):
        y = jax.jit(lambda x: jnp.sin(x) * 2)(halved(x))
        jnp.cos(x)  # is read by nothing
        return jax.nn.relu(checkpoint_name(jnp.sin(y), "hidden"))

    counts = operation_counts(jax.make_jaxpr(block)(1.0).jaxpr)
    assert counts == {"halved": 1, "sin": 2, "mul": 1, "relu": 1, "cos": 1}
    places = Places(["sin 2/2", "halved 1/1", "hidden"])
    named = jax.make_jaxpr(places.named_in(block))(1.0)
    places.check()
    names = [
        (before.params.get("name", before.primitive.name), after.params["name"])
        for before, after in zip(named.eqns, named.eqns[1:], strict=False)
        if after.primitive.name == "name"
    ]
    assert names == [
        ("custom_vjp_call", "halved 1/1"),
        ("sin", "sin 2/2"),
        ("sin 2/2", "hidden"),
    ]


def test_a_call_with_shardings_is_one_operation_and_keeps_them():
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    inner = jax.jit(jnp.sin, out_shardings=device)
    places = Places(["jit 1/1"])
    named = jax.make_jaxpr(places.named_in(lambda x: inner(x) * 2))(1.0)
    places.check()
    call, name, _ = named.eqns
    assert call.params["out_shardings"] == (device,)
    assert name.params["name"] == "jit 1/1"


@jax.custom_vjp
def product(x, weight):
    return x @ weight


product.defvjp(
    lambda x, weight: (x @ weight, (x, weight)),
    lambda kept, ct: (ct @ kept[1].T, kept[0].T @ ct),
)


def of_rule(block, x):
    return x + jnp.sin(product(x, block.up)) @ block.down


def of_loop(block, x):
    def step(x, _):
        return jnp.sin(x @ block.up) @ block.down, None

    return jax.lax.scan(step, x, length=2)[0] @ block.up @ block.down


def of_named_arrays(block, x):
    Rows, In, Inner = hax.make_axes(rows=ROWS, inputs=WIDTH, inner=INNER)
    up, down = hax.named(block.up, (In, Inner)), hax.named(block.down, (Inner, In))
    hidden = hax.sin(hax.dot(hax.named(x, (Rows, In)), up, axis=In))
    return hax.dot(hidden, down, axis=Inner).array


@pytest.mark.remat3
@pytest.mark.parametrize(
    ("apply", "place"),
    [(of_rule, "product 1/1"), (of_loop, UP), (of_named_arrays, UP)],
)
def test_gradients_of_other_blocks_under_transformations(apply, place):
    block_class = type("Block", (Mlp,), {"__call__": apply})
    blocks = stack(lambda key: block_class(*jax.tree.leaves(Mlp.init(key))))

    def gradients(remat):
        run = jax.jit(gradient(remat))
        # Names of JAX's remat3 can't be batched.
        if getattr(jax.config, "jax_remat3", False):
            return run(blocks, X)
        return jax.vmap(run, (None, 0))(blocks, jnp.stack([X, X + 1, X - 1]))

    kept = ScanCheckpointPolicy(save_block_internals=[place])
    assert_close(gradients(kept), gradients(False))
    assert flops(kept, blocks) <= flops(True, blocks) - Layers.size * PRODUCT


def test_a_policy_of_places_is_written_as_it_is_read():
    remat = ScanCheckpointPolicy(save_block_internals=[UP, "exp 1/1"])
    assert eval(repr(remat)) == remat
    assert repr(remat) == (
        "ScanCheckpointPolicy(save_block_internals=['dot_general 1/2', 'exp 1/1'])"
    )
