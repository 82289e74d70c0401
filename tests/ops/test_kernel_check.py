"""Kernels are tried on the device before they are used, and refused where they are wrong."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from stacked_remat.ops._backends import choose_backend
from stacked_remat.ops._expert_backends import ExpertsBackend, ExpertsFacts
from stacked_remat.ops._grouped_product import kernels_of
from stacked_remat.ops._kernel_check import against_device

from .test_grouped_products import _outer, _product


def broken(x, y, sizes, dtype):
    return jnp.roll(_outer(x, y, sizes, dtype), 1, axis=0)


def failing(x, y, sizes, dtype):
    raise RuntimeError("no kernel image.\nmore")


@pytest.mark.parametrize(
    ("outer", "message"),
    [(_outer, None), (broken, "off by .* of the largest entry"), (failing, "no kernel image")],
)
def test_kernels_are_tried_on_the_device_before_they_are_used(outer, message):
    kernels = kernels_of(_product, outer)
    backends = {
        "here": ExpertsBackend(
            kernels, lambda call: against_device("here", kernels, call.dtype, call.platform)
        ),
        "block": ExpertsBackend(None),
    }
    call = ExpertsFacts("cpu", jnp.dtype("float32"))
    choose = functools.partial(choose_backend, "backend of experts", backends)
    if message is None:
        assert choose("auto", call) is backends["here"]
        return
    with pytest.warns(UserWarning, match=f"'here' is not used: on cpu with jax .*{message}"):
        assert jax.jit(lambda: choose("auto", call) is backends["block"])()
    with pytest.raises(ValueError, match=message):
        choose("here", call)  # without another warning
    other = dataclasses.replace(call, platform="tpu")  # which is not attached
    assert choose("auto", other) is backends["here"]
