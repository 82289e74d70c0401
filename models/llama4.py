"""The text decoder of Llama 4 (Meta 2025): attention in chunks, or without a rotary
embedding.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jaxtyping import PRNGKeyArray

from models.hf_io import config_fields as hf
from models.hf_io.formats import ALTERNATING, HfFormat, register_format
from models.hf_io.stacked_weights import ExpertsTensor
from models.parts.attention import Attention
from models.parts.config import LayerKind, SparseDecoderConfig
from models.parts.experts import init_feed_forward
from models.parts.norms import unweighted_rms_norm
from models.parts.sections import (
    FULL,
    SLIDING,
    ExpertsConfig,
    Routing,
    TemperatureConfig,
)
from models.qwen3 import Qwen3Layer


@dataclass(frozen=True)
class Llama4Config(SparseDecoderConfig):
    """A Llama 4 decoder: `attention.window` is the size of chunks, of which tokens see
    their own; layers without it have a temperature in place of a rotary embedding.

    Attributes:
        qk_norm: whether queries and keys that are rotated are normalised too.
        temperature: of queries that are not.
    """

    layers_know_positions = True
    # Llama4TextMoe gives its experts tokens times sigmoids.
    routing = Routing(scoring="sigmoid", weighs_input=True)

    experts: ExpertsConfig = field(
        default_factory=lambda: ExpertsConfig(experts_per_token=1, norm_topk_prob=False)
    )
    qk_norm: bool = True
    temperature: TemperatureConfig = field(default_factory=TemperatureConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        scaling = self.rotary.scaling
        if self.qk_norm and scaling and scaling.attention_factor_used != 1:
            raise ValueError(
                f"model.rotary.scaling is {scaling.rope_type}, which changes the length"
                " of heads, and model.qk_norm would undo that. Take llama3, or qk_norm:"
                " false."
            )

    @property
    def shared_dim(self) -> int:
        """Inner width of the shared expert."""
        return self.experts.intermediate_dim

    def init_layer(self, kind: LayerKind, *, key: PRNGKeyArray) -> Qwen3Layer:
        """Makes a layer that is wired as one of Qwen3."""
        attention_key, mlp_key = jax.random.split(key)
        options: dict[str, Any] = {"rotary": None, "temperature": self.temperature}
        if kind.window is not None:
            # Chunks are cut from a document's first token on, and don't overlap as
            # windows do.
            options = {"rotary": self.rotary, "interleaved": True, "chunk": kind.window}
            if self.qk_norm:
                # Of rotated heads in transformers, whose mean square is the same
                norm = unweighted_rms_norm(self.HeadDim, self.rms_norm_eps)
                options |= {"q_norm": norm, "k_norm": norm}
        return Qwen3Layer(
            input_norm=self.init_norm(),
            attention=Attention.init(self, **options, key=attention_key),
            post_attention_norm=self.init_norm(),
            mlp=init_feed_forward(self, kind, key=mlp_key),
        )


FIELDS = hf.with_defaults(
    hf.SIZES, head_dim=128, num_key_value_heads=8, rms_norm_eps=1e-5
) | {
    "intermediate_size": hf.Field("experts.intermediate_dim"),
    "intermediate_size_mlp": hf.Field("mlp_dim", 16_384, written="Mlp.size"),
    "num_local_experts": hf.Field("experts.num_experts", 16),
    "num_experts_per_tok": hf.Field("experts.experts_per_token", 1),
    "use_qk_norm": hf.Field("qk_norm", True),
    "floor_scale": hf.Field("temperature.floor", 8_192),
    "attn_scale": hf.Field("temperature.scale", 0.1),
    "rope_theta": hf.Rotary(theta=500_000.0, longest=131_072),
    "router_aux_loss_coef": hf.LoadBalance(),
}


def from_hf(given: hf.ConfigFields) -> hf.Found:
    """Reads a `config.json`; defaults are those of transformers."""
    found = hf.read_decoder(given, FIELDS) | {"experts.norm_topk_prob": False}
    if not given("attn_temperature_tuning", True, kind=int):
        found["temperature.scale"] = 0.0
    layers = range(found["num_layers"])
    # Every so many layers, the last of them has experts: of 2 the layers 1, 3, ...
    every = given.at_least(1, "interleave_moe_layer_step", 1)
    sparse = hf.read_numbers(given, "moe_layers", layers)
    if sparse is None:
        sparse = layers[every - 1 :: every]
    found["experts.dense_layers"] = [one for one in layers if one not in sparse]
    rotates = hf.read_rotated(given, layers)
    # Attention in chunks and a rotary embedding go together.
    types = ["chunked_attention" if is_on else FULL for is_on in rotates]
    given.only("layer_types", types)
    chunk = given("attention_chunk_size", 8_192)
    found["attention.window"] = chunk if any(rotates) else None
    kinds = [SLIDING if is_on else FULL for is_on in rotates]
    return found | {"attention.layer_types": kinds if any(rotates) else None}


def to_hf(config: Llama4Config) -> dict[str, Any]:
    """Writes a `config.json`."""
    rotates = [kind.window is not None for kind in config.layer_kinds]
    sparse = [n for n, kind in enumerate(config.layer_kinds) if kind.sparse]
    return hf.write_decoder(config, FIELDS) | {
        "moe_layers": sparse,
        "no_rope_layers": [*map(int, rotates)],
        "attention_chunk_size": config.attention.window or 8_192,
    }


# `[expert, in, out]`, which Llama4TextExperts does not say
_GATE_UP = ExpertsTensor("gate_up_proj", transposed=True, swapped=True)
TENSORS = {
    "mlp": "feed_forward",
    "mlp.router": "router",
    "mlp.shared": "shared_expert",
    "mlp.experts.gate_proj.weight": _GATE_UP,
    "mlp.experts.up_proj.weight": _GATE_UP,
    "mlp.experts.down_proj.weight": replace(_GATE_UP, name="down_proj"),
}

register_format(
    HfFormat(
        "llama4_text",
        Llama4Config,
        FIELDS,
        TENSORS,
        from_hf=from_hf,
        to_hf=to_hf,
        probe={
            "attention": ALTERNATING,
            "temperature": TemperatureConfig(2, 0.5),
            "experts": ExpertsConfig(8, 1, norm_topk_prob=False, dense_layers=(0,)),
        },
        checksum=1.24616,
    )
)
