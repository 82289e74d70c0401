"""What error messages say of arguments that cannot be split over the layers, and which arguments are keys."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import pytest

from stacked_remat import BlockSeq, Stacked, fold, map, scan
from stacked_remat._layer_axis import is_unsplit_key

from .blocks import PlainBlock, PlainScanBlock

Layers = hax.Axis("layers", 4)
KEYS = jax.random.split(jax.random.key(0), 4)
TABLE = jnp.ones((8, 3))


def message_of(call):
    with pytest.raises(ValueError) as error:
        call()
    return str(error.value)


class TestHowToShare:
    """What each operation advises works there."""

    @pytest.mark.parametrize(
        "name, run, option",
        [
            ("fold", lambda: fold(lambda c, table: c, Layers)(0.0, TABLE), "is_scanned="),
            ("scan", lambda: scan(lambda c, table: (c, c), Layers)(0.0, TABLE), "is_scanned="),
            ("map", lambda: map(lambda table: table, Layers)(TABLE), "is_mapped="),
        ],
    )
    def test_functions(self, name, run, option):
        message = message_of(run)
        assert message.startswith(f"{name} over `layers` (size 4)")
        assert "table has leading dimension 8 (shape (8, 3))" in message
        assert f"close over it ({name}(lambda" in message and f"say what is split with {option}" in message
        assert "stack." not in message

    @pytest.mark.parametrize("Stack", [Stacked, BlockSeq])
    @pytest.mark.parametrize("verb", ["fold", "scan", "vmap"])
    def test_methods(self, Stack, verb):
        stack = Stack.init(Layers, PlainScanBlock if verb == "scan" else PlainBlock)(3, key=KEYS)
        message = message_of(lambda: getattr(stack, verb)(jnp.ones(3) if verb != "vmap" else KEYS, TABLE))
        assert message.startswith(f"{Stack.__name__}.{verb} over `layers` (size 4)")
        assert "scale has leading dimension 8" in message
        assert f"close over it (stack.{verb}_via(lambda block, " in message and "is_scanned" not in message

    @pytest.mark.parametrize("Stack", [Stacked, BlockSeq])
    def test_init(self, Stack):
        def block(table, *, key):
            assert table.shape == (8, 3)
            return PlainBlock(3, key=key)

        message = message_of(lambda: Stack.init(Layers, block)(TABLE, key=KEYS))
        advice = f"{Stack.__name__}.init(Layers, lambda *, key: Block(array, key=key))(key=keys)"
        assert message.startswith(f"{Stack.__name__}.init over `layers`") and f"({advice})" in message
        assert "_via" not in message and "is_scanned" not in message
        names = dict(Layers=Layers, Block=block, array=TABLE, keys=KEYS, Stacked=Stacked, BlockSeq=BlockSeq)
        assert eval(advice, names).fold(jnp.ones(3)).shape == (3,)

    def test_arrays_of_the_stack_have_one_name(self):
        class Block(eqx.Module):
            weight: jax.Array

            def __call__(self, x):
                return x

        stack = Stacked.init(Layers, Block)(jnp.ones(4))
        stack = eqx.tree_at(lambda stack: stack.stacked.weight, stack, jnp.ones(3))
        for call in (lambda: stack.fold(1.0), lambda: stack.vmap(1.0), lambda: stack.get_layer(0)):
            assert "stacked.weight has leading dimension 3" in message_of(call)


class TestKeys:
    @pytest.mark.parametrize("Stack", [Stacked, BlockSeq])
    @pytest.mark.parametrize("key", [jax.random.key(0), jax.random.PRNGKey(0)], ids=["typed", "raw"])
    @pytest.mark.parametrize("count", [1, 2, 5])
    def test_a_wrong_number_of_keys_is_told_to_split(self, Stack, key, count):
        message = message_of(lambda: Stack.init(Layers, PlainBlock)(3, key=jax.random.split(key, count)))
        assert f"key has leading dimension {count}" in message
        assert "jax.random.split(key, 4)" in message and "whole array" not in message

    @pytest.mark.parametrize("Stack", [Stacked, BlockSeq])
    @pytest.mark.parametrize("name", ["key", "rng", "seed", "init_key", "seeds", "dropoutKey", "key2"])
    def test_a_raw_key_for_two_layers_is_known_by_its_name(self, Stack, name):
        """A single old-style key is two integers, so that it could be split over two layers."""
        build = Stack.init(Layers.resize(2), lambda **keys: PlainBlock(3, key=keys[name]))
        with pytest.raises(ValueError, match=rf"{name}=jax.random.split\({name}, 2\)"):
            build(**{name: jax.random.PRNGKey(0)})

    @pytest.mark.parametrize("name", ["monkeys", "keyboard", "seeded", "ids", "args[0]"])
    def test_other_pairs_of_integers_are_not_keys(self, name):
        assert not is_unsplit_key(name, jnp.zeros(2, jnp.uint32))
        assert is_unsplit_key(name, jax.random.key(0))

    def test_split_keys_are_not_single_ones(self):
        assert not is_unsplit_key("key", jax.random.split(jax.random.PRNGKey(0), 2))
        assert not is_unsplit_key("key", jax.random.split(jax.random.key(0), 2))
        assert not is_unsplit_key("key", jnp.zeros(2, jnp.int32))
        assert not is_unsplit_key("key", 3)
