"""Qwen3-Next (Qwen team 2025): three layers of the gated delta net to one of gated
attention, experts with a gated shared one.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
from haliax import NamedArray
from jaxtyping import PRNGKeyArray

from models.hf_io import config_fields as hf
from models.hf_io.formats import HfFormat, register_format
from models.hf_io.stacked_weights import HeadsTensor
from models.parts.attention import Attention
from models.parts.cache import LayerCache
from models.parts.config import LayerKind, SparseDecoderConfig, rotated_width
from models.parts.decoder import DecoderLayer, LayerOutput, residual
from models.parts.delta_net import GatedDeltaNet
from models.parts.experts import init_feed_forward
from models.parts.hybrid import HybridDecoderConfig
from models.parts.mlp import FeedForward
from models.parts.norms import Norm, offset_rms_norm
from models.parts.remat_presets import ATTENTION_NAMES
from models.parts.sections import ExpertsConfig, LinearAttentionConfig
from models.parts.tokens import Tokens
from models.qwen3 import MOE_FIELDS, read_dense_layers, write_dense_layers
from stacked_remat.training.config_checks import check_positive


class Qwen3NextLayer(DecoderLayer):
    """A layer of Qwen3-Next, with attention or linear attention, and an MLP or
    experts.
    """

    input_norm: Norm
    attention: Attention | None
    linear_attention: GatedDeltaNet | None
    post_attention_norm: Norm
    mlp: FeedForward

    @staticmethod
    def init(
        config: "GatedHybridConfig",
        kind: LayerKind,
        mlp: FeedForward,
        *,
        key: PRNGKeyArray,
    ) -> "Qwen3NextLayer":
        """Makes the mixer and the norms of a layer around an MLP or experts."""
        attention = linear_attention = None
        if kind.linear:
            linear_attention = GatedDeltaNet.init(
                config, config.linear, norm_eps=config.rms_norm_eps, key=key
            )
        else:
            attention = Attention.init(
                config,
                rotary=config.rotary,
                rotary_dim=rotated_width(config.head_dim, config.partial_rotary_factor),
                q_norm=offset_rms_norm(config.HeadDim, config.rms_norm_eps),
                k_norm=offset_rms_norm(config.HeadDim, config.rms_norm_eps),
                gate=True,
                key=key,
            )
        return Qwen3NextLayer(
            input_norm=config.init_norm(),
            attention=attention,
            linear_attention=linear_attention,
            post_attention_norm=config.init_norm(),
            mlp=mlp,
        )

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
class GatedHybridConfig(HybridDecoderConfig):
    """What the configs of Qwen3-Next and Qwen3.5 share.

    Attributes:
        linear: sizes of layers with linear attention.
        partial_rotary_factor: the part of a head that is rotated.
    """

    attention_names = (*ATTENTION_NAMES, "gate")

    linear: LinearAttentionConfig = field(default_factory=LinearAttentionConfig)
    partial_rotary_factor: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        rotated_width(self.head_dim, self.partial_rotary_factor)

    def init_norm(self) -> Norm:
        """Makes a norm over `Embed`."""
        # Qwen3NextRMSNorm of transformers: weights are the factors less one.
        return offset_rms_norm(self.Embed, self.rms_norm_eps)


@dataclass(frozen=True)
class Qwen3NextConfig(GatedHybridConfig, SparseDecoderConfig):
    """A Qwen3-Next decoder.

    Attributes:
        shared_dim: inner width of the MLP that all tokens are routed to besides.
    """

    shared_dim: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("model", self, "shared_dim")

    def init_layer(self, kind: LayerKind, *, key: PRNGKeyArray) -> Qwen3NextLayer:
        """Makes a layer from `key`."""
        mixer_key, mlp_key = jax.random.split(key)
        mlp = init_feed_forward(
            self, kind, shared_dim=self.shared_dim, shared_gate=True, key=mlp_key
        )
        return Qwen3NextLayer.init(self, kind, mlp, key=mixer_key)


LINEAR_FIELDS = {
    "linear_num_key_heads": hf.Field("linear.num_key_heads", 16),
    "linear_num_value_heads": hf.Field("linear.num_value_heads", 32),
    "linear_key_head_dim": hf.Field("linear.key_dim", 128),
    "linear_value_head_dim": hf.Field("linear.value_dim", 128),
    "linear_conv_kernel_dim": hf.Field("linear.conv_size", 4),
}
FIELDS = (
    MOE_FIELDS
    | LINEAR_FIELDS
    | {
        "head_dim": hf.Field("attention.head_dim", 256, written="head_dim"),
        "norm_topk_prob": hf.Field("experts.norm_topk_prob", True),
        "shared_expert_intermediate_size": hf.Field("shared_dim", 512),
    }
)


def from_hf(given: hf.ConfigFields) -> hf.Found:
    """Reads a `config.json`; defaults are those of transformers."""
    found = hf.read_decoder(given, FIELDS, kv_heads=2)
    found |= hf.read_rotary(given, partial=0.25)
    found |= read_layers(given, found["num_layers"]) | hf.read_load_balance(given)
    return found | read_dense_layers(given, found["num_layers"])


def to_hf(config: Qwen3NextConfig) -> dict[str, Any]:
    """Writes a `config.json`."""
    written = hf.write_decoder(config, FIELDS) | hf.write_rotary(config.rotary)
    written |= hf.write_hybrid_layers(config) | hf.write_load_balance(config)
    written |= {"partial_rotary_factor": config.partial_rotary_factor}
    return written | write_dense_layers(config)


def read_layers(given: hf.ConfigFields, num_layers: int) -> hf.Found:
    """The layers with attention: every fourth by default."""
    every = given("full_attention_interval", 4)
    usual = [
        hf.LINEAR if number % every else hf.FULL for number in range(1, num_layers + 1)
    ]
    return hf.read_hybrid_layers(given, num_layers, usual)


SHARED_TENSORS = {
    "attention.q_proj": HeadsTensor("q_proj", head_axes=2),
    "attention.gate_proj": HeadsTensor("q_proj", head_axes=2),
    "linear_attention": "linear_attn",
    "linear_attention.q_conv": "conv1d",
    "linear_attention.k_conv": "conv1d",
    "linear_attention.v_conv": "conv1d",
    "linear_attention.decay": "",
    "linear_attention.decay.a_log": "A_log",
    "linear_attention.o_proj": "out_proj",
    "mlp.shared": "shared_expert",
    "mlp.shared_gate": "shared_expert_gate",
}
TENSORS = SHARED_TENSORS | {
    "linear_attention.q_proj": HeadsTensor("in_proj_qkvz"),
    "linear_attention.k_proj": HeadsTensor("in_proj_qkvz"),
    "linear_attention.v_proj": HeadsTensor("in_proj_qkvz"),
    "linear_attention.gate_proj": HeadsTensor("in_proj_qkvz"),
    "linear_attention.b_proj": HeadsTensor("in_proj_ba"),
    "linear_attention.a_proj": HeadsTensor("in_proj_ba"),
}

register_format(
    HfFormat(
        "qwen3_next",
        Qwen3NextConfig,
        from_hf,
        to_hf,
        FIELDS,
        TENSORS,
        not_read=("mtp.",),
        probe={"experts": ExpertsConfig(dense_layers=(0,))},
        checksum=1.90600,
    )
)
