"""Llama 2 and 3 (Dubey et al. 2024, "The Llama 3 Herd of Models")."""

from dataclasses import dataclass

import jax
from haliax import NamedArray
from jaxtyping import PRNGKeyArray

from models.hf_io import config_fields as hf
from models.hf_io.formats import HfFormat, register_format
from models.parts.attention import Attention
from models.parts.cache import LayerCache
from models.parts.config import DecoderConfig, LayerKind
from models.parts.decoder import DecoderLayer, LayerOutput, residual
from models.parts.mlp import GatedMlp
from models.parts.norms import Norm
from models.parts.sections import RotaryConfig
from models.parts.tokens import Tokens


class LlamaLayer(DecoderLayer):
    """A layer of a Llama, and of decoders that differ from it in options alone."""

    input_norm: Norm
    attention: Attention
    post_attention_norm: Norm
    mlp: GatedMlp

    @staticmethod
    def init(
        config: DecoderConfig,
        kind: LayerKind,
        *,
        rotary: RotaryConfig | None,
        output_bias: bool | None = None,
        key: PRNGKeyArray,
    ) -> "LlamaLayer":
        """Makes a layer from `key`; arguments are as of `Attention.init`."""
        attention_key, mlp_key = jax.random.split(key)
        return LlamaLayer(
            input_norm=config.init_norm(),
            attention=Attention.init(
                config,
                rotary=rotary,
                window=kind.window,
                output_bias=output_bias,
                key=attention_key,
            ),
            post_attention_norm=config.init_norm(),
            mlp=GatedMlp.init(config, config.Mlp, key=mlp_key),
        )

    def forward(
        self, x: NamedArray, tokens: Tokens, cache: LayerCache | None = None
    ) -> LayerOutput:
        """Adds attention, then the MLP, each of normalised input."""
        # LlamaDecoderLayer of transformers
        attended, cache = self.attention(self.input_norm(x), tokens, cache)
        x = residual(x + attended)
        # The MLP is given the norm to apply it tile by tile.
        mixed, statistics = self.mlp(x, tokens, norm=self.post_attention_norm)
        return x + mixed, cache, statistics


@dataclass(frozen=True)
class LlamaConfig(DecoderConfig):
    """A Llama decoder."""

    def init_layer(self, kind: LayerKind, *, key: PRNGKeyArray) -> LlamaLayer:
        """Makes a layer from `key`."""
        return LlamaLayer.init(self, kind, rotary=self.rotary, key=key)


FIELDS = hf.DENSE_SIZES | {"rope_theta": hf.Rotary(longest=2_048)}

register_format(
    HfFormat("llama", LlamaConfig, FIELDS, checksum=-1.41486),
)
