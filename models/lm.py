"""The loss of a decoder on a batch, whole or sequence by sequence.

A decoder maps tokens to hidden states, which is the expensive part, and computes their
losses from a few logits at a time.
"""

from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray
from jaxtyping import Array, Float

from models.parts.decoder import Decoder
from models.parts.router_statistics import AuxiliaryLoss
from stacked_remat.training import POSITION_AXIS, Metrics, TokenBatch


def next_token_loss(
    model: Decoder, batch: TokenBatch, z_loss: float = 0.0
) -> tuple[Float[Array, ""], Metrics]:
    """Mean cross entropy of the next token, in nats, plus the model's auxiliary losses.

    Args:
        batch: all `[Batch, Pos]`; a target of weight 0 does not count, and documents do
            not see each other.
        z_loss: as `chunked_cross_entropy` takes it; the cross entropy includes it.

    The metrics have the cross entropy alone under `loss`.
    """
    losses, auxiliary = _token_losses(model, batch, z_loss)
    cross_entropy = hax.sum(losses).scalar() / _total_weight(batch)
    return cross_entropy + auxiliary.loss, {"loss": cross_entropy, **auxiliary.metrics}


def example_losses(
    model: Decoder, batch: TokenBatch, z_loss: float = 0.0
) -> tuple[tuple[NamedArray, Any], Metrics]:
    """`next_token_loss`, sequence by sequence.

    Returns:
        Each sequence's part of the batch's mean cross entropy, `[Batch]` in nats, which
        add up to the metric `loss`, and the sums for `auxiliary_of_sums`; and the
        metrics.
    """
    losses, auxiliary = _token_losses(model, batch, z_loss)
    parts = hax.sum(losses, POSITION_AXIS) / _total_weight(batch)
    # Routers count all tokens but padding, whatever the weights of their targets.
    real = hax.ones(batch.tokens.axes)
    if batch.documents is not None:
        real = hax.where(batch.documents != 0, real, 0.0)
    count = hax.sum(real).scalar()
    sums = jax.tree.map(lambda mean: mean * count, auxiliary.statistics), count
    return (parts, sums), {"loss": hax.sum(parts).scalar(), **auxiliary.metrics}


def loss_and_sums(
    model: Decoder, batch: TokenBatch, z_loss: float = 0.0
) -> tuple[tuple[Float[Array, ""], Any], Metrics]:
    """The mean cross entropy of the next token, and the sums for `auxiliary_of_sums`;
    the parts of a loss.
    """
    (parts, sums), _ = example_losses(model, batch, z_loss)
    loss = hax.sum(parts).scalar()
    return (loss, sums), {"loss": loss}


def auxiliary_of_sums(model: Decoder, sums: Any) -> tuple[Float[Array, ""], Metrics]:
    """The auxiliary losses of sequences together, and their metrics, by the sums of
    `example_losses`.
    """
    of_statistics, count = sums
    means = jax.tree.map(lambda one: one / jnp.maximum(count, 1.0), of_statistics)
    found = model.auxiliary(means)
    return found.loss, found.metrics


def _token_losses(
    model: Decoder, batch: TokenBatch, z_loss: float
) -> tuple[NamedArray, AuxiliaryLoss]:
    """The weighted cross entropy of every token, `[Batch, Pos]`, and the model's
    auxiliary losses.
    """
    hidden, auxiliary = model.hidden_states(
        batch.tokens, documents=batch.documents, positions=batch.positions
    )
    losses = model.token_losses(
        hidden, batch.targets, weights=batch.weights, z_loss=z_loss
    )
    return losses, auxiliary


def _total_weight(batch: TokenBatch) -> Array:
    # A batch may have no target at all.
    return jnp.maximum(hax.sum(batch.weights).scalar(), 1.0)
