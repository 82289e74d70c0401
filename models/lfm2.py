"""LFM2 (Liquid AI 2025): layers with a gated short convolution among layers with
attention.
"""

from dataclasses import dataclass
from typing import Any

import jax
from haliax import NamedArray
from jaxtyping import PRNGKeyArray

from models.hf_io import config_fields as hf
from models.hf_io.formats import HfFormat, register_format
from models.parts.attention import Attention
from models.parts.cache import LayerCache
from models.parts.config import LayerKind
from models.parts.decoder import DecoderLayer, LayerOutput, residual
from models.parts.experts import init_feed_forward
from models.parts.gated_convolution import CONVOLUTION_NAMES, GatedConvolution
from models.parts.hybrid import HybridDecoderConfig
from models.parts.mlp import FeedForward
from models.parts.norms import Norm, rms_norm
from models.parts.sections import FULL
from models.parts.tokens import Tokens
from stacked_remat._messages import shown
from stacked_remat.training.config_checks import Count


class Lfm2Layer(DecoderLayer):
    """A layer of LFM2, with attention or a convolution, and an MLP or experts."""

    input_norm: Norm
    attention: Attention | None
    conv: GatedConvolution | None
    post_attention_norm: Norm
    mlp: FeedForward

    def forward(
        self, x: NamedArray, tokens: Tokens, cache: LayerCache | None = None
    ) -> LayerOutput:
        """Adds the mixer, then the MLP or experts, each of normalised input."""
        # Lfm2DecoderLayer of transformers
        mixed, cache = self.mixer(self.input_norm(x), tokens, cache)
        x = residual(x + mixed)
        output, statistics = self.mlp(x, tokens, norm=self.post_attention_norm)
        return x + output, cache, statistics


@dataclass(frozen=True)
class ConvolutionalConfig(HybridDecoderConfig):
    """What decoders of LFM2 share; of `layer_types` those that are linear have a
    convolution.

    Attributes:
        conv_size: how many tokens a convolution reads, the newest included.
        conv_bias: whether convolutions and their projections have biases.
    """

    linear_names = CONVOLUTION_NAMES
    linear_heads = "channels"

    conv_size: Count = 3
    conv_bias: bool = False

    @property
    def expert_options(self) -> dict[str, Any]:
        """Options of `SparseExperts.init`."""
        return {}

    def init_layer(self, kind: LayerKind, *, key: PRNGKeyArray) -> Lfm2Layer:
        """Makes a layer from `key`."""
        mixer_key, mlp_key = jax.random.split(key)
        attention = conv = None
        if kind.linear:
            # No rotary embedding: a window's taps are positions.
            conv = GatedConvolution.init(
                self, self.conv_size, bias=self.conv_bias, key=mixer_key
            )
        else:
            attention = Attention.init(
                self,
                rotary=self.rotary,
                # Over each head, before rotation
                q_norm=rms_norm(self.HeadDim, self.rms_norm_eps),
                k_norm=rms_norm(self.HeadDim, self.rms_norm_eps),
                key=mixer_key,
            )
        return Lfm2Layer(
            input_norm=self.init_norm(),
            attention=attention,
            conv=conv,
            post_attention_norm=self.init_norm(),
            mlp=init_feed_forward(self, kind, **self.expert_options, key=mlp_key),
        )


@dataclass(frozen=True)
class Lfm2Config(ConvolutionalConfig):
    """An LFM2 decoder."""


SIZES = hf.without(hf.DENSE_SIZES, "attention_bias", "rms_norm_eps") | {
    "num_key_value_heads": hf.KeyValueHeads(8),
    "norm_eps": hf.Field("rms_norm_eps", 1e-5),
    "conv_L_cache": hf.Field("conv_size", 3),
    "conv_bias": hf.Field("conv_bias", False),
    "tie_word_embeddings": hf.Field("tie_word_embeddings", True, ("tie_embedding",)),
    "rope_theta": hf.Rotary(theta=1_000_000.0, longest=128_000),
}
FIELDS = SIZES | {
    "intermediate_size": hf.Field("mlp_dim", 12_288, written="Mlp.size"),
    "block_use_swiglu": hf.Only(True),
    "use_pos_enc": hf.Only(True),
    # Of the first weights, and sizes under second names
    **hf.ignored("block_mlp_init_scale", "block_out_init_scale"),
    **hf.ignored("block_use_xavier_init", "conv_use_xavier_init"),
    **hf.ignored("block_dim", "block_norm_eps", "conv_dim", "conv_dim_out"),
    **hf.ignored("num_heads"),
}
LAYERS = hf.HybridLayers(linear="conv", period=1, period_name="")


def from_hf(given: hf.ConfigFields) -> hf.Found:
    """Reads a `config.json`; defaults are those of transformers."""
    found = hf.read_decoder(given, FIELDS)
    found["mlp_dim"] = _mlp_dim(given, given("block_ff_dim", found["mlp_dim"]))
    layers = range(found["num_layers"])
    # An older name for the same, which counts where `layer_types` is absent
    full = given("full_attn_idxs", [*layers])
    if strange := [layer for layer in full if layer not in layers]:
        raise ValueError(
            f"full_attn_idxs names layer {shown(strange[0])}; there are 0 to"
            f" {layers[-1]}."
        )
    usual = [FULL if layer in full else "conv" for layer in layers]
    return found | LAYERS.read_kinds(given("layer_types", usual), found)


def _mlp_dim(given: hf.ConfigFields, width: int) -> int:
    """The inner width of MLPs: by default two thirds of that written, rounded up."""
    multiple = given.at_least(1, "block_multiple_of", 256)
    factor = given("block_ffn_dim_multiplier", 1.0, kind=float, null=None)
    if not given("block_auto_adjust_ff_dim", True):
        return width
    width = 2 * width // 3
    # Lfm2MLP of transformers: without a factor it doesn't round either.
    return width if factor is None else -(int(factor * width) // -multiple) * multiple


def to_hf(config: Lfm2Config) -> dict[str, Any]:
    """Writes a `config.json`."""
    written = hf.write_decoder(config, FIELDS) | LAYERS.write(config, "layer_types")
    return written | {"block_auto_adjust_ff_dim": False}


TENSORS = {
    # Despite its name it is of the last layer's output.
    "norm": "model.embedding_norm",
    "input_norm": "operator_norm",
    "post_attention_norm": "ffn_norm",
    "attention.o_proj": "out_proj",
    "attention.q_norm": "q_layernorm",
    "attention.k_norm": "k_layernorm",
    "mlp": "feed_forward",
    "mlp.gate_proj": "w1",
    "mlp.up_proj": "w3",
    "mlp.down_proj": "w2",
}

register_format(
    HfFormat(
        "lfm2",
        Lfm2Config,
        FIELDS,
        TENSORS,
        from_hf=from_hf,
        to_hf=to_hf,
        probe={"conv_bias": True},
        checksum=-0.40063,
    )
)
