"""The gated delta rule in chunks of positions, as matrix products.

The recurrence, with a decay `exp(g) <= 1` for each head or each channel of the keys:

    S_t = exp(g_t) S_{t-1} + k_t u_t^T,    u_t = beta_t (v_t - (exp(g_t) S_{t-1})^T k_t)
    o_t = S_t^T q_t

Write `d(i, j) = exp(g_{j+1} + ... + g_i)` for the decay from position j to i. With `S`
the state before a chunk, the state after its position i is

    S_i = d(i, 0) S + sum over j <= i of d(i, j) k_j u_j^T,

so the `u` of a chunk solve a unit lower triangular system (the WY form of a product of
Householder matrices; Yang et al. 2024, "Parallelizing Linear Transformers with the
Delta Rule", arXiv:2406.06484; with decays "Gated Delta Networks", arXiv:2412.06464, and
by channel "Kimi Linear", arXiv:2510.26692):

    (I + L) u = beta (v - K S),    L_ij = beta_i k_i^T d(i, j) k_j  for j < i,
                                   K_i = d(i, 0) k_i.

Let `T = (I + L)^-1`, `W = T beta K` and `Y = T beta v`, which the state has no part in,
so they are batched products of all chunks of a group. Through the chunks goes only

    u = Y - W S,    S' = d(n, 0) S + sum over j of d(n, j) k_j u_j^T,

and the outputs `o = (d(i, 0) q_i)^T S + sum over j <= i of (q_i^T d(i, j) k_j) u_j` are
again batched. Without `beta` nothing is erased and `u = v`: Mamba-2's dual form (Dao
and Gu 2024, arXiv:2405.21060).

Decays: `d(i, j)` is no quotient `d(i, 0) / d(j, 0)`, which would overflow, nor the
exponential of a difference of sums, which would lose weak decays beside strong ones. So
any decay is exact, also one of zero (`g = -inf`), by which a document begins anew. By
head, the sums for all pairs of positions are the product of `g` with an array of zeros
and ones. By channel there is no array of `[chunk, chunk, Key]`: a chunk is halved until
it has one position. A position i of a second half and j of a first half have `d(i, j) =
after_i before_j`, where `after_i` is the decay from the middle to i, and `before_j`
that from j to the middle. So products across the middle are those of rows times `after`
with keys times `before`.

FLOPs per position and head, for chunks of n positions, keys of d and values of e: `n d`
for `k^T d k` and as many for `q^T d k` (twice that by head, whose whole square is
computed), `2 n (d + e)` for `T [K, v]`, `6 d e` for `W S`, `S'` and `q^T S`, and `2 n
e` for the sum over `u`; and of less weight, about `2 n^2` for T, and as many by head
for the sums of decays.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from ._padding import pad_axis

# `group` are value heads that share a key head; `decay` is one number for all channels,
# or as many as `key`
Keys = Float[Array, "chunk head 1 token key"]
Values = Float[Array, "chunk head group token value"]
LogDecays = Float[Array, "chunk head group token decay"]
Strengths = Float[Array, "chunk head group token 1"]
State = Float[Array, "head group key value"]
# Of all chunks and heads, or parts of them. Of low rank, also under `jax.vmap`, since
# XLA's CPU backend (jaxlib 0.10.2) ends the process at products of rank 8
Block = Float[Array, "block token channel"]
Square = Float[Array, "block token token"]

_DIRECT = 16
"""Up to so many tokens a triangle is inverted by products of whole squares."""

_LEAST = -1e30
"""A finite log decay of zero; so are sums of as many as a chunk has."""


class Decays(NamedTuple):
    """Sums of log decays, and products that decay by them."""

    # From before the first position to each
    after: Float[Array, "*chunks token decay"]
    # From each position to the last
    before: Float[Array, "*chunks token decay"]
    # For each array of rows: `row_i^T d(i, j) key_j` for j <= i, else 0
    products: list[Float[Array, "*chunks token token"]]


def delta_chunks(
    state: State,
    query: Keys | None,
    key: Keys,
    value: Values,
    log_decay: LogDecays,
    beta: Strengths | None,
) -> tuple[State, Values | None]:
    """The state after some chunks, and their outputs; all in one dtype.

    Without `query` there are no outputs. In columns of the state that values lack
    nothing is written.
    """
    rows = [key] if query is None else [key, query]
    decays = _decays_by_head if log_decay.shape[-1] == 1 else _decays_by_channel
    after, before, products = decays(rows, key, log_decay)
    erased, *attended = products
    # d(i, 0), and d(n, j) k_j, in the notation above
    from_start = jnp.exp(after)
    kept_key = key * jnp.exp(before)
    # d(n, 0), a column that scales the rows of a state
    to_end = from_start[..., -1:, :]
    whole = jnp.swapaxes(to_end, -1, -2)
    if beta is None:
        written = value
        read = None
    else:
        lower = beta * jnp.tril(erased, -1)
        inverse = inverse_of_unit_lower(lower)
        # Y and W
        written = inverse @ (beta * value)
        decayed_key = from_start * key
        read = inverse @ (beta * decayed_key)
    written = pad_axis(written, written.ndim - 1, state.shape[-1])

    def next_state(state: State, chunk: tuple) -> tuple[State, tuple]:
        whole, kept_key, written, read = chunk
        update = written
        if read is not None:
            update = written - read @ state
        decayed = whole * state
        added = jnp.swapaxes(kept_key, -1, -2) @ update
        return decayed + added, (state, update)

    chunks = whole, kept_key, written, read
    state, (states, updates) = lax.scan(next_state, state, chunks)
    if query is None:
        return state, None
    (of_updates,) = attended
    decayed_query = from_start * query
    return state, decayed_query @ states + of_updates @ updates


def _decays_by_head(
    rows: list[Keys], key: Keys, log_decay: Float[Array, "chunk head group token 1"]
) -> Decays:
    tokens = log_decay.shape[-2]
    row, column, token = np.ogrid[:tokens, :tokens, :tokens]
    is_between = jnp.asarray((column < token) & (token <= row), log_decay.dtype)
    # Zero times -inf would be NaN
    log_decay = jnp.maximum(log_decay, _LEAST)
    # Sums of decays are in full float32 whatever matrix products are
    sums = jnp.einsum(
        "ijt,...t->...ij", is_between, log_decay[..., 0], precision="highest"
    )
    is_seen = np.tri(tokens, dtype=bool)
    decay = jnp.where(is_seen, jnp.exp(sums), 0.0)
    transposed = jnp.swapaxes(key, -1, -2)
    products = []
    for row in rows:
        whole_square = row @ transposed
        products.append(whole_square * decay)
    # Sums are from after a position, so the first position's own decay is lacking.
    from_first = sums[..., :, :1]
    after = from_first + log_decay[..., :1, :]
    to_last = sums[..., -1, :, None]
    return Decays(after, to_last, products)


def _decays_by_channel(rows: list[Keys], key: Keys, log_decay: LogDecays) -> Decays:
    *chunks, tokens, channels = log_decay.shape

    def blocks(x: Array) -> Block:
        # Value heads that share a key head have decays of their own
        of_values = jnp.broadcast_to(x, log_decay.shape)
        return of_values.reshape(-1, tokens, channels)

    rows = [blocks(row) for row in rows]
    after, before, products = _decays_by_halves(rows, blocks(key), blocks(log_decay))
    squares = [product.reshape(*chunks, tokens, tokens) for product in products]
    return Decays(
        after.reshape(log_decay.shape), before.reshape(log_decay.shape), squares
    )


def _decays_by_halves(rows: list[Block], key: Block, log_decay: Block) -> Decays:
    """By channel, of blocks of a power of two of tokens: of each half, and across the
    middle.
    """
    tokens = log_decay.shape[1]
    if tokens == 1:
        own = [jnp.sum(row * key, -1, keepdims=True) for row in rows]
        return Decays(log_decay, jnp.zeros_like(log_decay), own)
    halves = [_halves(row) for row in rows]
    within = _decays_by_halves(halves, _halves(key), _halves(log_decay))
    first_after, second_after = _first_and_second(within.after)
    first_before, second_before = _first_and_second(within.before)
    half = tokens // 2
    to_middle = key[:, :half] * jnp.exp(first_before)
    from_middle = jnp.exp(second_after)
    products = []
    for row, diagonal in zip(rows, within.products, strict=True):
        later_row = row[:, half:] * from_middle
        across = later_row @ jnp.swapaxes(to_middle, 1, 2)
        products.append(_lower_triangle(diagonal, across))
    whole_second = second_after[:, -1:]
    second_after = first_after[:, -1:] + second_after
    first_before = first_before + whole_second
    after = jnp.concatenate([first_after, second_after], 1)
    before = jnp.concatenate([first_before, second_before], 1)
    return Decays(after, before, products)


def inverse_of_unit_lower(
    lower: Float[Array, "*chunks token token"],
) -> Float[Array, "*chunks token token"]:
    """`(I + lower)^-1` of a strictly lower triangle, of a power of two of tokens."""
    tokens = lower.shape[-1]
    blocks = lower.reshape(-1, tokens, tokens)
    return _inverse_by_halves(blocks).reshape(lower.shape)


def _inverse_by_halves(lower: Square) -> Square:
    """Of two halves `[[A, 0], [B, D]]` it is `[[A', 0], [-D' B A', D']]`, with the
    inverses `A'` and `D'`.
    """
    tokens = lower.shape[1]
    if tokens <= _DIRECT:
        return _inverse_of_blocks(lower)
    half = tokens // 2
    diagonal = [lower[:, :half, :half], lower[:, half:, half:]]
    halves = jnp.stack(diagonal, 1)
    halves = halves.reshape(-1, half, half)
    inverses = _inverse_by_halves(halves)
    first, second = _first_and_second(inverses)
    below = lower[:, half:, :half]
    across = _precise_product(second, below, first)
    return _lower_triangle(inverses, -across)


def _inverse_of_blocks(lower: Square) -> Square:
    """The same by products of whole squares, of which most factors are 0: for small
    ones.
    """
    tokens = lower.shape[-1]
    row, column = np.ogrid[:tokens, :tokens]
    # Of the blocks on the diagonal; at first of one token
    identity = jnp.asarray(row == column, lower.dtype)
    inverse = jnp.broadcast_to(identity, lower.shape)
    size = 1
    while size < tokens:
        row_block = row // size
        column_block = column // size
        # Whether an entry is below the diagonal blocks of two that become one
        is_below = row_block == column_block + 1
        is_across = is_below & (row_block % 2 == 1)
        across = jnp.where(is_across, lower, 0.0)
        inverse = inverse - _precise_product(inverse, across, inverse)
        size *= 2
    return inverse


def _precise_product(left: Square, middle: Square, right: Square) -> Square:
    """Of few FLOPs; an error in an inverse would be in all that follows."""
    product = jnp.matmul(left, middle, precision="highest")
    return jnp.matmul(product, right, precision="highest")


def _halves(blocks: Block) -> Block:
    """Each block as two, one after the other."""
    count, tokens, channels = blocks.shape
    return blocks.reshape(2 * count, tokens // 2, channels)


def _first_and_second(halves: Array) -> tuple[Array, Array]:
    pairs = halves.reshape(-1, 2, *halves.shape[1:])
    return pairs[:, 0], pairs[:, 1]


def _lower_triangle(diagonal: Square, across: Square) -> Square:
    """`[[first, 0], [across, second]]` for each two on the diagonal."""
    first, second = _first_and_second(diagonal)
    zeros = jnp.zeros_like(across)
    above = jnp.concatenate([first, zeros], 2)
    below = jnp.concatenate([across, second], 2)
    return jnp.concatenate([above, below], 1)
