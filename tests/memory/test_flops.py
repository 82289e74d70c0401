"""Tests of `count_flops` against counts made by hand."""

import contextlib
import dataclasses
import functools
import re
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import hijax
from jax.sharding import Mesh, PartitionSpec

from stacked_remat import ScanCheckpointPolicy, StackedPattern, lax_scan
from stacked_remat._policy import resolve_policy
from stacked_remat._trips import known_branches, known_trips
from stacked_remat.memory import compare, count_flops
from stacked_remat.ops._attention_rule import Blocks, Sight, attend_by
from stacked_remat.ops._attention_splash import splash_kernel

SQUARE = jnp.ones((8, 8))
PRODUCT = 2 * 8**3  # FLOP of SQUARE @ SQUARE


def count(fn, *args):
    return count_flops(jax.make_jaxpr(fn)(*args))


def test_products_are_two_for_each_pair():
    assert (
        count(lambda x, y: x @ y, jnp.ones((3, 5)), jnp.ones((5, 7))).matmul
        == 2 * 3 * 5 * 7
    )
    batched = count(
        lambda x, y: jnp.einsum("bij,bkj->bik", x, y),
        jnp.ones((4, 3, 5)),
        jnp.ones((4, 7, 5)),
    )
    assert batched.matmul == 2 * 4 * 3 * 7 * 5
    assert batched.exact


@pytest.mark.parametrize(("window", "blocks"), [(None, 15), (100, 9)])
def test_a_splash_kernel_counts_the_blocks_of_its_table(window, blocks):
    # Six heads over five blocks of 128
    query, key = (
        jnp.ones((2, 640, 1, 3, 8)),
        jnp.ones((2, 640, 1, 8)),
    )

    def attend(query, key, value):
        return attend_by(
            splash_kernel(interpret=True),
            query,
            key,
            value,
            Sight(),
            Blocks(1.0, 128, window),
        )

    product = 6 * 2 * blocks * 128**2 * 8
    forward = jax.make_jaxpr(attend)(query, key, key)
    assert count_flops(forward).matmul == 2 * product
    assert count_flops(forward, trained=[True] * 3).matmul == 3 * 2 * product
    # Scores again and three products for keys and values, scores again and two for
    # queries; and the output of each position times its cotangent.
    both = count(jax.grad(lambda *a: attend(*a).sum(), (0, 1, 2)), query, key, key)
    assert both.matmul == (2 + 4 + 3) * product + 6 * 2 * 640 * 8
    assert both.exact


def test_convolution():
    def conv(x, kernel, groups):
        return jax.lax.conv_general_dilated(
            x, kernel, (1,), "VALID", feature_group_count=groups
        )

    x = jnp.ones((2, 6, 10))  # batch, features, positions
    assert (
        count(lambda k: conv(x, k, 1), jnp.ones((4, 6, 3))).matmul
        == 2 * (2 * 4 * 8) * 6 * 3
    )
    assert (
        count(lambda k: conv(x, k, 2), jnp.ones((4, 3, 3))).matmul
        == 2 * (2 * 4 * 8) * 3 * 3
    )


def test_ragged_products_count_each_row_once():
    sizes = jnp.array([3, 0, 5], dtype=jnp.int32)
    found = count(jax.lax.ragged_dot, jnp.ones((8, 4)), jnp.ones((3, 4, 6)), sizes)
    assert found.matmul == 2 * 8 * 4 * 6
    gradient = jax.grad(lambda w: jax.lax.ragged_dot(jnp.ones((8, 4)), w, sizes).sum())
    assert count(gradient, jnp.ones((3, 4, 6))).matmul == 2 * 8 * 4 * 6


def test_unused_results_do_not_count():
    assert count(lambda x: (x @ x, x)[1], SQUARE).matmul == 0

    def body(x, _):
        return x @ x, (x @ x @ x).sum()

    assert (
        count(lambda x: jax.lax.scan(body, x, None, length=5)[0], SQUARE).matmul
        == 5 * PRODUCT
    )


def test_a_scan_counts_its_body_times_its_length():
    def nested(x):
        def outer(x, _):
            return (
                jax.lax.scan(lambda x, _: (x @ x, None), x, None, length=3)[0] @ x,
                None,
            )

        return jax.lax.scan(outer, x, None, length=5)[0]

    assert count(nested, SQUARE).matmul == 5 * (3 + 1) * PRODUCT
    assert (
        count(
            lambda x: jax.lax.scan(lambda x, _: (x @ x, None), x, None, length=0)[0],
            SQUARE,
        ).matmul
        == 0
    )
    assert (
        count(lambda x: jax.lax.map(lambda row: x @ row, x), SQUARE).matmul == PRODUCT
    )


@pytest.mark.parametrize("reverse", [False, True])
def test_gradient_of_a_checkpointed_scan(reverse):
    """Forward two products a layer; backward four, and the first again: its second is
    not needed.
    """

    def loss(x, weights):
        def layer(x, w):
            return jnp.tanh(x @ w) @ w, None

        return jax.lax.scan(jax.checkpoint(layer), x, weights, reverse=reverse)[0].sum()

    found = count(jax.grad(loss, (0, 1)), jnp.ones((3, 8)), jnp.ones((6, 8, 8)))
    assert found.matmul == 6 * (2 + 1 + 4) * (2 * 3 * 8 * 8)
    assert found.exact


HIJAX: Any = hijax  # `VJPHiPrimitive` is of JAX 0.10.2, `HiPrim` of 0.12


class Product(getattr(HIJAX, "VJPHiPrimitive", None) or HIJAX.HiPrim):
    """`x @ w` plus the device's number on an axis, if it has one, and a product that
    nobody reads.
    """

    def __init__(self, x, w, axis=None):
        self.in_avals = {"x": jax.typeof(x)}, jax.typeof(w)
        self.out_aval = {"y": jax.typeof(x)}, jax.typeof(w)
        self.params = {"axis": axis}
        super().__init__()

    def expand(self, x, w):
        number = (
            0.0
            if self.params["axis"] is None
            else jax.lax.axis_index(self.params["axis"]).astype(x["x"].dtype)
        )
        return {"y": x["x"] @ w + number}, w @ w

    def vjp_fwd(self, nzs, x, w):
        return self(x, w), (x, w)

    def vjp_bwd_retval(self, residuals, cotangents):
        x, w = residuals
        return {"x": cotangents[0]["y"] @ w.T}, x["x"].T @ cotangents[0]["y"]


def product(x, w, axis=None):
    return Product(x, w, axis)({"x": x}, w)[0]["y"]


def test_primitives_that_expand_into_others_are_looked_into():
    x, size = jnp.ones((4, 8)), 2 * 4 * 8 * 8
    assert count(product, x, SQUARE).matmul == size
    scanned = count(
        lambda x: jax.lax.scan(
            lambda x, _: (product(x, SQUARE), None), x, None, length=5
        )[0],
        x,
    )
    assert scanned.matmul == 5 * size and scanned.exact
    assert (
        count(jax.jit(jax.value_and_grad(lambda w: product(x, w).sum())), SQUARE).matmul
        == 2 * size
    )
    traced = jax.make_jaxpr(product)(x, SQUARE)
    assert count_flops(traced, trained=[False, True]).matmul == 2 * size
    mesh, spec = Mesh(np.array(jax.devices()[:4]), "d"), PartitionSpec("d")
    for check_vma in (True, False):
        divided = jax.shard_map(
            lambda x, w: product(x, w, "d"),
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
            check_vma=check_vma,
        )
        # A row of `x` on each device
        assert count(divided, x, jnp.ones((32, 8))).matmul == size


def test_axes_that_no_shard_map_divides_are_those_of_all_devices():
    """What a `jax.shard_map` over one axis runs is counted once for each of its
    devices, whatever the other axes of the mesh.
    """
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    spec = PartitionSpec("a")
    product = jax.shard_map(
        lambda x: x @ SQUARE, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"a"}
    )
    assert count(jax.jit(product), SQUARE).matmul == PRODUCT


def test_calls_are_looked_into():
    @jax.custom_vjp
    def with_vjp(x):
        return x @ x

    with_vjp.defvjp(lambda x: (x @ x, x), lambda x, ct: (ct @ x @ x,))

    @jax.custom_jvp
    def with_jvp(x):
        return x @ x

    with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), tangents[0]))
    assert count(with_vjp, SQUARE).matmul == PRODUCT
    assert count(jax.grad(lambda x: with_vjp(x).sum()), SQUARE).matmul == 2 * PRODUCT
    assert count(with_jvp, SQUARE).matmul == PRODUCT
    assert count(jax.jit(lambda x: x @ x), SQUARE).matmul == PRODUCT
    assert count(jax.remat(lambda x: x @ x), SQUARE).matmul == PRODUCT
    assert count(jax.vmap(lambda x: x @ x), jnp.ones((4, 8, 8))).matmul == 4 * PRODUCT


@pytest.mark.parametrize(("low", "high"), [(0, 7), (3, 10), (5, 5), (7, 3), (0, 10**9)])
def test_a_loop_with_bounds_of_python_integers(low, high):
    found = count(lambda x: jax.lax.fori_loop(low, high, lambda _, x: x @ x, x), SQUARE)
    assert found.matmul == max(high - low, 0) * PRODUCT
    assert found.exact


def segments(x, lengths, named=lambda _: contextlib.nullcontext()):
    """Loops whose lengths are read from a table, each in a conditional that the table
    decides too.
    """
    table = jnp.asarray(lengths)

    def segment(x, k):
        with named(known_trips(sum(lengths), len(lengths))):
            x = jax.lax.fori_loop(jnp.int32(0), table[k], lambda _, x: x @ x, x)
        with named(known_branches([3, 1])):
            return jax.lax.cond(table[k] > 3, lambda x: x @ x @ x, lambda x: x, x), None

    return jax.lax.scan(segment, x, jnp.arange(len(lengths), dtype=jnp.int32))[0]


def test_loops_and_conditionals_are_counted_as_their_names_say():
    def named(x):
        return segments(x, [4, 3, 2, 1], lambda name: name)

    forward = (10 + 2) * PRODUCT
    for fn in (
        named,
        jax.jit(named),
        jax.checkpoint(named),
        lambda x: jax.vmap(named)(x[None]),
    ):
        assert count(fn, SQUARE) == dataclasses.replace(
            count(named, SQUARE), matmul=forward
        )
    tangent = count(lambda x: jax.jvp(named, (x,), (x,)), SQUARE)
    assert tangent.matmul == 3 * forward and tangent.exact
    assert not count(lambda x: segments(x, [4, 3, 2, 1]), SQUARE).exact


KINDS = {"one": 1, "three": 3}
POLICIES = [
    True,
    "offload",
    "nested",
    ScanCheckpointPolicy(max_carries=2),
    ScanCheckpointPolicy(max_carries=3),
    ScanCheckpointPolicy(nested=3, save_carries="offload"),
    ScanCheckpointPolicy(nested=2, save_carries="offload", max_carries=2),
    ScanCheckpointPolicy(nested=3, first_layers=2),
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_layers_of_several_kinds_count_what_the_schedule_says(policy):
    """Their loops are by kind, and which kinds are run again depends on the
    schedule.
    """
    Layers, Width = hax.Axis("layers", 11), hax.Axis("width", 8)
    order = [
        "one",
        "three",
        "three",
        "one",
        "three",
        "one",
        "one",
        "three",
        "three",
        "three",
        "one",
    ]

    class Products(eqx.Module):
        weight: hax.NamedArray
        products: int = eqx.field(static=True)

        @staticmethod
        def init(products, *, key):
            return Products(
                hax.random.normal(key, (Width, Width.alias("out"))), products
            )

        def __call__(self, x):
            for _ in range(self.products):
                x = hax.tanh(x.dot(self.weight, axis=Width)).rename({"out": "width"})
            return x

    def make(keys):
        kinds = {
            name: functools.partial(Products.init, count)
            for name, count in KINDS.items()
        }
        return StackedPattern.init(Layers, kinds, order)(key=keys)

    blocks = eqx.filter_eval_shape(
        make, jax.random.split(jax.random.key(0), Layers.size)
    )
    resolved = resolve_policy(policy)
    schedule = resolved.schedule(Layers.size - resolved.first_layers)
    again = [
        layer + resolved.first_layers
        for replayed in schedule.program().replayed
        for layer in replayed
    ]
    visited = [*range(Layers.size)] * 3  # forward, and two products of the transpose
    visited += range(resolved.first_layers, Layers.size)  # again for the internals
    products = sum(KINDS[order[layer]] for layer in [*visited, *again])

    def loss(blocks):
        return hax.sum(blocks.fold(hax.ones(Width), remat=policy)).scalar()

    found = count(lambda blocks: eqx.filter_grad(loss)(blocks), blocks)
    assert found.exact and found.matmul == products * 2 * 8**2


def test_a_branch_on_data_counts_its_most_expensive_side_and_says_so():
    found = count(
        lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x),
        SQUARE,
    )
    assert found.matmul == 2 * PRODUCT
    assert not found.exact
    assert "most expensive" in found.too_high[0]
    same = count(
        lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: x @ x.T, lambda x: x.T @ x, x),
        SQUARE,
    )
    assert same.matmul == PRODUCT
    assert same.exact


def test_an_unknown_trip_count_is_never_silent():
    def fn(x, n):
        return jax.lax.fori_loop(jnp.int32(0), n, lambda _, x: x @ x, x)

    found = count(fn, SQUARE, jnp.int32(3))
    assert found.matmul == PRODUCT
    assert not found.exact
    assert "trip count" in found.too_low[0]
    assert "test_flops.py" in found.too_low[0]


def test_a_loop_counts_the_trips_that_are_expected_of_it_and_not_those_within():
    def fn(x, n):
        def inner(_, x):
            return jax.lax.fori_loop(jnp.int32(0), n, lambda _, x: x @ x, x)

        with known_trips(5, exact=False):
            return jax.lax.fori_loop(jnp.int32(0), n, inner, x)

    found = count(jax.vmap(fn, (0, None)), jnp.stack([SQUARE] * 2), jnp.int32(3))
    assert found.matmul == 2 * 5 * PRODUCT
    assert sorted(reason.split()[-2] for reason in found.too_low) == ["5", "counted"]


def test_work_inside_an_unknown_operation_is_never_silent():
    found = count(jnp.linalg.inv, SQUARE)
    assert not found.exact
    assert any("lu" in reason for reason in found.too_low)


def test_a_loop_that_ends_at_an_equality_is_counted_once():
    def fn(x):
        return jax.lax.while_loop(
            lambda s: s[0] != 2000, lambda s: (s[0] + 2, s[1] @ s[1]), (0, x)
        )[1]

    found = count(fn, SQUARE)
    assert found.matmul == PRODUCT and not found.exact


def test_tables_without_products_say_how_many_steps_run_again():
    def loss(x, policy):
        def step(carry, _):
            return jnp.sin(carry), None

        last, _ = lax_scan(step, x, None, length=5000, remat=policy)
        return last.sum()

    def compared(transform):
        def gradient(policy):
            return transform(lambda x: jax.grad(loss)(x, policy))

        two = ScanCheckpointPolicy(max_carries=2)
        policies = [False, True, "nested", two, "recompute"]
        return compare(gradient, jnp.ones((3, 2)), candidates=policies)

    # Each layer once for its pullback, and others to make carries again: of 5,000 in
    # two slots 1 + 2 + ... + 4,998, as layer n is replayed from the first before each
    # of the visits after it.
    most = 4_998 * 4_999 // 2
    for transform in (lambda f: f, jax.vmap):
        found = compared(transform)
        rows = str(found).splitlines()[3:8]
        shown = [re.split(r" {2,}", row)[-2] for row in rows]
        assert shown == ["0", "5,000", "9,905", f"{5_000 + most:,}", "10,000"]
