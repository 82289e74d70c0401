"""DeepSeek V3 (DeepSeek-AI 2024) and Kimi K2: latent attention, a dense prefix, experts
chosen in groups.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from models.decoder.config import (
    OF_RUN,
    ExpertsConfig,
    LatentConfig,
    LayerSpec,
    RouterSpec,
    SparseDecoderConfig,
)
from models.hf_io import config_fields as hf
from models.hf_io.formats import HfFormat, register_format
from stacked_remat.ops import YarnRotary
from stacked_remat.training.config_checks import check_choices, check_positive


@dataclass(frozen=True)
class DeepseekV3Config(SparseDecoderConfig):
    """A DeepSeek V3 decoder.

    Attributes:
        latent: widths of attention; they give `attention.head_dim`.
        num_groups: groups of experts.
        groups_per_token: from how many of them a token chooses.
        gate_scale: factor of the gates.
        shared_experts: experts that all tokens are routed to.
        bias: of routers: `frozen`, or `by_load`: its gradient is 1 for experts that
            more tokens than the mean chose and -1 for others, so that the optimizer
            evens the load out without a loss (Wang et al. 2024, arXiv:2408.15664). The
            norm that `optimizer.max_grad_norm` bounds leaves them out.
    """

    num_heads: int = 4
    num_kv_heads: int = 4
    experts: ExpertsConfig = field(
        default_factory=lambda: ExpertsConfig(router_dtype="float32")
    )
    latent: LatentConfig = field(default_factory=LatentConfig)
    num_groups: int = 1
    groups_per_token: int = 1
    gate_scale: float = 2.5
    shared_experts: int = 1
    bias: Literal["frozen", "by_load"] = field(default="frozen", metadata=OF_RUN)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(
            "model",
            self,
            "num_groups",
            "groups_per_token",
            "gate_scale",
            "shared_experts",
        )
        check_choices("model", self)
        members = self.experts.num_experts // self.num_groups
        if (
            self.experts.num_experts % self.num_groups
            or self.num_groups > 1 > members - 1
        ):
            raise ValueError(
                f"model.num_groups = {self.num_groups} must divide"
                f" model.experts.num_experts = {self.experts.num_experts} into groups"
                " of at least two."
            )
        groups, chosen = self.groups_per_token, self.experts.experts_per_token
        if groups > self.num_groups or chosen > groups * members:
            raise ValueError(
                f"model.groups_per_token = {groups} must be at most model.num_groups ="
                f" {self.num_groups}, and model.experts.experts_per_token = {chosen} at"
                f" most {groups} groups of {members}."
            )

    def _check_heads(self) -> None:
        if self.attention.head_dim not in (None, self.head_dim):
            raise ValueError(
                "Leave model.attention.head_dim out: model.latent gives the width of"
                " heads."
            )
        if self.num_kv_heads != self.num_heads:
            raise ValueError(
                f"model.num_kv_heads must be model.num_heads = {self.num_heads}, got"
                f" {self.num_kv_heads}."
            )

    @property
    def head_dim(self) -> int:
        """Width of a head of queries and keys."""
        return self.latent.plain_dim + self.latent.rotary_dim

    def layer(self, number: int) -> LayerSpec:
        """What one layer is."""
        scaling, scale = self.rotary.scaling, None
        if isinstance(scaling, YarnRotary) and scaling.mscale_all_dim is not None:
            temperature = 0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1
            scale = self.head_dim**-0.5 * temperature**2
        return replace(
            super().layer(number),
            scale=scale,
            latent=self.latent,
            router=RouterSpec(
                scoring="sigmoid",
                bias=self.bias,
                num_groups=self.num_groups,
                groups_per_token=self.groups_per_token,
                gate_scale=self.gate_scale,
                shared_dim=self.shared_experts * self.experts.intermediate_dim,
            ),
        )


def _read_prefix(given: hf.ConfigFields, found: hf.Found) -> None:
    first = given("first_k_dense_replace", 3)
    found["experts.dense_layers"] = [*range(min(first, found["num_layers"]))]
    given.only("moe_layer_freq", 1)


_ROTARY = hf.rope(longest=4_096)


def _read_rotary(given: hf.ConfigFields, found: hf.Found) -> None:
    _ROTARY.read("rotary", given, found)
    section = given.read.get("rope_scaling") or given.read.get("rope_parameters") or {}
    if section.get("mscale_all_dim") and found["rotary.scaling"].mscale_all_dim is None:
        raise ValueError(
            "rope_scaling has mscale_all_dim without mscale, or with attention_factor:"
            " this is not supported."
        )


FIELDS = {
    **hf.DECODER_FIELDS,
    "head_dim": hf.ignored(),
    "rotary": hf.Entry(
        lambda _, given, found: _read_rotary(given, found), _ROTARY.write
    ),
    "prefix": hf.computed(
        _read_prefix,
        lambda config: {"first_k_dense_replace": len(config.experts.dense_layers)},
    ),
    "q_lora_rank": hf.attribute("latent.query_rank", None),
    "kv_lora_rank": hf.attribute("latent.key_value_rank", 512),
    "qk_nope_head_dim": hf.attribute("latent.plain_dim", 128),
    "qk_rope_head_dim": hf.attribute("latent.rotary_dim", 64),
    "v_head_dim": hf.attribute("latent.value_dim", 128),
    "rope_interleave": hf.attribute("latent.interleaved", True),
    "n_routed_experts": hf.attribute(
        "experts.num_experts", 256, aliases=("num_local_experts",)
    ),
    "num_experts_per_tok": hf.attribute("experts.experts_per_token", 8),
    "moe_intermediate_size": hf.attribute("experts.intermediate_dim", 2_048),
    "norm_topk_prob": hf.attribute("experts.norm_topk_prob", True),
    "n_group": hf.attribute("num_groups", 8),
    "topk_group": hf.attribute("groups_per_token", 4),
    "routed_scaling_factor": hf.attribute("gate_scale", 2.5),
    "n_shared_experts": hf.attribute("shared_experts", 1),
    "scoring_func": hf.only("sigmoid"),
    "topk_method": hf.only("noaux_tc"),
    "aux_loss_alpha": hf.ignored(),  # of a loss in training, as the next
    "seq_aux": hf.ignored(),
    # Their tensors are left out.
    "num_nextn_predict_layers": hf.ignored(written=0),
    "num_mtp_layers": hf.ignored(),
    "qk_head_dim": hf.ignored(),  # the sum of two others
}
TENSORS = {
    "router": "gate",
    "bias": "gate.e_score_correction_bias",
    "shared": "shared_experts",
    "q_a_norm": "q_a_layernorm",
    "kv_a_proj": "kv_a_proj_with_mqa",
    "kv_a_norm": "kv_a_layernorm",
}

register_format(
    HfFormat(
        "deepseek_v3",
        DeepseekV3Config,
        FIELDS,
        TENSORS,
        quant_methods=("fp8",),
        further_layers=True,
    ),
    "kimi_k2",
)
