"""What Gemma 2 and Gemma 3 share: four norms a layer, and GELU."""

from dataclasses import dataclass
from typing import Any

import jax
from haliax import NamedArray
from jaxtyping import PRNGKeyArray

from models.hf_io import config_fields as hf
from models.parts.attention import Attention
from models.parts.cache import LayerCache
from models.parts.config import DecoderConfig, LayerKind
from models.parts.decoder import DecoderLayer, LayerOutput, residual
from models.parts.mlp import GatedMlp, gelu_gated
from models.parts.norms import Norm, offset_rms_norm
from models.parts.tokens import Tokens
from stacked_remat.training.config_checks import Count


@dataclass(frozen=True)
class ScaledConfig(DecoderConfig):
    """What decoders of Gemma share.

    Attributes:
        query_pre_attn_scalar: scores are divided by its square root.
    """

    tie_word_embeddings: bool = True
    query_pre_attn_scalar: Count = 256

    @property
    def embedding_scale(self) -> float:
        """The square root of the width."""
        # The decoder rounds it to the dtype of activations, as transformers does.
        return self.hidden_dim**0.5

    def init_norm(self) -> Norm:
        """Makes a norm over `Embed`."""
        # Gemma2RMSNorm of transformers: weights are the factors less one.
        return offset_rms_norm(self.Embed, self.rms_norm_eps)


class GemmaLayer(DecoderLayer):
    """A layer of Gemma."""

    input_norm: Norm
    attention: Attention
    attention_output_norm: Norm
    post_attention_norm: Norm
    mlp: GatedMlp
    mlp_output_norm: Norm

    @staticmethod
    def init(
        config: ScaledConfig, kind: LayerKind, *, key: PRNGKeyArray, **options: Any
    ) -> "GemmaLayer":
        """Makes a layer from `key`, with options of `Attention.init`."""
        attention_key, mlp_key = jax.random.split(key)
        return GemmaLayer(
            input_norm=config.init_norm(),
            attention=Attention.init(
                config,
                window=kind.window,
                # Not by the width of a head, which is another number in the 27B models
                scale=config.query_pre_attn_scalar**-0.5,
                **options,
                key=attention_key,
            ),
            attention_output_norm=config.init_norm(),
            post_attention_norm=config.init_norm(),
            mlp=GatedMlp.init(config, config.Mlp, gating=gelu_gated, key=mlp_key),
            mlp_output_norm=config.init_norm(),
        )

    def forward(
        self, x: NamedArray, tokens: Tokens, cache: LayerCache | None = None
    ) -> LayerOutput:
        """Attention, then the MLP, with norms of what each is given and of what it
        adds.
        """
        # Gemma2DecoderLayer of transformers
        attended, cache = self.attention(self.input_norm(x), tokens, cache)
        x = residual(x + self.attention_output_norm(attended))
        mixed, statistics = self.mlp(x, tokens, norm=self.post_attention_norm)
        return x + self.mlp_output_norm(mixed), cache, statistics


_GELU = "gelu_pytorch_tanh"
SIZES = hf.with_defaults(
    hf.DENSE_SIZES, head_dim=256, tie_word_embeddings=True, num_key_value_heads=4
) | {
    "hidden_act": hf.Only(_GELU),
    "hidden_activation": hf.Only(_GELU, written=True),
    "query_pre_attn_scalar": hf.Field("query_pre_attn_scalar", 256),
}

# What a Llama calls `post_attention_layernorm` is before its MLP; here that name is
# of the norm of attention's output.
TENSORS = {
    "attention_output_norm": "post_attention_layernorm",
    "post_attention_norm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}
