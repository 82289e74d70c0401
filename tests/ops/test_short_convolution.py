"""Tests of short convolutions against one position at a time."""

import haliax as hax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from stacked_remat.ops import short_convolution, short_convolution_step

from ..blocks import assert_close, quick_jit
from ..random_arrays import normal

Batch, Pos, Heads, Dim = hax.make_axes(batch=2, position=9, heads=2, dim=3)
Tap = Axis("tap", 4)
Kept = Axis("tap", 3)
WEIGHT = normal(1, Heads, Tap, Dim)


def inputs(Pos=Pos):
    return normal(0, Batch, Pos, Heads, Dim)


def by_position(x, window, documents):
    """`[batch, pos, heads, dim]`, with NumPy."""
    weight = np.asarray(WEIGHT.rearrange((Tap, Heads, Dim)).array)
    longer = np.concatenate([window, x], axis=1)
    y = np.zeros_like(x)
    for b, t, tap in np.ndindex(*x.shape[:2], Tap.size):
        source = t + tap - 3
        between = documents[b, max(source, 0) : t + 1]
        if len(set(between)) == 1:
            y[b, t] += weight[tap] * longer[b, source + 3]
    return y


DOCUMENTS = np.array([[0, 0, 1, 1, 1, 1, 1, 0, 0], [3, 4, 4, 4, 4, 4, 4, 4, 4]])


@pytest.mark.parametrize("has_documents", [False, True])
def test_it_equals_one_position_at_a_time(has_documents):
    documents = DOCUMENTS if has_documents else np.zeros_like(DOCUMENTS)
    options = {}
    if has_documents:
        options["documents"] = hax.named(jnp.asarray(documents), (Batch, Pos))
    x = inputs()
    window = normal(2, Batch, Kept, Heads, Dim)

    def convolve(x, window):
        return short_convolution(x, WEIGHT, Pos, Tap, window=window, **options)

    y, after = quick_jit(convolve)(x, window)
    expected = by_position(np.asarray(x.array), np.asarray(window.array), documents)
    assert y.axes == x.axes and after.axes == window.axes
    np.testing.assert_allclose(y.array, expected, atol=1e-5)
    last = np.array(x.array[:, -3:])
    if has_documents:
        last[0, 0] = 0.0  # of another document
    np.testing.assert_array_equal(after.array, last)


@pytest.mark.parametrize("has_documents", [False, True])
def test_padding_is_not_in_the_window(has_documents):
    x = inputs()
    window = normal(2, Batch, Kept, Heads, Dim)
    lengths = [0, 2]
    options = {"lengths": hax.named(jnp.array(lengths), Batch)}
    if has_documents:
        options["documents"] = hax.named(jnp.asarray(DOCUMENTS), (Batch, Pos))
    _, after = quick_jit(
        lambda x: short_convolution(x, WEIGHT, Pos, Tap, window=window, **options)
    )(x)
    longer = hax.concatenate("tap", [window, x.rename({"position": "tap"})])
    for b, length in enumerate(lengths):
        expected = np.array(longer[Batch, b].array[length : length + 3])
        if has_documents and b == 1:
            expected[:2] = 0.0
        np.testing.assert_array_equal(after[Batch, b].array, expected)


def test_positions_one_by_one_or_in_parts_are_those_of_the_whole():
    x = inputs()
    expected, last = short_convolution(x, WEIGHT, Pos, Tap)

    @quick_jit
    def in_parts(x):
        y, window = short_convolution(x[Pos, :2], WEIGHT, Pos.resize(2), Tap)
        outputs = [y]
        for i in range(2, Pos.size):
            y, window = short_convolution_step(x[Pos, i], WEIGHT, Tap, window)
            outputs.append(y.broadcast_axis(Pos.resize(1)))
        return hax.concatenate(Pos.name, outputs).rearrange(x.axes), window

    assert_close(in_parts(x), (expected, last))


def test_one_tap_is_a_factor():
    One = Tap.resize(1)
    x, weight = inputs(), WEIGHT[Tap, :1]
    y, window = short_convolution(x, weight, Pos, One)
    assert window.axis_size("tap") == 0
    assert_close(y, x * weight[One, 0])
    step, _ = short_convolution_step(x[Pos, 0], weight, One, window[Batch, :])
    assert_close(step, y[Pos, 0])


def test_documents_and_lengths_may_lack_axes():
    x = inputs()
    documents = hax.named(jnp.asarray(DOCUMENTS[0]), Pos)
    options = {"documents": documents, "lengths": hax.named(jnp.array([3, 9]), Batch)}
    found = short_convolution(x, WEIGHT, Pos, Tap, **options)
    options["documents"] = documents.broadcast_axis(Batch)
    assert_close(found, short_convolution(x, WEIGHT, Pos, Tap, **options))


def test_sums_are_in_float32():
    x, weight = inputs().astype(jnp.bfloat16), WEIGHT.astype(jnp.bfloat16)
    y, window = short_convolution(x, weight, Pos, Tap)
    assert y.dtype == window.dtype == jnp.bfloat16
    wide, _ = short_convolution(
        x.astype(jnp.float32), weight.astype(jnp.float32), Pos, Tap
    )
    np.testing.assert_array_equal(y.array, wide.array.astype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (inputs()[Heads, 0], {}, "`x` has .* must have heads=2, dim=3"),
        (
            inputs(),
            {"window": hax.zeros((Batch, Tap, Heads, Dim))},
            "`window` has .*tap=4.* must have .*tap=3",
        ),
        (inputs(), {"lengths": hax.zeros(Heads, int)}, "`lengths` has heads=2"),
        (inputs(), {"documents": hax.zeros(Pos)}, "`documents` must be integers"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(x, options, message):
    with pytest.raises(ValueError, match=message):
        short_convolution(x, WEIGHT, Pos, Tap, **options)


@pytest.mark.parametrize(
    ("x", "weight", "Pos", "Tap", "message"),
    [
        (inputs(), WEIGHT, "other", Tap, "`x` has .*, and no axis 'other'"),
        (inputs(), WEIGHT, Pos, "other", "`weight` has .*, and no axis 'other'"),
        (
            inputs(),
            WEIGHT["tap", :0],
            Pos,
            "tap",
            "`weight` has .*tap=0.*: there are no",
        ),
        (inputs().rename({Batch: "tap"}), WEIGHT, Pos, Tap, "Rename it in `weight`"),
        (inputs(), WEIGHT.broadcast_axis(Pos), Pos, Tap, "axis of positions"),
    ],
)
def test_axes_that_do_not_fit_are_refused(x, weight, Pos, Tap, message):
    with pytest.raises(ValueError, match=message):
        short_convolution(x, weight, Pos, Tap)


def test_without_positions_the_window_stays():
    x, documents = inputs()[Pos, :0], hax.zeros(Pos.resize(0), int)
    window = normal(2, Batch, Kept, Heads, Dim)
    options = {"documents": documents, "window": window}
    y, after = short_convolution(x, WEIGHT, Pos.name, Tap, **options)
    assert y.axes == x.axes
    assert_close(after.rearrange(window.axes), window)
