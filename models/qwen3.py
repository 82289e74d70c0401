"""Qwen3 (Yang et al. 2025): RMS norms of queries and keys over each head."""

from dataclasses import dataclass

import jax
from haliax import NamedArray
from jaxtyping import PRNGKeyArray

from models.hf_io import config_fields as hf
from models.hf_io.formats import ALTERNATING, HfFormat, register_format
from models.parts.attention import Attention, CausalAttention
from models.parts.cache import LayerCache
from models.parts.config import DecoderConfig, LayerKind
from models.parts.decoder import DecoderLayer, LayerOutput, residual
from models.parts.experts import init_feed_forward
from models.parts.mlp import FeedForward
from models.parts.norms import Norm, rms_norm
from models.parts.tokens import Tokens
from models.qwen2 import LaterWindows


class Qwen3Layer(DecoderLayer):
    """A layer of Qwen3, and of decoders that differ from it in their parts alone."""

    input_norm: Norm
    attention: CausalAttention
    post_attention_norm: Norm
    mlp: FeedForward

    @staticmethod
    def init(
        config: DecoderConfig, kind: LayerKind, *, key: PRNGKeyArray
    ) -> "Qwen3Layer":
        """Makes a layer from `key`."""
        attention_key, mlp_key = jax.random.split(key)
        return Qwen3Layer(
            input_norm=config.init_norm(),
            attention=Attention.init(
                config,
                rotary=config.rotary,
                window=kind.window,
                # Over each head, before rotation; OLMo's are over all heads.
                q_norm=rms_norm(config.HeadDim, config.rms_norm_eps),
                k_norm=rms_norm(config.HeadDim, config.rms_norm_eps),
                key=attention_key,
            ),
            post_attention_norm=config.init_norm(),
            mlp=init_feed_forward(config, kind, key=mlp_key),
        )

    def forward(
        self, x: NamedArray, tokens: Tokens, cache: LayerCache | None = None
    ) -> LayerOutput:
        """Adds attention, then the MLP or experts, each of normalised input."""
        # Qwen3DecoderLayer of transformers
        attended, cache = self.attention(self.input_norm(x), tokens, cache)
        x = residual(x + attended)
        # The MLP or experts apply the norm themselves, tile by tile.
        mixed, statistics = self.mlp(x, tokens, norm=self.post_attention_norm)
        return x + mixed, cache, statistics


@dataclass(frozen=True)
class Qwen3Config(DecoderConfig):
    """A dense Qwen3 decoder: every layer has one MLP."""

    def init_layer(self, kind: LayerKind, *, key: PRNGKeyArray) -> Qwen3Layer:
        """Makes a layer from `key`."""
        return Qwen3Layer.init(self, kind, key=key)


FIELDS = hf.with_defaults(hf.DENSE_SIZES, head_dim=128, num_key_value_heads=32) | {
    "use_qk_norm": hf.Only(True),
    "rope_theta": hf.Rotary(),
    "sliding_window": LaterWindows(),
}

register_format(
    HfFormat(
        "qwen3",
        Qwen3Config,
        FIELDS,
        probe={"attention": ALTERNATING},
        checksum=-0.21074,
    )
)
