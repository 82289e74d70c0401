"""The sparse feed-forward half of a layer: a top-k router and SwiGLU experts.

The experts are themselves a stack, folded over the named axis `Experts`: each adds its share to the output of
the tokens that chose it. All experts see all tokens, and the gate of those that did not choose it is zero.
That is exact, needs no sorting and no capacity, and costs `num_experts / experts_per_token` times the
arithmetic of the experts that were chosen: right for a few small experts.
"""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jaxtyping import PRNGKeyArray

from models.qwen3_moe.config import Qwen3MoeConfig
from models.qwen3_moe.layers import linear
from stacked_remat import Stacked, checkpoint_name


class RouterStatistics(eqx.Module):
    """How one layer's router spread its tokens, over the axis `Experts`, in float32.

    Attributes:
        load: how many times an expert was chosen, per token; sums to `experts_per_token`. Has no gradient.
        importance: mean router probability of an expert; sums to one.
    """

    load: NamedArray
    importance: NamedArray


def load_balance_loss(statistics: RouterStatistics, Experts: Axis) -> NamedArray:
    """The auxiliary loss of Switch Transformer (Fedus et al. 2021, eq. 4), extended to top-k routing.

    `num_experts * sum_e load_e * importance_e`. It is `experts_per_token` for even routing and grows to at
    most `num_experts` as a single expert takes more. With statistics averaged over layers first, it is
    `load_balancing_loss_func` of Hugging Face transformers.

    Returns:
        The loss over the axes that the statistics have besides `Experts`; a `Layers` axis gives one per
        layer.
    """
    return hax.dot(statistics.load, statistics.importance, axis=Experts) * float(Experts.size)


class SwiGlu(eqx.Module):
    """One expert: `down(silu(gate(x)) * up(x))` (Shazeer 2020)."""

    gate_proj: hnn.Linear
    up_proj: hnn.Linear
    down_proj: hnn.Linear

    @staticmethod
    def init(config: Qwen3MoeConfig, *, key: PRNGKeyArray) -> "SwiGlu":
        """Makes the three projections, without biases, from `key`."""
        gate_key, up_key, down_key = jax.random.split(key, 3)
        return SwiGlu(
            gate_proj=linear(config, config.Embed, config.ExpertDim, key=gate_key),
            up_proj=linear(config, config.Embed, config.ExpertDim, key=up_key),
            down_proj=linear(config, config.ExpertDim, config.Embed, key=down_key),
        )

    def __call__(self, x: NamedArray) -> NamedArray:
        """Maps `[..., Embed]` to `[..., Embed]`."""
        return self.down_proj(hnn.silu(self.gate_proj(x)) * self.up_proj(x))


class SparseExperts(eqx.Module):
    """Routes every token to `experts_per_token` experts and sums their weighted outputs.

    Names for remat policies: `router_probs`, and `experts_output`, what every expert says of every token
    before its gate weighs it, `tokens * num_experts * embed` numbers a layer: the gradient of the gates needs
    it, that of the weighted sum does not.
    """

    router: hnn.Linear
    experts: Stacked
    config: Qwen3MoeConfig = eqx.field(static=True)

    @staticmethod
    def init(config: Qwen3MoeConfig, *, key: PRNGKeyArray) -> "SparseExperts":
        """Makes the router and all experts from `key`."""
        router_key, experts_key = jax.random.split(key)
        # Whether an expert's intermediates are kept is for the policy of the stack of layers to say.
        make_experts = Stacked.init(config.Experts, SwiGlu, remat=False)
        return SparseExperts(
            router=linear(config, config.Embed, config.Experts, key=router_key),
            experts=make_experts(config, key=jax.random.split(experts_key, config.Experts.size)),
            config=config,
        )

    def route(self, x: NamedArray) -> tuple[NamedArray, RouterStatistics]:
        """Chooses experts for every token.

        Args:
            x: `[..., Embed]`.

        Returns:
            Gates `[..., Experts]` in float32, zero for the experts that were not chosen, and statistics.
        """
        Experts = self.config.Experts
        probabilities = hnn.softmax(self.router(x).astype(jnp.float32), axis=Experts)
        probabilities = checkpoint_name(probabilities, "router_probs")
        Choice = Axis("choice", self.config.experts.experts_per_token)
        _, choices = hax.top_k(probabilities, Experts, Choice.size, new_axis=Choice)
        chosen = hax.sum(hnn.one_hot(choices, Experts, dtype=jnp.float32), axis=Choice)
        gates = probabilities * chosen
        if self.config.experts.norm_topk_prob:
            gates = gates / hax.sum(gates, axis=Experts)
        tokens = tuple(axis for axis in probabilities.axes if axis != Experts)
        return gates, RouterStatistics(hax.mean(chosen, axis=tokens), hax.mean(probabilities, axis=tokens))

    def __call__(self, x: NamedArray) -> tuple[NamedArray, RouterStatistics]:
        """Maps `[..., Embed]` to `[..., Embed]`, with the router's statistics.

        Cost: `6 * tokens * num_experts * embed * expert_dim` FLOPs. Forward, one expert's intermediates at a
        time; for the gradient, those of all experts of one layer, `tokens * num_experts * (3 * expert_dim +
        embed)` numbers.
        """
        gates, statistics = self.route(x)
        mixed = self.experts.fold_via(_add_expert)(hax.zeros_like(x), x, gates.astype(x.dtype))
        return mixed, statistics


def _add_expert(expert: SwiGlu, mixed: NamedArray, x: NamedArray, gate: NamedArray) -> NamedArray:
    output = checkpoint_name(expert(x), "experts_output")
    return (mixed + output * gate).rearrange(mixed.axes)
