"""DeepSeek V3 (DeepSeek-AI 2024) and Kimi K2: latent attention, a dense prefix, experts
chosen in groups.
"""

import math
from dataclasses import dataclass

import jax
from jaxtyping import PRNGKeyArray

from models.hf_io import config_fields as hf
from models.hf_io.formats import FURTHER_LAYERS, HfFormat, register_format
from models.parts.config import LatentDecoderConfig, LayerKind, MtpDecoderConfig
from models.parts.experts import init_feed_forward
from models.parts.latent_attention import LatentAttention
from models.parts.sections import ExpertsConfig, MtpConfig
from models.qwen3 import Qwen3Layer
from stacked_remat.ops import YarnRotary


@dataclass(frozen=True)
class DeepseekV3Config(LatentDecoderConfig, MtpDecoderConfig):
    """A DeepSeek V3 decoder."""

    gate_scale: float = 2.5

    def init_layer(self, kind: LayerKind, *, key: PRNGKeyArray) -> Qwen3Layer:
        """Makes a layer that is wired as one of Qwen3, with latent attention."""
        attention_key, mlp_key = jax.random.split(key)
        return Qwen3Layer(
            input_norm=self.init_norm(),
            attention=LatentAttention.init(
                self,
                self.latent,
                rotary=self.rotary,
                window=kind.window,
                # Of whole heads, rotated coordinates or not
                scale=self._scale(),
                key=attention_key,
            ),
            post_attention_norm=self.init_norm(),
            # The first layers have an MLP, the others experts, some of them for all
            # tokens.
            mlp=init_feed_forward(self, kind, key=mlp_key),
        )

    def _scale(self) -> float | None:
        """The factor of scores, which YaRN raises."""
        scaling = self.rotary.scaling
        if not isinstance(scaling, YarnRotary) or scaling.mscale_all_dim is None:
            return None
        # yarn_get_mscale of transformers, once for queries and once for keys
        temperature = 0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1
        return self.head_dim**-0.5 * temperature**2


FIELDS = hf.without(hf.DENSE_SIZES, "head_dim") | hf.LATENT_SIZES | hf.FURTHER_TOKENS
FIELDS |= {
    "rope_interleave": hf.Field("latent.interleaved", True),
    "n_routed_experts": hf.Field("experts.num_experts", 256, ("num_local_experts",)),
    "num_experts_per_tok": hf.Field("experts.experts_per_token", 8),
    "moe_intermediate_size": hf.Field("experts.intermediate_dim", 2_048),
    "norm_topk_prob": hf.Field("experts.norm_topk_prob", True),
    "n_group": hf.Field("num_groups", 8),
    "topk_group": hf.Field("groups_per_token", 4),
    "routed_scaling_factor": hf.Field("gate_scale", 2.5),
    "n_shared_experts": hf.Field("shared_experts", 1),
    "first_k_dense_replace": hf.DensePrefix(3),
    "rope_theta": hf.Rotary(longest=4_096),
    "scoring_func": hf.Only("sigmoid"),
    "topk_method": hf.Only("noaux_tc"),
    "moe_layer_freq": hf.Only(1),
    **hf.ignored("aux_loss_alpha", "seq_aux"),  # of a loss in training
}


def from_hf(given: hf.ConfigFields) -> hf.Found:
    """Reads a `config.json`; defaults are those of transformers."""
    found = hf.read_decoder(given, FIELDS)
    rotated = found["latent.rotary_dim"]
    whole = found["latent.plain_dim"] + rotated
    # Transformers writes these, and overwrites what it reads: others get the warning of
    # unknown fields.
    for name, width in (("head_dim", rotated), ("qk_head_dim", whole)):
        if given.document.get(name) == width:
            given.ignore(name)
    document = given.document
    section = document.get("rope_scaling") or document.get("rope_parameters") or {}
    scaling = found["rotary.scaling"]
    if section.get("mscale_all_dim") and scaling.mscale_all_dim is None:
        raise ValueError(
            "rope_scaling has mscale_all_dim without mscale, or with attention_factor:"
            " this is not supported."
        )
    return found


register_format(
    HfFormat(
        "deepseek_v3",
        DeepseekV3Config,
        FIELDS,
        quant_methods=("fp8",),
        further=FURTHER_LAYERS,
        from_hf=from_hf,
        probe={"experts": ExpertsConfig(dense_layers=(0,)), "mtp": MtpConfig(1, 1.0)},
        checksum=0.10078,
    ),
    "kimi_k2",
)
