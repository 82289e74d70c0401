"""Tests on the device itself whether kernels of grouped products give the gradients of their definition."""

import functools
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._placement import platform_of, target_device
from ._expert_chunks import ChunkLoop, chunk_plan
from ._expert_loop import Inputs, apply_experts
from ._grouped_product import Kernels

_TOKENS, _EMBED, _INNER, _CHOSEN, _EXPERTS = 200, 128, 64, 2, 4
_TOLERANCE = 0.05  # of the largest entry; a row or tile that is read from elsewhere is wrong by its own size


def against_device(name: str, kernels: Kernels, dtype: Any, platform: str) -> str | None:
    """Why kernels can't be relied on; None if they can, or if the program is for a device not attached.

    Computes and differentiates a small layer of experts, once in a process for each device and dtype.
    Warns if the results are wrong, since `backend="auto"` then takes another backend.

    Args:
        name: of the backend.
        kernels: its grouped products.
        dtype: of the tokens.
        platform: of the device that the program is for.

    Cost: two small compilations.
    """
    device = target_device()
    is_attached = device in jax.local_devices() and platform_of(device) == platform
    return _reason(name, kernels, dtype, device) if is_attached else None


@functools.cache
def _reason(name: str, kernels: Kernels, dtype: Any, device: Any) -> str | None:
    # The caller may be within a trace and contexts of JAX, which another thread does not have.
    with ThreadPoolExecutor(1) as pool:
        reason = pool.submit(_difference, kernels, dtype, device).result()
    if reason is not None:
        reason = f"on {device.device_kind} with jax {jax.__version__} {reason}"
        warnings.warn(f"The backend of experts {name!r} is not used: {reason}.", stacklevel=2)
    return reason


def _difference(kernels: Kernels, dtype: Any, device: Any) -> str | None:
    rng = np.random.default_rng(0)
    choices = np.array([rng.permutation(_EXPERTS + 1)[:_CHOSEN] for _ in range(_TOKENS)])
    choices = np.where(choices == 1, -1, choices)  # nobody's expert; one of the others is out of range

    def normal(*shape: int) -> Array:
        return jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[-2]), dtype)

    with jax.default_device(device):
        matrices = (_EMBED, _INNER), (_EMBED, _INNER), (_INNER, _EMBED)
        weights = tuple(normal(_EXPERTS, *shape) for shape in matrices)
        inputs = Inputs(normal(_TOKENS, _EMBED), normal(_TOKENS, _CHOSEN), weights)
        plan = chunk_plan(jnp.asarray(choices), _EXPERTS, 2, kernels.rows_of)
        loop = ChunkLoop(_expert, None, tuple, kernels)
        wanted = _gradients(functools.partial(_definition, choices), inputs)
        try:
            found = _gradients(
                lambda inputs: apply_experts(loop, inputs, plan, (None,) * len(weights)), inputs
            )
        except Exception as error:  # whatever a compiler raises
            return f"its kernels fail: {str(error).partition(chr(10))[0].rstrip('.') or type(error).__name__}"
    pairs = zip(found, wanted, strict=True)
    off = np.max([np.max(np.abs(one - other)) / np.max(np.abs(other)) for one, other in pairs])  # NaN stays
    return None if off <= _TOLERANCE else f"its gradients are off by {off:.2g} of the largest entry"


def _gradients(fn: Any, inputs: Inputs) -> list[np.ndarray]:
    """The result of a function and the gradients of its square, in float32."""

    def loss(inputs: Inputs) -> tuple[Array, Array]:
        out = fn(inputs).astype(jnp.float32)
        return jnp.sum(out**2), out

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(inputs)
    return [np.asarray(leaf, np.float32) for leaf in (out, *jax.tree.leaves(gradients))]


def _expert(weights: Any, rows: Array, gates: Array) -> Array:
    gate, up, down = weights
    return (jax.nn.silu(rows @ gate) * (rows @ up) * gates[:, None]) @ down


def _definition(choices: np.ndarray, inputs: Inputs) -> Array:
    """The sum over all experts, each on every token."""
    x, *weights = (leaf.astype(jnp.float32) for leaf in (inputs.x, *inputs.weights))
    chosen = choices[:, :, None] == np.arange(_EXPERTS)
    gates = jnp.sum(jnp.where(chosen, inputs.gates.astype(jnp.float32)[:, :, None], 0.0), axis=1)
    return sum(_expert([one[i] for one in weights], x, gates[:, i]) for i in range(_EXPERTS))  # pyright: ignore[reportReturnType]
