"""gpt-oss (OpenAI 2025): windows in every second layer, sinks, and experts with a
clamped SwiGLU in all.
"""

from dataclasses import dataclass
from typing import Any

import haliax as hax
import haliax.nn as hnn
import jax
from haliax import NamedArray
from jaxtyping import PRNGKeyArray

from models.hf_io import config_fields as hf
from models.hf_io.formats import ALTERNATING, HfFormat, register_format
from models.hf_io.stacked_weights import ExpertsTensor
from models.parts.attention import Attention
from models.parts.config import LayerKind, SparseDecoderConfig
from models.parts.experts import SparseExperts
from models.qwen3 import Qwen3Layer

_SLOPE = 1.702  # with it, x * sigmoid(slope * x) approximates GELU
_LIMIT = 7.0


def clamped(gate: NamedArray, up: NamedArray) -> NamedArray:
    """`g * sigmoid(1.702 * g) * (u + 1)`, where g is `gate` of at most 7 and u is `up`
    between -7 and 7.
    """
    # The gate has no lower bound: its sigmoid is zero there.
    bounded: Any = hax.minimum(gate, _LIMIT)
    factor = hax.clip(up, -_LIMIT, _LIMIT) + 1
    return bounded * hnn.sigmoid(_SLOPE * bounded) * factor


@dataclass(frozen=True)
class GptOssConfig(SparseDecoderConfig):
    """A gpt-oss decoder: attention with sinks, and experts with biases and a clamped
    SwiGLU in every layer.

    In the published models every second layer, from the first on, has a window of 128
    positions, and attention has biases.
    """

    all_sparse = True

    def init_layer(self, kind: LayerKind, *, key: PRNGKeyArray) -> Qwen3Layer:
        """Makes a layer that is wired as one of Qwen3."""
        attention_key, mlp_key = jax.random.split(key)
        return Qwen3Layer(
            input_norm=self.init_norm(),
            attention=Attention.init(
                self,
                rotary=self.rotary,
                window=kind.window,
                # A sink takes a part of the softmax and has no value: a head may
                # attend to nothing.
                sinks=True,
                key=attention_key,
            ),
            post_attention_norm=self.init_norm(),
            # GptOssTopKRouter takes the softmax of the chosen logits. That of all
            # logits, divided by its sum over the chosen ones, is the same.
            mlp=SparseExperts.init(self, gating=clamped, mlp_bias=True, key=mlp_key),
        )


_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4_096,
    # The bounds between stretched and other wavelengths are not rounded.
    "truncate": False,
}

SIZES = hf.with_defaults(
    hf.SIZES,
    head_dim=64,
    num_key_value_heads=8,
    attention_bias=True,
    rms_norm_eps=1e-5,
)
FIELDS = SIZES | {
    "intermediate_size": hf.Field("experts.intermediate_dim"),
    "num_local_experts": hf.Field("experts.num_experts", 128, ("num_experts",)),
    "num_experts_per_tok": hf.Field("experts.experts_per_token", 4),
    "rope_theta": hf.Rotary(150_000.0, _YARN, longest=131_072),
    "router_aux_loss_coef": hf.LoadBalance(),
    "sliding_window": hf.Windows(128, period=2),
    "swiglu_alpha": hf.Only(_SLOPE, written=True),
    "swiglu_limit": hf.Only(_LIMIT, written=True),
    # Transformers ignores these: `rope_scaling` has its own length.
    **hf.ignored("initial_context_length", "experts_per_token"),
}

# Rows of gate and up alternate in one tensor of all experts, `[expert, in, out]`.
_GATE_UP = ExpertsTensor("gate_up_proj", transposed=True, interleaved=True)
_GATE_UP_BIAS = ExpertsTensor("gate_up_proj_bias", interleaved=True)
TENSORS = {
    "mlp.router": "router",
    "mlp.experts.gate_proj.weight": _GATE_UP,
    "mlp.experts.gate_proj.bias": _GATE_UP_BIAS,
    "mlp.experts.up_proj.weight": _GATE_UP,
    "mlp.experts.up_proj.bias": _GATE_UP_BIAS,
    "mlp.experts.down_proj.weight": ExpertsTensor("down_proj", transposed=True),
    "mlp.experts.down_proj.bias": ExpertsTensor("down_proj_bias"),
}

register_format(
    HfFormat(
        "gpt_oss",
        GptOssConfig,
        FIELDS,
        TENSORS,
        quant_methods=("mxfp4",),
        probe={"attention": ALTERNATING},
        checksum=-0.38057,
    )
)
