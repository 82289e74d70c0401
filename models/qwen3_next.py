"""Qwen3-Next (Qwen team 2025): gated delta nets, gated attention, and a gated shared
expert.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
from haliax import NamedArray
from jaxtyping import PRNGKeyArray

from models.hf_io import config_fields as hf
from models.hf_io.formats import HfFormat, register_format
from models.hf_io.stacked_weights import HeadsTensor
from models.parts.attention import Attention
from models.parts.cache import LayerCache
from models.parts.config import (
    LayerKind,
    MtpDecoderConfig,
    PartialRotaryConfig,
    SparseDecoderConfig,
)
from models.parts.decoder import DecoderLayer, LayerOutput, residual
from models.parts.delta_net import DELTA_NAMES, GatedDeltaNet
from models.parts.experts import init_feed_forward
from models.parts.hybrid import HybridDecoderConfig
from models.parts.latent_attention import LatentAttention
from models.parts.mlp import FeedForward
from models.parts.norms import Norm, offset_rms_norm
from models.parts.remat_presets import ATTENTION_NAMES
from models.parts.sections import ExpertsConfig, LinearAttentionConfig, MtpConfig
from models.parts.tokens import Tokens
from models.qwen3_moe import FIELDS as QWEN3_FIELDS
from stacked_remat.training.config_checks import Count


class Qwen3NextLayer(DecoderLayer):
    """A layer of Qwen3-Next, with linear attention or with attention."""

    input_norm: Norm
    # Of Kimi Linear, which has such layers too, it is latent.
    attention: Attention | LatentAttention | None
    linear_attention: GatedDeltaNet | None
    post_attention_norm: Norm
    mlp: FeedForward

    def forward(
        self, x: NamedArray, tokens: Tokens, cache: LayerCache | None = None
    ) -> LayerOutput:
        """Adds the mixer, then the MLP or experts, each of normalised input."""
        # Qwen3NextDecoderLayer of transformers
        attended, cache = self.mixer(self.input_norm(x), tokens, cache)
        x = residual(x + attended)
        mixed, statistics = self.mlp(x, tokens, norm=self.post_attention_norm)
        return x + mixed, cache, statistics


@dataclass(frozen=True)
class GatedHybridConfig(PartialRotaryConfig, HybridDecoderConfig, MtpDecoderConfig):
    """What the decoders of Qwen3-Next and Qwen3.5 share.

    Attributes:
        shared_dim: as of `Qwen3NextConfig`; a dense decoder has none.
        linear: sizes of layers with linear attention.
    """

    attention_names = (*ATTENTION_NAMES, "gate")
    linear_names = DELTA_NAMES
    shared_dim: ClassVar[Any] = None
    most_depths = 1

    partial_rotary_factor: float = 0.25
    linear: LinearAttentionConfig = field(default_factory=LinearAttentionConfig)

    # Whatever the pattern says of the layer after the last
    @property
    def further_kind(self) -> LayerKind:
        """A layer with attention, and with experts where others have them."""
        return LayerKind(sparse=self.sparse is not None)

    def init_norm(self) -> Norm:
        """Makes a norm over `Embed`."""
        # Qwen3NextRMSNorm of transformers: weights are the factors less one.
        return offset_rms_norm(self.Embed, self.rms_norm_eps)

    def init_layer(self, kind: LayerKind, *, key: PRNGKeyArray) -> Qwen3NextLayer:
        """Makes a layer from `key`."""
        mixer_key, mlp_key = jax.random.split(key)
        attention = linear_attention = None
        if kind.linear:
            linear_attention = GatedDeltaNet.init(
                self, self.linear, norm_eps=self.rms_norm_eps, key=mixer_key
            )
        else:
            attention = Attention.init(
                self,
                rotary=self.rotary,
                # A quarter of a head, its first coordinates
                rotary_dim=self.rotated_dim,
                q_norm=offset_rms_norm(self.HeadDim, self.rms_norm_eps),
                k_norm=offset_rms_norm(self.HeadDim, self.rms_norm_eps),
                gate=True,
                key=mixer_key,
            )
        # Qwen3NextSparseMoeBlock: beside the chosen experts, one times a sigmoid
        shared = {"shared_dim": self.shared_dim, "shared_gate": True}
        mlp = init_feed_forward(self, kind, **shared, key=mlp_key)
        return Qwen3NextLayer(
            input_norm=self.init_norm(),
            attention=attention,
            linear_attention=linear_attention,
            post_attention_norm=self.init_norm(),
            mlp=mlp,
        )


@dataclass(frozen=True)
class Qwen3NextConfig(GatedHybridConfig, SparseDecoderConfig):
    """A Qwen3-Next decoder.

    Attributes:
        shared_dim: inner width of the expert that all tokens are routed to besides.
    """

    shared_dim: Count = 128


SIZES = hf.LINEAR_SIZES | {
    "head_dim": hf.Field("attention.head_dim", 256, written="head_dim"),
    "rope_theta": hf.Rotary(partial=0.25),
    "layer_types": hf.HybridLayers(),
}
FIELDS = hf.without(QWEN3_FIELDS, "sliding_window", "max_window_layers", "use_qk_norm")
FIELDS |= SIZES | {
    "num_key_value_heads": hf.KeyValueHeads(2),
    "norm_topk_prob": hf.Field("experts.norm_topk_prob", True),
    "shared_expert_intermediate_size": hf.Field("shared_dim", 512),
    # Published files have the layer, and no field for it.
    "num_nextn_predict_layers": hf.Field("mtp.depths", 1, written="mtp.trained_depths"),
}

# Head by head: [query, gate] of attention, and of a group of linear attention its query
# and key, then its values and gates, or its betas and decays.
_QUERY_AND_GATE = HeadsTensor("q_proj", head_axes=2)
SHARED_TENSORS = {
    "attention.q_proj": _QUERY_AND_GATE,
    "attention.gate_proj": _QUERY_AND_GATE,
    "linear_attention.o_proj": "out_proj",
    "mlp.shared": "shared_expert",
    "mlp.shared_gate": "shared_expert_gate",
}
_QKVZ = HeadsTensor("in_proj_qkvz")
_BA = HeadsTensor("in_proj_ba")
TENSORS = SHARED_TENSORS | {
    "linear_attention.q_proj": _QKVZ,
    "linear_attention.k_proj": _QKVZ,
    "linear_attention.v_proj": _QKVZ,
    "linear_attention.gate_proj": _QKVZ,
    "linear_attention.b_proj": _BA,
    "linear_attention.a_proj": _BA,
}

FURTHER_TENSORS = {
    "layer": "mtp.layers.{}",
    "embedding_norm": "mtp.pre_fc_norm_embedding",
    "hidden_norm": "mtp.pre_fc_norm_hidden",
    "eh_proj": "mtp.fc",
    "norm": "mtp.norm",
}

register_format(
    HfFormat(
        "qwen3_next",
        Qwen3NextConfig,
        FIELDS,
        TENSORS,
        not_read=("mtp.",),
        further=FURTHER_TENSORS,
        probe={"experts": ExpertsConfig(dense_layers=(0,)), "mtp": MtpConfig(1, 1.0)},
        checksum=-3.54478,
    )
)
