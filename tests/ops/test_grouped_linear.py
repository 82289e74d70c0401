"""Backends of `grouped_experts` by grouped products give what the walk over blocks
gives, for any routing.
"""

import functools
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from stacked_remat import fold, memory
from stacked_remat._memory_spaces import compiled_for
from stacked_remat.lora import LoraLinear
from stacked_remat.ops import _expert_loop, apply_linear, grouped_experts
from stacked_remat.ops._backends import Backend, choose_backend
from stacked_remat.ops._grouped_linear import Kernels, megablox_kernels
from stacked_remat.ops.grouped_experts import EXPERT_BACKENDS, ExpertsFacts
from tests.ops.test_grouped_experts import example as swiglu_example, swiglu

from ..blocks import assert_close, quick_jit
from ..random_arrays import normal

EXPERTS, EMBED, INNER, TOKENS, CHOSEN = 5, 4, 3, 9, 2
Experts = Axis("experts", EXPERTS)


def _own_matrices(w, sizes, rows):
    return jnp.take(
        w, jnp.repeat(jnp.arange(len(sizes)), sizes, total_repeat_length=rows), axis=0
    )


def _product(x, w, sizes, transposed):
    w = w.swapaxes(1, 2) if transposed else w
    found = jnp.einsum(
        "rk,rkn->rn",
        x,
        _own_matrices(w, sizes, len(x)),
        preferred_element_type=jnp.float32,
    )
    is_real = jnp.arange(len(x)) < jnp.sum(sizes)
    return jnp.where(is_real[:, None], found, jnp.nan).astype(x.dtype)


def _outer(x, y, sizes):
    own = _own_matrices(jnp.eye(len(sizes)), sizes, len(x))
    is_real = (jnp.arange(len(x)) < jnp.sum(sizes))[:, None]
    x, y = (jnp.where(is_real, one, 0) for one in (x, y))
    return jnp.einsum(
        "re,rk,rn->ekn", own, x, y, preferred_element_type=jnp.float32
    ).astype(x.dtype)


# The definition of the two products, in place of kernels
PLAIN = Kernels(_product, _outer)


@pytest.fixture
def backend(monkeypatch):
    """The name of a backend that runs the kernels for TPUs here."""
    monkeypatch.setitem(
        EXPERT_BACKENDS, "here", Backend(megablox_kernels(interpret=True))
    )
    return "here"


@pytest.fixture
def plain(monkeypatch):
    monkeypatch.setitem(EXPERT_BACKENDS, "here", Backend(PLAIN))
    return "here"


@pytest.fixture
def three_chunks(monkeypatch):
    """Of which the last is padded."""
    monkeypatch.setattr(_expert_loop, "_CHUNK_BYTES", 4 * CHOSEN * EMBED * 4)


def linear_of(seed, Out, In, adapted=False):
    made = hnn.Linear(
        normal(seed, Experts, Out, In), normal(seed + 1, Experts, Out), In, Out
    )
    if not adapted:
        return made
    Rank = Axis("lora_rank", 2)
    a, b = normal(seed + 2, Experts, In, Rank), normal(seed + 3, Experts, Rank, Out)
    return LoraLinear(made, a, b, 0.5)


def gated(weights, rows, linear=apply_linear):
    row = hax.named(rows, (Axis("row", rows.shape[0]), "embed"))
    return linear(weights["gate"], row).rearrange(("row", "inner")).array


def mlp(weights, rows, gates, saved=None, linear=apply_linear):
    Row = Axis("row", rows.shape[0])
    x = hax.named(rows, (Row, "embed"))
    gate = hax.named(
        gated(weights, rows, linear) if saved is None else saved, (Row, "inner")
    )
    hidden = (
        hnn.silu(gate)
        * linear(weights["up"], x)
        * linear(weights["scale"], hax.ones(Row, gate.dtype))
    )
    return (
        linear(weights["down"], hidden * hax.named(gates, Row))
        .rearrange((Row, "embed"))
        .array
    )


def example(dtype=jnp.float32):
    Embed, Inner = Axis("embed", EMBED), Axis("inner", INNER)
    weights = dict(
        gate=linear_of(0, Inner, Embed, adapted=True),
        up=linear_of(10, Inner, Embed),
        down=linear_of(20, Embed, Inner, adapted=True),
        scale=normal(30, Experts),
    )
    x, cotangent = normal(40, TOKENS, EMBED), normal(41, TOKENS, EMBED)
    arrays = weights, x, normal(42, TOKENS, CHOSEN), cotangent
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), dtype), arrays)


def routings():
    """By name: random, one expert takes all, some of nobody, an expert of which nobody
    is, all of nobody.
    """
    rng = np.random.default_rng(0)
    free = np.array(
        [rng.permutation(EXPERTS)[:CHOSEN] for _ in range(TOKENS)], np.int32
    )
    return {
        "random": free,
        "one": np.broadcast_to(np.array([2, -1], np.int32), free.shape),
        "none of the last": np.where(free == EXPERTS - 1, -1, free),
        "out of range": np.where(
            rng.random(free.shape) < 0.4, rng.choice([-7, 5, 100], free.shape), free
        ),
        "nobody": np.full_like(free, EXPERTS),
    }


def of_backend(backend, saved=None, trained=lambda path: True):
    """Values and gradients of a backend; compiled once for every routing."""

    @quick_jit
    def run(choices, weights, x, gates, cotangent):
        chosen = jax.tree_util.tree_map_with_path(
            lambda path, _: trained(path), weights
        )
        moving, still = eqx.partition(weights, chosen)

        def loss(moving, x, gates):
            own = eqx.combine(moving, still)
            out = grouped_experts(
                mlp, own, Experts, x, choices, gates, saved=saved, backend=backend
            )
            return jnp.sum((out * cotangent).astype(jnp.float32)), out

        return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(moving, x, gates)

    return run


block = of_backend("block")  # the walk over blocks, with which all tests compare


@pytest.mark.parametrize("saved", [None, pytest.param(gated, marks=pytest.mark.deep)])
def test_values_and_gradients_of_any_routing_in_one_compilation(
    backend, saved, three_chunks
):
    run: Any = of_backend(backend, saved)
    for choices in routings().values():
        found, wanted = run(choices, *example()), block(choices, *example())
        assert_close(found, wanted, atol=1e-4, rtol=1e-4)
        nowhere = ((choices < 0) | (choices >= EXPERTS)).all(axis=1)
        np.testing.assert_array_equal(found[0][1][nowhere], 0)
    assert run._cache_size() == 1


@pytest.mark.deep
def test_bfloat16_of_any_routing(plain):
    run, args = of_backend(plain), example(jnp.bfloat16)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), args)
    for choices in routings().values():
        found, wanted = run(choices, *args), block(choices, *wide)
        assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(found[1]))
        for got, want in zip(
            jax.tree.leaves(found[1]), jax.tree.leaves(wanted[1]), strict=True
        ):
            assert jnp.linalg.norm(
                got.astype(jnp.float32) - want
            ) <= 0.03 * jnp.linalg.norm(want)


def counted(monkeypatch):
    """The kinds of products of the traced program, as they are traced."""
    kinds = []

    def noting(kind, fn):
        return lambda *args: kinds.append(kind) or fn(*args)

    here = Backend(Kernels(noting("rows", _product), noting("weights", _outer)))
    monkeypatch.setitem(EXPERT_BACKENDS, "here", here)
    return kinds


def test_frozen_weights_have_no_product_and_adapters_do(monkeypatch):
    kinds = counted(monkeypatch)
    choices = routings()["random"]
    frozen = of_backend("here", trained=lambda path: False)
    jax.eval_shape(frozen, choices, *example())
    assert kinds.count("weights") == 0

    def is_adapter(path):
        return getattr(path[1], "name", "") in ("a", "b")

    found = of_backend("here", trained=is_adapter)(choices, *example())
    value, (gradients, *others) = block(choices, *example())
    gradients = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf if is_adapter(path) else None, gradients
    )
    assert_close(found, (value, (gradients, *others)), atol=1e-4, rtol=1e-4)
    assert kinds.count("weights") == 4


def unusual(weights, rows, gates, linear=apply_linear):
    """Not finite for rows of zeros."""
    gate = linear(weights["gate"], rows)
    gate = gate * jax.lax.rsqrt(jnp.sum(gate * gate, axis=-1, keepdims=True))
    some = jnp.where(jnp.maximum(gate > 1, gate < -1), 0.5, gate)
    hidden = jnp.clip(some * linear(weights["up"], rows), -0.1, 0.1)
    return linear(weights["down"], hidden * gates[:, None])


def test_an_unusual_expert(backend, three_chunks):
    # Padding, and choices out of range: their rows are zeros, of which the expert's
    # derivative is not finite.
    weights, x, choices, gates, cotangent = swiglu_example(
        5, routings()["out of range"]
    )

    @functools.partial(quick_jit, static_argnums=0)
    def gradients(backend, *args):
        def loss(weights, x, gates):
            return jnp.vdot(
                grouped_experts(
                    unusual, weights, Experts, x, choices, gates, backend=backend
                ),
                cotangent,
            )

        return jax.grad(loss, (0, 1, 2))(*args)

    assert_close(
        *(gradients(name, weights, x, gates) for name in (backend, "block")),
        atol=1e-4,
        rtol=1e-4,
    )


def test_of_a_pair_only_what_is_saved_is_kept(plain):
    weights, x, gates, _ = example()
    choices = jnp.asarray(routings()["random"])

    def kept(saved):
        def run(weights, x):
            return grouped_experts(
                mlp, weights, Experts, x, choices, gates, saved=saved, backend=plain
            )

        residuals = jax.tree.leaves(
            jax.eval_shape(lambda *args: jax.vjp(run, *args)[1], weights, x)
        )
        return [
            leaf.shape
            for leaf in residuals
            if TOKENS * CHOSEN in leaf.shape and leaf.dtype == x.dtype
        ]

    assert kept(None) == []
    assert kept(gated) == [(1, TOKENS * CHOSEN, INNER)]


def test_gradients_have_gradients(backend):
    choices, (weights, x, gates, cotangent) = routings()["random"], example()
    direction = normal(9, *x.shape)

    @jax.jit
    def along(x):
        def total(x, name):
            out = grouped_experts(
                mlp, weights, Experts, x, choices, gates, backend=name
            )
            return jnp.sum(out * cotangent)

        def slope(x, name):
            return jnp.vdot(jax.grad(total)(x, name), direction)

        return jax.grad(slope)(x, backend), jax.grad(slope)(x, "block")

    assert_close(*along(x), atol=1e-3, rtol=1e-3)


def mapped_by_a_function(weights, rows, gates, linear=apply_linear):
    return linear(lambda rows: rows, rows) * gates[:, None]


class Doubled(hnn.Linear):
    def __call__(self, inputs, *, key=None):
        return 2 * super().__call__(inputs)


def by_a_subclass(weights, rows, gates, linear=apply_linear):
    of = hnn.Linear.init(Axis("embed", 2), Axis("mlp", 3), key=jax.random.key(0))
    return linear(Doubled(of.weight, of.bias, of.In, of.Out, of.dot_general), rows)


def of_other_dtypes(weights, rows, gates, linear=apply_linear):
    return linear(weights["gate"].astype(jnp.bfloat16), rows)


def by_itself(weights, rows, gates):
    return (rows @ weights["gate"] * gates[:, None]) @ weights["down"]


@pytest.mark.parametrize(
    ("expert", "message"),
    [
        (
            mapped_by_a_function,
            "maps rows by <function .*; take the backend 'block' for others",
        ),
        (by_a_subclass, "maps rows by Doubled"),
        (of_other_dtypes, "maps rows of float32 by weights of bfloat16: cast one"),
        (
            by_itself,
            (
                "'megablox' does not support this call: its expert has no argument"
                " `linear`"
            ),
        ),
    ],
)
def test_an_expert_without_grouped_products_is_refused(expert, message):
    weights, x, choices, gates, _ = swiglu_example(5, routings()["random"])
    run = functools.partial(
        grouped_experts, expert, weights, Experts, x, choices, gates
    )
    with compiled_for("tpu"), pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: run(backend="megablox"))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "megablox",
            dict(platform="cpu"),
            "it runs on TPUs, and the program is for 'cpu'",
        ),
        (
            "megablox",
            dict(dtype=jnp.dtype("float16")),
            "bfloat16 and float32, not float16",
        ),
        ("megablox", dict(on_host=True), "weights are in host memory"),
        (
            "megablox",
            dict(devices=4),
            r"can't divide it among 4 devices: .*check_vma=False",
        ),
        (
            "megablox",
            dict(is_varying=True),
            "do not say over which devices results vary: .*check_vma=False",
        ),
        ("megablox", dict(takes_linear=False), "its expert has no argument `linear`"),
        (
            "triton",
            {},
            (
                "Unknown backend of experts 'triton'. Use 'auto' or one of megablox,"
                " tokamax, block"
            ),
        ),
        ("megablox", {}, "megablox"),
        ("auto", {}, "megablox"),
        ("auto", dict(on_host=True), "block"),
        ("auto", dict(takes_linear=False), "block"),
        ("auto", dict(platform="cuda"), "block"),
    ],
)
def test_backends_say_why_they_do_not_support_a_call(name, change, message):
    call = ExpertsFacts(**(dict(platform="tpu", dtype=jnp.dtype("bfloat16")) | change))
    if message in EXPERT_BACKENDS:
        found = choose_backend("experts", EXPERT_BACKENDS, name, call)
        assert found is EXPERT_BACKENDS[message].kernel
        return
    with pytest.raises(ValueError, match=message):
        choose_backend("experts", EXPERT_BACKENDS, name, call)


def test_vmap_over_weights_alone(backend):
    weights, x, choices, gates, cotangent = swiglu_example(5, routings()["random"])
    many = jax.tree.map(lambda leaf: jnp.stack([leaf, 0.5 * leaf]), weights)

    @quick_jit
    def gradients(many):
        def loss(weights, name):
            out = grouped_experts(
                swiglu, weights, Experts, x, choices, gates, backend=name
            )
            # Of large ones rounding is large
            return jnp.vdot(jnp.sin(0.1 * out), cotangent)

        return [
            jax.vmap(jax.grad(functools.partial(loss, name=name)))(many)
            for name in (backend, "block")
        ]

    assert_close(*gradients(many), atol=1e-4, rtol=1e-4)


@pytest.mark.target("tpu")
def test_for_a_tpu_it_does_not_pad_the_stack_of_narrow_matrices():
    """The rows of `[512, 16]` have 16 of 128 lanes: row-major, a stack of them takes 8
    times its bytes.
    """
    Layers, Many, width, rank = Axis("layers", 16), Axis("experts", 64), 512, 16
    stack = jax.ShapeDtypeStruct((Layers.size, Many.size, width, rank), jnp.float32)
    x = jax.ShapeDtypeStruct((1024, width), jnp.bfloat16)

    def adapter(weights, rows, gates, linear=apply_linear):
        a, b = (weight.astype(rows.dtype) for weight in weights)
        return linear(b.swapaxes(-1, -2), linear(a, rows * gates[:, None]))

    def loss(weights, x):
        choices, gates = (
            jnp.zeros((len(x), 1), jnp.int32),
            jnp.ones((len(x), 1), x.dtype),
        )

        def layer(x, own):
            return x + grouped_experts(
                adapter, own, Many, x, choices, gates, backend="megablox"
            )

        return jnp.sum(fold(layer, Layers, remat="nested")(x, weights))

    report = memory.report(jax.grad(loss), (stack, stack), x, target="v5p")
    assert report.temporaries < report.outputs
