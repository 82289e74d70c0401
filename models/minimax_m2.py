"""MiniMax-M2 (MiniMax 2025): experts in all layers, chosen by a sigmoid."""

from dataclasses import dataclass

import jax
from jaxtyping import PRNGKeyArray

from models.hf_io import config_fields as hf
from models.hf_io.formats import NUMBERED_EXPERTS, HfFormat, register_format
from models.parts.attention import Attention
from models.parts.config import LayerKind, PartialRotaryConfig, SparseDecoderConfig
from models.parts.experts import SparseExperts
from models.parts.norms import rms_norm
from models.parts.sections import Routing
from models.qwen3 import Qwen3Layer


@dataclass(frozen=True)
class MiniMaxM2Config(PartialRotaryConfig, SparseDecoderConfig):
    """A MiniMax-M2 decoder, whose routers have biases that are not trained."""

    all_sparse = True
    # The bias decides who is chosen; gates are of the scores without it.
    routing = Routing(scoring="sigmoid", bias="frozen")

    def init_layer(self, kind: LayerKind, *, key: PRNGKeyArray) -> Qwen3Layer:
        """Makes a layer that is wired as one of Qwen3."""
        attention_key, mlp_key = jax.random.split(key)
        return Qwen3Layer(
            input_norm=self.init_norm(),
            attention=Attention.init(
                self,
                rotary=self.rotary,
                window=kind.window,
                rotary_dim=self.rotated_dim,
                # Over all heads together, so attention is not cut into tiles of heads
                q_norm=rms_norm(self.QueryHeads, self.rms_norm_eps),
                k_norm=rms_norm(self.KeyHeads, self.rms_norm_eps),
                key=attention_key,
            ),
            post_attention_norm=self.init_norm(),
            mlp=SparseExperts.init(self, key=mlp_key),
        )


FIELDS = hf.with_defaults(hf.SIZES, head_dim=128, num_key_value_heads=8) | {
    "attention_bias": hf.Only(False),
    "intermediate_size": hf.Field("experts.intermediate_dim", 1_536),
    "num_local_experts": hf.Field("experts.num_experts", 256, ("num_experts",)),
    "num_experts_per_tok": hf.Field("experts.experts_per_token", 8),
    # Files have a number of coordinates, transformers keeps a part of a head.
    "rope_theta": hf.Rotary(
        5_000_000.0, longest=196_608, partial=1.0, width="rotary_dim"
    ),
    "router_aux_loss_coef": hf.LoadBalance(),
    "scoring_func": hf.Only("sigmoid"),
    "use_qk_norm": hf.Only(True),
    "qk_norm_type": hf.Only("per_layer"),
    "use_routing_bias": hf.Only(True),
    # Tensors of these layers, which predict further tokens, are left out.
    **hf.ignored("use_mtp", "num_mtp_modules", "mtp_transformer_layers"),
}

TENSORS = NUMBERED_EXPERTS | {
    "mlp": "block_sparse_moe",
    "mlp.bias.value": "e_score_correction_bias",
}

register_format(
    HfFormat(
        "minimax_m2",
        MiniMaxM2Config,
        FIELDS,
        TENSORS,
        loaded={"block_sparse_moe": "mlp"},
        quant_methods=("fp8",),
        further_layers=True,
        probe={"partial_rotary_factor": 0.5},
        checksum=0.85993,
    )
)
