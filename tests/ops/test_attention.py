"""Tests of attention against one head and one position at a time."""

import functools

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from stacked_remat import ScanCheckpointPolicy, fold, memory
from stacked_remat.ops import _attention_backends, causal_attention
from stacked_remat.ops._attention_backends import (
    BACKENDS,
    AttentionCall,
    exact_attention,
)
from stacked_remat.ops._attention_blockwise import BLOCKWISE
from stacked_remat.ops._attention_rule import Blocks, Sight, attend_by
from stacked_remat.ops._attention_splash import splash_kernel
from stacked_remat.ops._backends import backends_taken, choose_backend

from ..blocks import assert_close, quick_jit
from ..random_arrays import normal

Batch, Pos, HeadDim = Axis("batch", 2), Axis("position", 5), Axis("head_dim", 6)
KVHeads, HeadsPerKV = Axis("kv_heads", 2), Axis("heads_per_kv", 3)


def run(fn, *args):
    """`fn(*args)`, compiled in a hurry."""
    return quick_jit(fn)(*args)


def attend(query, key, value, *, Pos=Pos, **options):
    def of(query, key, value):
        return causal_attention(query, key, value, Pos, KVHeads, HeadDim, **options)

    return run(of, query, key, value)


def naive_attention(
    query, key, value, documents, window=None, sinks=None, softcap=None
):
    """`[batch, pos, kv, group, dim]` to `[batch, pos, kv, group, value_dim]`, a query
    head and a position at a time.
    """
    out = np.zeros((*query.shape[:-1], value.shape[-1]), query.dtype)
    for b, q, kv, group in np.ndindex(query.shape[:4]):
        first = 0 if window is None else max(0, q + 1 - window)
        seen = [s for s in range(first, q + 1) if documents[b, s] == documents[b, q]]
        scores = key[b, seen, kv] @ query[b, q, kv, group] / np.sqrt(query.shape[-1])
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        sink = 0.0 if sinks is None else np.exp(sinks[kv, group] - scores.max())
        weights = np.exp(scores - scores.max())
        out[b, q, kv, group] = (weights / (weights.sum() + sink)) @ value[b, seen, kv]
    return out


def arrays(length, seed=0, dtype=jnp.float32, value_dim=6):
    """Query, key, value and a cotangent of the result."""
    heads, shape = (2, length, 2, 3), (2, length, 2)
    shapes = (*heads, 6), (*shape, 6), (*shape, value_dim), (*heads, value_dim)
    return tuple(
        normal(4 * seed + k, *shape, dtype=dtype) for k, shape in enumerate(shapes)
    )


KEPT = pytest.mark.skipif(
    getattr(jax.config, "jax_remat3", False) and jax.__version_info__ < (0, 11),
    reason="with JAX_REMAT3=1 JAX 0.10 keeps kernels whose results nothing reads",
)
SINKS = hax.named(
    jnp.array([[-2.0, 0.0, 3.0], [1.0, -0.5, 30.0]]), (KVHeads, HeadsPerKV)
)


@pytest.mark.parametrize("backend", ["exact", "blockwise"])
@pytest.mark.parametrize(
    ("window", "sinks", "softcap", "value_dim"),
    [(None, None, None, 6), (3, SINKS, None, 2), (4, SINKS, 0.8, 9)],
)
def test_it_equals_one_head_and_position_at_a_time(
    window, sinks, softcap, value_dim, backend
):
    query, key, value, _ = arrays(9, value_dim=value_dim)
    ValueDim = Axis("value_dim", value_dim)
    # Consecutive positions of one number.
    documents = jnp.array([[1, 0, 1, 0, 2, 0, 1, 2, 2], [3, 3, 0, 3, 0, 0, 3, 1, 1]])
    in_order = np.cumsum(np.diff(np.asarray(documents), prepend=-1) != 0, axis=1)
    Pos = Axis("position", 9)
    attended = attend(
        hax.named(query, (Batch, Pos, KVHeads, HeadsPerKV, HeadDim)),
        hax.named(key, (Batch, Pos, KVHeads, HeadDim)),
        hax.named(value, (Batch, Pos, KVHeads, ValueDim)),
        Pos=Pos,
        documents=hax.named(documents, (Batch, Pos)),
        window=window,
        sinks=None if sinks is None else sinks.rearrange((HeadsPerKV, KVHeads)),
        softcap=softcap,
        backend=backend,
    )
    own = None if sinks is None else np.asarray(sinks.array)
    query, key, value = map(np.asarray, (query, key, value))
    options = dict(window=window, sinks=own, softcap=softcap)
    expected = naive_attention(query, key, value, in_order, **options)
    assert attended.axes == (Batch, Pos, KVHeads, HeadsPerKV, ValueDim)
    np.testing.assert_allclose(attended.array, expected, atol=1e-5)


@pytest.mark.parametrize("value_dim", [6, 4])
def test_tangents_are_those_of_the_gradient(value_dim):
    """Forward mode, which `"exact"` alone has."""
    *inputs, cotangent = arrays(7, value_dim=value_dim)
    *tangents, _ = arrays(7, seed=1, value_dim=value_dim)
    blocks = Blocks(0.4, 7, 5, softcap=0.8)

    @quick_jit
    def both(inputs, tangents, cotangent):
        def of(query, key, value):
            return exact_attention(query, key, value, Sight(), blocks, SINKS.array)

        _, forward = jax.jvp(of, inputs, tangents)
        _, pullback = jax.vjp(of, *inputs)
        backward = pullback(cotangent)
        along = [jnp.vdot(one, ct) for one, ct in zip(tangents, backward, strict=True)]
        return jnp.vdot(forward, cotangent), sum(along)

    found, expected = both(tuple(inputs), tuple(tangents), cotangent)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def attended_with_gradients(of, blocks, rows=None):
    """What attention by `of` gives, and the gradients of its inputs."""

    @quick_jit
    def run(query, key, value, cotangent, sinks, documents=None):
        def attend(query, key, value, sinks):
            return of(query, key, value, Sight.of(documents, rows), blocks, sinks)

        attended, pullback = jax.vjp(attend, query, key, value, sinks)
        return attended, pullback(cotangent)

    return run


def random_documents(rng, length):
    """Documents of random lengths, or any numbers."""
    rows = rng.integers(0, 4, (2, length))
    return jnp.asarray(np.sort(rows) if rng.random() < 0.7 else rows, jnp.int32)


@pytest.mark.parametrize(
    (
        "length",
        "size",
        "window",
        "has_documents",
        "rows",
        "sinks",
        "dtype",
        "softcap",
        "value_dim",
    ),
    [
        (13, 4, None, True, None, None, jnp.float32, None, 6),
        (11, 2, 3, True, (1, 2, 7, 10), SINKS.array, jnp.float32, 0.7, 4),
        (7, 8, 2, False, None, SINKS.array, jnp.float32, None, 6),
        (16, 2, 5, True, (2, 3, 4, 10, 11, 15), SINKS.array, jnp.bfloat16, None, 6),
        (10, 4, None, False, None, None, jnp.float32, 0.5, 9),
    ],
)
def test_values_and_gradients_in_blocks_are_those_of_the_definition(
    length, size, window, has_documents, rows, sinks, dtype, softcap, value_dim
):
    rows = None if rows is None else jnp.asarray(rows, jnp.int32)
    given = [
        x if rows is None or i in (1, 2) else x[:, rows]
        for i, x in enumerate(arrays(length, value_dim=value_dim))
    ]
    blocks = Blocks(0.4, size, window, softcap=softcap)
    given = [*(x.astype(dtype) for x in given), sinks]

    def close(got, wanted):
        atol, rtol = (3e-5, 1e-4) if dtype == jnp.float32 else (0.1, 0.1)
        np.testing.assert_allclose(
            np.asarray(got, np.float64), wanted, atol=atol, rtol=rtol
        )

    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(jnp.float64), given)
        found, expected = (
            attended_with_gradients(of, blocks, rows)
            for of in (functools.partial(attend_by, BLOCKWISE), exact_attention)
        )
        for _ in range(8 if has_documents else 1):
            documents = random_documents(rng, length) if has_documents else None
            got, wanted = found(*given, documents), expected(*wide, documents)
            jax.tree.map(close, got, wanted)


def test_memory_grows_with_the_length_and_not_with_its_square():
    def temporaries(length):
        query, key, value, _ = (jnp.zeros(x.shape, x.dtype) for x in arrays(length))
        gradient = jax.grad(
            lambda q: jnp.sum(
                attend_by(BLOCKWISE, q, key, value, Sight(), Blocks(1.0, 32))
            )
        )
        return memory.report(gradient, query).temporaries

    assert temporaries(1024) / temporaries(256) < 5


@pytest.mark.remat3
@pytest.mark.parametrize(
    "kernel", [BLOCKWISE, pytest.param(splash_kernel(interpret=True), marks=KEPT)]
)
def test_with_output_and_log_sum_exp_saved_a_layer_does_not_attend_again(kernel):
    query, key, value, _ = arrays(256)

    def loops(names):
        def layer(x, scale):
            inputs = x * scale, key * scale, value * scale
            return x + attend_by(kernel, *inputs, Sight(), Blocks(0.4, 128))

        def loss(scales):
            policy = ScanCheckpointPolicy(save_block_internals=names)
            return jnp.sum(fold(layer, Axis("layers", 3), remat=policy)(query, scales))

        compiled = quick_jit(jax.grad(loss)).lower(jnp.ones(3)).compile()
        return compiled.as_text().count(" while(")

    everything = loops(["attention_output", "attention_lse"])
    assert everything < loops(["attention_output"]) == loops(["nothing"])


def test_extra_batch_axes_and_any_order_of_axes():
    Group = Axis("more", 2)
    axes = (Group, Batch, Pos, KVHeads, HeadsPerKV, HeadDim)
    query = normal(0, *axes)
    key, value = (normal(i, Group, Batch, Pos, KVHeads, HeadDim) for i in (1, 2))
    expected = attend(query, key, value, backend="exact")
    order = (HeadDim, Pos, HeadsPerKV, Group, KVHeads, Batch)
    found = run(
        lambda q, k, v: causal_attention(q, k, v, "position", "kv_heads", HeadDim),
        query.rearrange(order),
        key,
        value,
    )
    assert found.axes == order and expected.axes == axes
    np.testing.assert_allclose(found.rearrange(axes).array, expected.array, atol=1e-5)


def test_gradients_have_the_dtypes_of_what_they_are_of():
    query, key, value = named_arrays()
    key = key.astype(jnp.bfloat16)

    def total(arrays):
        query, key, value = arrays
        attended = causal_attention(
            query, key, value, Pos, KVHeads, HeadDim, backend="blockwise"
        )
        return hax.sum(attended).scalar()

    with jax.numpy_dtype_promotion("standard"):
        found = jax.eval_shape(jax.grad(total), (query, key, value))
    assert [one.dtype for one in found] == [jnp.float32, jnp.bfloat16, jnp.float32]


def test_no_group_axis_is_one_head_a_key_head():
    query, key, value = (array["batch", 0] for array in named_arrays())
    query = query["heads_per_kv", 0]
    found = attend(query, key, value)
    expected = attend(query, key, value, backend="exact")
    np.testing.assert_allclose(found.array, expected.array, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            dict(backend="cudnn"),
            (
                "'cudnn' does not support this call: it runs on NVIDIA GPUs, and the"
                " program is for 'cpu'"
            ),
        ),
        (dict(window=0), "window must be a number of positions, at least 1; got 0"),
        (dict(window=True), "at least 1; got True"),
        (
            dict(key=jnp.ones(3), Pos="position"),
            "`key` must be a named array of floating-point numbers; got",
        ),
        (
            dict(HeadDim=Axis("head_dim", 3)),
            "`key` has .*head_dim=6; it must have .* head_dim=3",
        ),
        (
            dict(Pos=Axis("position", 4)),
            "`key` has .*position=5.*; it must have position=4",
        ),
        (
            dict(query=hax.ones((Batch, KVHeads, HeadDim))),
            "`query` has .*; it must have .*position=5",
        ),
        (
            dict(query=hax.ones((Batch, Pos, KVHeads, HeadDim), dtype=int)),
            "`query` must be floating-point numbers; got int32",
        ),
        (
            dict(documents=hax.ones((Batch, Pos))),
            "`documents` must be integers; got float32",
        ),
        (
            dict(documents=jnp.ones((2, 5), int)),
            "`documents` must be a named array of integers; got Array",
        ),
        (
            dict(documents=hax.ones((Pos, Axis("x", 2)), dtype=int)),
            (
                "`documents` has position=5, x=2; it must have position=5, and may have"
                " batch=2"
            ),
        ),
        (
            dict(sinks=hax.ones(KVHeads)),
            "`sinks` has kv_heads=2; it must have kv_heads=2, heads_per_kv=3",
        ),
        (
            dict(value=hax.ones((Batch, Pos, KVHeads, HeadDim, Axis("more", 2)))),
            (
                "`value` has .*more=2; it must have batch=2, position=5, kv_heads=2 and"
                " one axis of a head's coordinates, of any size"
            ),
        ),
        (
            dict(value=hax.ones((Batch, Pos, KVHeads))),
            "`value` has .*; it must have .* and one axis of a head's coordinates",
        ),
        (
            dict(value=hax.ones((Batch, Pos, HeadDim))),
            "`value` has .*; it must have batch=2, position=5, kv_heads=2",
        ),
        (
            dict(value=hax.ones((Batch, Pos, KVHeads, Axis("heads_per_kv", 2)))),
            (
                "`value` has the axis heads_per_kv=2, whose name is that of an axis of"
                " query heads. Rename it, as to 'head_dim'"
            ),
        ),
        (dict(softcap=0.0), "softcap must be a positive number, or None .*; got 0.0"),
        (dict(softcap=jnp.ones(())), "softcap must be a positive number"),
    ],
)
def test_arguments_are_checked(change, message):
    query, key, value = named_arrays()
    arguments = (
        dict(
            query=query, key=key, value=value, Pos=Pos, KVHeads=KVHeads, HeadDim=HeadDim
        )
        | change
    )
    with pytest.raises(ValueError, match=message):
        causal_attention(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(dtype=jnp.dtype("float32")), "takes bfloat16 and float16, not float32"),
        (dict(head_dim=136), "multiples of 8 up to 128, not 136"),
        (dict(value_dim=60), "multiples of 8 up to 128, not 60"),
        (dict(value_dim=64), None),
        (dict(blocks=Blocks(1.0, 8, softcap=50.0)), "it has no softcap of the scores"),
        (dict(has_documents=True), "no document boundaries"),
        (dict(blocks=Blocks(1.0, 8, window=4)), None),
        (dict(among=2), "the axis of positions is divided over devices"),
        ({}, None),
        (
            dict(installed=False),
            r"JAX finds no cuDNN here (pip install nvidia-cudnn-cu13)",
        ),
    ],
)
def test_cudnn_says_why_it_does_not_support_a_call(change, message, monkeypatch):
    change = dict(change)
    installed = change.pop("installed", True)
    monkeypatch.setattr(_attention_backends, "cudnn_is_installed", lambda: installed)
    call = dict(platform="cuda", dtype=jnp.dtype("bfloat16"), position=64, head_dim=128)
    call |= dict(value_dim=128, has_documents=False, blocks=Blocks(1.0, 8))
    whole = AttentionCall(**(call | change))
    reason = BACKENDS["cudnn"].why_not(whole)
    assert reason is None if message is None else message in reason
    taken = "blockwise" if message else "cudnn"
    with backends_taken() as found:
        assert (
            choose_backend("attention", BACKENDS, "auto", whole, "window 4")
            is BACKENDS[taken].kernel
        )
    assert found["attention, window 4"].startswith(taken)
    assert message is None or f"not cudnn: {reason}" in found["attention, window 4"]


@pytest.mark.parametrize("value_dim", [6, 2, 9])
def test_cudnn_is_given_keys_and_values_of_one_width(value_dim, monkeypatch):
    scale = 0.4

    def causal(query, key, value):
        assert query.shape[-1] == key.shape[-1] == value.shape[-1]
        key, value = (jnp.repeat(x, 3, axis=2) for x in (key, value))
        scores = jnp.einsum("bqhd,bshd->bhqs", query, key) * scale
        scores = jnp.where(jnp.tri(query.shape[1], dtype=bool), scores, -jnp.inf)
        output = jnp.einsum("bhqs,bshd->bqhd", jax.nn.softmax(scores), value)
        return output, jax.nn.logsumexp(scores, axis=-1)

    def gradients(inputs, results, cotangent, scale, window):
        assert results[0].shape == cotangent.shape
        return jax.vjp(lambda *some: causal(*some)[0], *inputs)[1](cotangent)

    forward = lambda query, key, value, scale, window: causal(query, key, value)  # noqa: E731
    monkeypatch.setattr(_attention_backends, "cudnn_attention", forward)
    monkeypatch.setattr(_attention_backends, "cudnn_attention_gradients", gradients)
    kernel = functools.partial(attend_by, BACKENDS["cudnn"].kernel)
    given = (*arrays(7, value_dim=value_dim), None)
    found, expected = (
        attended_with_gradients(of, Blocks(scale, 7))(*given)
        for of in (kernel, exact_attention)
    )
    assert_close(found, expected, 1e-4, 3e-5)


def test_a_window_over_all_positions_is_none():
    arguments = *named_arrays(), Pos, KVHeads, HeadDim
    wide, none = (
        causal_attention(*arguments, window=window) for window in (2**40, None)
    )
    np.testing.assert_allclose(wide.array, none.array, rtol=1e-6)


def test_no_positions():
    query, key, value = (array["position", :0] for array in named_arrays())
    assert (
        causal_attention(query, key, value, Pos.resize(0), KVHeads, HeadDim).axes
        == query.axes
    )


def named_arrays():
    query, key, value, _ = arrays(Pos.size)
    axes = (Batch, Pos, KVHeads, HeadDim)
    return (
        hax.named(query, (*axes[:3], HeadsPerKV, HeadDim)),
        hax.named(key, axes),
        hax.named(value, axes),
    )


def test_second_derivatives_of_blockwise_attention_are_refused():
    query, key, value = named_arrays()

    def gradient(query, backend="blockwise"):
        def total(query):
            attended = causal_attention(
                query, key, value, Pos, KVHeads, HeadDim, backend=backend
            )
            return hax.sum(attended**2).scalar()

        return jax.grad(total)(query)

    jax.eval_shape(
        lambda: jax.jvp(lambda query: gradient(query, "exact"), (query,), (query,))
    )
    for derivative in (
        lambda: jax.jvp(gradient, (query,), (query,)),
        lambda: jax.grad(lambda query: hax.sum(gradient(query) ** 2).scalar())(query),
    ):
        with pytest.raises(
            NotImplementedError, match="first derivatives only.*backend='exact'"
        ):
            jax.eval_shape(derivative)


def test_a_scale_that_is_learnt_is_refused():
    query, key, value = named_arrays()

    def total(scale):
        return hax.sum(
            causal_attention(query, key, value, Pos, KVHeads, HeadDim, scale=scale)
        ).scalar()

    jax.eval_shape(lambda: total(0.3))
    with pytest.raises(ValueError, match="multiply query by one that is learnt"):
        jax.grad(total)(0.3)
