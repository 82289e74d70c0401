"""Kimi Linear (Kimi team 2025): Kimi Delta Attention, latent attention, and experts.

Three layers of Kimi Delta Attention to one of latent attention without positions, and
experts as DeepSeek V3's.
"""

from dataclasses import dataclass, field

import haliax.nn as hnn
import jax
from jaxtyping import PRNGKeyArray

from models.hf_io import config_fields as hf
from models.hf_io.formats import (
    JOINED_CONVOLUTIONS,
    NUMBERED_EXPERTS,
    SEPARATE_CONVOLUTIONS,
    HfFormat,
    register_format,
)
from models.parts.config import LatentDecoderConfig, LayerKind
from models.parts.delta_net import GatedDeltaNet
from models.parts.experts import init_feed_forward
from models.parts.hybrid import DeltaDecoderConfig, HybridLayer
from models.parts.latent_attention import LatentAttention
from models.parts.sections import ExpertsConfig, LinearAttentionConfig, RotaryConfig


@dataclass(frozen=True)
class KimiLinearConfig(LatentDecoderConfig, DeltaDecoderConfig):
    """A Kimi Linear decoder; files have one number and width of heads in `linear`."""

    linear: LinearAttentionConfig = field(
        default_factory=lambda: LinearAttentionConfig(num_key_heads=4)
    )
    gate_scale: float = 2.446

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rotary.theta != RotaryConfig.theta or self.rotary.scaling is not None:
            raise ValueError(
                "Leave out model.rotary.theta and scaling: Kimi Linear rotates nothing."
            )

    def init_layer(self, kind: LayerKind, *, key: PRNGKeyArray) -> HybridLayer:
        """Makes a layer from `key`."""
        # KimiLinearDecoderLayer of transformers
        mixer_key, mlp_key = jax.random.split(key)
        mlp = init_feed_forward(self, kind, key=mlp_key)
        if kind.linear:
            linear_attention = GatedDeltaNet.init(
                self,
                self.linear,
                norm_eps=self.rms_norm_eps,
                # Not SiLU, as gates of gated delta nets have
                activation=hnn.sigmoid,
                # As narrow as one head
                rank=self.linear.key_dim,
                key=mixer_key,
            )
            return HybridLayer.init(self, mlp, linear_attention=linear_attention)
        # Linear layers know positions by their decays; here only the mask does.
        attention = LatentAttention.init(self, self.latent, rotary=None, key=mixer_key)
        return HybridLayer.init(self, mlp, attention=attention)


FIELDS = hf.with_defaults(hf.DENSE_SIZES, rms_norm_eps=1e-5) | hf.LATENT_SIZES
# The names of the published files, and those of transformers for the same
FIELDS |= {
    "num_experts": hf.Field("experts.num_experts", 256, ("num_local_experts",)),
    "num_experts_per_token": hf.Field(
        "experts.experts_per_token", 8, ("num_experts_per_tok",)
    ),
    "moe_intermediate_size": hf.Field("experts.intermediate_dim", 1_024),
    "moe_renormalize": hf.Field("experts.norm_topk_prob", True, ("norm_topk_prob",)),
    "num_expert_group": hf.Field("num_groups", 1, ("n_group",)),
    "topk_group": hf.Field("groups_per_token", 1),
    "routed_scaling_factor": hf.Field("gate_scale", 2.446),
    "num_shared_experts": hf.Field("shared_experts", 1, ("n_shared_experts",)),
    "model_max_length": hf.Field(
        "rotary.max_position_embeddings", 1_048_576, ("max_position_embeddings",)
    ),
    "first_k_dense_replace": hf.DensePrefix(1, types_name="mlp_layer_types"),
    "linear_attn_config.num_heads": hf.Field(
        "linear.num_key_heads", 32, ("linear_num_heads",), also="linear.num_value_heads"
    ),
    "linear_attn_config.head_dim": hf.Field(
        "linear.key_dim", 128, ("linear_head_dim",), also="linear.value_dim"
    ),
    "linear_attn_config.short_conv_kernel_size": hf.Field(
        "linear.conv_size", 4, ("linear_conv_kernel_dim",)
    ),
    "linear_attn_config.full_attn_layers": hf.LayerNumbers(
        first=1, others_name="linear_attn_config.kda_layers"
    ),
    "layer_types": hf.HybridLayers(period=None),
    "tie_word_embeddings": hf.Only(False),  # without effect in transformers
    "mla_use_nope": hf.Only(True, written=True),
    "moe_router_activation_func": hf.Only("sigmoid", written=True),
    "use_grouped_topk": hf.Only(True, written=True),
    "moe_layer_freq": hf.Only(1, written=True),
    "pad_token_id": hf.NoPadding(),
    **hf.ignored("head_dim", "qk_head_dim"),  # of nothing, and a sum
    **hf.ignored("rope_theta", "rope_scaling", "rope_parameters"),  # of no rotation
    **hf.ignored("num_nextn_predict_layers"),  # of no tensor
}

# Dense layers have an `mlp`, the others a `block_sparse_moe`.
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
TENSORS = {
    **SEPARATE_CONVOLUTIONS,
    **NUMBERED_EXPERTS,
    "linear_attention": "self_attn",
    "linear_attention.a_proj": "",
    "linear_attention.a_proj.down": "f_a_proj",
    "linear_attention.a_proj.up": "f_b_proj",
    "linear_attention.gate_proj": "",
    "linear_attention.gate_proj.down": "g_a_proj",
    "linear_attention.gate_proj.up": "g_b_proj",
    "mlp": "",
    "mlp.gate_proj": "mlp.gate_proj",
    "mlp.up_proj": "mlp.up_proj",
    "mlp.down_proj": "mlp.down_proj",
    "mlp.router": "block_sparse_moe.gate",
    "mlp.bias.value": "block_sparse_moe.gate.e_score_correction_bias",
    "mlp.shared": "block_sparse_moe.shared_experts",
    "mlp.experts": "block_sparse_moe.experts",
}
LOADED = JOINED_CONVOLUTIONS | {
    "block_sparse_moe": "mlp",
    "self_attn.f_a_proj": "self_attn.forget_gate.f_a_proj",
    "self_attn.f_b_proj": "self_attn.forget_gate.f_b_proj",
    "self_attn.dt_bias": "self_attn.forget_gate.dt_bias",
    "self_attn.A_log": "self_attn.forget_gate.A_log",
}

register_format(
    HfFormat(
        "kimi_linear",
        KimiLinearConfig,
        FIELDS,
        TENSORS,
        loaded=LOADED,
        # Transformers writes those of dense layers so.
        also_read={f"block_sparse_moe.{name}": f"mlp.{name}" for name in _PROJECTIONS},
        shapes={"linear_attention.decay.a_log": (1, 1, -1, 1)},
        probe={"num_layers": 4, "experts": ExpertsConfig(dense_layers=(0,))},
        checksum=-1.32539,
    )
)
