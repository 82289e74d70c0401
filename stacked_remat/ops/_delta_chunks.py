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

Decays without overflow: `d(i, j)` is never a quotient `d(i, 0) / d(j, 0)`. A chunk is
halved until it has one position. A position i of a second half and j of a first half
have `d(i, j) = after_i before_j`, with `after_i` from the middle to i and `before_j`
from j to the middle: exponentials of sums of decays, all at most 1. No difference of
sums is taken, so nothing is lost to rounding where decays are extreme, and a decay of
zero (`g = -inf`), by which a document begins anew, is exact. By channel, a level of
this needs the keys times `before`, and no `[chunk, chunk, Key]` array.

FLOPs per position and head, for chunks of n positions, keys of d and values of e: `n d`
for `k^T d k` and as many for `q^T d k` (twice that by head, whose whole square is
computed), `2 n (d + e)` for `T [K, v]`, `6 d e` for `W S`, `S'` and `q^T S`, `2 n e`
for the sum over `u`, and about `n^2 / 3` for T.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ._padding import pad_axis

# Key heads `head`, and value heads `group` that share one; `decay` is one number for
# all channels, or as many as `key`
Keys = Float[Array, "chunk head 1 token key"]
Values = Float[Array, "chunk head group token value"]
LogDecays = Float[Array, "chunk head group token decay"]
Strengths = Float[Array, "chunk head group token 1"]
State = Float[Array, "head group key value"]
Square = Float[Array, "*chunks token token"]


class Decays(NamedTuple):
    """Sums of log decays of consecutive positions, and products that decay by them."""

    # From before the first position to each
    after: Float[Array, "*chunks token decay"]
    # From each position to the last
    before: Float[Array, "*chunks token decay"]
    # For each array of rows: `rows_i^T d(i, j) keys_j` for j <= i, else 0
    products: tuple[Square, ...]


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
    rows = (key,) if query is None else (key, query)
    decays = _products_by_head(rows, key, log_decay)
    erased, *attended = decays.products
    from_start = jnp.exp(decays.after)
    kept_key = key * jnp.exp(decays.before)
    whole = jnp.swapaxes(from_start[..., -1:, :], -1, -2)
    if beta is None:
        written, read = value, None
    else:
        inverse = inverse_of_unit_lower(beta * jnp.tril(erased, -1))
        written = inverse @ (beta * value)
        read = inverse @ (beta * (from_start * key))
    written = pad_axis(written, written.ndim - 1, state.shape[-1])

    def next_state(state: State, chunk: tuple) -> tuple[State, tuple]:
        whole, kept_key, written, read = chunk
        update = written if read is None else written - read @ state
        after = whole * state + jnp.swapaxes(kept_key, -1, -2) @ update
        return after, (state, update)

    chunks = whole, kept_key, written, read
    state, (states, updates) = lax.scan(next_state, state, chunks)
    if query is None:
        return state, None
    return state, (from_start * query) @ states + attended[0] @ updates


def _products_by_head(
    rows: tuple[Keys, ...], key: Keys, log_decay: LogDecays
) -> Decays:
    """`decayed_products`, whose factor one decay for all channels is."""
    if log_decay.shape[-1] > 1:
        return decayed_products(rows, key, log_decay)
    ones = jnp.ones_like(log_decay)
    after, before, (decay,) = decayed_products((ones,), ones, log_decay)
    transposed = jnp.swapaxes(key, -1, -2)
    products = []
    for row in rows:
        products.append((row @ transposed) * decay)
    return Decays(after, before, tuple(products))


def decayed_products(rows: tuple[Array, ...], keys: Array, log_decay: Array) -> Decays:
    """The products of each of some arrays of rows with keys, decayed, and the sums of
    decays; `[..., token, channel]`, of a power of two of tokens.
    """
    tokens = log_decay.shape[-2]
    if tokens == 1:
        # Value heads that share a key head have decays of their own
        shape = (*log_decay.shape[:-1], 1)
        own = []
        for row in rows:
            product = jnp.sum(row * keys, -1, keepdims=True)
            own.append(jnp.broadcast_to(product, shape))
        return Decays(log_decay, jnp.zeros_like(log_decay), tuple(own))

    def halves(x: Array) -> Array:
        return x.reshape(*x.shape[:-2], 2, tokens // 2, x.shape[-1])

    rows = tuple(map(halves, rows))
    keys = halves(keys)
    within = decayed_products(rows, keys, halves(log_decay))
    after, before = within.after, within.before
    to_middle = jnp.exp(_first(before))
    from_middle = jnp.exp(_second(after))
    earlier = jnp.swapaxes(_first(keys) * to_middle, -1, -2)
    products = []
    for row, own in zip(rows, within.products, strict=True):
        across = (_second(row) * from_middle) @ earlier
        products.append(_lower_triangle(_first(own), across, _second(own)))
    of_halves = after[..., -1:, :]
    after = [_first(after), _second(after) + _first(of_halves)]
    before = [_first(before) + _second(of_halves), _second(before)]
    return Decays(
        jnp.concatenate(after, -2), jnp.concatenate(before, -2), tuple(products)
    )


def inverse_of_unit_lower(lower: Square) -> Square:
    """`(I + lower)^-1` of a strictly lower triangle, of a power of two of tokens.

    Of two halves `[[A, 0], [B, D]]` it is `[[A', 0], [-D' B A', D']]`, with the
    inverses `A'` and `D'`.
    """
    tokens = lower.shape[-1]
    if tokens == 1:
        return jnp.ones_like(lower)
    half = tokens // 2
    diagonal = [lower[..., :half, :half], lower[..., half:, half:]]
    inverses = inverse_of_unit_lower(jnp.stack(diagonal, -3))
    first, second = _first(inverses), _second(inverses)
    across = -(second @ lower[..., half:, :half] @ first)
    return _lower_triangle(first, across, second)


def _lower_triangle(first: Array, across: Array, second: Array) -> Array:
    """`[[first, 0], [across, second]]`."""
    above = jnp.concatenate([first, jnp.zeros_like(across)], -1)
    below = jnp.concatenate([across, second], -1)
    return jnp.concatenate([above, below], -2)


def _first(halves: Array) -> Array:
    return halves[..., 0, :, :]


def _second(halves: Array) -> Array:
    return halves[..., 1, :, :]
