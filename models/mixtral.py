"""Mixtral (Jiang et al. 2024): a Mistral with experts in every layer."""

from dataclasses import dataclass
from typing import Any

import jax
from haliax import NamedArray
from jaxtyping import PRNGKeyArray

from models.hf_io import config_fields as hf
from models.hf_io.formats import HfFormat, register_format
from models.parts.attention import Attention
from models.parts.cache import LayerCache
from models.parts.config import LayerKind, SparseDecoderConfig
from models.parts.decoder import DecoderLayer, LayerOutput, residual
from models.parts.experts import SparseExperts
from models.parts.norms import Norm
from models.parts.sections import AttentionConfig
from models.parts.tokens import Tokens


class MixtralLayer(DecoderLayer):
    """A layer of Mixtral."""

    input_norm: Norm
    attention: Attention
    post_attention_norm: Norm
    mlp: SparseExperts

    def forward(
        self, x: NamedArray, tokens: Tokens, cache: LayerCache | None = None
    ) -> LayerOutput:
        """Adds attention, then the experts, each of normalised input."""
        attended, cache = self.attention(self.input_norm(x), tokens, cache)
        x = residual(x + attended)
        mixed, statistics = self.mlp(x, tokens, norm=self.post_attention_norm)
        return x + mixed, cache, statistics


@dataclass(frozen=True)
class MixtralConfig(SparseDecoderConfig):
    """A Mixtral decoder."""

    all_sparse = True

    def init_layer(self, kind: LayerKind, *, key: PRNGKeyArray) -> MixtralLayer:
        """Makes a layer from `key`."""
        attention_key, mlp_key = jax.random.split(key)
        # Gates are a softmax over all experts, divided by its sum over the chosen ones:
        # MixtralTopKRouter of transformers.
        return MixtralLayer(
            input_norm=self.init_norm(),
            attention=Attention.init(
                self, rotary=self.rotary, window=kind.window, key=attention_key
            ),
            post_attention_norm=self.init_norm(),
            mlp=SparseExperts.init(self, key=mlp_key),
        )


FIELDS = hf.without(hf.SIZES, "attention_bias") | {
    "rms_norm_eps": hf.Field("rms_norm_eps", 1e-5),
    "intermediate_size": hf.Field("experts.intermediate_dim"),
    "num_local_experts": hf.Field("experts.num_experts", 8, ("num_experts",)),
    "num_experts_per_tok": hf.Field("experts.experts_per_token", 2),
}


def from_hf(given: hf.ConfigFields) -> hf.Found:
    """Reads a `config.json`; defaults are those of transformers."""
    given.only("attention_bias", False)
    found = hf.read_decoder(given, FIELDS, kv_heads=8)
    found |= hf.read_rotary(given, theta=1_000_000.0, longest=131_072)
    found |= hf.read_windows(given, found["num_layers"], None)
    return found | hf.read_load_balance(given)


def to_hf(config: MixtralConfig) -> dict[str, Any]:
    """Writes a `config.json`."""
    written = hf.write_decoder(config, FIELDS) | hf.write_rotary(config.rotary)
    written |= {"sliding_window": config.attention.window}
    return written | hf.write_load_balance(config)


# As in Mistral's own files: w2 is the projection back to the residual stream.
TENSORS = {
    "mlp": "block_sparse_moe",
    "mlp.experts.gate_proj": "w1",
    "mlp.experts.up_proj": "w3",
    "mlp.experts.down_proj": "w2",
}

register_format(
    HfFormat(
        "mixtral",
        MixtralConfig,
        from_hf,
        to_hf,
        FIELDS,
        TENSORS,
        loaded={"block_sparse_moe": "mlp"},
        probe={"attention": AttentionConfig(window=3)},
        checksum=0.91225,
    )
)
