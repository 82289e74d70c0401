"""Backends of `grouped_experts` by grouped products give what the walk over blocks gives, for any routing."""

import functools

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from stacked_remat.lora import LoraLinear
from stacked_remat.ops import _expert_backends, _expert_chunks, grouped_experts
from stacked_remat.ops._expert_backends import EXPERT_BACKENDS, ExpertsBackend, megablox_kernels
from stacked_remat.ops._grouped_product import Kernels
from stacked_remat.ops._grouped_triton import triton_kernels

EXPERTS, EMBED, INNER, TOKENS, CHOSEN = 5, 4, 3, 9, 2
Experts = Axis("experts", EXPERTS)
quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def _own_matrices(w, sizes, rows):
    return jnp.take(w, jnp.repeat(jnp.arange(len(sizes)), sizes, total_repeat_length=rows), axis=0)


def _product(x, w, sizes, transposed, dtype):
    w = w.swapaxes(1, 2) if transposed else w
    found = jnp.einsum("rk,rkn->rn", x, _own_matrices(w, sizes, len(x)), preferred_element_type=jnp.float32)
    return found.astype(dtype)


def _outer(x, y, sizes, dtype):
    own = _own_matrices(jnp.eye(len(sizes)), sizes, len(x))
    return jnp.einsum("re,rk,rn->ekn", own, x, y, preferred_element_type=jnp.float32).astype(dtype)


PLAIN = Kernels(_product, _outer)  # the definition of the two products, in place of kernels


KERNELS = dict(plain=PLAIN, triton=triton_kernels(interpret=True), megablox=megablox_kernels(interpret=True))


@pytest.fixture(params=KERNELS)
def backend(request, monkeypatch):
    """The name of a backend that runs here with the kernels of another."""
    monkeypatch.setitem(EXPERT_BACKENDS, "here", ExpertsBackend(KERNELS[request.param]))
    return "here"


@pytest.fixture
def plain(monkeypatch):
    monkeypatch.setitem(EXPERT_BACKENDS, "here", ExpertsBackend(PLAIN))
    return "here"


def linear(key, Out, In, adapted=False):
    keys = jax.random.split(key, 4)
    made = hnn.Linear(
        hax.random.normal(keys[0], (Experts, Out, In)), hax.random.normal(keys[1], (Experts, Out)), In, Out
    )
    if not adapted:
        return made
    Rank = Axis("lora_rank", 2)
    a, b = hax.random.normal(keys[2], (Experts, In, Rank)), hax.random.normal(keys[3], (Experts, Rank, Out))
    return LoraLinear(made, a, b, 0.5)


def gated(weights, rows):
    row = hax.named(rows, (Axis("row", rows.shape[0]), "embed"))
    return weights["gate"](row).rearrange(("row", "inner")).array


def mlp(weights, rows, gates, saved=None):
    Row = Axis("row", rows.shape[0])
    x = hax.named(rows, (Row, "embed"))
    gate = hax.named(gated(weights, rows) if saved is None else saved, (Row, "inner"))
    hidden = hnn.silu(gate) * weights["up"](x) * weights["scale"]
    return weights["down"](hidden * hax.named(gates, Row)).rearrange((Row, "embed")).array


def example(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 7)
    Embed, Inner = Axis("embed", EMBED), Axis("inner", INNER)
    weights = dict(
        gate=linear(keys[0], Inner, Embed, adapted=True),
        up=linear(keys[1], Inner, Embed),
        down=linear(keys[2], Embed, Inner, adapted=True),
        scale=hax.random.normal(keys[3], Experts),
    )
    x = jax.random.normal(keys[4], (TOKENS, EMBED))
    gates, cotangent = jax.random.normal(keys[5], (TOKENS, CHOSEN)), jax.random.normal(keys[6], x.shape)
    return jax.tree.map(lambda leaf: leaf.astype(dtype), (weights, x, gates, cotangent))


def routings():
    """By name: random, one expert takes all, some of nobody, an expert of which nobody is, all of nobody."""
    rng = np.random.default_rng(0)
    free = np.array([rng.permutation(EXPERTS)[:CHOSEN] for _ in range(TOKENS)], np.int32)
    return {
        "random": free,
        "one": np.broadcast_to(np.array([2, -1], np.int32), free.shape),
        "none of the last": np.where(free == EXPERTS - 1, -1, free),
        "out of range": np.where(rng.random(free.shape) < 0.4, rng.choice([-7, 5, 100], free.shape), free),
        "nobody": np.full_like(free, EXPERTS),
    }


def both(backend, saved=None, trained=lambda path: True):
    """Values and gradients of a backend and of the walk over blocks; compiled once for every routing."""

    @functools.partial(jax.jit, compiler_options=quick)
    def run(choices, weights, x, gates, cotangent):
        moving, still = eqx.partition(
            weights, jax.tree_util.tree_map_with_path(lambda p, _: trained(p), weights)
        )

        def loss(moving, x, gates, backend):
            own = eqx.combine(moving, still)
            out = grouped_experts(mlp, own, Experts, x, choices, gates, saved=saved, backend=backend)
            return jnp.sum((out * cotangent).astype(jnp.float32)), out

        gradient = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
        return gradient(moving, x, gates, backend), gradient(moving, x, gates, "block")

    return run


def assert_close(found, wanted, **tolerance):
    jax.tree.map(functools.partial(np.testing.assert_allclose, **tolerance), found, wanted)


@pytest.mark.parametrize("saved", [None, gated])
def test_values_and_gradients_of_any_routing_in_one_compilation(backend, saved, monkeypatch):
    monkeypatch.setattr(
        _expert_chunks, "_MOST_BYTES", 4 * CHOSEN * EMBED * 4
    )  # three chunks, the last padded
    run = both(backend, saved)
    for choices in routings().values():
        found, wanted = run(choices, *example())
        assert_close(found, wanted, atol=1e-4, rtol=1e-4)
        nowhere = ((choices < 0) | (choices >= EXPERTS)).all(axis=1)
        np.testing.assert_array_equal(found[0][1][nowhere], 0)
    assert run._cache_size() == 1


def test_bfloat16(backend):
    found, _ = both(backend)(routings()["random"], *example(jnp.bfloat16))
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), example(jnp.bfloat16))
    _, wanted = both("block")(routings()["random"], *wide)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(found[1]))
    for got, want in zip(jax.tree.leaves(found[1]), jax.tree.leaves(wanted[1]), strict=True):
        np.testing.assert_allclose(got.astype(jnp.float32), want, atol=0.03 * float(jnp.max(jnp.abs(want))))
