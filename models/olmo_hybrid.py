"""OLMo Hybrid (Ai2 2026): gated delta nets with norms before them, and the attention of
OLMo 3.
"""

from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import PRNGKeyArray

from models.hf_io import config_fields as hf
from models.hf_io.formats import (
    JOINED_CONVOLUTIONS,
    SEPARATE_CONVOLUTIONS,
    HfFormat,
    register_format,
)
from models.olmo3 import Olmo3Layer
from models.parts.attention import Attention
from models.parts.config import LayerKind
from models.parts.delta_net import GatedDeltaNet
from models.parts.hybrid import DeltaDecoderConfig, HybridLayer
from models.parts.mlp import GatedMlp
from models.parts.norms import rms_norm
from models.parts.sections import FULL, LINEAR


@dataclass(frozen=True)
class OlmoHybridConfig(DeltaDecoderConfig):
    """An OLMo Hybrid decoder.

    Attributes:
        negative_eigenvalues: whether beta is up to 2, not 1.
        rotates: whether queries and keys of attention are rotated.
    """

    negative_eigenvalues: bool = True
    rotates: bool = False

    def init_layer(
        self, kind: LayerKind, *, key: PRNGKeyArray
    ) -> HybridLayer | Olmo3Layer:
        """Makes a layer from `key`."""
        mixer_key, mlp_key = jax.random.split(key)
        mlp = GatedMlp.init(self, self.Mlp, key=mlp_key)
        if kind.linear:
            linear_attention = GatedDeltaNet.init(
                self,
                self.linear,
                norm_eps=1e-5,  # whatever that of other norms
                # Eigenvalues 1 - beta of a state's step are then from -1 to 1, which
                # tracks states that alternate (arXiv:2411.12537).
                beta_scale=2.0 if self.negative_eigenvalues else 1.0,
                key=mixer_key,
            )
            return HybridLayer.init(self, mlp, linear_attention=linear_attention)
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


TENSORS = SEPARATE_CONVOLUTIONS | {
    # Of layers with linear attention
    "input_norm": "attention_layer_norm",
    "post_attention_norm": "feedforward_layer_norm",
    "linear_attention.gate_proj": "g_proj",
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
            **JOINED_CONVOLUTIONS,
        },
        joined={"conv1d": (*JOINED_CONVOLUTIONS,)},
        not_read=("mtp.",),
        probe={"layer_types": (LINEAR, FULL), "rotates": True},
        checksum=-0.05680,
    )
)
