"""LFM2 (Liquid AI 2025): layers with a gated short convolution among layers with
attention.
"""

from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import PRNGKeyArray

from models.hf_io import config_fields as hf
from models.hf_io.formats import HfFormat, register_format
from models.parts.attention import Attention
from models.parts.config import LayerKind
from models.parts.experts import init_feed_forward
from models.parts.gated_convolution import CONVOLUTION_NAMES, GatedConvolution
from models.parts.hybrid import HybridDecoderConfig, HybridLayer
from models.parts.norms import rms_norm
from stacked_remat.training.config_checks import Count


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

    def init_layer(self, kind: LayerKind, *, key: PRNGKeyArray) -> HybridLayer:
        """Makes a layer from `key`."""
        # Lfm2DecoderLayer of transformers
        mixer_key, mlp_key = jax.random.split(key)
        mlp = init_feed_forward(self, kind, key=mlp_key)
        if kind.linear:
            # No rotary embedding: a window's taps are positions.
            conv = GatedConvolution.init(
                self, self.conv_size, bias=self.conv_bias, key=mixer_key
            )
            return HybridLayer.init(self, mlp, conv=conv)
        attention = Attention.init(
            self,
            rotary=self.rotary,
            # Over each head, before rotation
            q_norm=rms_norm(self.HeadDim, self.rms_norm_eps),
            k_norm=rms_norm(self.HeadDim, self.rms_norm_eps),
            key=mixer_key,
        )
        return HybridLayer.init(self, mlp, attention=attention)


@dataclass(frozen=True)
class Lfm2Config(ConvolutionalConfig):
    """An LFM2 decoder."""


SIZES = hf.with_defaults(hf.DENSE_SIZES, num_key_value_heads=8)
SIZES = hf.without(SIZES, "attention_bias", "rms_norm_eps") | {
    "norm_eps": hf.Field("rms_norm_eps", 1e-5),
    "conv_L_cache": hf.Field("conv_size", 3),
    "conv_bias": hf.Field("conv_bias", False),
    "tie_word_embeddings": hf.Field("tie_word_embeddings", True, ("tie_embedding",)),
    "rope_theta": hf.Rotary(theta=1_000_000.0, longest=128_000),
}
LAYERS = hf.HybridLayers(linear=("conv",), period=1)
FIELDS = SIZES | {
    "intermediate_size": hf.Field("mlp_dim", 12_288, written="Mlp.size"),
    # An older name for the same, which counts where `layer_types` is absent
    "full_attn_idxs": hf.LayerNumbers(),
    "layer_types": LAYERS,
    "block_use_swiglu": hf.Only(True),
    "use_pos_enc": hf.Only(True),
    # Of the first weights, and sizes under second names
    **hf.ignored("block_mlp_init_scale", "block_out_init_scale"),
    **hf.ignored("block_use_xavier_init", "conv_use_xavier_init"),
    **hf.ignored("block_dim", "block_norm_eps", "conv_dim", "conv_dim_out"),
    **hf.ignored("num_heads"),
}


def from_hf(given: hf.ConfigFields) -> hf.Found:
    """Reads a `config.json`; defaults are those of transformers."""
    found = hf.read_decoder(given, FIELDS)
    width = given("block_ff_dim", found["mlp_dim"])
    return found | {"mlp_dim": _mlp_dim(given, width)}


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
    return hf.write_decoder(config, FIELDS) | {"block_auto_adjust_ff_dim": False}


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
