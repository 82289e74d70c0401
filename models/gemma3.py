"""The text decoder of Gemma 3 (Gemma team 2025): a window in five layers of six, four
norms a layer.
"""

from dataclasses import dataclass, replace

import jax
from haliax import NamedArray
from jaxtyping import PRNGKeyArray

from models.hf_io import config_fields as hf
from models.hf_io.formats import ALTERNATING, HfFormat, register_format
from models.parts.attention import Attention
from models.parts.cache import LayerCache
from models.parts.config import DecoderConfig, LayerKind
from models.parts.decoder import DecoderLayer, LayerOutput, residual
from models.parts.mlp import GatedMlp, gelu_gated
from models.parts.norms import Norm, offset_rms_norm
from models.parts.tokens import Tokens
from stacked_remat.training.config_checks import Count


class Gemma3Layer(DecoderLayer):
    """A layer of Gemma 3."""

    input_norm: Norm
    attention: Attention
    attention_output_norm: Norm
    post_attention_norm: Norm
    mlp: GatedMlp
    mlp_output_norm: Norm

    def forward(
        self, x: NamedArray, tokens: Tokens, cache: LayerCache | None = None
    ) -> LayerOutput:
        """Attention, then the MLP, with norms of what each is given and of what it
        adds.
        """
        # Gemma3DecoderLayer of transformers
        attended, cache = self.attention(self.input_norm(x), tokens, cache)
        x = residual(x + self.attention_output_norm(attended))
        mixed, statistics = self.mlp(x, tokens, norm=self.post_attention_norm)
        return x + self.mlp_output_norm(mixed), cache, statistics


@dataclass(frozen=True)
class Gemma3Config(DecoderConfig):
    """A Gemma 3 decoder.

    Attributes:
        query_pre_attn_scalar: scores are divided by its square root.
        local_theta: the base of the wavelengths in layers with a window.
    """

    tie_word_embeddings: bool = True
    query_pre_attn_scalar: Count = 256
    local_theta: float = 10_000.0

    @property
    def embedding_scale(self) -> float:
        """The square root of the width."""
        # The decoder rounds it to the dtype of activations, as transformers does.
        return self.hidden_dim**0.5

    def init_norm(self) -> Norm:
        """Makes a norm over `Embed`."""
        # Gemma3RMSNorm of transformers: weights are the factors less one.
        return offset_rms_norm(self.Embed, self.rms_norm_eps)

    def init_layer(self, kind: LayerKind, *, key: PRNGKeyArray) -> Gemma3Layer:
        """Makes a layer from `key`."""
        attention_key, mlp_key = jax.random.split(key)
        # Windows are short: wavelengths of their own, not stretched
        rotary = self.rotary
        if kind.window is not None:
            rotary = replace(rotary, theta=self.local_theta, scaling=None)
        return Gemma3Layer(
            input_norm=self.init_norm(),
            attention=Attention.init(
                self,
                rotary=rotary,
                window=kind.window,
                # Not by the width of a head, which is another number in the 27B model
                scale=self.query_pre_attn_scalar**-0.5,
                # In place of the softcap of scores in Gemma 2
                q_norm=offset_rms_norm(self.HeadDim, self.rms_norm_eps),
                k_norm=offset_rms_norm(self.HeadDim, self.rms_norm_eps),
                key=attention_key,
            ),
            attention_output_norm=self.init_norm(),
            post_attention_norm=self.init_norm(),
            mlp=GatedMlp.init(self, self.Mlp, gating=gelu_gated, key=mlp_key),
            mlp_output_norm=self.init_norm(),
        )


_GELU = "gelu_pytorch_tanh"
SIZES = hf.DENSE_SIZES | {
    "head_dim": hf.Field("attention.head_dim", 256, written="head_dim"),
    "tie_word_embeddings": hf.Field("tie_word_embeddings", True),
    "num_key_value_heads": hf.KeyValueHeads(4),
    "hidden_act": hf.Only(_GELU),
    "hidden_activation": hf.Only(_GELU, written=True),
    "query_pre_attn_scalar": hf.Field("query_pre_attn_scalar", 256),
}
FIELDS = SIZES | {
    "rope_theta": hf.RotaryByKind(1_000_000.0, 131_072, local_theta="local_theta"),
    "sliding_window": hf.Windows(4_096, period=6, period_name="sliding_window_pattern"),
}

# What a Llama calls `post_attention_layernorm` is before its MLP; here that name is
# of the norm of attention's output.
TENSORS = {
    "attention_output_norm": "post_attention_layernorm",
    "post_attention_norm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}

register_format(
    HfFormat(
        "gemma3_text",
        Gemma3Config,
        FIELDS,
        TENSORS,
        probe={"attention": ALTERNATING, "query_pre_attn_scalar": 9},
        checksum=4.84197,
    )
)
