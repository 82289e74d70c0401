"""Tests of `per_device` on virtual devices."""

import functools

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from haliax.partitioning import current_thread_local_mapping
from jax.sharding import AxisType, Mesh

from stacked_remat.ops import per_device

from ..blocks import assert_close

Row, Col = Axis("row", 8), Axis("col", 3)
X = hax.named(jnp.arange(24.0).reshape(8, 3), (Row, Col))


def mesh(kind=AxisType.Auto, **axes):
    devices = np.array(jax.devices()[: int(np.prod(list(axes.values())))])
    return Mesh(
        devices.reshape(tuple(axes.values())),
        tuple(axes),
        axis_types=(kind,) * len(axes),
    )


def sizes(x):
    """The number of rows that the function sees, in every entry."""
    return hax.full_like(x, float(x.axis_size("row")))


@pytest.mark.parametrize(
    ("mapping", "axes", "rows"),
    [
        ({"row": "data"}, {"data": 4}, 2),
        ({"row": ("data", "model")}, {"data": 4, "model": 2}, 1),
        (
            {"row": "data"},
            {"data": 2, "model": 4},
            4,
        ),  # the compiler partitions over the other axis
        ({"row": "data"}, {"data": 1, "model": 4}, 8),
        ({"col": "data"}, {"data": 4}, 8),
        ({}, {"data": 4}, 8),
    ],
    ids=str,
)
def test_each_device_does_its_own_rows(mapping, axes, rows):
    with jax.set_mesh(mesh(**axes)), hax.axis_mapping(mapping):
        run = functools.partial(per_device, sizes, over=(Row,), out=(Row, Col))
        for seen in (run(X), jax.jit(run)(X)):
            np.testing.assert_array_equal(seen.array, np.full((8, 3), rows))
            assert seen.axes == (Row, Col)


def test_without_a_mesh_or_a_mapping_it_is_a_plain_call():
    assert per_device(lambda x: x * 2, X, over=(Row,), out=(Row, Col)).axes == (
        Row,
        Col,
    )
    with hax.axis_mapping({"row": "data"}):
        assert float(per_device(sizes, X, over=(Row,), out=(Row, Col)).array[0, 0]) == 8
    with jax.set_mesh(mesh(data=4)):
        assert float(per_device(sizes, X, over=(Row,), out=(Row, Col)).array[0, 0]) == 8


def test_values_gradients_and_several_results():
    weights = hax.named(jnp.linspace(0.5, 1.5, 3), Col)
    plain = jnp.asarray(0.5)

    def both(tree, x, none):
        assert none is None and tree["static"] == "text"
        product = hax.dot(x, tree["weights"] * tree["plain"], axis=Col)
        return hax.tanh(product), x * product

    def value(weights, plain, x):
        tree = {"weights": weights, "plain": plain, "static": "text"}
        first, second = per_device(
            both, tree, x, None, over=(Row,), out=((Row,), (Row, Col))
        )
        return hax.sum(first).scalar() + hax.sum(second**2).scalar()

    gradient = jax.value_and_grad(value, (0, 1, 2))
    wanted = gradient(weights, plain, X)
    with jax.set_mesh(mesh(data=8)), hax.axis_mapping({"row": "data"}):
        found = jax.jit(gradient)(weights, plain, X)
    assert_close(found, wanted, 1e-6, 0)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        (
            {"row": "data", "col": "data"},
            "axes `row` and `col` are both mapped to data",
        ),
        ({"row": "nope"}, "axis `row` is mapped to 'nope'; the mesh has data, model"),
        (
            {"row": "data"},
            "`row` of 8 can't be divided evenly over the 3 devices of data",
        ),
    ],
)
def test_invalid_mappings_are_refused(mapping, message):
    with (
        jax.set_mesh(mesh(data=3, model=2)),
        hax.axis_mapping(mapping),
        pytest.raises(ValueError, match=message),
    ):
        jax.eval_shape(
            lambda x: per_device(sizes, x, over=(Row, Col), out=(Row, Col)), X
        )


def test_divided_axes_are_not_mapped_inside():
    seen = []

    def look(x):
        seen.append(current_thread_local_mapping())
        return x

    mapping = {"row": "data", "col": "model"}
    with jax.set_mesh(mesh(data=2, model=1)), hax.axis_mapping(mapping):
        jax.jit(lambda x: per_device(look, x, over=(Row,), out=(Row, Col)))(X)
        assert current_thread_local_mapping() == mapping
    with jax.set_mesh(mesh(data=2, model=3)), hax.axis_mapping(mapping):
        jax.jit(lambda x: per_device(look, x, over=(Row,), out=(Row, Col)))(X)
    assert seen == [None, {"col": ("model",)}]
