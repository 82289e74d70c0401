"""Kimi Linear (Kimi team 2025): Kimi Delta Attention, latent attention, and experts.

Three layers of Kimi Delta Attention to one of latent attention without positions, and
experts as DeepSeek V3's.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import haliax.nn as hnn
import jax
from jaxtyping import PRNGKeyArray

from models.hf_io import config_fields as hf
from models.hf_io.formats import HfFormat, register_format
from models.parts.config import LatentDecoderConfig, LayerKind
from models.parts.delta_net import DELTA_NAMES, GatedDeltaNet
from models.parts.experts import init_feed_forward
from models.parts.hybrid import HybridDecoderConfig
from models.parts.latent_attention import LatentAttention
from models.parts.sections import (
    FULL,
    LINEAR,
    ExpertsConfig,
    LinearAttentionConfig,
    RotaryConfig,
)
from models.qwen3_next import Qwen3NextLayer
from stacked_remat._messages import shown


@dataclass(frozen=True)
class KimiLinearConfig(LatentDecoderConfig, HybridDecoderConfig):
    """A Kimi Linear decoder.

    Attributes:
        linear: sizes of layers with Kimi Delta Attention.
    """

    linear_names = DELTA_NAMES

    linear: LinearAttentionConfig = field(
        default_factory=lambda: LinearAttentionConfig(num_key_heads=4)
    )
    gate_scale: float = 2.446

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = self.linear
        if sizes.KeyHeads.size != sizes.num_value_heads or (
            sizes.key_dim != sizes.value_dim
        ):
            raise ValueError(
                "model.linear must have as many num_key_heads as num_value_heads, and"
                f" key_dim equal to value_dim, got {sizes}."
            )
        length = RotaryConfig.max_position_embeddings
        if replace(self.rotary, max_position_embeddings=length) != RotaryConfig():
            raise ValueError(
                "Leave out all of model.rotary but max_position_embeddings: Kimi Linear"
                " rotates nothing."
            )

    def init_layer(self, kind: LayerKind, *, key: PRNGKeyArray) -> Qwen3NextLayer:
        """Makes a layer from `key`."""
        # KimiLinearDecoderLayer of transformers is wired as Qwen3-Next's.
        mixer_key, mlp_key = jax.random.split(key)
        attention = linear_attention = None
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
        else:
            # Linear layers know positions by their decays; here only the mask does.
            attention = LatentAttention.init(
                self, self.latent, rotary=None, key=mixer_key
            )
        mlp = init_feed_forward(
            self, kind, routing=self.routing, shared_dim=self.shared_dim, key=mlp_key
        )
        return Qwen3NextLayer(
            input_norm=self.init_norm(),
            attention=attention,
            linear_attention=linear_attention,
            post_attention_norm=self.init_norm(),
            mlp=mlp,
        )


FIELDS = hf.without(hf.DENSE_SIZES, "head_dim") | hf.LATENT_SIZES
# The names of the published files, and those of transformers for the same
FIELDS |= {
    "rms_norm_eps": hf.Field("rms_norm_eps", 1e-5),
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
    "first_k_dense_replace": hf.DensePrefix(1),
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


def from_hf(given: hf.ConfigFields) -> hf.Found:
    """Reads a `config.json`; defaults are those of transformers."""
    found = hf.read_decoder(given, FIELDS)
    # Transformers has the fields of this section beside others, under its own names.
    section = hf.ConfigFields(given("linear_attn_config", {}))
    heads = section("num_heads", given("linear_num_heads", 32))
    width = section("head_dim", given("linear_head_dim", 128))
    taps = section("short_conv_kernel_size", given("linear_conv_kernel_dim", 4))
    found |= {"linear.num_key_heads": heads, "linear.num_value_heads": heads}
    found |= {"linear.key_dim": width, "linear.value_dim": width}
    found["linear.conv_size"] = taps
    usual = _attention_types(section, found["num_layers"])
    found |= hf.HybridLayers().read_kinds(given("layer_types", usual), found)
    section.check_left("kimi_linear", "linear_attn_config")
    # Of transformers, where `first_k_dense_replace` can't say it
    if kinds := given("mlp_layer_types", []):
        hf.check_length("mlp_layer_types", kinds, found["num_layers"])
        hf.check_names("mlp_layer_types", kinds, ("dense", "sparse"))
        dense = [number for number, kind in enumerate(kinds) if kind == "dense"]
        found["experts.dense_layers"] = dense
    return found


def _attention_types(section: hf.ConfigFields, last: int) -> list[str]:
    """The attention of each layer by two lists of numbers, counted from 1."""
    numbers = range(1, last + 1)
    full = section("full_attn_layers", [])
    linear = section("kda_layers", [])
    if not full and not linear:
        full = [number for number in numbers if number % 4 == 1 and number > 1]
    elif sorted(map(str, [*full, *linear])) != sorted(map(str, numbers)):
        raise ValueError(
            f"linear_attn_config: full_attn_layers {shown(full)} and kda_layers"
            f" {shown(linear)} must have each of the layers 1 to {last} once."
        )
    return [FULL if number in full else LINEAR for number in numbers]


def to_hf(config: KimiLinearConfig) -> dict[str, Any]:
    """Writes a `config.json`, with the fields of the published ones."""
    types = [*enumerate(config.types_of_layers, 1)]
    sizes = config.linear
    section = {
        "num_heads": sizes.num_key_heads,
        "head_dim": sizes.key_dim,
        "short_conv_kernel_size": sizes.conv_size,
        "full_attn_layers": [number for number, kind in types if kind == FULL],
        "kda_layers": [number for number, kind in types if kind == LINEAR],
    }
    written = hf.write_decoder(config, FIELDS) | {"linear_attn_config": section}
    dense = config.experts.dense_layers
    if [*dense] != [*range(len(dense))]:
        written["mlp_layer_types"] = [
            "dense" if layer in dense else "sparse"
            for layer in range(config.num_layers)
        ]
    return written


# Dense layers have an `mlp`, the others a `block_sparse_moe`.
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
TENSORS = {
    "linear_attention": "self_attn",
    "linear_attention.q_conv": "q_conv1d",
    "linear_attention.k_conv": "k_conv1d",
    "linear_attention.v_conv": "v_conv1d",
    "linear_attention.a_proj": "",
    "linear_attention.a_proj.down": "f_a_proj",
    "linear_attention.a_proj.up": "f_b_proj",
    "linear_attention.gate_proj": "",
    "linear_attention.gate_proj.down": "g_a_proj",
    "linear_attention.gate_proj.up": "g_b_proj",
    "linear_attention.norm": "o_norm",
    "mlp": "",
    "mlp.gate_proj": "mlp.gate_proj",
    "mlp.up_proj": "mlp.up_proj",
    "mlp.down_proj": "mlp.down_proj",
    "mlp.router": "block_sparse_moe.gate",
    "mlp.bias.value": "block_sparse_moe.gate.e_score_correction_bias",
    "mlp.shared": "block_sparse_moe.shared_experts",
    "mlp.experts": "block_sparse_moe.experts",
    "mlp.experts.gate_proj": "w1",
    "mlp.experts.up_proj": "w3",
    "mlp.experts.down_proj": "w2",
}
LOADED = {
    "block_sparse_moe": "mlp",
    "self_attn.q_conv1d": "self_attn.conv1d",
    "self_attn.k_conv1d": "self_attn.conv1d",
    "self_attn.v_conv1d": "self_attn.conv1d",
} | {
    f"self_attn.{name}": f"self_attn.forget_gate.{name}"
    for name in ("f_a_proj", "f_b_proj", "dt_bias", "A_log")
}

register_format(
    HfFormat(
        "kimi_linear",
        KimiLinearConfig,
        FIELDS,
        TENSORS,
        loaded=LOADED,
        from_hf=from_hf,
        to_hf=to_hf,
        # Transformers writes those of dense layers so.
        also_read={f"block_sparse_moe.{name}": f"mlp.{name}" for name in _PROJECTIONS},
        shapes={"linear_attention.decay.a_log": (1, 1, -1, 1)},
        names={
            "linear.num_key_heads": "linear_attn_config.num_heads",
            "linear.key_dim": "linear_attn_config.head_dim",
            "linear.conv_size": "linear_attn_config.short_conv_kernel_size",
        },
        probe={"num_layers": 4, "experts": ExpertsConfig(dense_layers=(0,))},
        checksum=-1.32539,
    )
)
