"""Tests of lists of NNX layers: stacks that refuse unlike layers, and patterns of
several kinds.
"""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")
from flax import nnx

from stacked_remat import shared
from stacked_remat.nnx import pattern, remat_scan, stack

from ..blocks import assert_close, policies


class Layer(nnx.Module):
    def __init__(self, seed, factor=2.0, activation=jnp.tanh, width=4):
        self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(seed))
        self.parts = nnx.List([nnx.Linear(4, width, rngs=nnx.Rngs(seed + 9))])
        self.options, self.activation = {"factor": factor}, activation

    def __call__(self, x, scale=1.0):
        factor = self.options["factor"]
        x = x + scale * self.activation(self.linear(x))
        return x if factor is None else x + factor * self.parts[0](x)


class Other(Layer):
    pass


class Normed(nnx.Module):
    def __init__(self):
        self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.norm(x)


X = jnp.asarray(np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4))
SCALE = jnp.float32(0.3)


def loop(layers, x):
    for layer in layers:
        x = layer(x, SCALE)
    return x


def folded(x, stacked):
    run = remat_scan(
        lambda x, layer, scale: layer(x, scale),
        in_axes=(nnx.Carry, 0, None),
        out_axes=nnx.Carry,
    )
    return run(x, stacked, SCALE)


def test_a_stack_is_the_list():
    layers = [Layer(seed) for seed in range(5)]
    assert_close(folded(X, stack(layers)), loop(layers, X))


@pytest.mark.parametrize(
    ("make_other", "message"),
    [
        (
            partial(Layer, 1, factor=3.0),
            r"Layers 0 and 2 differ in options.factor: 2.0 and 3.0\. ",
        ),
        (
            partial(Layer, 1, factor=None),
            r"Layers 0 and 2 differ in options.factor: 2.0 and None\. ",
        ),
        (
            partial(Layer, 1, factor=2),
            r"Layers 0 and 2 differ in options.factor: 2.0 and 2\. ",
        ),
        (
            partial(Layer, 1, activation=jnp.sin),
            "Layers 0 and 2 differ in activation: .*tanh.*sin",
        ),
        (partial(Layer, 1, width=8), "differ in parts.0"),
        (
            partial(Other, 1),
            "differ in their class: Layer and Other. .* Use stacked_remat.nnx.pattern",
        ),
    ],
)
def test_a_stack_refuses_unlike_layers(make_other, message):
    with pytest.raises(ValueError, match=message):
        stack([Layer(0), Layer(1), make_other()])


def test_attributes_that_python_does_not_compare_by_value():
    """NaN, and partials with equal parts."""

    def layer(seed, slope):
        activation = partial(jax.nn.leaky_relu, negative_slope=slope)
        made = Layer(seed, activation=activation)
        made.options["unset"] = float("nan")
        return made

    layers = [layer(seed, 0.2) for seed in range(3)]
    assert_close(folded(X, stack(layers)), loop(layers, X))
    blocks = pattern([*layers, layer(3, 0.1)])
    assert [*blocks.stacks] == ["Layer_0", "Layer_1"]
    assert_close(blocks.fold(X, shared(SCALE)), loop([*layers, layer(3, 0.1)], X))
    for other in (0.1, 1):
        with pytest.raises(ValueError, match="Layers 0 and 1 differ in activation"):
            stack([layer(0, True), layer(1, other)])


def test_what_is_no_list_of_modules_is_refused():
    for make in (stack, pattern):
        with pytest.raises(TypeError, match="a list of nnx.Modules; got a Layer"):
            make(Layer(0))
        with pytest.raises(ValueError, match="There are no layers"):
            make([])
        with pytest.raises(TypeError, match="Layer 1 is a function"):
            make([Layer(0), lambda x: x])


def test_a_pattern_of_kinds_is_the_list():
    kinds = (0, 1, 0, 2, 1, 0, 2)
    changes = [
        {"factor": 0.2},
        {"factor": None},
        {"factor": 0.2, "activation": jnp.sin},
    ]
    layers = [Layer(seed, **changes[kind]) for seed, kind in enumerate(kinds)]
    graphdef, states = nnx.split(nnx.List(layers))

    def of_list(states):
        return jnp.sum(loop(nnx.merge(graphdef, states), X) ** 2)

    expected = jax.grad(of_list)(states)
    for remat in policies("True", "nested", "offload").values():
        blocks = pattern(layers, remat=remat)
        assert blocks.pattern == tuple(f"Layer_{kind}" for kind in kinds)
        of_blocks = eqx.filter_value_and_grad(
            lambda own: jnp.sum(own.fold(X, shared(SCALE)) ** 2)
        )
        value, gradient = of_blocks(blocks)
        assert_close(value, of_list(states))
        for number in range(len(layers)):
            assert_close(
                jax.tree.leaves(gradient[number].state),
                jax.tree.leaves(expected[number]),
            )
        assert_close(blocks[3].module(X), layers[3](X))


def test_a_pattern_refuses_layers_that_write():
    blocks = pattern([Normed(), Normed()])
    with pytest.raises(
        ValueError, match="The layer writes to .*mean.*, and a pattern keeps no state"
    ):
        blocks.fold(X)


def test_names_of_mesh_axes_begin_with_that_of_the_layers():
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
    with nnx.use_eager_sharding(False):
        layers = [
            nnx.Linear(4, 4, kernel_init=init, rngs=nnx.Rngs(seed)) for seed in range(3)
        ]
        stacked = stack(layers, "depth")
        specs: Any = nnx.get_partition_spec
        names = specs(nnx.state(stacked))["kernel"].get_value()
        assert names == jax.P("depth", "embed", "mlp")
        run = remat_scan(
            lambda x, layer: layer(x),
            in_axes=(nnx.Carry, 0),
            out_axes=nnx.Carry,
            transform_metadata={nnx.PARTITION_NAME: "depth"},
        )
        assert_close(run(X, stacked), layers[2](layers[1](layers[0](X))))


def test_layers_that_share_a_variable_are_refused():
    layers = [nnx.Linear(4, 4, rngs=nnx.Rngs(seed)) for seed in range(3)]
    layers[2].kernel = layers[0].kernel
    for function in (stack, pattern):
        with pytest.raises(
            ValueError, match="Layers 0 and 2 share the variable kernel"
        ):
            function(layers)
