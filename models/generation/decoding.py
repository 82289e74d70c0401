"""Decodes with a language model: reads all prompts at once, then adds one token to each
at a time.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from jaxtyping import Array, Int, Key, PRNGKeyArray

from models.generation.sampling import Sampling, next_tokens
from models.parts.decoder import Decoder
from stacked_remat.training import BATCH_AXIS, POSITION_AXIS

Tokens = Int[np.ndarray, " tokens"]


class Decoding(eqx.Module):
    """Sequences that are being continued, one a row.

    Attributes:
        tokens: `[batch]`, the newest of each, which the model has not read yet.
        positions: `[batch]`, their positions.
        cache: of the tokens before them.
    """

    tokens: NamedArray
    positions: NamedArray
    cache: Any


def continued_tokens(
    model: Decoder,
    prompts: Sequence[Tokens],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    key: PRNGKeyArray,
    first_row: int = 0,
) -> Iterator[Int[np.ndarray, " batch"]]:
    """Continues all prompts as one batch: yields the next token of every one,
    `max_new_tokens` times.

    A row does not depend on the others: its logits are equal up to rounding, its random
    numbers its own.

    Args:
        prompts: at least one token each; they may differ in length.
        key: of the random numbers. Row r draws from `jax.random.fold_in(key, r)`.
        first_row: the number of the first row.

    Cost: one forward pass over `prompts x longest prompt`, then a step for each token,
    which reads the weights and the cache once. The cache, for the longest prompt and
    the new tokens, is updated in place. Compiles twice for each number of prompts and
    `padded_length` of the longest.
    """
    assert prompts and all(len(prompt) for prompt in prompts) and max_new_tokens > 0
    lengths = [len(prompt) for prompt in prompts]
    Batch = Axis(BATCH_AXIS, len(prompts))
    Pos = Axis(POSITION_AXIS, padded_length(max(lengths)))
    padded = np.zeros((Batch.size, Pos.size), np.int32)
    # Padding is at the ends, where no token of the prompt sees it.
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    # By the row among all prompts, so that the size of batches changes no text.
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(
        first_row + jnp.arange(Batch.size)
    )
    slots = Pos.size + max_new_tokens - 1  # the last new token is not read
    named = (
        hax.named(jnp.asarray(padded), (Batch, Pos)),
        hax.named(jnp.asarray(lengths, jnp.int32), Batch),
    )
    # The first token comes with the prompts: their last hidden states predict it.
    decoding = first_tokens(model, *named, keys, sampling, slots)
    yield np.asarray(decoding.tokens.array)
    for _ in range(max_new_tokens - 1):
        decoding = one_more_token((model, keys), decoding, sampling)
        yield np.asarray(decoding.tokens.array)


def padded_length(tokens: int) -> int:
    """The length to which prompts are padded, at most a quarter more: four of them for
    each doubling.
    """
    unit = max(16, 2 ** (tokens.bit_length() - 3))
    return -(-tokens // unit) * unit


@eqx.filter_jit
def first_tokens(
    model: Decoder,
    prompts: NamedArray,
    lengths: NamedArray,
    keys: Key[Array, " batch"],
    sampling: Sampling,
    slots: int,
) -> Decoding:
    """Reads the prompts, the first `lengths` tokens of `[batch, position]`, and draws
    the next.
    """
    hidden, cache = model.prefill(prompts, slots, lengths)
    (Batch,) = lengths.axes
    # Rows end at different positions.
    last = hidden[{Batch: hax.arange(Batch), POSITION_AXIS: lengths - 1}]
    return Decoding(_drawn(model, last, lengths, keys, sampling), lengths, cache)


@eqx.filter_jit(donate="warn-except-first")
def one_more_token(
    model_and_keys: tuple[Decoder, Key[Array, " batch"]],
    decoding: Decoding,
    sampling: Sampling,
) -> Decoding:
    """Reads the newest tokens and draws the next; `decoding` is donated and can't be
    used again.

    Cost: one token a row through the model; beside the cache, only the memory of one
    layer's step.
    """
    model, keys = model_and_keys
    hidden, cache = model.decode(decoding.tokens, decoding.positions, decoding.cache)
    positions = decoding.positions + 1
    return Decoding(_drawn(model, hidden, positions, keys, sampling), positions, cache)


def _drawn(
    model: Decoder,
    hidden: NamedArray,
    positions: NamedArray,
    keys: Key[Array, " batch"],
    sampling: Sampling,
) -> NamedArray:
    """Draws the tokens at `positions` from the hidden states `[batch, Embed]` before
    them.
    """
    (Batch,) = positions.axes
    logits = model.logits(hidden).rearrange((Batch, model.Vocab))
    # A number for each position: nothing is carried from token to token.
    keys = jax.vmap(jax.random.fold_in)(keys, positions.array)
    return hax.named(next_tokens(logits.array, sampling, keys), Batch)
