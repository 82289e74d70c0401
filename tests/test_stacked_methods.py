"""Which blocks and options `Stacked` and `BlockSeq` take, and how they act as sequences of layers."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stacked_remat import BlockSeq, ScanCheckpointPolicy, Stacked

from .blocks import Hidden, NamedBlock, PlainBlock

Layers = hax.Axis("layers", 4)
both = pytest.mark.parametrize("Stack", [Stacked, BlockSeq])


def keys():
    return jax.random.split(jax.random.key(0), Layers.size)


@both
def test_a_built_block_is_not_its_class(Stack):
    name = f"{Stack.__name__}.init"
    with pytest.raises(TypeError, match=rf"{name} takes the class of the blocks.*got 3 \(int\)"):
        Stack.init(Layers, 3)
    partial = eqx.Partial(PlainBlock, 3)  # a module too, and one that builds blocks
    for build in (partial, eqx.filter_jit(partial)):
        assert Stack.init(Layers, build)(key=keys())[0].size == 3


@both
def test_an_ordinary_method_named_init_builds_nothing(Stack):
    class Block(PlainBlock):
        def init(self, x):
            return x

    with pytest.raises(TypeError, match="Block.init, which is an ordinary method.*@staticmethod.*lambda"):
        Stack.init(Layers, Block)
    assert Stack.init(Layers, lambda **kwargs: Block(3, **kwargs))(key=keys())[0].init(1) == 1

    class Built(eqx.Module):
        weight: jax.Array

        @classmethod
        def init(cls, size, *, key):
            return cls(jax.random.normal(key, (size,)))

    assert Stack.init(Layers, Built)(3, key=keys())[0].weight.shape == (3,)


@both
@pytest.mark.parametrize("verb", ["fold", "scan"])
@pytest.mark.parametrize("name, value", [("unroll", 2), ("remat", False), ("reverse", False)])
def test_an_option_may_be_a_parameter_of_the_block(Stack, verb, name, value):
    class Block(eqx.Module):
        weight: jax.Array

        def __call__(self, x, remat=1.0, unroll=1.0, reverse=1.0):
            assert remat == unroll == reverse == 1.0
            return x if verb == "fold" else (x, x)

    stack = Stack.init(Layers, Block)(jnp.ones(4))
    getattr(stack, verb)(1.0)
    with pytest.raises(
        TypeError, match=rf"{name}={value} may be for {verb} or for Block.__call__.*{verb}_via"
    ):
        getattr(stack, verb)(1.0, **{name: value})
    if Stack is Stacked:
        options = rf"block\(x\), Layers, {name}=...\)\(x, layers.stacked\)"
        with pytest.raises(TypeError, match=rf"for {verb}_vjp write stacked_remat.{verb}_vjp.*{options}"):
            getattr(stack, f"{verb}_vjp")(1.0, **{name: value})
    getattr(stack, f"{verb}_via")(Block.__call__, **{name: value})(1.0)


@both
def test_with_remat(Stack):
    stack = Stack.init(Layers, PlainBlock)(3, key=keys())
    nested = stack.with_remat("nested")
    assert type(nested) is Stack and nested.remat == ScanCheckpointPolicy(nested=True)
    assert stack.remat == ScanCheckpointPolicy()
    assert eqx.tree_equal(nested.with_remat(True), stack)
    ensemble = eqx.filter_vmap(lambda keys: Stack.init(Layers, PlainBlock)(3, key=keys))
    stacks = ensemble(jax.random.split(jax.random.key(0), (2, 4))).with_remat("nested")
    assert stacks.remat == nested.remat


@both
def test_it_is_a_sequence(Stack):
    stack = Stack.init(Layers, NamedBlock)(Hidden, key=keys())
    layers = list(stack.unstacked())
    assert len(stack) == 4 and eqx.tree_equal(list(stack), layers)
    for i in (0, 3, -1, -4, np.int64(2)):
        assert eqx.tree_equal(stack[i], layers[i]) and eqx.tree_equal(stack.get_layer(i), layers[i])
    for rows in (
        slice(1, 3),
        slice(None, None, 2),
        slice(-2, None),
        slice(9),
        slice(None, None, -1),
        slice(2, 2),
    ):
        part = stack[rows]
        assert type(part) is Stack and part.remat == stack.remat
        assert part.Layers == Layers.resize(len(layers[rows]))
        assert eqx.tree_equal(list(part), layers[rows])
    x = hax.ones(Hidden)
    halves = stack[2:].fold(stack[:2].fold(x))
    np.testing.assert_allclose(halves.array, stack.fold(x).array, rtol=1e-6)
    assert eqx.tree_equal(stack[2:2].fold(x), x)
    with pytest.raises(IndexError, match="`layers` has no layers"):
        stack[2:2][0]


@both
def test_slices_of_any_stack(Stack):
    """The axis may be at any place, an array shared, and a subclass may have its own constructor."""

    class Block(eqx.Module):
        late: hax.NamedArray
        rate: float

    class Tower(Stack):
        def __init__(self, rate):
            made = Stack.init(Layers, Block)(hax.arange(Layers), rate)
            self.Layers, self.remat = Layers, made.remat
            if Stack is Stacked:
                table = hax.arange(Layers).broadcast_axis(Hidden)
                self.stacked = Block(table.rearrange((Hidden, Layers)), rate)
            else:
                self.blocks = made.blocks

    part = Tower(0.5)[1:3].with_remat(False)
    assert (
        type(part) is Tower and part.remat.saves_everything and [block.rate for block in part] == [0.5, 0.5]
    )
    np.testing.assert_array_equal([block.late.array.ravel()[0] for block in part], [1, 2])
