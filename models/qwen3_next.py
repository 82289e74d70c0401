"""Qwen3-Next (Qwen team 2025): gated delta nets, gated attention, and a gated shared
expert.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
from haliax import NamedArray
from jaxtyping import PRNGKeyArray

from models.hf_io import config_fields as hf
from models.hf_io.formats import HfFormat, register_format
from models.hf_io.stacked_weights import HeadsTensor
from models.parts.attention import Attention
from models.parts.cache import LayerCache
from models.parts.config import LayerKind, PartialRotaryConfig, SparseDecoderConfig
from models.parts.decoder import DecoderLayer, LayerOutput, residual
from models.parts.delta_net import GatedDeltaNet
from models.parts.experts import init_feed_forward
from models.parts.hybrid import HybridDecoderConfig
from models.parts.mlp import FeedForward
from models.parts.norms import Norm, offset_rms_norm
from models.parts.remat_presets import ATTENTION_NAMES
from models.parts.sections import ExpertsConfig, LinearAttentionConfig, MtpConfig
from models.parts.tokens import Tokens
from models.qwen3 import MOE_FIELDS, read_dense_layers, write_dense_layers
from stacked_remat.training.config_checks import check_positive


class Qwen3NextLayer(DecoderLayer):
    """A layer of Qwen3-Next, with linear attention or with attention."""

    input_norm: Norm
    attention: Attention | None
    linear_attention: GatedDeltaNet | None
    post_attention_norm: Norm
    mlp: FeedForward

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
class GatedHybridConfig(PartialRotaryConfig, HybridDecoderConfig):
    """What the decoders of Qwen3-Next and Qwen3.5 share.

    Attributes:
        shared_dim: as of `Qwen3NextConfig`; a dense decoder has none.
        linear: sizes of layers with linear attention.
        mtp: a layer that predicts a further token; at most one.
    """

    attention_names = (*ATTENTION_NAMES, "gate")
    shared_dim: ClassVar[Any] = None

    partial_rotary_factor: float = 0.25
    linear: LinearAttentionConfig = field(default_factory=LinearAttentionConfig)
    mtp: MtpConfig = field(default_factory=MtpConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mtp.depths > 1:
            raise ValueError(
                f"model.mtp.depths = {self.mtp.depths} must be at most 1: files of this"
                " architecture have one layer that predicts a further token."
            )

    @property
    def further_tokens(self) -> MtpConfig:
        """The layer that predicts a further token."""
        return self.mtp

    @property
    def further_kind(self) -> LayerKind:
        """A layer with attention, and with experts where others have them."""
        return LayerKind(sparse=self.sparse is not None)

    def init_norm(self) -> Norm:
        """Makes a norm over `Embed`."""
        # Qwen3NextRMSNorm of transformers: weights are the factors less one.
        return offset_rms_norm(self.Embed, self.rms_norm_eps)

    def init_layer(self, kind: LayerKind, *, key: PRNGKeyArray) -> Qwen3NextLayer:
        """Makes a layer from `key`."""
        mixer_key, mlp_key = jax.random.split(key)
        attention = linear_attention = None
        if kind.linear:
            linear_attention = GatedDeltaNet.init(
                self, self.linear, norm_eps=self.rms_norm_eps, key=mixer_key
            )
        else:
            attention = Attention.init(
                self,
                rotary=self.rotary,
                rotary_dim=self.rotated_dim,
                window=kind.window,
                q_norm=offset_rms_norm(self.HeadDim, self.rms_norm_eps),
                k_norm=offset_rms_norm(self.HeadDim, self.rms_norm_eps),
                gate=True,
                key=mixer_key,
            )
        shared = {"shared_dim": self.shared_dim, "shared_gate": True}
        mlp = init_feed_forward(self, kind, **shared, key=mlp_key)
        return Qwen3NextLayer(
            input_norm=self.init_norm(),
            attention=attention,
            linear_attention=linear_attention,
            post_attention_norm=self.init_norm(),
            mlp=mlp,
        )


@dataclass(frozen=True)
class Qwen3NextConfig(GatedHybridConfig, SparseDecoderConfig):
    """A Qwen3-Next decoder.

    Attributes:
        shared_dim: inner width of the expert that all tokens are routed to besides.
    """

    shared_dim: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("model", self, "shared_dim")


HEAD_DIM = {"head_dim": hf.Field("attention.head_dim", 256, written="head_dim")}
FIELDS = MOE_FIELDS | hf.LINEAR_SIZES | HEAD_DIM
FIELDS |= {"norm_topk_prob": hf.Field("experts.norm_topk_prob", True)}
FIELDS |= {"shared_expert_intermediate_size": hf.Field("shared_dim", 512)}
# Published files have the layer, and no field for it.
FIELDS |= {
    "num_nextn_predict_layers": hf.Field("mtp.depths", 1, written="mtp.trained_depths")
}


def from_hf(given: hf.ConfigFields) -> hf.Found:
    """Reads a `config.json`; defaults are those of transformers."""
    found = hf.read_decoder(given, FIELDS, kv_heads=2)
    found |= hf.read_rotary(given, partial=0.25) | hf.read_load_balance(given)
    found |= hf.read_hybrid_layers(given, found["num_layers"])
    return found | read_dense_layers(given, found["num_layers"])


def to_hf(config: Qwen3NextConfig) -> dict[str, Any]:
    """Writes a `config.json`."""
    written = hf.write_decoder(config, FIELDS) | hf.write_rotary(config.rotary)
    written |= {"partial_rotary_factor": config.partial_rotary_factor}
    written |= hf.write_hybrid_layers(config) | hf.write_load_balance(config)
    return written | write_dense_layers(config)


_QUERY_AND_GATE = HeadsTensor("q_proj", head_axes=2)
SHARED_TENSORS = {
    "attention.q_proj": _QUERY_AND_GATE,
    "attention.gate_proj": _QUERY_AND_GATE,
    "linear_attention.o_proj": "out_proj",
    "mlp.shared": "shared_expert",
    "mlp.shared_gate": "shared_expert_gate",
}
_QKVZ, _BA = HeadsTensor("in_proj_qkvz"), HeadsTensor("in_proj_ba")
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
        from_hf,
        to_hf,
        FIELDS,
        TENSORS,
        not_read=("mtp.",),
        further=FURTHER_TENSORS,
        probe={"experts": ExpertsConfig(dense_layers=(0,)), "mtp": MtpConfig(1, 1.0)},
        checksum=-3.54478,
    )
)
