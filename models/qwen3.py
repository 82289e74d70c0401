"""Qwen3 (Yang et al. 2025), dense and with experts: RMS norms of queries and keys over
each head.
"""

from dataclasses import dataclass
from typing import ClassVar

from models.decoder.config import DecoderConfig, LayerSpec, SparseDecoderConfig
from models.hf_io import config_fields as hf
from models.hf_io.formats import HfFormat, register_format
from models.qwen2 import WINDOWS
from stacked_remat._messages import shown


@dataclass(frozen=True)
class Qwen3Config(DecoderConfig):
    """A dense Qwen3 decoder: every layer has one MLP."""

    block: ClassVar[LayerSpec] = LayerSpec(qk_norm="per_head")


@dataclass(frozen=True)
class Qwen3MoeConfig(SparseDecoderConfig):
    """A Qwen3 decoder with experts in every layer, or in all but some."""

    block: ClassVar[LayerSpec] = LayerSpec(qk_norm="per_head")


def _read_dense_layers(given: hf.ConfigFields, found: hf.Found) -> None:
    step, num_layers = given("decoder_sparse_step", 1) or 1, found["num_layers"]
    dense = given("mlp_only_layers", [])
    if strange := [layer for layer in dense if layer not in range(num_layers)]:
        raise ValueError(
            f"mlp_only_layers names layer {shown(strange[0])}; there are 0 to"
            f" {num_layers - 1}."
        )
    found["experts.dense_layers"] = [
        i for i in range(num_layers) if i in dense or (i + 1) % step
    ]


_SHARED = {**hf.DECODER_FIELDS, "use_qk_norm": hf.only(True)}
FIELDS = {
    **_SHARED,
    "num_key_value_heads": hf.kv_heads(32),
    "head_dim": hf.attribute("attention.head_dim", 128, written="head_dim"),
    **WINDOWS,
}
MOE_FIELDS = {
    **_SHARED,
    "num_key_value_heads": hf.kv_heads(4),
    "windows": hf.windows(4_096, switch="use_sliding_window"),
    "max_window_layers": hf.ignored(),
    "num_experts": hf.attribute("experts.num_experts", aliases=("num_local_experts",)),
    "num_experts_per_tok": hf.attribute("experts.experts_per_token"),
    "moe_intermediate_size": hf.attribute("experts.intermediate_dim"),
    "norm_topk_prob": hf.attribute("experts.norm_topk_prob", False),
    "load_balance": hf.LOAD_BALANCE,
    "dense_layers": hf.computed(
        _read_dense_layers,
        lambda config: {
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(config.experts.dense_layers),
        },
    ),
}
MOE_TENSORS = {"router": "gate"}

register_format(HfFormat("qwen3", Qwen3Config, FIELDS))
register_format(HfFormat("qwen3_moe", Qwen3MoeConfig, MOE_FIELDS, MOE_TENSORS))
