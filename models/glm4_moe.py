"""GLM-4.5 and GLM-4.6 (GLM team 2025): heads rotated by half, and a sigmoid router."""

from dataclasses import dataclass, field

import jax
from jaxtyping import PRNGKeyArray

from models.hf_io import config_fields as hf
from models.hf_io.formats import FURTHER_LAYERS, HfFormat, register_format
from models.parts.attention import Attention
from models.parts.config import (
    GroupedDecoderConfig,
    LayerKind,
    MtpDecoderConfig,
    PartialRotaryConfig,
)
from models.parts.experts import init_feed_forward
from models.parts.norms import rms_norm
from models.parts.sections import ExpertsConfig, MtpConfig
from models.qwen3 import Qwen3Layer


@dataclass(frozen=True)
class Glm4MoeConfig(PartialRotaryConfig, GroupedDecoderConfig, MtpDecoderConfig):
    """A GLM-4.5 decoder; attention's last projection has no bias.

    Attributes:
        qk_norm: whether queries and keys are normalised.
    """

    experts: ExpertsConfig = field(
        default_factory=lambda: ExpertsConfig(router_dtype="float32")
    )
    partial_rotary_factor: float = 0.5
    qk_norm: bool = False

    def init_layer(self, kind: LayerKind, *, key: PRNGKeyArray) -> Qwen3Layer:
        """Makes a layer that is wired as one of Qwen3, with an MLP or with experts."""
        attention_key, mlp_key = jax.random.split(key)
        # Some sizes have norms: GLM-4.5 has, GLM-4.5-Air has not.
        q_norm = k_norm = None
        if self.qk_norm:
            q_norm = rms_norm(self.HeadDim, self.rms_norm_eps)
            k_norm = rms_norm(self.HeadDim, self.rms_norm_eps)
        # Glm4MoeDecoderLayer of transformers
        return Qwen3Layer(
            input_norm=self.init_norm(),
            attention=Attention.init(
                self,
                rotary=self.rotary,
                window=kind.window,
                # The first coordinates of a head; the others tell nothing of positions.
                rotary_dim=self.rotated_dim,
                q_norm=q_norm,
                k_norm=k_norm,
                # Glm4MoeAttention: `attention_bias` is of the other three projections.
                output_bias=False,
                key=attention_key,
            ),
            post_attention_norm=self.init_norm(),
            # As DeepSeek V3's: sigmoids, a bias of the choice alone, and one expert for
            # all tokens
            mlp=init_feed_forward(self, kind, key=mlp_key),
        )


SIZES = hf.with_defaults(hf.DENSE_SIZES, num_key_value_heads=8, rms_norm_eps=1e-5)
FIELDS = SIZES | {
    "use_qk_norm": hf.Field("qk_norm", False),
    "n_routed_experts": hf.Field("experts.num_experts", 128, ("num_local_experts",)),
    "num_experts_per_tok": hf.Field("experts.experts_per_token", 8),
    "moe_intermediate_size": hf.Field("experts.intermediate_dim", 1_408),
    "norm_topk_prob": hf.Field("experts.norm_topk_prob", True),
    "n_group": hf.Field("num_groups", 1),
    "topk_group": hf.Field("groups_per_token", 1),
    "routed_scaling_factor": hf.Field("gate_scale", 1.0),
    "n_shared_experts": hf.Field("shared_experts", 1),
    "first_k_dense_replace": hf.DensePrefix(1),
    "rope_theta": hf.Rotary(longest=131_072, partial=0.5),
    **hf.FURTHER_TOKENS,
}


def from_hf(given: hf.ConfigFields) -> hf.Found:
    """Reads a `config.json`; defaults are those of transformers."""
    found = hf.read_decoder(given, FIELDS)
    if found["attention.head_dim"] is None:  # rounded down, where it does not divide
        found["attention.head_dim"] = found["hidden_dim"] // found["num_heads"]
    return found


register_format(
    HfFormat(
        "glm4_moe",
        Glm4MoeConfig,
        FIELDS,
        further=FURTHER_LAYERS,
        from_hf=from_hf,
        probe={
            "qk_norm": True,
            "experts": ExpertsConfig(dense_layers=(0,)),
            "mtp": MtpConfig(1, 1.0),
        },
        checksum=0.19804,
    )
)
