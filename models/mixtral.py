"""Mixtral (Jiang et al. 2024): a Mistral with experts in every layer."""

from dataclasses import dataclass

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


FIELDS = hf.SIZES | {
    "num_key_value_heads": hf.KeyValueHeads(8),
    "attention_bias": hf.Only(False),
    "rms_norm_eps": hf.Field("rms_norm_eps", 1e-5),
    "intermediate_size": hf.Field("experts.intermediate_dim"),
    "num_local_experts": hf.Field("experts.num_experts", 8, ("num_experts",)),
    "num_experts_per_tok": hf.Field("experts.experts_per_token", 2),
    "rope_theta": hf.Rotary(theta=1_000_000.0, longest=131_072),
    "sliding_window": hf.Windows(None),
    "router_aux_loss_coef": hf.LoadBalance(),
}
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
        FIELDS,
        TENSORS,
        loaded={"block_sparse_moe": "mlp"},
        probe={"attention": AttentionConfig(window=3)},
        checksum=0.91225,
    )
)
