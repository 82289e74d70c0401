"""Tests by running it whether a device's compiler moves carries to the host and back
correctly.

Offloading is an annotation that XLA carries out, and it has silently given wrong
results: one release read offloaded residuals of a scan in the wrong order on GPUs
(openxla/xla#46231).

So the gradients of a small stack under each policy that offloads are compared with
those of one that keeps all carries on the device. A compiler may be right for one
program and wrong for another; the three policies offload by the three ways there are:
carries of a plain scan, boundaries of a sweep, and internals of a layer by name.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis
from jaxtyping import Array

from ._checkpoint import checkpoint_name
from ._policy import OFFLOAD, ScanCheckpointPolicy, ScanCheckpointSpec
from ._scan.api import fold

_POLICIES: tuple[ScanCheckpointPolicy, ...] = (
    ScanCheckpointPolicy(save_carries=OFFLOAD),
    ScanCheckpointPolicy(save_carries=OFFLOAD, nested=True),
    ScanCheckpointPolicy(offload_block_internals=["hidden"]),
)
_LAYERS = Axis("layers", 8)
# Slices of a whole tile: smaller ones fail on TPUs (jax#24115)
_WIDTH = 128
# Of the largest entry; a carry that is read out of order is wrong by its own size
_TOLERANCE = 1e-3


class OffloadError(RuntimeError):
    """Offloaded gradients differ from those that stay on the device."""


def check_offload() -> None:
    """Make sure that the default device computes the same gradients with offloading as
    without.

    Runs a stack of 8 layers of 128 x 128 under the policies that offload, once per
    process and device. Call it before training with a policy that offloads; for another
    device in `jax.default_device(device)`.

    Raises:
        OffloadError: they differ, or the compiler refuses the program; says what to use
            instead.

    Cost: four small compilations, and 6 MiB of device memory.
    """
    (device,) = jnp.zeros(()).devices()
    _check(device)


# Once for each device: a compiler does not change while a process runs
@functools.cache
def _check(device: Any) -> None:
    expected = _gradients(True)  # all carries on the device
    wrong: list[str] = []
    for policy in _POLICIES:
        # A compiler that refuses the program is as little use as one that is wrong
        try:
            gradients = _gradients(policy)
        except jax.errors.JaxRuntimeError as error:
            wrong.append(
                f"{policy!r}: the compiler refuses it: {str(error).splitlines()[0]}"
            )
            continue
        largest = np.max(np.abs(expected))
        error = np.max(np.abs(gradients - expected)) / largest
        if not error <= _TOLERANCE:  # NaN too
            wrong.append(f"{policy!r}: off by {error:.2g} of the largest entry")
    if wrong:
        raise OffloadError(
            f"Offloading gives wrong gradients on {device.device_kind}"
            f" ({device.platform}) with jax {jax.__version__}:\n  "
            + "\n  ".join(wrong)
            + '\nUse a policy that stays on the device (remat="nested", or nested with'
            " fewer carries: ScanCheckpointPolicy(max_carries=k)), or another version"
            " of JAX. A known cause on GPUs is openxla/xla#46231, fixed after jaxlib"
            " 0.11.0."
        )


def _gradients(remat: ScanCheckpointSpec) -> np.ndarray:
    """The gradients of the weights of a stack under a policy."""

    def layer(x: Array, weight: Array) -> Array:
        return x + jnp.sin(checkpoint_name(jnp.sin(x @ weight), "hidden"))

    def loss(weights: Array, x: Array) -> Array:
        return jnp.sum(fold(layer, _LAYERS, remat=remat)(x, weights) ** 2)

    # So scaled that products keep the size of what they are taken of
    shape = (_LAYERS.size, _WIDTH, _WIDTH)
    normal = jax.random.normal(jax.random.key(0), shape)
    weights = normal * _WIDTH**-0.5
    gradient = jax.jit(jax.grad(loss))
    return np.asarray(gradient(weights, normal[0]))
