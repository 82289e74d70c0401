"""Tests of linear attention against the recurrence, one position at a time."""

from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from stacked_remat import fold, memory
from stacked_remat.ops import (
    _linear_groups,
    linear_attention,
    linear_attention_step,
)

from ..blocks import POLICIES, assert_close_to_scale, is_by_name, quick_jit
from ..random_arrays import normal

Batch, Heads, Group = Axis("batch", 2), Axis("heads", 2), Axis("group", 3)
Key, Value = Axis("key", 4), Axis("value", 5)
Pos = Axis("position", 5)


def arguments(
    Pos: Axis,
    *,
    by_channel: bool = False,
    has_beta: bool = True,
    dtype: Any = jnp.float32,
    scale: float = 1.0,
) -> Any:
    """Query, key, value, log decays and strengths."""
    of_keys = (Batch, Pos, Heads, Key)
    query, key = (normal(seed, *of_keys, dtype=dtype) for seed in (0, 1))
    norm = hax.sqrt(hax.sum(key * key, Key))
    value = normal(2, Batch, Pos, Group, Heads, Value, dtype=dtype)
    decayed = (Key,) if by_channel else ()
    log_decay = normal(3, Batch, Pos, Heads, Group, *decayed, dtype=dtype)
    beta = None
    if has_beta:
        beta = hax.nn.sigmoid(normal(4, Batch, Pos, Heads, Group, dtype=dtype))
    return query, key / norm, value, -scale * hax.nn.softplus(log_decay), beta


def attended(
    arrays: Any, Pos: Axis, Key: Axis = Key, Value: Axis = Value, **options: Any
) -> Any:
    query, key, value, log_decay, beta = arrays
    return linear_attention(
        query, key, value, log_decay, beta, Pos, Key, Value, **options
    )


def recurrence(
    query,
    key,
    value,
    log_decay,
    beta,
    Pos,
    Key=Key,
    Value=Value,
    *,
    documents=None,
    lengths=None,
    state=None,
):
    """The output and the last state, in float64, a position at a time."""
    if state is None:
        state = hax.zeros((Batch, Heads, Group, Key, Value), jnp.float64)
    query, key, value, log_decay, beta, state = jax.tree.map(
        lambda x: x.astype(jnp.float64), (query, key, value, log_decay, beta, state)
    )

    def step(before, i):
        at = lambda x, i=i: x[Pos.name, i]  # noqa: E731
        state = before
        if documents is not None:
            is_other = at(documents) != at(documents, jnp.maximum(i - 1, 0))
            state = hax.where(is_other, 0.0, state)
        state = state * hax.exp(at(log_decay))
        update = at(value)
        if beta is not None:
            update = at(beta) * (update - hax.dot(state, at(key), axis=Key))
        state = state + hax.dot(at(key), update, axis=())
        output = hax.dot(state, at(query), axis=Key)
        if lengths is not None:
            state = hax.where(i < lengths, state, before)
        order = [axis for axis in value.axes if axis.name != Pos.name]
        return state.rearrange(before.axes), output.rearrange(order)

    with jax.numpy_dtype_promotion("standard"):
        state, output = hax.scan(step, Pos)(state, jnp.arange(Pos.size))
    return output.rearrange(value.axes), state


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 8 positions, two in a group."""
    monkeypatch.setattr(_linear_groups, "_CHUNK", 8)
    monkeypatch.setattr(_linear_groups, "_GROUP", 24)  # of 12 heads


def with_gradients(attend, Pos):
    """The results and the gradients of all arguments, of a sum over what is no
    padding.
    """

    @quick_jit
    def run(arrays, options):
        def loss(arrays, state):
            given = options if state is None else options | {"state": state}
            results = attend(*arrays, Pos, Key, Value, **given)
            output, last = jax.tree.map(jnp.sin, results)
            if "lengths" in options:
                position = hax.arange(Pos).broadcast_axis(Batch)
                output = hax.where(position < options["lengths"], output, 0.0)
            total = hax.sum(output.astype(last.dtype)) + hax.sum(last)
            return total.scalar(), (output, last)

        rest = dict(options)
        state = rest.pop("state", None)
        options = rest
        return jax.value_and_grad(loss, (0, 1), has_aux=True)(arrays, state)

    return run


DOCUMENTS = [[0] * 3 + [1] * 5 + [0] * 22 + [2], [4] * 17 + [5, 4, 5] + [6] * 11]


@pytest.mark.parametrize("has_beta", [True, False])
@pytest.mark.parametrize("by_channel", [False, True])
def test_values_and_gradients_are_those_of_the_recurrence(
    by_channel, has_beta, small_chunks
):
    Pos = Axis("position", 31)
    ours, by_position = (
        with_gradients(attend, Pos) for attend in (linear_attention, recurrence)
    )
    with jax.enable_x64(True):
        arrays = arguments(
            Pos, by_channel=by_channel, has_beta=has_beta, dtype=jnp.float64
        )
        options = {
            "documents": hax.named(jnp.array(DOCUMENTS), (Batch, Pos)),
            "lengths": hax.named(jnp.array([31, 20]), Batch),
            "state": normal(5, Batch, Heads, Group, Key, Value, dtype=jnp.float64),
        }
        found, expected = ours(arrays, options), by_position(arrays, options)
        assert_close_to_scale(found, expected, 1e-11)
        with_float32 = ours(*jax.tree.map(as_float32, (arrays, options)))
        assert {x.dtype for x in jax.tree.leaves(with_float32)} == {
            jnp.dtype("float32")
        }
        wide = jax.tree.map(lambda x: x.astype(jnp.float64), with_float32)
        assert_close_to_scale(wide, expected, 1e-5)


def as_float32(x):
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("scale", [1e4, 1e30, np.inf])
def test_extreme_decays_are_exact(scale, by_channel, small_chunks):
    """Weak decays that follow strong ones are not rounded away."""
    Pos = Axis("position", 24)
    query, key, value, log_decay, beta = arguments(Pos, by_channel=by_channel)
    strong = normal(6, *log_decay.axes) > 0.5
    log_decay = hax.where(strong, -scale, 0.01 * log_decay)
    arrays = query, key, value, log_decay, beta
    found = with_gradients(linear_attention, Pos)(arrays, {})
    with jax.enable_x64(True):
        expected = with_gradients(recurrence, Pos)(arrays, {})
        wide = jax.tree.map(lambda x: x.astype(jnp.float64), found)
        expected = jax.tree.map(lambda x: x.astype(jnp.float64), expected)
    assert_close_to_scale(wide, expected, 1e-5)


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("has_beta", [True, False])
def test_positions_one_by_one_or_in_parts_are_those_of_the_whole(
    has_beta, by_channel, small_chunks
):
    Pos = Axis("position", 12)
    arrays = arguments(Pos, by_channel=by_channel, has_beta=has_beta)
    expected, last = quick_jit(lambda arrays: attended(arrays, Pos))(arrays)

    @quick_jit
    def in_parts(arrays):
        """The first seven by one call, then one by one."""
        first, state = attended(part(slice(0, 7)), Pos.resize(7))
        outputs = [first]
        for i in range(7, Pos.size):
            query, key, value, log_decay, beta = part(i)
            output, state = linear_attention_step(
                query, key, value, log_decay, beta, Key, Value, state
            )
            outputs.append(output.broadcast_axis(Pos.resize(1)))
        return hax.concatenate(Pos.name, outputs).rearrange(value_axes), state

    def part(where):
        return [None if x is None else x[Pos.name, where] for x in arrays]

    value_axes = arrays[2].axes
    found, state = in_parts(arrays)
    assert state.axes == last.axes
    assert_close_to_scale((found, state), (expected, last), 1e-5)


def test_axes_may_be_in_any_order_and_given_by_name():
    Pos = Axis("position", 7)
    query, key, value, log_decay, beta = arguments(Pos, by_channel=True)
    expected = linear_attention(query, key, value, log_decay, beta, Pos, Key, Value)
    output, state = linear_attention(
        query.rearrange((Key, Pos, Heads, Batch)),
        key.rearrange((Heads, Key, Pos, Batch)),
        value.rearrange((Value, Heads, Pos, Group, Batch)),
        log_decay.rearrange((Key, Group, Pos, Batch, Heads)),
        beta.rearrange((Pos, Group, Heads, Batch)),
        "position",
        "key",
        "value",
    )
    assert output.axes == (Value, Heads, Pos, Group, Batch)
    output = output.rearrange(value.axes)
    state = state.rearrange(expected[1].axes)
    assert_close_to_scale((output, state), expected)


def test_decays_and_strengths_may_lack_axes():
    Pos = Axis("position", 7)
    query, key, value, log_decay, beta = arguments(Pos)
    log_decay, beta = log_decay[Batch, 0][Heads, 1], beta[Group, 0]
    found = linear_attention(query, key, value, log_decay, beta, Pos, Key, Value)
    expected = linear_attention(
        query,
        key,
        value,
        log_decay.broadcast_axis((Batch, Heads)),
        beta.broadcast_axis(Group),
        *(Pos, Key, Value),
    )
    assert_close_to_scale(found, expected)


def test_without_positions_the_state_stays():
    Pos = Axis("position", 0)
    state = normal(0, Batch, Heads, Group, Key, Value)
    arrays = arguments(Pos)
    output, after = attended(arrays, Pos, state=state)
    assert output.axes == arrays[2].axes
    np.testing.assert_array_equal(after.array, state.array)


@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        (0, lambda x: x[Heads, 0], "`query` has .* must have .*heads=2"),
        (1, lambda x: x.array, "`key` must be a named array"),
        (2, lambda x: x[Batch, 0], "`value` has .* must have batch=2"),
        (2, lambda x: x.rename({"group": "key"}), "'key' .* in one of them. Rename"),
        (3, lambda x: x[Pos, 0], "`log_decay` has .* must have position=5"),
        (4, lambda x: x.rename({"group": "other"}), "`beta` has .*other=3.*may have"),
        (4, lambda x: x > 0, "`beta` must be floating-point"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(place, change, message):
    arrays = [*arguments(Pos)]
    arrays[place] = change(arrays[place])
    with pytest.raises(ValueError, match=message):
        attended(arrays, Pos)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"documents": hax.zeros((Batch, Pos))}, "`documents` must be integers"),
        ({"documents": hax.zeros(Batch, int)}, "`documents` has .* must have position"),
        ({"lengths": hax.zeros(Group, int)}, "`lengths` has group=3"),
        ({"state": hax.zeros((Batch, Heads, Key, Value))}, "`state` has .* group=3"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        attended(arguments(Pos), Pos, **options)


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(40))
def test_random_shapes_and_options(seed, small_chunks):
    """Five draws of documents, lengths, states and decays for each of 40 shapes."""
    rng = np.random.default_rng(seed)
    Pos = Axis("position", int(rng.integers(1, 60)))
    by_channel, has_beta, has_lengths, has_documents = rng.random(4) < 0.5
    ours, by_position = (
        with_gradients(attend, Pos) for attend in (linear_attention, recurrence)
    )
    for draw in range(5):
        with jax.enable_x64(True):
            scale = 10.0 ** rng.uniform(-2, 3)
            arrays = arguments(
                Pos,
                by_channel=by_channel,
                has_beta=has_beta,
                dtype=jnp.float64,
                scale=scale,
            )
            seeds = 5 + 10 * draw
            state = normal(seeds, Batch, Heads, Group, Key, Value, dtype=jnp.float64)
            options = {"state": state}
            if has_documents:
                changes = rng.random((Batch.size, Pos.size)) < rng.random()
                documents = jnp.asarray(np.cumsum(changes, 1))
                options["documents"] = hax.named(documents, (Batch, Pos))
            if has_lengths:
                lengths = jnp.asarray(rng.integers(0, Pos.size + 1, Batch.size))
                options["lengths"] = hax.named(lengths, Batch)
            found, expected = ours(arrays, options), by_position(arrays, options)
            assert_close_to_scale(found, expected, 1e-10)


def hidden_by(arrays, **options):
    """A layer's update of the hidden states `[Batch, Pos, Heads, Value]`."""
    query, key, value, log_decay, beta = arrays
    (Pos,) = (axis for axis in query.axes if axis.name == "position")

    def layer(x, scale):
        values = value * scale + x.broadcast_axis(Group)
        output, _ = linear_attention(
            query, key, values, log_decay, beta, Pos, Key, Value, **options
        )
        return x + hax.mean(output, Group).rearrange(x.axes)

    return layer


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(policy, id=name, marks=[pytest.mark.deep] * (name != "nested"))
        for name, policy in POLICIES.items()
        if not is_by_name(policy)
    ],
)
def test_within_layers_of_any_policy(policy, small_chunks):
    Pos, Layers = Axis("position", 20), Axis("layers", 3)
    layer = hidden_by(arguments(Pos))
    x, scales = normal(8, Batch, Pos, Heads, Value), normal(9, Layers)

    def loss(run):
        return quick_jit(
            jax.value_and_grad(lambda *args: hax.sum(hax.sin(run(*args))).scalar())
        )

    def loop(x, scales):
        for i in range(Layers.size):
            x = layer(x, scales[Layers, i])
        return x

    found = loss(fold(layer, Layers, remat=policy))(x, scales)
    assert_close_to_scale(found, loss(loop)(x, scales), 1e-5)


@pytest.mark.parametrize("by_channel", [False, True])
def test_under_vmap_and_in_forward_mode(by_channel, small_chunks):
    Pos = Axis("position", 20)
    arrays = arguments(Pos, by_channel=by_channel)

    def attend(arrays):
        return attended(arrays, Pos)

    @quick_jit
    def both(arrays):
        each = hax.vmap(attend, Batch)(arrays)
        tangents = jax.tree.map(jnp.cos, arrays)
        results, forward = jax.jvp(attend, (arrays,), (tangents,))
        _, pullback = jax.vjp(attend, arrays)
        (backward,) = pullback(jax.tree.map(jnp.ones_like, results))
        pairs = zip(*map(jax.tree.leaves, (tangents, backward)), strict=True)
        along = sum(jnp.vdot(one, other) for one, other in pairs)
        total = sum(jnp.sum(tangent) for tangent in jax.tree.leaves(forward))
        return each, results, total, along

    each, results, total, along = both(arrays)
    each = jax.tree.map(
        lambda x, y: x.rearrange(y.axes), each, results, is_leaf=is_named
    )
    assert_close_to_scale(each, results)
    np.testing.assert_allclose(total, along, rtol=1e-4)


def is_named(x):
    return isinstance(x, hax.NamedArray)


LONG_HEADS, LONG_KEY, LONG_VALUE = hax.make_axes(heads=32, key=128, value=128)


def long_layer(tokens, *, by_channel):
    """The output and the gradients of a layer, and its arguments; then its FLOPs
    forward.
    """
    Pos = Axis("position", tokens)
    of_keys, of_values = (Pos, LONG_HEADS, LONG_KEY), (Pos, LONG_HEADS, LONG_VALUE)

    def shape(dtype, *axes):
        return jax.eval_shape(lambda: hax.zeros(axes, dtype))

    query, value = shape(jnp.bfloat16, *of_keys), shape(jnp.bfloat16, *of_values)
    decays = of_keys if by_channel else of_keys[:-1]
    log_decay = shape(jnp.float32, *decays)
    beta = shape(jnp.float32, Pos, LONG_HEADS)

    def run(cotangent, *arrays):
        def attend(*arrays):
            return attended(arrays, Pos, LONG_KEY, LONG_VALUE)[0]

        output, pullback = jax.vjp(attend, *arrays)
        return output, pullback(cotangent)

    n, d, e = 64, LONG_KEY.size, LONG_VALUE.size
    squares = 4 * n * d // (2 if by_channel else 1)  # keys and queries with keys
    within = squares + 2 * n * (d + e) + 2 * n * e
    forward = tokens * LONG_HEADS.size * (within + 6 * d * e)
    return run, (value, query, query, value, log_decay, beta), forward


@pytest.mark.parametrize("by_channel", [False, True])
def test_flops_are_those_of_the_products_and_grow_with_the_length(by_channel):
    """A forward pass, the same again, and a backward pass of twice as many."""
    counts = []
    for tokens in (65_536, 262_144):
        run, arrays, forward = long_layer(tokens, by_channel=by_channel)
        flops = memory.count_flops(jax.make_jaxpr(run)(*arrays))
        assert flops.exact
        counts.append(flops.matmul)
        assert 4 * forward < flops.matmul < 1.2 * 4 * forward
    assert counts[1] < 4.1 * counts[0]


@pytest.mark.target("cuda")
@pytest.mark.parametrize(("by_channel", "most"), [(False, 0.5), (True, 0.75)])
def test_temporaries_of_a_long_layer_on_a_gpu(by_channel, most):
    """Beside arguments of 2 or 3 GiB, and as many of results."""
    run, arrays, _ = long_layer(65_536, by_channel=by_channel)
    report = memory.report(run, *arrays, target="h200")
    assert report.temporaries < most * 2**30


@pytest.mark.torch
def test_in_bfloat16_it_is_as_close_to_float64_as_transformers():
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    Pos, Key, Value = hax.make_axes(position=300, key=16, value=32)
    of_keys = (Batch, Pos, Heads, Key)
    unit = [
        x / hax.sqrt(hax.sum(x * x, Key)) for x in (normal(i, *of_keys) for i in (0, 1))
    ]
    value, cotangent = (normal(i, Batch, Pos, Heads, Value) for i in (2, 3))
    log_decay = -hax.nn.softplus(normal(4, Batch, Pos, Heads) - 2.0)
    beta = hax.nn.sigmoid(normal(5, Batch, Pos, Heads))
    rounded = [x.astype(jnp.bfloat16) for x in (*unit, value, cotangent)]

    def ours(query, key, value, log_decay, beta, cotangent):
        def attend(query, key, value, log_decay, beta):
            # Theirs scales queries; by a power of two, which is exact
            arrays = query * Key.size**-0.5, key, value, log_decay, beta
            return linear_attention(*arrays, Pos, Key, Value)[0]

        output, pullback = jax.vjp(attend, query, key, value, log_decay, beta)
        return [x.array for x in (output, *pullback(cotangent))]

    arrays = *rounded[:3], log_decay, beta, rounded[3]
    found = quick_jit(ours)(*arrays)
    with jax.enable_x64(True):
        expected = quick_jit(ours)(*(x.astype(jnp.float64) for x in arrays))
        expected = [np.asarray(x) for x in expected]

    def tensor(x, dtype):
        return torch.tensor(np.asarray(x.astype(jnp.float32).array), dtype=dtype)

    *inputs, decays, betas, last = (
        tensor(x, torch.bfloat16 if x.dtype == jnp.bfloat16 else torch.float32)
        for x in arrays
    )
    inputs = [x.requires_grad_() for x in (*inputs, decays, betas)]
    output, _ = modeling.torch_chunk_gated_delta_rule(*inputs)
    output.backward(last)
    theirs = [output, *(x.grad for x in inputs)]
    for mine, other, exact in zip(found, theirs, expected, strict=True):
        off = np.linalg.norm(np.asarray(mine, np.float64) - exact)
        other = other.detach().to(torch.float64).numpy()
        assert off <= 1.001 * np.linalg.norm(other - exact)
