"""Attention on NVIDIA GPUs by cuDNN's fused kernels, of all positions in one document."""

import jax.numpy as jnp

from .._compat import cudnn_attention, cudnn_attention_gradients
from ._attention_rule import Attended, Blocks, Kernel, Key, LogSumExp, Query, Sight


def _forward(query: Query, key: Key, value: Key, sight: Sight, blocks: Blocks) -> tuple[Query, LogSumExp]:
    one = query.reshape(*query.shape[:2], -1, query.shape[-1])
    output, lse = cudnn_attention(one, key, value, blocks.scale, blocks.window)
    return output.reshape(query.shape), jnp.moveaxis(lse, 1, 2).reshape(query.shape[:-1])


def _backward(attended: Attended, cotangent: Query, blocks: Blocks) -> tuple[Query, Key, Key]:
    query, key, value, _, _, output, lse = attended
    one, output, cotangent = (x.reshape(*x.shape[:2], -1, x.shape[-1]) for x in (query, output, cotangent))
    lse = jnp.moveaxis(lse.reshape(one.shape[:-1]), 2, 1)
    found = cudnn_attention_gradients(one, key, value, output, lse, cotangent, blocks.scale, blocks.window)
    return found[0].reshape(query.shape), found[1], found[2]


CUDNN = Kernel(_forward, _backward)
