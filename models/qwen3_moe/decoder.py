"""The Qwen3 mixture-of-experts decoder: embedding, a stack of layers, a norm and a head."""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jaxtyping import PRNGKeyArray

from models.lm import AuxiliaryLoss, LanguageModel, build_model
from models.qwen3_moe.attention import Attention
from models.qwen3_moe.config import Qwen3MoeConfig
from models.qwen3_moe.experts import RouterStatistics, SparseExperts, load_balance_loss
from models.qwen3_moe.layers import cast_floating, linear, rms_norm
from stacked_remat import ScanCheckpointSpec, Stacked
from stacked_remat.ops import RotaryTable, rotary_table
from stacked_remat.training import POSITION_AXIS


class DecoderLayer(eqx.Module):
    """Attention, then experts, each on the normalised residual stream and added back to it."""

    input_norm: hnn.RmsNorm
    attention: Attention
    post_attention_norm: hnn.RmsNorm
    experts: SparseExperts
    config: Qwen3MoeConfig = eqx.field(static=True)

    @staticmethod
    def init(config: Qwen3MoeConfig, *, key: PRNGKeyArray) -> "DecoderLayer":
        """Makes one layer from `key`."""
        attention_key, experts_key = jax.random.split(key)
        return DecoderLayer(
            input_norm=rms_norm(config, config.Embed),
            attention=Attention.init(config, key=attention_key),
            post_attention_norm=rms_norm(config, config.Embed),
            experts=SparseExperts.init(config, key=experts_key),
            config=config,
        )

    def __call__(self, x: NamedArray, rotary: RotaryTable) -> tuple[NamedArray, RouterStatistics]:
        """Maps the residual stream `[..., position, Embed]` to itself, with the router's statistics."""
        layer = cast_floating(self, x.dtype)
        x = x + layer.attention(layer.input_norm(x), rotary, POSITION_AXIS)
        mixed, statistics = layer.experts(layer.post_attention_norm(x))
        return x + mixed, statistics


class Qwen3MoeDecoder(LanguageModel):
    """A causal language model with the architecture of Qwen3-30B-A3B and its siblings.

    Tokens are `[..., position]`. With equal weights its logits are those of Hugging Face's
    `Qwen3MoeForCausalLM` when every layer is sparse.
    """

    embedding: hnn.Embedding
    layers: Stacked
    norm: hnn.RmsNorm
    head: hnn.Linear | None
    Vocab: Axis = eqx.field(static=True)
    config: Qwen3MoeConfig = eqx.field(static=True)

    @staticmethod
    def init(
        config: Qwen3MoeConfig, Vocab: Axis, *, remat: ScanCheckpointSpec = True, key: PRNGKeyArray
    ) -> "Qwen3MoeDecoder":
        """Makes a decoder in float32; `remat` is the policy of the stack of layers."""
        embedding_key, layers_key, head_key = jax.random.split(key, 3)
        weight = hax.random.normal(embedding_key, (Vocab, config.Embed)) * config.initializer_range
        make_layers = Stacked.init(config.Layers, DecoderLayer, remat=remat)
        tied = config.tie_word_embeddings
        return Qwen3MoeDecoder(
            embedding=hnn.Embedding(weight, Vocab, config.Embed),
            layers=make_layers(config, key=jax.random.split(layers_key, config.Layers.size)),
            norm=rms_norm(config, config.Embed),
            head=None if tied else linear(config, config.Embed, Vocab, key=head_key),
            Vocab=Vocab,
            config=config,
        )

    def layer_states(self, tokens: NamedArray) -> tuple[NamedArray, RouterStatistics]:
        """Maps tokens `[..., position]` to hidden states `[..., position, Embed]`, with statistics per layer.

        Returns:
            The normalised output of the last layer, and router statistics `[Layers, Experts]`.
        """
        dtype = jnp.dtype(self.config.compute_dtype)
        Pos = tokens.resolve_axis(POSITION_AXIS)
        rotary = rotary_table(hax.arange(Pos), self.config.HeadDim, theta=self.config.rope_theta)
        x = self.embedding(tokens).astype(dtype)
        x, statistics = self.layers.scan(x, rotary)
        return cast_floating(self.norm, dtype)(x), statistics

    def hidden_states(self, tokens: NamedArray) -> tuple[NamedArray, AuxiliaryLoss]:
        """Maps tokens `[..., position]` to hidden states, with the load-balance loss of every layer."""
        hidden, statistics = self.layer_states(tokens)
        per_layer = load_balance_loss(statistics, self.config.Experts)
        mean = hax.mean(per_layer).scalar()
        metrics = {
            "load_balance": jax.lax.stop_gradient(mean),
            "load_balance_per_layer": jax.lax.stop_gradient(per_layer.array),
        }
        return hidden, AuxiliaryLoss(mean * self.config.experts.load_balance_weight, metrics)

    def unembedding(self) -> NamedArray:
        """The head's weights, or the embedding's where they are tied."""
        return self.embedding.weight if self.head is None else self.head.weight


@build_model.register
def _build(
    config: Qwen3MoeConfig, Vocab: Axis, *, remat: ScanCheckpointSpec, key: PRNGKeyArray
) -> LanguageModel:
    return Qwen3MoeDecoder.init(config, Vocab, remat=remat, key=key)
