"""Command R7B and Command A (Cohere 2025): attention and MLP beside each other."""

from dataclasses import dataclass

import jax
from haliax import NamedArray
from jaxtyping import PRNGKeyArray

from models.hf_io import config_fields as hf
from models.hf_io.formats import ALTERNATING, HfFormat, register_format
from models.parts.attention import Attention
from models.parts.cache import LayerCache
from models.parts.config import DecoderConfig, LayerKind
from models.parts.decoder import DecoderLayer, LayerOutput
from models.parts.mlp import GatedMlp
from models.parts.norms import Norm, layer_norm
from models.parts.tokens import Tokens


class Cohere2Layer(DecoderLayer):
    """A layer of Cohere 2."""

    input_norm: Norm
    attention: Attention
    mlp: GatedMlp

    def forward(
        self, x: NamedArray, tokens: Tokens, cache: LayerCache | None = None
    ) -> LayerOutput:
        """Adds attention and the MLP, both of one normalised input."""
        # Cohere2DecoderLayer of transformers; no `residual` is in between to be named.
        # One norm serves both, and neither sees what the other adds.
        normalised = self.input_norm(x)
        attended, cache = self.attention(normalised, tokens, cache)
        mixed, statistics = self.mlp(normalised, tokens)
        return x + attended + mixed, cache, statistics


@dataclass(frozen=True)
class Cohere2Config(DecoderConfig):
    """A Cohere 2 decoder; layers with a window alone have a rotary embedding.

    `rms_norm_eps` is of its layer norms.

    Attributes:
        logit_scale: factor of the logits.
    """

    has_halves = False

    tie_word_embeddings: bool = True
    logit_scale: float = 0.0625

    @property
    def logit_factor(self) -> float:
        """Factor of the logits."""
        return self.logit_scale

    def init_norm(self) -> Norm:
        """Makes a norm over `Embed`."""
        # A layer norm subtracts the mean; Cohere2LayerNorm of transformers has no bias.
        return layer_norm(self.Embed, self.rms_norm_eps)

    def init_layer(self, kind: LayerKind, *, key: PRNGKeyArray) -> Cohere2Layer:
        """Makes a layer from `key`."""
        attention_key, mlp_key = jax.random.split(key)
        return Cohere2Layer(
            input_norm=self.init_norm(),
            attention=Attention.init(
                self,
                # Layers without a window know positions by the causal mask alone.
                rotary=None if kind.window is None else self.rotary,
                # Coordinates 2i and 2i + 1 are a pair; in a Llama i and i + half are.
                interleaved=True,
                window=kind.window,
                key=attention_key,
            ),
            mlp=GatedMlp.init(self, self.Mlp, key=mlp_key),
        )


SIZES = hf.with_defaults(hf.DENSE_SIZES, tie_word_embeddings=True)
FIELDS = hf.without(SIZES, "rms_norm_eps") | {
    "layer_norm_eps": hf.Field("rms_norm_eps", 1e-5),
    "logit_scale": hf.Field("logit_scale", 0.0625),
    "rope_theta": hf.Rotary(longest=8_192),
    "sliding_window": hf.Windows(4_096, period=4, period_name="sliding_window_pattern"),
    "position_embedding_type": hf.Only("rope_gptj"),
    "order_of_interleaved_layers": hf.Only("local_attn_first"),
    "use_gated_activation": hf.Only(True),
    "use_parallel_block": hf.Only(True),
    # The second is that of `tie_word_embeddings` in other implementations.
    **hf.ignored("layer_switch", "use_embedding_sharing", "use_parallel_embedding"),
}

register_format(
    HfFormat(
        "cohere2",
        Cohere2Config,
        FIELDS,
        probe={"attention": ALTERNATING},
        checksum=-0.02488,
    )
)
