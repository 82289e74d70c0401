"""Qwen3 with experts (Yang et al. 2025) in every layer, or in all but some."""

from dataclasses import dataclass
from typing import Any

from jaxtyping import PRNGKeyArray

from models.hf_io import config_fields as hf
from models.hf_io.formats import ALTERNATING, HfFormat, register_format
from models.parts.config import LayerKind, SparseDecoderConfig
from models.parts.sections import ExpertsConfig
from models.qwen3 import Qwen3Layer


@dataclass(frozen=True)
class Qwen3MoeConfig(SparseDecoderConfig):
    """A Qwen3 decoder with experts in every layer, or in all but some."""

    def init_layer(self, kind: LayerKind, *, key: PRNGKeyArray) -> Qwen3Layer:
        """Makes a layer of Qwen3."""
        return Qwen3Layer.init(self, kind, key=key)


class DenseLayers(hf.Entry):
    """The layers without experts, which two fields say."""

    def read(self, given: hf.ConfigFields, name: str, found: hf.Found) -> hf.Found:
        """Their numbers."""
        # Qwen3MoeDecoderLayer: every `step`-th layer has experts, unless it is named.
        step = given.at_least(1, "decoder_sparse_step", 1)
        layers = range(found["num_layers"])
        dense = hf.read_numbers(given, name, layers) or []
        is_dense = [layer for layer in layers if layer in dense or (layer + 1) % step]
        return {"experts.dense_layers": is_dense}

    def write(self, config: SparseDecoderConfig, name: str) -> dict[str, Any]:
        """Each by its number."""
        return {"decoder_sparse_step": 1, name: [*config.experts.dense_layers]}


FIELDS = hf.with_defaults(hf.DENSE_SIZES, num_key_value_heads=4) | {
    "num_experts": hf.Field("experts.num_experts", aliases=("num_local_experts",)),
    "num_experts_per_tok": hf.Field("experts.experts_per_token"),
    "moe_intermediate_size": hf.Field("experts.intermediate_dim"),
    "norm_topk_prob": hf.Field("experts.norm_topk_prob", False),
    "use_qk_norm": hf.Only(True),
    "rope_theta": hf.Rotary(),
    "sliding_window": hf.Windows(4_096, switch="use_sliding_window"),
    # Of dense models: here all layers have the window, or none.
    "max_window_layers": hf.Ignored(),
    "router_aux_loss_coef": hf.LoadBalance(),
    "mlp_only_layers": DenseLayers(),
}

register_format(
    HfFormat(
        "qwen3_moe",
        Qwen3MoeConfig,
        FIELDS,
        probe={"attention": ALTERNATING, "experts": ExpertsConfig(dense_layers=(0,))},
        checksum=0.54457,
    )
)
