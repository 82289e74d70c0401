"""Tests of `per_device` on virtual devices, alone and inside other operations."""

import functools

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from haliax.partitioning import current_thread_local_mapping
from jax.sharding import AxisType, Mesh

from stacked_remat.ops import causal_attention, chunked_cross_entropy, per_device

Row, Col = Axis("row", 8), Axis("col", 3)
X = hax.named(jnp.arange(24.0).reshape(8, 3), (Row, Col))


def mesh(**axes):
    devices = np.array(jax.devices()[: int(np.prod(list(axes.values())))])
    return Mesh(devices.reshape(tuple(axes.values())), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def sizes(x):
    """The number of rows that the function sees, in every entry."""
    return hax.full_like(x, float(x.axis_size("row")))


@pytest.mark.parametrize(
    ("mapping", "axes", "rows"),
    [
        ({"row": "data"}, {"data": 4}, 2),
        ({"row": ("data", "model")}, {"data": 4, "model": 2}, 1),
        ({"row": "data"}, {"data": 2, "model": 4}, 4),  # the compiler partitions over the other axis
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
    assert per_device(lambda x: x * 2, X, over=(Row,), out=(Row, Col)).axes == (Row, Col)
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
        first, second = per_device(both, tree, x, None, over=(Row,), out=((Row,), (Row, Col)))
        return hax.sum(first).scalar() + hax.sum(second**2).scalar()

    gradient = jax.value_and_grad(value, (0, 1, 2))
    wanted = gradient(weights, plain, X)
    with jax.set_mesh(mesh(data=8)), hax.axis_mapping({"row": "data"}):
        found = jax.jit(gradient)(weights, plain, X)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"row": "data", "col": "data"}, "axes `row` and `col` are both mapped to data"),
        ({"row": "nope"}, "axis `row` is mapped to 'nope'; the mesh has data, model"),
        ({"row": "data"}, "`row` of 8 can't be divided evenly over the 3 devices of data"),
    ],
)
def test_invalid_mappings_are_refused(mapping, message):
    with (
        jax.set_mesh(mesh(data=3, model=2)),
        hax.axis_mapping(mapping),
        pytest.raises(ValueError, match=message),
    ):
        jax.eval_shape(lambda x: per_device(sizes, x, over=(Row, Col), out=(Row, Col)), X)


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


Batch, Pos, KVHeads, Group, HeadDim = (
    Axis("batch", 4),
    Axis("pos", 6),
    Axis("kv", 2),
    Axis("group", 2),
    Axis("dim", 8),
)
Embed, Vocab = Axis("embed", 8), Axis("vocab", 12)


def attention(keys):
    query = hax.random.normal(keys[0], (Batch, Pos, KVHeads, Group, HeadDim))
    key, value = (hax.random.normal(one, (Batch, Pos, KVHeads, HeadDim)) for one in keys[1:3])
    documents = hax.broadcast_axis(hax.named(jnp.array([1, 1, 2, 2, 2, 2]), Pos), Batch)
    sinks = hax.random.normal(keys[0], (KVHeads, Group))
    return (query, key, value, sinks), lambda q, k, v, s: causal_attention(
        q, k, v, Pos, KVHeads, HeadDim, documents=documents, sinks=s
    )


def cross_entropy(keys):
    hidden = hax.random.normal(keys[0], (Batch, Pos, Embed))
    head = hax.random.normal(keys[1], (Vocab, Embed))
    targets = hax.random.randint(keys[2], (Batch, Pos), 0, Vocab.size)
    return (hidden, head), lambda hidden, head: chunked_cross_entropy(
        hidden, head, targets, Embed, Vocab, chunk_size=4
    )


@pytest.mark.parametrize(
    ("operation", "mapping"),
    [(attention, {"batch": "data", "kv": "model"}), (cross_entropy, {"batch": "data"})],
    ids=["attention", "cross_entropy"],
)
def test_operations_divide_tokens_without_gathering_them(operation, mapping):
    args, run = operation(jax.random.split(jax.random.key(0), 3))

    def gradient(*args):
        return jax.value_and_grad(lambda *args: hax.sum(run(*args) ** 2).scalar(), tuple(range(len(args))))(
            *args
        )

    wanted = jax.jit(gradient)(*args)
    with jax.set_mesh(mesh(data=4, model=2)), hax.axis_mapping(mapping):
        placed = hax.shard(args)
        compiled = jax.jit(gradient).lower(*placed).compile()
        found = compiled(*placed)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)
    program = compiled.as_text() or ""
    assert "all-gather" not in program and "all-to-all" not in program
