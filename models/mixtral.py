"""Mixtral (Jiang et al. 2024): a Mistral with experts in every layer."""

from dataclasses import dataclass

import jax
from jaxtyping import PRNGKeyArray

from models.hf_io import config_fields as hf
from models.hf_io.formats import NUMBERED_EXPERTS, HfFormat, register_format
from models.parts.attention import Attention
from models.parts.config import LayerKind, SparseDecoderConfig
from models.parts.experts import SparseExperts
from models.parts.sections import AttentionConfig
from models.qwen3 import Qwen3Layer


@dataclass(frozen=True)
class MixtralConfig(SparseDecoderConfig):
    """A Mixtral decoder."""

    all_sparse = True

    def init_layer(self, kind: LayerKind, *, key: PRNGKeyArray) -> Qwen3Layer:
        """Makes a layer that is wired as one of Qwen3."""
        attention_key, mlp_key = jax.random.split(key)
        # Gates are a softmax over all experts, divided by its sum over the chosen ones:
        # MixtralTopKRouter of transformers.
        return Qwen3Layer(
            input_norm=self.init_norm(),
            attention=Attention.init(
                self, rotary=self.rotary, window=kind.window, key=attention_key
            ),
            post_attention_norm=self.init_norm(),
            mlp=SparseExperts.init(self, key=mlp_key),
        )


SIZES = hf.with_defaults(hf.SIZES, num_key_value_heads=8, rms_norm_eps=1e-5)
FIELDS = SIZES | {
    "attention_bias": hf.Only(False),
    "intermediate_size": hf.Field("experts.intermediate_dim"),
    "num_local_experts": hf.Field("experts.num_experts", 8, ("num_experts",)),
    "num_experts_per_tok": hf.Field("experts.experts_per_token", 2),
    "rope_theta": hf.Rotary(theta=1_000_000.0, longest=131_072),
    "sliding_window": hf.Windows(None),
    "router_aux_loss_coef": hf.LoadBalance(),
}
TENSORS = NUMBERED_EXPERTS | {"mlp": "block_sparse_moe"}

register_format(
    HfFormat(
        "mixtral",
        MixtralConfig,
        FIELDS,
        TENSORS,
        loaded={"block_sparse_moe": "mlp"},
        probe={"attention": AttentionConfig(window=3)},
        checksum=0.91225,
    )
)
