"""The loss of a decoder on a batch, whole or token by token.

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
from models.parts.multi_token_prediction import DEPTHS_AXIS, targets_ahead
from models.parts.router_statistics import AuxiliaryLoss
from stacked_remat.training import Metrics, TokenBatch


def next_token_loss(
    model: Decoder, batch: TokenBatch, z_loss: float = 0.0
) -> tuple[Float[Array, ""], Metrics]:
    """Mean cross entropy of the next token, in nats, plus that of further tokens where
    the model has layers for them, and the model's auxiliary losses.

    Args:
        batch: all `[Batch, Pos]`; a target of weight 0 does not count, and documents do
            not see each other.
        z_loss: as `chunked_cross_entropy` takes it; the cross entropies include it.

    The metrics have the cross entropy of the next token alone under `loss`, and that of
    the token after it under `mtp_loss_1`.
    """
    loss, auxiliary, metrics = _loss_of_all(model, batch, z_loss)
    return loss + auxiliary.loss, {**metrics, **auxiliary.metrics}


def losses_by_token(
    model: Decoder, batch: TokenBatch, z_loss: float = 0.0
) -> tuple[tuple[NamedArray, Any], Metrics]:
    """The cross entropy of the next token, token by token.

    Returns:
        Each token's part of the batch's mean cross entropy, `[Batch, Pos]` in nats,
        which add up to the metric `loss`, and the sums for `auxiliary_of_sums`; and the
        metrics. Layers that predict further tokens are left out.
    """
    hidden, auxiliary = model.hidden_states(
        batch.tokens, documents=batch.documents, positions=batch.positions
    )
    losses = _token_losses(model, hidden, batch, z_loss)
    parts = losses / batch.total_weight
    metrics = {"loss": hax.sum(parts).scalar(), **auxiliary.metrics}
    return (parts, _sums(auxiliary, batch)), metrics


def loss_and_sums(
    model: Decoder, batch: TokenBatch, z_loss: float = 0.0
) -> tuple[tuple[Float[Array, ""], Any], Metrics]:
    """`next_token_loss` without the auxiliary losses, and the sums for
    `auxiliary_of_sums`; the parts of a loss.
    """
    loss, auxiliary, metrics = _loss_of_all(model, batch, z_loss)
    return (loss, _sums(auxiliary, batch)), metrics


def auxiliary_of_sums(model: Decoder, sums: Any) -> tuple[Float[Array, ""], Metrics]:
    """The auxiliary losses of sequences together, and their metrics, by the sums of
    `losses_by_token` or `loss_and_sums`.
    """
    of_statistics, count = sums
    means = jax.tree.map(lambda one: one / jnp.maximum(count, 1.0), of_statistics)
    found = model.auxiliary(means)
    return found.loss, found.metrics


def _sums(auxiliary: AuxiliaryLoss, batch: TokenBatch) -> tuple[Any, Array]:
    """The sums over tokens of which the statistics of routers are means, and how many
    tokens there are, without padding.
    """
    # Routers count all tokens but padding, whatever the weights of their targets.
    real = hax.ones(batch.tokens.axes)
    if batch.documents is not None:
        real = hax.where(batch.documents != 0, real, 0.0)
    count = hax.sum(real).scalar()
    # A loss of routers is a product of means over the whole batch, and no sum of those
    # of its sequences; of sums it can be computed at the end.
    return jax.tree.map(lambda mean: mean * count, auxiliary.statistics), count


def _loss_of_all(
    model: Decoder, batch: TokenBatch, z_loss: float
) -> tuple[Array, AuxiliaryLoss, Metrics]:
    """The mean cross entropy of the next token plus the weighted one of further tokens,
    the model's auxiliary losses, and the metrics of the cross entropies.
    """
    hidden, further, auxiliary = model.further_states(
        batch.tokens, documents=batch.documents, positions=batch.positions
    )
    losses = _token_losses(model, hidden, batch, z_loss)
    loss = hax.sum(losses).scalar() / batch.total_weight
    metrics = {"loss": loss}
    if further is not None:
        of_further, more = _further_loss(model, further, batch, z_loss)
        loss = loss + of_further
        metrics = metrics | more
    return loss, auxiliary, metrics


def _token_losses(
    model: Decoder, hidden: NamedArray, batch: TokenBatch, z_loss: float
) -> NamedArray:
    """The weighted cross entropy of every token, `[Batch, Pos]`."""
    return model.token_losses(
        hidden, batch.targets, weights=batch.weights, z_loss=z_loss
    )


def _further_loss(
    model: Decoder, hidden: NamedArray, batch: TokenBatch, z_loss: float
) -> tuple[Array, Metrics]:
    """The weighted mean over depths of the cross entropies of further tokens, and the
    mean of each depth over its own targets as a metric.

    `hidden` is `[depths, Batch, Pos, Embed]`.
    """
    Depths = hidden.resolve_axis(DEPTHS_AXIS)
    shifted = [targets_ahead(batch, 1 + depth) for depth in range(Depths.size)]
    # [depths, Batch, Pos], as the hidden states are: the head computes all depths at
    # once
    targets, weights = (
        hax.stack(Depths, of_depths) for of_depths in zip(*shifted, strict=True)
    )
    losses = model.token_losses(hidden, targets, weights=weights, z_loss=z_loss)
    total, count = (
        hax.sum(each, batch.tokens.axes).rearrange((Depths,)).array
        for each in (losses, weights)
    )
    # The log has each depth's mean over its own targets; the loss divides all by those
    # of the next token, so that losses of microbatches add up.
    means = jax.lax.stop_gradient(total / jnp.maximum(count, 1.0))
    metrics = {f"mtp_loss_{1 + depth}": mean for depth, mean in enumerate(means)}
    weight = model.config.further_tokens.weight
    return weight * jnp.mean(total) / batch.total_weight, metrics
