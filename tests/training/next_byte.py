"""The smallest language model: the logits of the next token are a row of a table."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from stacked_remat.training import TokenBatch


class NextByte(eqx.Module):
    table: Float[Array, "vocab vocab"]


def next_byte(vocab: int = 257) -> NextByte:
    return NextByte(jnp.zeros((vocab, vocab)))


def token_losses(model: NextByte, batch: TokenBatch) -> Float[Array, "batch position"]:
    """The cross entropy of each token, weighted."""
    log_probs = jax.nn.log_softmax(model.table[batch.tokens.array])
    picked = -jnp.take_along_axis(log_probs, batch.targets.array[..., None], axis=-1)[
        ..., 0
    ]
    return picked * batch.weights.array


def next_byte_loss(model: NextByte, batch: TokenBatch):
    loss = jnp.sum(token_losses(model, batch)) / jnp.sum(batch.weights.array)
    return loss, {"loss": loss}
