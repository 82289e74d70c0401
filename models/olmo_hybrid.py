"""OLMo Hybrid (Ai2 2026): gated delta nets with norms before them, and the attention of
OLMo 3.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
from haliax import NamedArray
from jaxtyping import PRNGKeyArray

from models.hf_io import config_fields as hf
from models.hf_io.formats import HfFormat, register_format
from models.olmo3 import Olmo3Layer
from models.parts.attention import Attention
from models.parts.cache import LayerCache
from models.parts.config import LayerKind
from models.parts.decoder import DecoderLayer, LayerOutput, residual
from models.parts.delta_net import DELTA_NAMES, GatedDeltaNet
from models.parts.hybrid import HybridDecoderConfig
from models.parts.mlp import GatedMlp
from models.parts.norms import Norm, rms_norm
from models.parts.sections import FULL, LINEAR, LinearAttentionConfig
from models.parts.tokens import Tokens


class OlmoLinearLayer(DecoderLayer):
    """A layer of OLMo Hybrid with linear attention; the others are those of OLMo 3."""

    input_norm: Norm
    linear_attention: GatedDeltaNet
    post_attention_norm: Norm
    mlp: GatedMlp

    def forward(
        self, x: NamedArray, tokens: Tokens, cache: LayerCache | None = None
    ) -> LayerOutput:
        """Adds linear attention, then the MLP, each of normalised input."""
        # OlmoHybridLinearAttentionDecoderLayer of transformers
        attended, cache = self.linear_attention(self.input_norm(x), tokens, cache)
        x = residual(x + attended)
        mixed, statistics = self.mlp(x, tokens, norm=self.post_attention_norm)
        return x + mixed, cache, statistics


@dataclass(frozen=True)
class OlmoHybridConfig(HybridDecoderConfig):
    """An OLMo Hybrid decoder.

    Attributes:
        linear: sizes of layers with linear attention.
        negative_eigenvalues: whether beta is up to 2, not 1.
        rotates: whether queries and keys of attention are rotated.
    """

    linear_names = DELTA_NAMES

    linear: LinearAttentionConfig = field(default_factory=LinearAttentionConfig)
    negative_eigenvalues: bool = True
    rotates: bool = False

    def init_layer(
        self, kind: LayerKind, *, key: PRNGKeyArray
    ) -> OlmoLinearLayer | Olmo3Layer:
        """Makes a layer from `key`."""
        mixer_key, mlp_key = jax.random.split(key)
        mlp = GatedMlp.init(self, self.Mlp, key=mlp_key)
        if kind.linear:
            return OlmoLinearLayer(
                input_norm=self.init_norm(),
                linear_attention=GatedDeltaNet.init(
                    self,
                    self.linear,
                    norm_eps=1e-5,  # whatever that of other norms
                    # Eigenvalues 1 - beta of a state's step are then from -1 to 1,
                    # which tracks states that alternate (arXiv:2411.12537).
                    beta_scale=2.0 if self.negative_eigenvalues else 1.0,
                    key=mixer_key,
                ),
                post_attention_norm=self.init_norm(),
                mlp=mlp,
            )
        # Norms are before linear attention, and after attention.
        return Olmo3Layer(
            attention=Attention.init(
                self,
                rotary=self.rotary if self.rotates else None,
                # Over all heads together
                q_norm=rms_norm(self.QueryHeads, self.rms_norm_eps),
                k_norm=rms_norm(self.KeyHeads, self.rms_norm_eps),
                key=mixer_key,
            ),
            attention_output_norm=self.init_norm(),
            mlp=mlp,
            mlp_output_norm=self.init_norm(),
        )


# Without defaults: transformers computes these sizes, and writes them.
_LINEAR = {name: hf.Field(size.path) for name, size in hf.LINEAR_SIZES.items()}
FIELDS = (
    hf.DENSE_SIZES
    | _LINEAR
    | {
        "linear_allow_neg_eigval": hf.Field("negative_eigenvalues", True),
        "linear_use_gate": hf.Only(True),
        "rope_theta": hf.Rotary(longest=65_536),
        "layer_types": hf.HybridLayers(),
        "pad_token_id": hf.NoPadding(),
        # Of the initial weights
        **hf.ignored("linear_a_log_min", "linear_a_log_max", "linear_dt_init_floor"),
        **hf.ignored("linear_dt_min", "linear_dt_max"),
    }
)


def from_hf(given: hf.ConfigFields) -> hf.Found:
    """Reads a `config.json`; defaults are those of transformers."""
    # A theta of null, beside the section or in it, stands for no rotation.
    section = given.document.get("rope_parameters")
    if not isinstance(section, dict) or not section:
        section = given.document  # where the field is absent, or refused below
    rotates = section.get("rope_theta", 10_000.0) is not None
    if not rotates:
        given.ignore("rope_parameters")
    return hf.read_decoder(given, FIELDS) | {"rotates": rotates}


def to_hf(config: OlmoHybridConfig) -> dict[str, Any]:
    """Writes a `config.json`."""
    written = hf.write_decoder(config, FIELDS)
    if not config.rotates:
        written["rope_parameters"] = {"rope_type": "default", "rope_theta": None}
    return written


TENSORS = {
    # Of layers with linear attention
    "input_norm": "attention_layer_norm",
    "post_attention_norm": "feedforward_layer_norm",
    "linear_attention.gate_proj": "g_proj",
    "linear_attention.q_conv": "q_conv1d",
    "linear_attention.k_conv": "k_conv1d",
    "linear_attention.v_conv": "v_conv1d",
    "linear_attention.norm": "o_norm",
    # Of layers with attention
    "attention_output_norm": "post_attention_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}

register_format(
    HfFormat(
        "olmo_hybrid",
        OlmoHybridConfig,
        FIELDS,
        TENSORS,
        from_hf=from_hf,
        to_hf=to_hf,
        loaded={
            "attention_layer_norm": "input_layernorm",
            "feedforward_layer_norm": "post_attention_layernorm",
            "q_conv1d": "conv1d",
            "k_conv1d": "conv1d",
            "v_conv1d": "conv1d",
        },
        joined={"conv1d": ("q_conv1d", "k_conv1d", "v_conv1d")},
        not_read=("mtp.",),
        probe={"layer_types": (LINEAR, FULL), "rotates": True},
        checksum=-0.05680,
    )
)
