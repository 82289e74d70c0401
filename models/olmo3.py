"""OLMo 3 (Ai2 2025): norms of what layers add to the residual stream, and over all
heads.
"""

from dataclasses import dataclass, replace

import jax
from haliax import NamedArray
from jaxtyping import PRNGKeyArray

from models.hf_io import config_fields as hf
from models.hf_io.formats import ALTERNATING, HfFormat, register_format
from models.parts.attention import Attention
from models.parts.cache import LayerCache
from models.parts.config import DecoderConfig, LayerKind
from models.parts.decoder import DecoderLayer, LayerOutput, residual
from models.parts.mlp import GatedMlp
from models.parts.norms import Norm, rms_norm
from models.parts.tokens import Tokens


class Olmo3Layer(DecoderLayer):
    """A layer of OLMo 3."""

    attention: Attention
    attention_output_norm: Norm
    mlp: GatedMlp
    mlp_output_norm: Norm

    def forward(
        self, x: NamedArray, tokens: Tokens, cache: LayerCache | None = None
    ) -> LayerOutput:
        """Attention, then the MLP, each normalised and added to the stream."""
        # Olmo3DecoderLayer of transformers: attention reads the stream itself, and what
        # it adds is normalised.
        attended, cache = self.attention(x, tokens, cache)
        x = residual(x + self.attention_output_norm(attended))
        # No norm before the MLP, so tiles are given none.
        mixed, statistics = self.mlp(x, tokens)
        return x + self.mlp_output_norm(mixed), cache, statistics


@dataclass(frozen=True)
class Olmo3Config(DecoderConfig):
    """An OLMo 3 decoder; the scaling of rotary frequencies is of layers without a
    window alone.
    """

    def init_layer(self, kind: LayerKind, *, key: PRNGKeyArray) -> Olmo3Layer:
        """Makes a layer from `key`."""
        attention_key, mlp_key = jax.random.split(key)
        # Windows are shorter than the original context, so nothing is stretched there.
        rotary = self.rotary
        if kind.window is not None:
            rotary = replace(rotary, scaling=None)
        return Olmo3Layer(
            attention=Attention.init(
                self,
                rotary=rotary,
                window=kind.window,
                # Over all heads together; those of Qwen3 are over each head.
                q_norm=rms_norm(self.QueryHeads, self.rms_norm_eps),
                k_norm=rms_norm(self.KeyHeads, self.rms_norm_eps),
                key=attention_key,
            ),
            attention_output_norm=self.init_norm(),
            mlp=GatedMlp.init(self, self.Mlp, key=mlp_key),
            mlp_output_norm=self.init_norm(),
        )


FIELDS = hf.with_defaults(hf.DENSE_SIZES, rms_norm_eps=1e-5) | {
    "rope_theta": hf.RotaryByKind(theta=500_000.0, longest=2_048),
    "sliding_window": hf.Windows(4_096, period=4),
}

TENSORS = {
    "attention_output_norm": "post_attention_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}

register_format(
    HfFormat(
        "olmo3",
        Olmo3Config,
        FIELDS,
        TENSORS,
        probe={"attention": ALTERNATING},
        checksum=-0.06347,
    )
)
