"""tokamax's kernels for NVIDIA GPUs: attention and grouped products, and whether they
can be called.

tokamax (Python 3.12 and later) has them in private modules, so versions that were not
tried are refused.

Attention: every query has a first and a last key. The forward kernel skips blocks of
keys outside of these; the backward kernels compute all that causality leaves, and with
the positions of some queries all. So queries with a window, or in documents that are
all short, are cut into chunks, which see two chunks of keys, and strips of queries go
with the keys that they may see.
"""

import contextlib
import functools
import importlib.metadata
import logging
import math
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import custom_batching, lax
from jax.experimental import layout
from jaxtyping import Array, Int

from .._memory_spaces import target_device
from .._trips import known_products
from ._attention_rule import (
    Attended,
    Blocks,
    Kernel,
    Key,
    LogSumExp,
    Output,
    Query,
    Sight,
    Value,
    flatten_heads,
)
from ._backends import UnsupportedCallError
from ._grouped_linear import Kernels
from ._padding import pad_axis

_VERSIONS = ("0.0.17",)
_called_for: dict[str, str] = {}
# Chunks of queries are multiples of it
_CHUNK = 512
# Strips of divided positions are joined to at most so many parts, since each takes two
# calls of kernels
_PARTS = 24
# Documents no longer than these parts of all positions are in chunks backward
_PARTS_OF_LENGTH = (32, 8)
# Elements of 16 bits that a kernel copies at least
_COPIED = 8
# Elements of 16 bits in a row of a tile
_TILE = 64
_STEPS: Any = {"block_k": _TILE, "max_concurrent_steps": 4, "grid_block_n": 4}


def why_not_tokamax(what: str, capabilities: Mapping[float, str]) -> str | None:
    """Why kernels for these compute capabilities can't run on the program's device;
    None if they can.
    """
    capability = getattr(target_device(), "compute_capability", "0")
    if float(capability) not in capabilities:
        known = " and ".join(
            f"{number} ({name})" for number, name in capabilities.items()
        )
        return f"{what} are for GPUs of compute capability {known}, not {capability}"
    try:
        version = importlib.metadata.version("tokamax")
    except importlib.metadata.PackageNotFoundError:
        return (
            "it needs Python 3.12 or later and tokamax: pip install"
            " 'stacked_remat[tokamax]'"
        )
    if version not in _VERSIONS:
        return f"it was tried with tokamax {', '.join(_VERSIONS)}, not {version}"
    return None


def check_one_kind_of_gpu(device: Any) -> None:
    """Check that this process has called kernels for no other kind of GPU: jaxlib
    (0.12) compiles Mosaic for the first one only.
    """
    capability = _called_for.setdefault("capability", device.compute_capability)
    if capability != device.compute_capability:
        raise UnsupportedCallError(
            "A process compiles tokamax's kernels for one kind of GPU, here of compute"
            f" capability {capability}, not {device.compute_capability} too: compile"
            f" for {device.device_kind} in another."
        )


@contextlib.contextmanager
def calling_tokamax() -> Iterator[None]:
    """Within it, kernels are for the program's device, which need not be attached, and
    may mix dtypes.

    Raises:
        UnsupportedCallError: see `check_one_kind_of_gpu`.
    """
    device = target_device()
    check_one_kind_of_gpu(device)
    log = logging.getLogger("absl")

    def says_more(record: logging.LogRecord) -> bool:
        # A page for every kernel
        return not str(record.msg).startswith("Autotuning cache miss")

    log.addFilter(says_more)
    try:
        with (
            # They ask `jax.extend.backend.get_default_device` for the number of cores.
            jax.default_device(device),
            jax.numpy_dtype_promotion("standard"),
            jax.numpy_rank_promotion("allow"),
        ):
            yield
    finally:
        log.removeFilter(says_more)


class _JaxOfTarget:
    """The module `jax`, but for its devices: the one that the program is for."""

    def devices(self) -> list[Any]:
        return [target_device()]

    def __getattr__(self, name: str) -> Any:
        return getattr(jax, name)


def _asking_for_target(fn: Any) -> Any:
    """`fn`, which reads `jax.devices()[0].core_count`, with those of the program.

    JAX's kernels (0.10.2, 0.12) have no argument for it, and a program may be for
    devices that are not attached. This is a copy, so `jax` stays as it is.
    """
    names = {**fn.__globals__, "jax": _JaxOfTarget()}
    copy = types.FunctionType(
        fn.__code__, names, fn.__name__, fn.__defaults__, fn.__closure__
    )
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy


def _forward(
    query: Query, key: Key, value: Value, sight: Sight, blocks: Blocks
) -> tuple[Output, LogSumExp]:
    from tokamax._src.ops.attention import (  # pyright: ignore[reportMissingImports]
        pallas_mosaic_gpu,
    )

    *heads, head_dim = query.shape
    value_dim = value.shape[-1]
    mask = _mask(sight.first(query.shape[1], blocks.window), sight.rows)
    # By a query in the mean, at most
    seen = min(key.shape[1] // 2, blocks.window or key.shape[1])
    products = 2 * seen * math.prod(heads) * (head_dim + value_dim)
    # With a small softcap it would by default not subtract the highest score, and
    # exponentials of 11 and more are infinite in float16.
    attend = pallas_mosaic_gpu.PallasMosaicGpuFlashAttention(use_stable_softmax=True)
    with calling_tokamax(), known_products(products):
        output, (highest, total) = attend(
            flatten_heads(query),
            key,
            value,
            logits_scale=blocks.scale,
            logits_soft_cap=blocks.softcap,
            mask=mask,
            return_residuals=True,
        )
    lse = jnp.moveaxis(highest + jnp.log(total), 1, 2)
    return output.reshape(*heads, value_dim), lse.reshape(heads)


def _backward(
    attended: Attended, cotangent: Output, blocks: Blocks
) -> tuple[Query, Key, Value]:
    length = attended.query.shape[1]
    window = blocks.window
    sight = attended.sight
    if blocks.strips > 1:
        return _in_strips(attended, cotangent, blocks)
    seen = (
        [window]
        if window is not None
        else [length // part for part in _PARTS_OF_LENGTH]
    )
    if sight.rows is not None or (window is None and sight.starts is None):
        seen = []
    chunks = sorted({-(-each // _CHUNK) * _CHUNK for each in seen})
    chunks = [chunk for chunk in chunks if 0 < 2 * chunk < length]
    ways = [
        functools.partial(_in_chunks, blocks=blocks, chunk=chunk) for chunk in chunks
    ]
    mask = _mask(sight.first(length, window), sight.rows)
    ways.append(functools.partial(_gradients, mask=mask, blocks=blocks))
    if window is not None or sight.starts is None or len(ways) == 1:
        return ways[0](attended, cotangent)
    # Known only when the program runs, which then takes one of the ways
    position = jnp.arange(length, dtype=jnp.int32)[None]
    longest = 1 + jnp.max(position - sight.starts)
    return lax.switch(
        jnp.sum(longest > jnp.asarray(chunks, jnp.int32)), ways, attended, cotangent
    )


def _one_by_one(run: Callable[..., Any]) -> Callable[..., Any]:
    """Called once for each example by `jax.vmap`, which traces kernels again, without
    `calling_tokamax`.
    """
    return lambda *arrays: custom_batching.sequential_vmap(
        lambda *own: run(*own, arrays[-1])
    )(*arrays[:-1])


ATTENTION = Kernel(_one_by_one(_forward), _one_by_one(_backward))


def _in_strips(
    attended: Attended, cotangent: Output, blocks: Blocks
) -> tuple[Query, Key, Value]:
    """The gradients of parts of the queries with the keys that they may see.

    And of parts of the keys, with the queries that may see them, so that no gradients
    are summed.
    """
    parts = math.gcd(_PARTS, blocks.strips)
    rows = attended.query.shape[1] // parts
    columns = attended.key.shape[1] // parts

    def gradients(
        queries: tuple[int, int], keys: tuple[int, int], products: tuple[int, int]
    ) -> tuple[Query, Key, Value]:
        own = slice(rows * queries[0], rows * queries[1])
        seen = slice(columns * keys[0], columns * keys[1])
        of_own, of_seen = (lambda x: x[:, own]), (lambda x: x[:, seen])
        some = _cut(attended, of_own, of_seen)
        positions, starts, _ = attended.sight
        assert positions is not None  # of strips they are given
        sight = Sight(positions[own] - seen.start)
        if starts is not None:
            sight = sight._replace(starts=starts[:, own] - seen.start)
        length = own.stop - own.start
        mask = _mask(sight.first(length, blocks.window), sight.rows)
        return _gradients(some, cotangent[:, own], mask, blocks, products)

    # How many parts before its own a query may see
    reach = parts
    if blocks.window is not None:
        reach = -(-(blocks.window - 1) // columns)
    of_query = []
    of_key = []
    of_value = []
    # XLA leaves out the kernel whose results are not used. Both compute scores and the
    # gradient of weights; one then that of queries, the other those of keys and values.
    for part in range(parts):
        own = (part, part + 1)
        seen = (max(0, part - reach), part + 1)
        of_query.append(gradients(own, seen, (2, 1))[0])
    for part in range(parts):
        own = (part, part + 1)
        seeing = (part, min(parts, part + 1 + reach))
        _, key_gradient, value_gradient = gradients(seeing, own, (2, 2))
        of_key.append(key_gradient)
        of_value.append(value_gradient)
    found = of_query, of_key, of_value
    of_query, of_key, of_value = (jnp.concatenate(some, axis=1) for some in found)
    return of_query, of_key, of_value


def _in_chunks(
    attended: Attended, cotangent: Output, blocks: Blocks, chunk: int
) -> tuple[Query, Key, Value]:
    """The gradients of chunks of queries, each with its own keys and those of the chunk
    before it.

    No query sees more than a chunk.
    """
    length = attended.query.shape[1]
    chunks = -(-length // chunk)

    # Chunks are examples for the kernels: `[batch * chunks, chunk, ...]`.
    def cut(x: Array, fill: float = 0) -> Array:
        padded = pad_axis(x, 1, chunks * chunk, fill)
        return padded.reshape(-1, chunk, *x.shape[2:])

    def with_before(x: Array) -> Array:
        own = cut(x).reshape(-1, chunks, chunk, *x.shape[2:])
        before = jnp.roll(own, 1, axis=1)  # the first chunk's is not seen
        both = jnp.concatenate([before, own], axis=2)
        return both.reshape(-1, 2 * chunk, *x.shape[2:])

    def joined(x: Array) -> Array:
        whole = x.reshape(-1, chunks * chunk, *x.shape[2:])
        return whole[:, :length]

    def summed(x: Array) -> Array:
        # A chunk of keys has gradients by its own queries, and by those after it.
        both = x.reshape(-1, chunks, 2, chunk, *x.shape[2:])
        before, own = jnp.moveaxis(both, 2, 0)
        total = own + jnp.roll(before, -1, axis=1)
        return joined(total.reshape(-1, chunk, *x.shape[2:]))

    first = attended.sight.first(length, blocks.window)
    first = jnp.broadcast_to(first, attended.lse.shape[:2])
    # Where the keys of each chunk begin, from which theirs are counted
    begins = chunk * (jnp.arange(chunks, dtype=jnp.int32) - 1)
    first = cut(first).reshape(-1, chunks, chunk) - begins[None, :, None]
    last = chunk + jnp.arange(chunk, dtype=jnp.int32)
    mask = _mask(first.reshape(-1, chunk), last)
    some = _cut(attended, cut, with_before)
    # Queries of padding have no weights.
    some = some._replace(lse=cut(attended.lse, jnp.inf))
    of_query, of_key, of_value = _gradients(some, cut(cotangent), mask, blocks)
    return joined(of_query), summed(of_key), summed(of_value)


def _cut(
    attended: Attended,
    of_queries: Callable[[Array], Array],
    of_keys: Callable[[Array], Array],
) -> Attended:
    return attended._replace(
        query=of_queries(attended.query),
        output=of_queries(attended.output),
        lse=of_queries(attended.lse),
        key=of_keys(attended.key),
        value=of_keys(attended.value),
    )


def _gradients(
    attended: Attended,
    cotangent: Output,
    mask: Any,
    blocks: Blocks,
    products: tuple[int, int] = (4, 3),
) -> tuple[Query, Key, Value]:
    """By two kernels, of which those that are used have so many products as wide as
    keys, and as values, in all.
    """
    from tokamax._src.ops.attention import (  # pyright: ignore[reportMissingImports]
        pallas_mosaic_gpu,
        pallas_mosaic_gpu_vjp,
    )

    query, key, value, _, _, output, lse = attended
    queries, output, cotangent = map(flatten_heads, (query, output, cotangent))
    # The highest score and the sum of the exponentials of others less that, of which it
    # has the logarithm.
    of_heads = lse.reshape(*lse.shape[:2], -1)
    highest = jnp.moveaxis(of_heads, 2, 1)
    forward = pallas_mosaic_gpu.PallasMosaicGpuFlashAttention()
    seen = key.shape[1] // 2 if mask.is_causal else key.shape[1]
    as_keys, as_values = products
    width = as_keys * key.shape[-1] + as_values * value.shape[-1]
    rows = math.prod(query.shape[:-1])
    flops = 2 * seen * rows * width
    with calling_tokamax(), known_products(flops // 2):  # of each kernel, in the mean
        bound = forward.bind(
            queries,
            key,
            value,
            logits_scale=blocks.scale,
            logits_soft_cap=blocks.softcap,
            mask=mask,
        )
        found = pallas_mosaic_gpu_vjp.PallasMosaicGpuFlashAttentionVjp()(
            (highest, jnp.ones_like(highest)),
            output,
            cotangent,
            *bound.args,
            **bound.kwargs,
        )
    return found["q"].reshape(query.shape), found["k"], found["v"]


def _mask(
    first: Int[Array, "batch row"] | None, last: Int[Array, " row"] | None
) -> Any:
    """Tokamax's mask; without a last key of each query it is causal, which skips blocks
    backward too.
    """
    from tokamax._src.ops.attention import base  # pyright: ignore[reportMissingImports]

    start = None if first is None else jnp.asarray(first)[:, None]
    if last is None:
        return base.Mask(is_causal=True, k_start=start)
    start = jnp.zeros_like(last)[None, None] if start is None else start
    return base.Mask(k_start=start, k_end=last[None, None] + 1)


def _product(x: Array, w: Array, sizes: Array, transposed: bool) -> Array:
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu
    from tokamax._src.ops.ragged_dot import (  # pyright: ignore[reportMissingImports]
        base,
        pallas_mosaic_gpu,
    )

    # Kernels take one order. Without a layout XLA transposes the stack that these are a
    # slice of.
    w = layout.with_layout_constraint(w, layout.Layout((0, 1, 2)))
    in_tiles = not any(size % _TILE for size in w.shape[1:])
    if transposed and in_tiles:
        # By JAX's kernel: for tokamax's, XLA makes a transposed copy of all matrices.
        tiles: Any = dict(block_m=2 * _TILE, block_n=_width(w.shape[1]), **_STEPS)
        with calling_tokamax():
            return ragged_dot_mgpu.ragged_dot(
                x, w, group_sizes=sizes, transpose_rhs=True, **tiles
            )
    names = (
        base.TRANS_RHS_RAGGED_DOT_DIM_NUMS
        if transposed
        else base.DEFAULT_RAGGED_DOT_DIM_NUMS
    )
    # On an H200 about twice as fast as the kernel's own guess.
    config = pallas_mosaic_gpu.Config(
        block_m=128,
        block_n=128,
        block_k=_TILE,
        num_stages=4,
        split_k=1,
        persistent=False,
        grid_minor_dim=0,
    )
    with calling_tokamax():
        found = pallas_mosaic_gpu.PallasMosaicGpuRaggedDot(config=config)(
            *(_aligned(x, 1, _COPIED), _aligned(w, 2, _COPIED)),
            group_sizes=sizes,
            ragged_dot_dimension_numbers=names,
        )
    return found[:, : w.shape[1 if transposed else 2]]


def _outer(x: Array, y: Array, sizes: Array) -> Array:
    """By JAX's kernel: tokamax's (0.0.17) overwrites what it reads, and gave wrong sums
    on an H200.
    """
    from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu

    count = jnp.sum(sizes)  # rows of no expert are last
    is_real = (jnp.arange(len(x)) < count)[:, None]
    # Rows of other experts in a tile are multiplied by zero, and those of none may hold
    # anything.
    wide = [
        _aligned(jnp.where(is_real, one, jnp.zeros((), one.dtype)), 1, _TILE)
        for one in (x, y)
    ]
    tiles = [_width(one.shape[1]) for one in wide]
    kernel = _asking_for_target(transposed_ragged_dot_mgpu.transposed_ragged_dot)
    with calling_tokamax():
        found = kernel(
            *wide, group_sizes=sizes, block_m=tiles[0], block_n=tiles[1], **_STEPS
        )
    return found[:, : x.shape[1], : y.shape[1]]


def _width(size: int) -> int:
    return 2 * _TILE if size % (2 * _TILE) == 0 else _TILE


def _aligned(x: Array, axes: int, multiple: int) -> Array:
    """With zeros to multiples of a number in the last axes."""
    widths = [(0, 0)] * x.ndim
    for axis in range(x.ndim - axes, x.ndim):
        widths[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, widths)


PRODUCTS = Kernels(_product, _outer, 128)
"""For bfloat16 and float16 on Hopper GPUs; one kernel of tokamax and two of JAX."""
