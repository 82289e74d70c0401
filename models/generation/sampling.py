"""Samples the next token from its logits: temperature, top-k and top-p."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

Logits = Float[Array, "*batch vocab"]
# Smaller numbers are 0 on most devices
_SMALLEST_TEMPERATURE = float(jnp.finfo(jnp.float32).tiny)


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn from the model's distribution.

    Attributes:
        temperature: logits are divided by it; 0 for the likeliest token each time.
        top_k: how many of the likeliest tokens remain; None for all.
        top_p: of the tokens that `top_k` leaves, the fewest whose probabilities reach
            this; None for all.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(
                "temperature must be 0, for the likeliest token, or positive; got"
                f" {self.temperature}."
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1 token; got {self.top_k}.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1; got {self.top_p}.")
        for name in ("top_k", "top_p"):
            if self.temperature == 0 and getattr(self, name) is not None:
                raise ValueError(
                    f"{name} has no effect with temperature 0, which always takes the"
                    " likeliest token. Leave it out, or raise the temperature."
                )


def next_tokens(
    logits: Float[Array, "batch vocab"], sampling: Sampling, keys: Key[Array, " batch"]
) -> Int[Array, " batch"]:
    """Draws a token for each row, with a key of its own, so that no row depends on the
    others.

    Temperature, `top_k` and `top_p` apply in this order, as in Hugging Face's
    `generate`.

    Cost: sorts the vocabulary once for each of `top_k` and `top_p`.
    """
    if sampling.temperature < _SMALLEST_TEMPERATURE:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits.astype(jnp.float32)
    # So that the likeliest token stays finite, however small the temperature is.
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / sampling.temperature
    if sampling.top_k is not None:
        logits = keep_top_k(logits, sampling.top_k)
    if sampling.top_p is not None and sampling.top_p < 1:
        logits = keep_top_p(logits, sampling.top_p)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def keep_top_k(logits: Logits, k: int) -> Logits:
    """The logits with minus infinity for all but the `k` highest, and those that equal
    the least of them.
    """
    # As TopKLogitsWarper of transformers: below the k-th, not at it
    highest, _ = jax.lax.top_k(logits, min(k, logits.shape[-1]))
    return jnp.where(logits < highest[..., -1:], -jnp.inf, logits)


def keep_top_p(logits: Logits, p: float) -> Logits:
    """The logits with minus infinity outside the smallest set of tokens whose
    probabilities reach `p`.

    Those that equal the least of them remain, and the likeliest token always does
    (Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration").
    """
    ordered = jnp.sort(logits, axis=-1, descending=True)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    # The probability of all tokens that are likelier than each: one remains while
    # theirs is below `p`, so the token that reaches it is the last.
    likelier = jnp.cumsum(probabilities, axis=-1) - probabilities
    lowest = jnp.min(
        ordered, axis=-1, keepdims=True, where=likelier < p, initial=jnp.inf
    )
    return jnp.where(logits < jnp.minimum(lowest, ordered[..., :1]), -jnp.inf, logits)
