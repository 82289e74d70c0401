"""Linear attention and convolutions of positions divided over devices equal those on
one.
"""

import haliax as hax
import jax
import jax.numpy as jnp
import pytest
from haliax import Axis

from stacked_remat.ops import UnsupportedCallError, short_convolution
from tests.ops.test_per_device import mesh

from ..blocks import assert_close_to_scale, quick_jit
from ..random_arrays import normal
from .test_linear_attention import Batch, Group, Heads, Key, Value, arguments, attended

Pos, Tap = Axis("pos", 32), Axis("tap", 4)
# Documents that end with a device's part, within it, and after several
DOCUMENTS = [[0] * 8 + [1] * 3 + [2] * 21, [3] * 15 + [4, 3] + [5] * 15]
# To axes of a mesh of 2 by 4
MAPPINGS = [
    {"pos": "four", "heads": "two"},
    pytest.param({"pos": ("two", "four")}, marks=pytest.mark.deep),
    pytest.param({"pos": "four", "batch": "two"}, marks=pytest.mark.deep),
    pytest.param({"pos": "two"}, marks=pytest.mark.deep),
    pytest.param({"batch": "two"}, marks=pytest.mark.deep),
]
LENGTHS = [[32, 32], [17, 0], [8, 32]]


def on_devices(mapping, run, arrays, options):
    with jax.set_mesh(mesh(two=2, four=4)), hax.axis_mapping(mapping):
        return quick_jit(run)(hax.shard(arrays), hax.shard(options))


def with_gradients(operation):
    """The results and the gradients of a sum over both."""

    def run(arrays, options):
        def loss(arrays):
            output, last = operation(arrays, options)
            if "lengths" in options:
                is_padding = hax.arange(Pos).broadcast_axis(Batch) >= options["lengths"]
                output = hax.where(is_padding, 0.0, output)
            total = hax.sum(hax.sin(output)) + hax.sum(hax.cos(last))
            return total.scalar(), (output, last)

        return jax.value_and_grad(loss, has_aux=True)(arrays)

    return run


def options():
    return {"documents": hax.named(jnp.array(DOCUMENTS), (Batch, Pos))}


@pytest.mark.parametrize("mapping", MAPPINGS, ids=str)
@pytest.mark.parametrize("by_channel", [False, True])
def test_linear_attention(by_channel, mapping):
    state = normal(5, Batch, Heads, Group, Key, Value)
    arrays = *arguments(Pos, by_channel=by_channel), state

    def attend(arrays, options):
        *arrays, state = arrays
        return attended(arrays, Pos, state=state, **options)

    run = with_gradients(attend)
    more = options() | {"lengths": hax.named(jnp.array([32, 17]), Batch)}
    expected = quick_jit(run)(arrays, more)
    found = on_devices(mapping, run, arrays, more)
    assert_close_to_scale(found, expected, 1e-5)


@pytest.mark.parametrize("mapping", MAPPINGS, ids=str)
def test_short_convolution(mapping):
    x, weight = normal(0, Batch, Pos, Heads, Key), normal(1, Tap, Heads, Key)
    window = normal(2, Batch, Tap.resize(3), Heads, Key)

    def convolve(arrays, options):
        x, weight, window = arrays
        return short_convolution(x, weight, Pos, Tap, window=window, **options)

    run = with_gradients(convolve)
    cases = [{}]
    for lengths in LENGTHS:
        cases.append(options() | {"lengths": hax.named(jnp.array(lengths), Batch)})
    for more in cases:
        expected = quick_jit(run)((x, weight, window), more)
        found = on_devices(mapping, run, (x, weight, window), more)
        assert_close_to_scale(found, expected, 1e-5)


def test_parts_are_as_long_as_the_window():
    Short = Pos.resize(8)
    x, weight = normal(0, Short), normal(1, Tap)
    with (
        jax.set_mesh(mesh(data=4)),
        hax.axis_mapping({"pos": "data"}),
        pytest.raises(UnsupportedCallError, match="has 2 positions .* fewer devices"),
    ):
        short_convolution(x, weight, Short, Tap)
