"""Granite 4 (Granite team 2025): Mamba-2 and attention, an MLP beside experts.

Nine layers of Mamba-2 to one of attention; a shared MLP in all and experts besides, and
Granite's factors.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import jax
from haliax import Axis
from jaxtyping import PRNGKeyArray

from models.granite import MULTIPLIERS, PROBE, GraniteLayer, MultipliedConfig
from models.hf_io import config_fields as hf
from models.hf_io.formats import HfFormat, register_format
from models.hf_io.stacked_weights import ExpertsTensor
from models.parts.attention import Attention
from models.parts.config import LayerKind, SparseDecoderConfig
from models.parts.experts import init_feed_forward
from models.parts.hybrid import HybridDecoderConfig
from models.parts.mamba2 import MAMBA_NAMES, Mamba2, MambaConfig
from models.parts.sections import FULL, LINEAR, ExpertsConfig
from stacked_remat.training.config_checks import Count


@dataclass(frozen=True)
class GraniteMoeHybridConfig(
    SparseDecoderConfig, HybridDecoderConfig, MultipliedConfig
):
    """A Granite 4 decoder, with experts in every layer, or in none where
    `experts.dense_layers` names all.

    Attributes:
        mamba: sizes of layers with Mamba-2.
        shared_dim: inner width of the MLP that all tokens pass.
        rotates: whether attention has a rotary embedding.
    """

    linear_names = MAMBA_NAMES

    mamba: MambaConfig = field(default_factory=MambaConfig)
    shared_dim: Count = 128
    rotates: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mlp_dim not in (None, self.shared_dim):
            raise ValueError(
                "Leave model.mlp_dim out: model.shared_dim is the width of MLPs."
            )

    @property
    def Mlp(self) -> Axis:
        """Inner width of the MLP of a layer without experts."""
        return Axis("mlp", self.shared_dim)

    def init_layer(self, kind: LayerKind, *, key: PRNGKeyArray) -> GraniteLayer:
        """Makes a layer of Granite."""
        # GraniteMoeHybridDecoderLayer of transformers
        mixer_key, mlp_key = jax.random.split(key)
        attention = mamba = None
        if kind.linear:
            mamba = Mamba2.init(self, self.mamba, key=mixer_key)
        else:
            attention = Attention.init(
                self,
                rotary=self.rotary if self.rotates else None,
                scale=self.attention_multiplier,
                key=mixer_key,
            )
        return GraniteLayer(
            input_norm=self.init_norm(),
            attention=attention,
            mamba=mamba,
            post_attention_norm=self.init_norm(),
            # The shared MLP, beside experts or alone
            mlp=init_feed_forward(self, kind, key=mlp_key),
            factor=self.residual_multiplier,
        )


FIELDS = {
    **hf.SIZES,
    **MULTIPLIERS,
    "intermediate_size": hf.Field("experts.intermediate_dim", 11_008),
    "num_local_experts": hf.Field("experts.num_experts", 8),
    "num_experts_per_tok": hf.Field("experts.experts_per_token", 2),
    "shared_intermediate_size": hf.Field("shared_dim", 1_024),
    "mamba_n_heads": hf.Field("mamba.num_heads", 128),
    "mamba_n_groups": hf.Field("mamba.num_groups", 1),
    "mamba_d_head": hf.Field("mamba.head_dim", "auto", kind=object),
    "mamba_d_state": hf.Field("mamba.state_dim", 256),
    "mamba_d_conv": hf.Field("mamba.conv_size", 4),
    "mamba_conv_bias": hf.Field("mamba.conv_bias", True),
    "mamba_proj_bias": hf.Field("mamba.bias", False),
    "rope_theta": hf.Rotary(longest=2_048),
    "router_aux_loss_coef": hf.LoadBalance(),
    "normalization_function": hf.Only("rmsnorm"),
    "time_step_limit": hf.Only([0.0, math.inf], [0.0, {"__float__": "Infinity"}]),
    # Transformers reads both names of a type, and other libraries the first.
    "layer_types": hf.HybridLayers(
        linear=("mamba", LINEAR),
        full=("attention", FULL),
        period=0,
        older_name="layers_block_type",
    ),
    **hf.ignored("mamba_chunk_size", "init_method"),  # change no result
}


def from_hf(given: hf.ConfigFields) -> hf.Found:
    """Reads a `config.json`; defaults are those of transformers."""
    found = hf.read_decoder(given, FIELDS)
    found["rotates"] = given("position_embedding_type", "nope") == "rope"
    width = given("mamba_expand", 2) * found["hidden_dim"]
    heads = found["mamba.num_heads"]
    if found["mamba.head_dim"] == "auto":
        found["mamba.head_dim"] = width // heads
    if heads * found["mamba.head_dim"] != width:
        raise ValueError(
            f"mamba_n_heads = {heads} heads of mamba_d_head = {found['mamba.head_dim']}"
            f" must be mamba_expand * hidden_size = {width} wide."
        )
    if found["experts.num_experts"] == 0:
        del found["experts.num_experts"], found["experts.experts_per_token"]
        found["experts.dense_layers"] = [*range(found["num_layers"])]
    return found


def to_hf(config: GraniteMoeHybridConfig) -> dict[str, Any]:
    """Writes a `config.json`."""
    written = hf.write_decoder(config, FIELDS)
    mamba = config.mamba
    written["mamba_expand"] = mamba.num_heads * mamba.head_dim // config.hidden_dim
    written["position_embedding_type"] = "rope" if config.rotates else "nope"
    if len(config.experts.dense_layers) == config.num_layers:
        written["num_local_experts"] = 0
    return written


# The MLP of all tokens is beside the experts. The first two maps of an MLP and of the
# experts are one tensor each, in this order.
TENSORS = {
    "mlp": "",
    "mlp.gate_proj": "shared_mlp.input_linear",
    "mlp.up_proj": "shared_mlp.input_linear",
    "mlp.down_proj": "shared_mlp.output_linear",
    "mlp.shared": "shared_mlp",
    "mlp.shared.gate_proj": "input_linear",
    "mlp.shared.up_proj": "input_linear",
    "mlp.shared.down_proj": "output_linear",
    "mlp.router": "block_sparse_moe.router.layer",
    "mlp.experts": "block_sparse_moe",
    "mlp.experts.gate_proj.weight": ExpertsTensor("input_linear.weight"),
    "mlp.experts.up_proj.weight": ExpertsTensor("input_linear.weight"),
    "mlp.experts.down_proj.weight": ExpertsTensor("output_linear.weight"),
}
LOADED = {
    "block_sparse_moe.router.layer": "block_sparse_moe.router",
    "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
}

register_format(
    HfFormat(
        "granitemoehybrid",
        GraniteMoeHybridConfig,
        FIELDS,
        TENSORS,
        loaded=LOADED,
        from_hf=from_hf,
        to_hf=to_hf,
        probe={
            **PROBE,
            "rotates": True,
            "mamba": MambaConfig(num_groups=2),
            "experts": ExpertsConfig(dense_layers=(0,)),
        },
        checksum=0.04445,
    )
)
