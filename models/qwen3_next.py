"""Qwen3-Next (Qwen team 2025): gated delta nets, gated attention, and a gated shared
expert.
"""

from dataclasses import dataclass

import jax
from jaxtyping import PRNGKeyArray

from models.hf_io import config_fields as hf
from models.hf_io.formats import HfFormat, register_format
from models.hf_io.stacked_weights import HeadsTensor
from models.parts.attention import Attention
from models.parts.config import (
    LayerKind,
    MtpDecoderConfig,
    PartialRotaryConfig,
    SparseDecoderConfig,
)
from models.parts.delta_net import GatedDeltaNet
from models.parts.experts import init_feed_forward
from models.parts.hybrid import DeltaDecoderConfig, HybridLayer
from models.parts.norms import Norm, offset_rms_norm
from models.parts.remat_presets import ATTENTION_NAMES
from models.parts.sections import ExpertsConfig, MtpConfig
from models.qwen3_moe import FIELDS as QWEN3_FIELDS
from stacked_remat.training.config_checks import Count


@dataclass(frozen=True)
class GatedHybridConfig(PartialRotaryConfig, DeltaDecoderConfig, MtpDecoderConfig):
    """What the decoders of Qwen3-Next and Qwen3.5 share."""

    attention_names = (*ATTENTION_NAMES, "gate")
    most_depths = 1

    partial_rotary_factor: float = 0.25

    # Whatever the pattern says of the layer after the last
    @property
    def further_kind(self) -> LayerKind:
        """A layer with attention, and with experts where others have them."""
        return LayerKind(sparse=self.sparse is not None)

    def init_norm(self) -> Norm:
        """Makes a norm over `Embed`."""
        # Qwen3NextRMSNorm of transformers: weights are the factors less one.
        return offset_rms_norm(self.Embed, self.rms_norm_eps)

    def init_layer(self, kind: LayerKind, *, key: PRNGKeyArray) -> HybridLayer:
        """Makes a layer from `key`."""
        # Qwen3NextDecoderLayer of transformers
        mixer_key, mlp_key = jax.random.split(key)
        mlp = init_feed_forward(self, kind, key=mlp_key)
        if kind.linear:
            linear_attention = GatedDeltaNet.init(
                self, self.linear, norm_eps=self.rms_norm_eps, key=mixer_key
            )
            return HybridLayer.init(self, mlp, linear_attention=linear_attention)
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
        return HybridLayer.init(self, mlp, attention=attention)


@dataclass(frozen=True)
class Qwen3NextConfig(GatedHybridConfig, SparseDecoderConfig):
    """A Qwen3-Next decoder.

    Attributes:
        shared_dim: inner width of the expert that all tokens are routed to besides.
    """

    # Qwen3NextSparseMoeBlock: beside the chosen experts, one times a sigmoid
    shared_gate = True

    shared_dim: Count = 128


MIXERS = hf.LINEAR_SIZES | {
    "rope_theta": hf.Rotary(partial=0.25),
    "layer_types": hf.HybridLayers(period_name="full_attention_interval"),
}
SIZES = hf.with_defaults(
    QWEN3_FIELDS, head_dim=256, num_key_value_heads=2, norm_topk_prob=True
)
FIELDS = hf.without(SIZES, "sliding_window", "max_window_layers", "use_qk_norm")
FIELDS |= MIXERS | {
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
