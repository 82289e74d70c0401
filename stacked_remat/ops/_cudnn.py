"""Attention by cuDNN: JAX's primitives for it, which have no public names.

They are imported when they are used. Checked with JAX 0.10.2 and 0.12.
"""

import contextlib
import functools
import inspect
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


@functools.cache
def cudnn_is_installed() -> bool:
    """Whether JAX can compile calls of cuDNN, for a GPU that is there or not; they fail
    late otherwise.
    """
    from jax._src import lib

    versions: Any = getattr(lib, "cuda_versions", None)
    with contextlib.suppress(RuntimeError):  # cuDNN not found
        return versions is not None and versions.cudnn_get_version() > 0
    return False


def cudnn_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, scale: float, window: int | None
) -> tuple[jax.Array, jax.Array]:
    """Causal attention of `[batch, position, heads, head_dim]`, and float32
    log-sum-exp, positions last.
    """
    from jax._src.cudnn import fused_attention_stablehlo

    fused: Any = fused_attention_stablehlo
    options = {
        "scale": scale,
        "mask_type": fused.MaskType.CAUSAL,
        "sliding_window_length": window,
    }
    return fused.dot_product_attention(
        query, key, value, **options, return_residual=True
    )


def cudnn_attention_gradients(
    inputs: Sequence[jax.Array],
    results: Sequence[jax.Array],
    ct: jax.Array,
    scale: float,
    window: int | None,
) -> Sequence[jax.Array]:
    from jax._src.cudnn import fused_attention_stablehlo

    fused: Any = fused_attention_stablehlo
    newer = inspect.signature(fused.dot_product_attention).parameters
    return fused._dot_product_attention_bwd_p_wrapper.bind(
        *(*inputs, *[jnp.zeros(0, inputs[0].dtype)] * 7, *reversed(results), ct),
        scale=scale,
        seed=42,
        dropout_rate=0.0,
        variadic_args=(False, False),  # no bias
        mask_type=fused.MaskType.CAUSAL,
        layout=fused.AttentionLayout.BTNH.value,
        sliding_window_length=window,
        **({"score_mod": None} if "score_mod" in newer else {}),
    )
