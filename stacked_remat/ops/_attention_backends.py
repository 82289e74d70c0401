"""The ways to compute attention, each with what it can serve."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from .._compat import cudnn_is_installed
from ._attention_blockwise import Blocks, Documents, Key, Query, blockwise_attention
from ._attention_splash import splash_attention, splash_block_size


@dataclass(frozen=True)
class Problem:
    """What a backend has to know to tell whether it serves.

    Attributes:
        platform: of the device the program is for: `"cpu"`, `"cuda"`, `"tpu"`.
        dtype: of queries, keys and values.
        position: number of positions.
        head_dim: width of a head.
        has_documents: whether there are document boundaries.
        blocks: scale, block size and window.
        batch: number of sequences.
        devices: how many the compiler is left to divide the program among; 1 inside `jax.shard_map`.
    """

    platform: str
    dtype: jnp.dtype
    position: int
    head_dim: int
    has_documents: bool
    blocks: Blocks
    batch: int = 1
    devices: int = 1


class Backend(ABC):
    """A way to compute causal grouped-query attention."""

    @abstractmethod
    def reason_against(self, problem: Problem) -> str | None:
        """Why it cannot serve; None if it can."""

    @abstractmethod
    def __call__(
        self, query: Query, key: Key, value: Key, documents: Documents | None, blocks: Blocks
    ) -> Query:
        """Compute it."""


class Blockwise(Backend):
    """Serves everything; see `_attention_blockwise.py`."""

    def reason_against(self, problem: Problem) -> str | None:
        return None

    def __call__(
        self, query: Query, key: Key, value: Key, documents: Documents | None, blocks: Blocks
    ) -> Query:
        return blockwise_attention(query, key, value, documents, blocks)


class Exact(Backend):
    """The definition, which holds all scores at once; the reference for the others."""

    def reason_against(self, problem: Problem) -> str | None:
        return None

    def __call__(
        self, query: Query, key: Key, value: Key, documents: Documents | None, blocks: Blocks
    ) -> Query:
        scores = jnp.einsum("bqkgd,bskd->bkgqs", query, key, preferred_element_type=jnp.float32)
        row, column = jnp.arange(query.shape[1])[:, None], jnp.arange(query.shape[1])[None, :]
        visible = row >= column
        if blocks.window is not None:
            visible &= row - column < blocks.window
        visible = visible[None]
        if documents is not None:
            visible = visible & (documents[:, :, None] == documents[:, None, :])
        lowest = float(jnp.finfo(jnp.float32).min)
        scores = jnp.where(visible[:, None, None], scores * blocks.scale, lowest)
        weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
        attended = jnp.einsum("bkgqs,bskd->bqkgd", weights, value, preferred_element_type=jnp.float32)
        return checkpoint_name(attended.astype(query.dtype), "attention_output")


class CuDnn(Backend):
    """The fused kernels of NVIDIA's library."""

    def reason_against(self, problem: Problem) -> str | None:
        if problem.platform != "cuda":
            return f"it runs on NVIDIA GPUs, and the program is for {problem.platform!r}"
        if problem.dtype not in (jnp.bfloat16, jnp.float16):
            return f"it takes bfloat16 and float16, not {problem.dtype}"
        if problem.head_dim > _widest_head() or problem.head_dim % 8:
            return (
                f"it takes head widths that are multiples of 8 up to {_widest_head()}, not {problem.head_dim}"
            )
        if problem.has_documents:
            return "it knows no document boundaries: a mask would take memory for position x position"
        if problem.blocks.window is not None:
            return "a window is not passed on to it"
        if not cudnn_is_installed():
            return "JAX finds no cuDNN here (pip install nvidia-cudnn-cu13)"
        return None

    def __call__(
        self, query: Query, key: Key, value: Key, documents: Documents | None, blocks: Blocks
    ) -> Query:
        batch, position, kv_heads, group, head_dim = query.shape
        attended = jax.nn.dot_product_attention(
            query.reshape(batch, position, kv_heads * group, head_dim),
            key,
            value,
            scale=blocks.scale,
            is_causal=True,
            implementation="cudnn",
        )
        return checkpoint_name(attended.reshape(query.shape), "attention_output")


def _widest_head() -> int:
    """256 on GPUs from Hopper on. JAX asks the one at hand, whatever GPU a program is compiled for."""
    capability = getattr(jax.local_devices()[0], "compute_capability", "0")
    return 256 if float(capability) >= 9.0 else 128


class Splash(Backend):
    """JAX's kernels for TPUs; see `_attention_splash.py`."""

    def reason_against(self, problem: Problem) -> str | None:
        if problem.platform != "tpu":
            return f"it runs on TPUs, and the program is for {problem.platform!r}"
        if problem.dtype not in (jnp.bfloat16, jnp.float32):
            return f"it takes bfloat16 and float32, not {problem.dtype}"
        if problem.head_dim > 512:
            return f"its blocks fit a TPU's vector memory for heads up to 512 wide, not {problem.head_dim}"
        if problem.devices > 1:
            return (
                f"the compiler can't divide it among {problem.devices} devices: attend inside "
                "jax.shard_map(..., check_vma=False)"
            )
        size = splash_block_size(
            problem.position,
            problem.batch if problem.has_documents else 1,
            problem.blocks.window,
            problem.head_dim * problem.dtype.itemsize,
        )
        return size if isinstance(size, str) else None

    def __call__(
        self, query: Query, key: Key, value: Key, documents: Documents | None, blocks: Blocks
    ) -> Query:
        size = splash_block_size(
            query.shape[1],
            1 if documents is None else query.shape[0],
            blocks.window,
            query.shape[-1] * query.dtype.itemsize,
        )
        assert isinstance(size, int), size
        return splash_attention(query, key, value, documents, blocks.scale, blocks.window, size)


BACKENDS: dict[str, Backend] = {
    "cudnn": CuDnn(),
    "splash": Splash(),
    "blockwise": Blockwise(),
    "exact": Exact(),
}
"""By name; those that are chosen by themselves come first, in the order in which they are asked."""
