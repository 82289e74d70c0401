"""Continuing sequences with a language model: the prompts at once, then a token of each at a time."""

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
from models.lm import LanguageModel
from stacked_remat.training import BATCH_AXIS, POSITION_AXIS

Tokens = Int[np.ndarray, " tokens"]


class Decoding(eqx.Module):
    """Sequences that are being continued, one a row.

    Attributes:
        tokens: `[batch]`, the newest of each, which the model has not read yet.
        positions: `[batch]`, where they stand.
        cache: what the model keeps of the tokens before them.
    """

    tokens: NamedArray
    positions: NamedArray
    cache: Any


def continued_tokens(
    model: LanguageModel,
    prompts: Sequence[Tokens],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    key: PRNGKeyArray,
) -> Iterator[Int[np.ndarray, " batch"]]:
    """Continues all prompts side by side: gives the next token of every one, `max_new_tokens` times.

    A row gets what it would get alone: the same logits up to rounding, and random numbers of its own.

    Args:
        model: any causal language model.
        prompts: at least one token each; they may differ in length.
        max_new_tokens: at the most; the caller may stop before.
        sampling: how tokens are drawn.
        key: of the random numbers. Row r draws from `jax.random.fold_in(key, r)`.

    Cost: one forward pass over `prompts x longest prompt`, then a step for each token, which reads the
    weights and the cache once. The cache is allocated once, for the longest prompt and the new tokens, and
    updated in place. Compiles twice for each number and length of prompts.
    """
    assert prompts and all(len(prompt) for prompt in prompts) and max_new_tokens > 0
    lengths = [len(prompt) for prompt in prompts]
    Batch, Pos = Axis(BATCH_AXIS, len(prompts)), Axis(POSITION_AXIS, max(lengths))
    padded = np.zeros((Batch.size, Pos.size), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(Batch.size))
    slots = Pos.size + max_new_tokens - 1  # the last new token is not read any more
    named = (hax.named(jnp.asarray(padded), (Batch, Pos)), hax.named(jnp.asarray(lengths, jnp.int32), Batch))
    decoding = first_tokens(model, *named, keys, sampling, slots)
    yield np.asarray(decoding.tokens.array)
    for _ in range(max_new_tokens - 1):
        decoding = one_more_token((model, keys), decoding, sampling)
        yield np.asarray(decoding.tokens.array)


@eqx.filter_jit
def first_tokens(
    model: LanguageModel,
    prompts: NamedArray,
    lengths: NamedArray,
    keys: Key[Array, " batch"],
    sampling: Sampling,
    slots: int,
) -> Decoding:
    """Reads the prompts, `[batch, position]` of which the first `lengths` tokens count, and draws the next.

    Args:
        model: as in `continued_tokens`.
        prompts: rows are filled up at their ends.
        lengths: `[batch]`.
        keys: one a row.
        sampling: how tokens are drawn.
        slots: of the cache.
    """
    hidden, cache = model.prefill(prompts, slots)
    (Batch,) = lengths.axes
    last = hidden[{Batch: hax.arange(Batch), POSITION_AXIS: lengths - 1}]
    return Decoding(_drawn(model, last, lengths, keys, sampling), lengths, cache)


@eqx.filter_jit(donate="warn-except-first")
def one_more_token(
    model_and_keys: tuple[LanguageModel, Key[Array, " batch"]], decoding: Decoding, sampling: Sampling
) -> Decoding:
    """Reads the newest tokens and draws the next. What is decoded so far is donated: it can't be used again.

    Cost: one token a row through the model; no memory beside the cache but that of one layer's step.
    """
    model, keys = model_and_keys
    hidden, cache = model.decode(decoding.tokens, decoding.positions, decoding.cache)
    positions = decoding.positions + 1
    return Decoding(_drawn(model, hidden, positions, keys, sampling), positions, cache)


def _drawn(
    model: LanguageModel,
    hidden: NamedArray,
    positions: NamedArray,
    keys: Key[Array, " batch"],
    sampling: Sampling,
) -> NamedArray:
    """The tokens that are to stand at `positions`, from the hidden states `[batch, Embed]` before them."""
    (Batch,) = positions.axes
    logits = model.logits(hidden).rearrange((Batch, model.Vocab))
    keys = jax.vmap(jax.random.fold_in)(keys, positions.array)
    return hax.named(next_tokens(logits.array, sampling, keys), Batch)
