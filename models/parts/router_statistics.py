"""How routers spread tokens over experts, and the losses that even it out."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.util import is_named_array
from jaxtyping import Array, Float

from models.parts.config import SparseDecoderConfig
from stacked_remat.training import Metrics


class AuxiliaryLoss(eqx.Module):
    """The terms that layers add to the loss, and their metrics.

    Attributes:
        loss: a scalar, already weighted, to be added to the cross entropy.
        metrics: named scalars or arrays for the log; they carry no gradient.
        statistics: the means over tokens of which both are functions, for
            `Decoder.auxiliary`.
    """

    loss: Float[Array, ""]
    metrics: Metrics
    statistics: "RouterStatistics | None" = None


class RouterStatistics(eqx.Module):
    """How one layer's router spread its tokens, without padding, over the axis
    `Experts`, in float32.

    Attributes:
        load: how many times an expert was chosen, per token; sums to
            `experts_per_token`. Has no gradient.
        importance: mean router probability of an expert; sums to one.
        z_loss: without `Experts`: mean square of the logarithm of the sum of the
            exponentials of the router's logits (Zoph et al. 2022, "ST-MoE", eq. 5).
    """

    load: NamedArray
    importance: NamedArray
    z_loss: NamedArray


def means(
    sums: RouterStatistics, x: NamedArray, Embed: Axis, documents: NamedArray | None
) -> RouterStatistics:
    """The statistics of the tokens `x` from their sums, without padding."""
    count = hax.ones(tuple(axis for axis in x.axes if axis != Embed))
    if documents is not None:
        count = hax.where(documents != 0, count, 0.0)
    # A batch may be padding alone.
    total = hax.maximum(hax.sum(count), 1.0)
    return jax.tree.map(lambda one: one / total, sums, is_leaf=is_named_array)


def router_losses(
    statistics: RouterStatistics, config: SparseDecoderConfig
) -> AuxiliaryLoss:
    """The weighted losses of the routers; see `ExpertsConfig.load_balance_loss`."""

    def balance(load: NamedArray, importance: NamedArray) -> Array:
        """That of Switch Transformer (Fedus et al. 2021, eq. 4), for the choice of
        several experts.

        `experts_per_token` for even routing, and at most `num_experts`; pooled as in
        transformers.
        """
        # load sums to experts_per_token and importance to 1, so of even ones the
        # product is experts_per_token / num_experts.
        return hax.dot(load, importance, axis=config.Experts).array * float(
            config.Experts.size
        )

    per_layer = {
        "load_balance": balance(statistics.load, statistics.importance),
        "router_z_loss": statistics.z_loss.array,
    }
    metrics = {name: jnp.mean(values) for name, values in per_layer.items()}
    if config.experts.load_balance_loss == "pooled":
        # Loads are averaged before the product, so layers may make up for each other.
        pooled = (
            hax.mean(one, "layers") for one in (statistics.load, statistics.importance)
        )
        metrics["load_balance"] = balance(*pooled)
    loss = config.experts.load_balance_weight_used * metrics["load_balance"]
    loss += config.experts.z_loss_weight * metrics["router_z_loss"]
    metrics |= {f"{name}_per_layer": values for name, values in per_layer.items()}
    # 1 for even routing, num_experts / experts_per_token where all tokens choose the
    # same experts.
    busiest = (
        hax.max(statistics.load, config.Experts).array
        / config.experts.experts_per_token
    )
    metrics["busiest_expert_per_layer"] = busiest * config.experts.num_experts
    return AuxiliaryLoss(loss, jax.lax.stop_gradient(metrics), statistics)
