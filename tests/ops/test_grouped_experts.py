"""Tests of `grouped_experts` against every expert applied to every token."""

import functools

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from stacked_remat import memory
from stacked_remat._memory_spaces import compiled_for
from stacked_remat.ops import _expert_blocks, apply_linear, grouped_experts

from ..blocks import assert_close, quick_jit
from ..jaxprs import equations_of
from ..random_arrays import normal

EMBED, INNER = 4, 3


def gated(weights, rows, linear=apply_linear):
    return linear(weights["gate"], rows)


def swiglu(weights, rows, gates, saved=None, linear=apply_linear):
    gate = gated(weights, rows, linear) if saved is None else saved
    hidden = jax.nn.silu(gate) * linear(weights["up"], rows)
    return linear(weights["down"], hidden * gates[:, None])


def dense(expert, weights, x, choices, gates):
    out = jnp.zeros_like(x)
    for e in range(weights["gate"].shape[0]):
        gate = jnp.sum(jnp.where(choices == e, gates, 0), axis=-1)
        out += expert(jax.tree.map(lambda leaf, e=e: leaf[e], weights), x, gate)
    return out


@pytest.fixture
def blocks(monkeypatch):
    """Sets the rows of a block, and the blocks of an iteration."""

    def blocks(*sizes):
        monkeypatch.setattr(
            _expert_blocks, "sizes_of_blocks", lambda pairs, experts: sizes
        )

    return blocks


def example(experts, choices, seed=0):
    shapes = {"gate": (EMBED, INNER), "up": (EMBED, INNER), "down": (INNER, EMBED)}
    weights = {
        name: normal(seed + i, experts, *shape)
        for i, (name, shape) in enumerate(shapes.items())
    }
    x, cotangent = (normal(seed + i, len(choices), EMBED) for i in (3, 5))
    return weights, x, jnp.asarray(choices), normal(seed + 4, *choices.shape), cotangent


def random_choices(rng, tokens, experts, per_token):
    """Routings to few experts or to all; some choices are out of range, as of
    padding.
    """
    favourites = rng.permutation(experts)
    free = rng.random() < 0.5
    rows = [
        (rng.permutation(experts) if free else favourites)[:per_token]
        for _ in range(tokens)
    ]
    choices = np.array(rows, np.int32)
    dropped = rng.random(choices.shape) < rng.choice([0.0, 0.3])
    return np.where(
        dropped, rng.choice([-1, experts, 100], choices.shape), choices
    ).astype(np.int32)


@pytest.mark.parametrize(
    ("tokens", "experts", "per_token", "block", "at_once", "saved"),
    [
        (7, 6, 3, 2, 3, gated),
        (7, 4, 2, 5, 1, None),
        (90, 4, 2, 64, 1, gated),
        (7, 1, 1, 1, 2, None),
    ],
)
def test_values_and_gradients_are_those_of_all_experts_on_all_tokens(
    tokens, experts, per_token, block, at_once, saved, blocks
):
    blocks(block, at_once)
    rng = np.random.default_rng(0)
    weights, x, _, gates, cotangent = example(
        experts, np.zeros((tokens, per_token), int)
    )
    run = functools.partial(
        grouped_experts, Experts=Axis("experts", experts), saved=saved
    )

    @quick_jit
    def both(choices):
        def loss(weights, x, gates, of):
            out = of(swiglu, weights, x=x, choices=choices, gates=gates)
            return jnp.sum(out * cotangent), out

        return [
            jax.value_and_grad(functools.partial(loss, of=of), (0, 1, 2), has_aux=True)(
                weights, x, gates
            )
            for of in (run, dense)
        ]

    for _ in range(12):
        choices = random_choices(rng, len(x), experts, per_token)
        found, expected = both(choices)
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, atol=1e-4, rtol=1e-4),
            found,
            expected,
        )
        nowhere = ((choices < 0) | (choices >= experts)).all(axis=1)
        np.testing.assert_array_equal(found[0][1][nowhere], 0)


def test_blocks_of_padding_are_skipped_where_no_example_has_rows_in_them(blocks):
    """With `jax.vmap` too, which otherwise runs both branches of a conditional and
    copies their results.
    """
    blocks(5, 1)
    choices = np.zeros((3, 7, 2), int)
    choices[1, :, 1], choices[2] = 3, [[-1, 4]]
    weights, x, _, gates, _ = example(4, choices[0])
    rows_of_blocks = []

    def expert(weights, rows, gates):
        jax.debug.callback(rows_of_blocks.append, rows)
        return swiglu(weights, rows, gates)

    def loss(weights, choices, expert=expert):
        return jnp.sum(
            grouped_experts(expert, weights, Axis("experts", 4), x, choices, gates)
        )

    each = quick_jit(loss)
    for own, count in zip(choices, (3, 4, 0), strict=True):  # of at most 14 // 5 + 4
        rows_of_blocks.clear()
        each(weights, own)
        jax.effects_barrier()
        assert len(rows_of_blocks) == count
    gradient = jax.grad(functools.partial(loss, expert=swiglu))
    of_all = jax.vmap(gradient, (None, 0))
    program = equations_of(of_all, weights, choices)
    assert [one.primitive.name for one in program].count(
        "cond"
    ) == 2  # forward and backward
    found = quick_jit(of_all)(weights, choices)
    one = quick_jit(gradient)
    expected = jax.tree.map(
        lambda *leaves: np.stack(leaves), *(one(weights, own) for own in choices)
    )
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5), found, expected
    )


@pytest.mark.parametrize("at_once", [1, 3])
def test_what_is_saved_may_be_named_and_need_not_be_finite_at_zero(at_once, blocks):
    """Some examples have no choices, and none of what is saved for their padding."""
    blocks(64, at_once)
    choices = np.stack([np.repeat([0, 3], [70, 5])[:, None], np.full((75, 1), -1)])
    weights, x, _, gates, cotangent = example(4, choices[0])

    def kept(weights, rows):
        return hax.named(1 + jnp.square(rows @ weights["gate"]), ("row", "inner"))

    def expert(weights, rows, gates, saved=None):
        saved = kept(weights, rows) if saved is None else saved
        return (rows @ weights["up"] / saved.array * gates[:, None]) @ weights["down"]

    def gradients(choices, saved):
        def loss(weights, x, gates):
            found = grouped_experts(
                expert, weights, Axis("experts", 4), x, choices, gates, saved=saved
            )
            return jnp.vdot(found, cotangent)

        return jax.grad(loss, (0, 1, 2))(weights, x, gates)

    found, expected = (
        quick_jit(jax.vmap(functools.partial(gradients, saved=saved)))(choices)
        for saved in (kept, None)
    )
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
        found,
        expected,
    )


def named_expert(weights, rows, gates):
    Row = Axis("row", rows.shape[0])
    hidden = hax.tanh(hax.dot(hax.named(rows, (Row, "embed")), weights, axis="embed"))
    return (hidden * hax.named(gates, Row)).rearrange((Row, "out")).array


def plain_expert(weights, rows, gates):
    return jnp.tanh(rows @ weights) * gates[:, None]


def test_named_weights_with_the_axis_anywhere():
    Experts, Embed, Out = Axis("experts", 3), Axis("embed", EMBED), Axis("out", EMBED)
    weights = hax.random.normal(jax.random.key(0), (Embed, Experts, Out))
    _, x, choices, gates, _ = example(3, np.array([[0, 2], [2, 1]]))

    def gradient(weights, expert):
        run = functools.partial(
            grouped_experts, expert, Experts=Experts, x=x, choices=choices, gates=gates
        )
        return jax.value_and_grad(lambda weights: jnp.sum(run(weights=weights)))(
            weights
        )

    in_front = weights.rearrange((Experts, Embed, Out))
    cases = (weights, named_expert), (in_front.array, plain_expert)
    (value, found), expected = quick_jit(lambda: [gradient(*case) for case in cases])()
    assert found.axes == weights.axes
    assert_close((value, found.rearrange(in_front.axes).array), expected, atol=1e-5)


TOKENS, EXPERTS, CHOSEN = 4096, 128, 8


def flops_of(argnums, TOKENS=TOKENS, saved=None, platform="cuda"):
    shapes = {"gate": (EMBED, INNER), "up": (EMBED, INNER), "down": (INNER, EMBED)}
    weights = {
        name: jax.ShapeDtypeStruct((EXPERTS, *shape), jnp.float32)
        for name, shape in shapes.items()
    }
    x, gates = (
        jax.ShapeDtypeStruct((TOKENS, size), jnp.float32) for size in (EMBED, CHOSEN)
    )

    def loss(weights, x, gates):
        choices = jnp.zeros((TOKENS, CHOSEN), jnp.int32)
        Experts = Axis("experts", EXPERTS)
        return jnp.sum(
            grouped_experts(swiglu, weights, Experts, x, choices, gates, saved=saved)
        )

    run = loss if argnums is None else jax.value_and_grad(loss, argnums)
    with compiled_for(platform):
        found = memory.count_flops(jax.make_jaxpr(run)(weights, x, gates))
    # On a CPU blocks that are all padding are skipped, and counted.
    assert not found.too_low and bool(found.too_high) == (platform == "cpu")
    # Products of the active experts
    return found.matmul / (2 * TOKENS * CHOSEN * EMBED * INNER)


def test_arithmetic_is_that_of_the_active_experts_and_some_padding():
    """In products of an active expert's matrices with its rows: 3 forward, 6 backward
    where all is trained.

    Backward, `gate` and `up` are applied again, and `down` is not.
    """
    padding = 1.125
    assert 3 <= flops_of(None) <= padding * 3
    assert 3 + 8 <= flops_of((0, 1, 2)) <= padding * (3 + 8)
    assert 3 + 5 <= flops_of((1, 2)) <= padding * (3 + 5)


@pytest.mark.parametrize("tokens", [1_024, 4_096, 65_536])
def test_arithmetic_with_a_saved_product(tokens):
    """9 products a pair without recomputation, 6 of frozen weights; 12 and 9 in a
    checkpointed layer.
    """
    assert flops_of((0, 1, 2), tokens, gated) <= 1.35 * 9
    assert flops_of((1, 2), tokens, gated) <= 1.35 * 6


def test_nothing_is_saved_where_nothing_is_differentiated():
    assert flops_of(None, saved=gated) == flops_of(None)
    calls = []
    assert (
        flops_of(None, saved=lambda *args: calls.append(args), platform="cpu")
        and not calls
    )


def test_frozen_experts_have_no_gradient_buffer():
    weights, x, choices, gates, _ = example(5, np.array([[0, 2], [2, 1], [3, 4]]))

    def loss(weights, x):
        return jnp.sum(
            grouped_experts(swiglu, weights, Axis("experts", 5), x, choices, gates)
        )

    def buffers(argnums):
        """Arrays of zeros that gradients of weights are added into."""
        program = equations_of(jax.grad(loss, argnums), weights, x)
        made = [
            one.outvars[0].aval
            for one in program
            if one.primitive.name == "broadcast_in_dim"
        ]
        return [aval for aval in made if aval.shape in {(5, 4, 3), (5, 3, 4)}]

    assert not buffers(1) and len(buffers((0, 1))) == 3


def test_half_precision_has_wide_sums():
    choices = np.tile(np.arange(4), (300, 1))
    weights, x, choices, gates, _ = example(4, choices)
    half = lambda tree: jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tree)  # noqa: E731
    run = functools.partial(
        grouped_experts, swiglu, Experts=Axis("experts", 4), choices=choices
    )

    @quick_jit
    def gradient(weights, x, gates):
        return jax.grad(
            lambda w: jnp.sum(run(weights=w, x=x, gates=gates).astype(jnp.float32))
        )(weights)

    found = gradient(*half((weights, x, gates)))
    wide = lambda tree: jax.tree.map(lambda leaf: leaf.astype(jnp.float32), half(tree))  # noqa: E731
    expected = gradient(*wide((weights, x, gates)))
    for got, want in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(
            got.astype(jnp.float32), want, atol=0.02 * float(jnp.max(jnp.abs(want)))
        )


def affine(weights, rows, gates, kept=None):
    mapped = rows @ weights["matrix"] if kept is None else kept
    return (mapped + weights["bias"][None]) * gates[:, None]


@pytest.mark.parametrize(("at_once", "saved"), [(1, False), (3, False), (3, True)])
def test_half_precision_gradients_that_cancel_over_blocks_are_exact(
    at_once, saved, blocks
):
    blocks(8, at_once)
    rng, tokens, experts = np.random.default_rng(0), 240, 3
    choices = np.array([rng.permutation(experts)[:2] for _ in range(tokens)])
    choices[tokens // 2 :] = choices[: tokens // 2]
    cotangent = rng.normal(size=(tokens, EMBED))
    cotangent[tokens // 2 :] = (
        0.02 * cotangent[tokens // 2 :] - cotangent[: tokens // 2]
    )
    half = lambda tree: jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), tree)  # noqa: E731
    wide = lambda tree: jax.tree.map(lambda leaf: leaf.astype(jnp.float32), half(tree))  # noqa: E731
    weights = {
        "matrix": normal(0, experts, EMBED, EMBED),
        "bias": normal(1, experts, EMBED),
    }
    x, gates = 1 + 0.01 * normal(2, tokens, EMBED), jnp.ones((tokens, 2))
    run = functools.partial(
        grouped_experts,
        Experts=Axis("experts", experts),
        backend="block",
        saved=(lambda weights, rows: rows @ weights["matrix"]) if saved else None,
    )

    def of_one_product(expert, weights, x, choices, gates):
        def of_expert(e):
            own = jax.tree.map(lambda leaf: leaf[e], weights)
            return expert(own, x, jnp.sum(jnp.where(choices == e, gates, 0), axis=-1))

        return functools.reduce(jnp.add, map(of_expert, range(experts)))

    def gradient(cast, of):
        def loss(weights):
            out = of(
                affine,
                weights,
                x=cast(x),
                choices=jnp.asarray(choices),
                gates=cast(gates),
            )
            return jnp.sum(out.astype(jnp.float32) * wide(cotangent))

        return quick_jit(jax.grad(loss))(cast(weights))

    exact = gradient(wide, of_one_product)
    found, plain = gradient(half, run), gradient(half, of_one_product)
    for name, expected in exact.items():
        own, other = (
            jnp.linalg.norm(one[name].astype(jnp.float32) - expected)
            for one in (found, plain)
        )
        assert found[name].dtype == jnp.bfloat16 and own <= 1.1 * other


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            dict(gates=jnp.ones((3, 1))),
            r"choices \(3, 2\) and gates \(3, 1\) must have the same shape",
        ),
        (dict(x=jnp.ones((2, EMBED))), "a row for each of the 2 tokens"),
        (
            dict(weights={"scale": jnp.ones(())}),
            r"weights\['scale'\] has the shape \(\); the first axis",
        ),
        (
            dict(weights={"gate": jnp.ones((4, 2))}),
            r"\['gate'\] has the shape \(4, 2\);.* the 5 experts",
        ),
        (
            dict(weights={"gate": hax.ones(Axis("embed", 4))}),
            r"weights\['gate'\] has no axis `experts`",
        ),
        (dict(choices=jnp.ones((3, 2))), "choices must be integers; got float32"),
        (
            dict(choices=jnp.ones(3, int)),
            r"choices must be a plain array .* got the shape \(3,\)",
        ),
        (
            dict(expert=lambda *args: swiglu(*args).sum(0, keepdims=True)),
            "a row of results for each row",
        ),
        (dict(Experts=Axis("experts", 4)), "4"),
        (
            dict(Experts=Axis("experts", 0)),
            "has no experts; there must be at least one",
        ),
        (
            dict(over=("e",)),
            "call grouped_experts inside jax.shard_map over them, or leave `over` out",
        ),
    ],
)
def test_arguments_are_checked(change, message):
    weights, x, choices, gates, _ = example(5, np.array([[0, 2], [2, 1], [3, 4]]))
    arguments = dict(
        expert=swiglu,
        weights=weights,
        Experts=Axis("experts", 5),
        x=x,
        choices=choices,
        gates=gates,
    )
    with pytest.raises(ValueError, match=message):
        grouped_experts(**(arguments | change))


def test_weights_may_have_more_arrays_than_an_array_has_dimensions():
    Experts, weights = (
        Axis("experts", 2),
        [jnp.full((2, 1, 3), float(k)) for k in range(70)],
    )
    x, gates, choices = jnp.ones((4, 3)), jnp.ones((4, 1)), jnp.zeros((4, 1), int)

    def total(x):
        return jnp.sum(
            grouped_experts(
                lambda w, rows, g: rows * sum(w) * g[:, None],
                weights,
                Experts,
                x,
                choices,
                gates,
            )
        )

    np.testing.assert_allclose(quick_jit(jax.grad(total))(x), sum(range(70)))


@pytest.mark.target("cuda")
def test_memory_at_65536_tokens_and_128_experts():
    tokens, embed, inner, half = 65_536, 2_048, 768, jnp.bfloat16
    shapes = {"gate": (embed, inner), "up": (embed, inner), "down": (inner, embed)}
    weights = {
        name: jax.ShapeDtypeStruct((128, *shape), half)
        for name, shape in shapes.items()
    }
    x, gates = (
        jax.ShapeDtypeStruct((tokens, embed), half),
        jax.ShapeDtypeStruct((tokens, 8), half),
    )
    choices = jax.ShapeDtypeStruct((tokens, 8), jnp.int32)

    def loss(weights, x, gates, choices, backend):
        out = grouped_experts(
            swiglu, weights, Axis("experts", 128), x, choices, gates, backend=backend
        )
        return jnp.sum(out.astype(jnp.float32))

    def report(backend):
        run = jax.value_and_grad(functools.partial(loss, backend=backend), (1, 2))
        return memory.report(run, weights, x, gates, choices, target="h200")

    frozen = report("block")
    assert max(frozen.temporaries, report("auto").temporaries) < 1.5 * 2**30
    active = 2 * 3 * tokens * 8 * embed * inner
    assert frozen.flops.exact and frozen.flops.matmul <= 1.07 * active * 8 / 3


def test_a_few_tokens_take_a_block_for_each_chosen_expert():
    """In a decoding step the weights of other experts are neither read nor
    multiplied.
    """
    weights = {"w": jnp.ones((EXPERTS, EMBED, EMBED))}
    choices, gates = jnp.arange(8, dtype=jnp.int32)[None, :], jnp.ones((1, 8))

    def run(weights, x):
        def expert(own, rows, gates):
            return rows @ own["w"] * gates[:, None]

        return grouped_experts(
            expert, weights, Axis("experts", EXPERTS), x, choices, gates
        )

    x = jnp.ones((1, EMBED))
    found = quick_jit(run)(weights, x)
    np.testing.assert_allclose(found, np.full((1, EMBED), 8.0 * EMBED))
    found = memory.count_flops(jax.make_jaxpr(run)(weights, x))
    # Blocks of 8 rows
    assert not found.too_low and found.matmul == 8 * (2 * 8 * EMBED * EMBED)


def test_weights_on_the_host_have_no_gradient_and_others_do():
    weights, x, choices, gates, _ = example(4, np.array([[0, 2]]))
    moved = jax.device_put(weights, jax.memory.Space.Host)

    def total(weights, x):
        return jnp.sum(
            grouped_experts(swiglu, weights, Axis("experts", 4), x, choices, gates)
        )

    of_x = quick_jit(jax.grad(total, 1))
    np.testing.assert_allclose(of_x(moved, x), of_x(weights, x), rtol=1e-6)
    with pytest.raises(
        ValueError,
        match="no gradient of weights in host memory. Move them to the device",
    ):
        jax.eval_shape(jax.grad(total), moved, x)


@pytest.mark.parametrize("at_once", [1, 4])
def test_tokens_that_are_not_numbers_spoil_no_expert_that_they_did_not_choose(
    at_once, blocks
):
    blocks(2, at_once)
    choices = np.array([[1, 4], [1, 2], [1, -1], [-1, 6], [2, 5]], np.int32)
    # Nobody chose 0 and 3, the last is out of range
    weights, x, choices, gates, cotangent = example(7, choices)
    # Which 6 alone sees
    spoiled, replaced = np.array(x), np.array(x)
    spoiled[3], replaced[3] = np.nan, 0.0

    def loss(weights, rows):
        found = grouped_experts(
            swiglu, weights, Axis("experts", 7), rows, choices, gates
        )
        return jnp.vdot(found[:3], cotangent[:3]) + jnp.vdot(found[4], cotangent[4])

    gradient_of = quick_jit(jax.grad(loss))
    found, wanted = (gradient_of(weights, rows) for rows in (spoiled, replaced))
    for name, gradient in found.items():
        np.testing.assert_array_equal(np.isnan(gradient).any((1, 2)), np.arange(7) == 6)
        np.testing.assert_allclose(gradient[:6], wanted[name][:6], rtol=1e-5, atol=1e-6)


def test_no_tokens():
    weights, x, choices, gates, _ = example(4, np.zeros((0, 2), int))

    def total(weights, x, gates):
        return jnp.sum(
            grouped_experts(swiglu, weights, Axis("experts", 4), x, choices, gates)
        )

    gradients = quick_jit(jax.grad(total, (0, 1, 2)))(weights, x, gates)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(gradients))
