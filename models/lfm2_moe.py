"""LFM2 with experts (Liquid AI 2025), such as LFM2-8B-A1B."""

from dataclasses import dataclass

from models.hf_io import config_fields as hf
from models.hf_io.formats import NUMBERED_EXPERTS, HfFormat, register_format
from models.lfm2 import (
    LAYERS,
    SIZES,
    TENSORS as DENSE_TENSORS,
    ConvolutionalConfig,
)
from models.parts.config import SparseDecoderConfig
from models.parts.sections import ExpertsConfig, Routing
from stacked_remat.training.config_checks import Positive


@dataclass(frozen=True)
class Lfm2MoeConfig(SparseDecoderConfig, ConvolutionalConfig):
    """An LFM2 decoder with experts.

    Attributes:
        expert_bias: whether a bias is added to the scores by which experts are chosen.
        gate_scale: factor of the gates.
    """

    expert_bias: bool = True
    gate_scale: Positive = 1.0

    @property
    def routing(self) -> Routing:
        """How experts are chosen."""
        # Lfm2MoeTopKRouter of transformers
        bias = "frozen" if self.expert_bias else "none"
        return Routing("sigmoid", bias=bias, gate_scale=self.gate_scale)


FIELDS = SIZES | {
    "intermediate_size": hf.Field("mlp_dim", 7_168, written="Mlp.size"),
    "num_experts": hf.Field("experts.num_experts", 32),
    "num_experts_per_tok": hf.Field("experts.experts_per_token", 4),
    "moe_intermediate_size": hf.Field("experts.intermediate_dim", 1_792),
    "norm_topk_prob": hf.Field("experts.norm_topk_prob", True),
    "routed_scaling_factor": hf.Field("gate_scale", 1.0),
    "use_expert_bias": hf.Field("expert_bias", True),
    "num_dense_layers": hf.DensePrefix(2),
    "layer_types": LAYERS,
}

TENSORS = (
    DENSE_TENSORS
    | NUMBERED_EXPERTS
    | {
        "mlp.router": "gate",
        "mlp.bias.value": "expert_bias",
    }
)

register_format(
    HfFormat(
        "lfm2_moe",
        Lfm2MoeConfig,
        FIELDS,
        TENSORS,
        probe={"gate_scale": 2.0, "experts": ExpertsConfig(dense_layers=(0,))},
        checksum=0.38276,
    )
)
