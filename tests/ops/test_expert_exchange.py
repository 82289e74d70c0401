"""Experts divided over devices give what all experts on all tokens give, for any
routing.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from jax.sharding import PartitionSpec as P

from stacked_remat.ops import grouped_experts
from stacked_remat.ops._backends import Backend
from stacked_remat.ops.grouped_experts import EXPERT_BACKENDS
from tests.jaxprs import equations_of
from tests.ops.test_grouped_experts import dense, example, swiglu
from tests.ops.test_grouped_linear import PLAIN
from tests.ops.test_per_device import mesh

Experts = Axis("experts", 8)
TOKENS, PER_TOKEN = 24, 3


def routings():
    """By name: even, all to the experts of one device, some to none, each device's to
    another, to nobody.
    """
    rng = np.random.default_rng(0)
    free = np.array(
        [rng.permutation(Experts.size)[:PER_TOKEN] for _ in range(TOKENS)], np.int32
    )
    return {
        "random": free,
        "one device": np.broadcast_to(np.array([7, 6, -1]), free.shape),
        "some to none": np.where(
            rng.random(free.shape) < 0.3, rng.choice([-1, 8, 100], free.shape), free
        ),
        "the first token alone": np.where(np.arange(TOKENS)[:, None] == 0, free, -1),
        "nobody": np.full_like(free, -1),
    }


@pytest.fixture(
    scope="module",
    params=[(("expert",), "block", True), (("data", "expert"), "plain", False)],
    ids=str,
)
def both(request):
    """Values and gradients of both, compiled once for all routings."""
    over, backend, tracked = request.param

    def run(weights, x, choices, gates):
        def local(weights, x, choices, gates):
            options = {"over": over, "backend": backend}
            return grouped_experts(
                swiglu, weights, Experts, x, choices, gates, **options
            )

        tokens = P(("data", "expert"))
        return jax.shard_map(
            local,
            in_specs=(P(over), tokens, tokens, tokens),
            out_specs=tokens,
            check_vma=tracked,
        )(weights, x, choices, gates)

    @jax.jit
    def both(weights, x, choices, gates, cotangent):
        def loss(weights, x, gates, of):
            out = of(weights, x, choices, gates)
            return jnp.sum(out * cotangent), out

        return [
            jax.value_and_grad(functools.partial(loss, of=of), (0, 1, 2), has_aux=True)(
                weights, x, gates
            )
            for of in (run, functools.partial(dense, swiglu))
        ]

    return both


@pytest.mark.parametrize("routing", routings())
def test_values_and_gradients_are_those_of_all_experts_on_all_tokens(
    both, routing, monkeypatch
):
    monkeypatch.setitem(EXPERT_BACKENDS, "plain", Backend(PLAIN))
    choices = routings()[routing].astype(np.int32)
    with jax.set_mesh(mesh(data=2, expert=4)):
        found, wanted = both(*example(Experts.size, choices))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, atol=1e-4, rtol=1e-4),
        found,
        wanted,
    )


@pytest.mark.parametrize(
    ("tokens", "row_bytes"), [(2**12, 2**11), (2**22, 2**11), (2**12, 2**28)]
)
def test_rows_of_a_round_are_an_eighth_of_all_or_half_a_gibibyte(tokens, row_bytes):
    def shape(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype)

    def expert(weights, rows, gates):
        return rows * weights[None, :] * gates[:, None]

    def loss(x, gates, weights, choices):
        def local(x, gates, weights, choices):
            return grouped_experts(
                expert, weights, Experts, x, choices, gates, over=("expert",)
            )

        run = jax.shard_map(
            local, in_specs=P("expert"), out_specs=P("expert"), check_vma=False
        )
        return jnp.sum(run(x, gates, weights, choices).astype(jnp.float32))

    pairs, width = (tokens, PER_TOKEN), row_bytes // 2
    args = (
        shape(tokens, width),
        shape(*pairs),
        shape(Experts.size, width),
        shape(*pairs, dtype=jnp.int32),
    )
    with jax.set_mesh(mesh(expert=4)):
        found = equations_of(jax.grad(loss, (0, 1)), *args)
    sent = [
        np.prod(var.aval.shape) * var.aval.dtype.itemsize
        for equation in found
        if equation.primitive.name == "all_to_all"
        for var in equation.outvars
    ]
    of_parts = tokens * PER_TOKEN // 4 // 8 * row_bytes
    assert max(sent) == max(min(of_parts, 2**29), 4 * row_bytes)
