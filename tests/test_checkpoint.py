"""`checkpoint_name` names every array of a tree and changes nothing else."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import pytest

from stacked_remat import checkpoint_name

from .jaxprs import equations_of


def test_names_every_array_of_a_tree_and_nothing_else():
    Axis = hax.Axis("a", 2)
    tree = {"named": hax.ones(Axis), "plain": jnp.ones(3), "text": "x", "none": None, "act": jnp.tanh, "n": 1}
    named = checkpoint_name(tree, "here")
    assert eqx.tree_equal(named, tree) and named["named"].axes == (Axis,)
    found = equations_of(lambda a, b: checkpoint_name((a, b), "here"), hax.ones(Axis), jnp.ones(3))
    assert [equation.params["name"] for equation in found] == ["here", "here"]


def test_the_gradient_is_the_identity():
    assert float(jax.grad(lambda x: checkpoint_name(x, "x") ** 2)(3.0)) == 6.0


def test_swapped_arguments_are_refused():
    with pytest.raises(TypeError, match="The tree comes first"):
        checkpoint_name("name", jnp.ones(3))  # pyright: ignore[reportArgumentType]
