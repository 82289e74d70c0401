"""Layers to and from the keys of a torch `Sequential`."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stacked_remat import BlockSeq, Stacked

from .blocks import Hidden, NamedBlock, PlainBlock

Layers = hax.Axis("layers", 4)
both = pytest.mark.parametrize("Stack", [Stacked, BlockSeq])


def keys():
    return jax.random.split(jax.random.key(0), Layers.size)


@both
def test_what_is_not_an_array_is_not_read_from_a_state_dict(Stack):
    class Block(eqx.Module):
        weight: jax.Array
        dropout: eqx.nn.Dropout
        count: int
        flag: bool
        rate: complex
        pair: tuple[jax.Array, float]

        def __call__(self, x, key):
            assert self.flag and type(self.count) is int
            return self.dropout(x, key=key) * self.weight * self.count * self.rate.real

    dropout = eqx.nn.Dropout(0.5)
    stack = Stack.init(Layers, Block)(
        jnp.ones(4), dropout, 3, True, 2.0 + 0.0j, (jnp.zeros(4), 0.5)
    )
    again = stack.from_state_dict(stack.to_state_dict("h"), "h")
    assert eqx.tree_equal(again, stack)
    numbers = [leaf for leaf in jax.tree.leaves(again) if not eqx.is_array(leaf)]
    assert {type(leaf) for leaf in numbers} == {float, bool, int, complex}
    again.fold(jnp.ones(3), keys())


@both
def test_state_dict_round_trip(Stack):
    for block, args in ((NamedBlock, (Hidden,)), (PlainBlock, (3,))):
        stack = Stack.init(Layers, block)(*args, key=keys())
        other = Stack.init(Layers, block)(
            *args, key=jax.random.split(jax.random.key(9), 4)
        )
        # Whose state dicts are alike
        sequence = BlockSeq.init(Layers, block)(*args, key=keys())
        for prefix in (None, "model.layers"):
            state = stack.to_state_dict(prefix)
            start = "" if prefix is None else "model.layers."
            assert set(state) == {
                f"{start}{i}.{name}" for i in range(4) for name in ("weight", "bias")
            }
            for saved in (state, sequence.to_state_dict(prefix)):
                restored = other.from_state_dict(
                    {**saved, "elsewhere": jnp.ones(1)}, prefix
                )
                assert eqx.tree_equal(restored, stack)
            assert eqx.tree_equal(other[:0].from_state_dict({}, prefix), other[:0])


@both
def test_every_problem_of_a_state_dict_is_named(Stack, tmp_path):
    stack = Stack.init(Layers, PlainBlock)(3, key=keys())
    state = stack.to_state_dict("h")
    del state["h.1.weight"], state["h.1.bias"], state["h.3.bias"]
    state["h.2.weight"] = jnp.ones((2, 3))
    state["h.4.weight"] = state["h.17.weight"] = jnp.ones((3, 3))
    with pytest.raises(ValueError) as error:
        stack.from_state_dict(state, "h")
    message = str(error.value)
    assert (
        "fit the stack of 4 layers" in message
        and "missing: h.1.weight (3, 3)" in message
    )
    assert "mismatched: h.2.weight is (2, 3), expected (3, 3)" in message
    assert "missing: h.3.bias (3,)" in message
    assert "unknown: h.4.weight (3, 3)" in message and "unknown: h.17.weight" in message
    # The entry that is there in its place
    renamed = stack.to_state_dict("h")
    renamed["h.1.weights"] = renamed.pop("h.1.weight")
    with pytest.raises(
        ValueError, match=r"missing: h.1.weight .*\n.*unknown: h.1.weights"
    ):
        stack.from_state_dict(renamed, "h")
    # As many problems as layers
    wrong = {f"h.{layer}.bias": jnp.ones(5) for layer in range(4)}
    with pytest.raises(ValueError, match=r"mismatched: h.0.bias is \(5,\)"):
        stack.from_state_dict(stack.to_state_dict("h") | wrong, "h")
    message = "no array of these layers, such as 'g.0.*; one that it has is 'h.0."
    with pytest.raises(ValueError, match=message):
        stack.from_state_dict(stack.to_state_dict("h"), "g")
    with pytest.raises(TypeError, match="and then the prefix of its keys; got 'h' fi"):
        stack.from_state_dict("h", stack.to_state_dict("h"))
    number = {**stack.to_state_dict("h"), "h.0.bias": 1.0}
    with pytest.raises(
        ValueError, match=r"mismatched: h.0.bias is \(\), expected \(3,\)"
    ):
        stack.from_state_dict(number, "h")
    # NumPy's files have bytes in the place of bfloat16
    halves = {
        key: np.asarray(value, jnp.bfloat16)
        for key, value in stack.to_state_dict("h").items()
    }
    np.savez(tmp_path / "halves.npz", **halves)
    read = dict(np.load(tmp_path / "halves.npz"))
    with pytest.raises(TypeError, match=r"'h.0.bias' .* \|V2, .*view\(jnp.bfloat16\)"):
        stack.from_state_dict(read, "h")
    viewed = {key: value.view(jnp.bfloat16) for key, value in read.items()}
    stack.from_state_dict(viewed, "h")


def test_what_all_layers_share_stays_shared_in_a_state_dict():
    class Block(eqx.Module):
        weight: hax.NamedArray
        table: hax.NamedArray
        scale: jax.Array

    stack = Stacked(Block(hax.arange(Layers), hax.arange(Hidden), jnp.ones(())), Layers)
    state = stack.to_state_dict("h")
    numpy = {key: np.asarray(array) for key, array in state.items()}
    assert eqx.tree_equal(stack.from_state_dict(numpy, "h"), stack)
    first = Stacked.of([stack[0]])
    one = eqx.tree_at(lambda stack: stack.stacked.table, first, hax.arange(Hidden))
    assert eqx.tree_equal(one.from_state_dict(one.to_state_dict("h"), "h"), one)
    with pytest.raises(
        ValueError, match="layers of the stack share table, but .* layer 2 differs from"
    ):
        stack.from_state_dict({**state, "h.2.table": jnp.zeros(3, jnp.int32)}, "h")
