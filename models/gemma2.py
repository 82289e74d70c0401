"""Gemma 2 (Gemma team 2024, arXiv:2408.00118): a window in every second layer, and
bounded scores and logits.
"""

from dataclasses import dataclass

import jax
from jaxtyping import PRNGKeyArray

from models.gemma3 import SIZES, TENSORS, Gemma3Layer
from models.hf_io import config_fields as hf
from models.hf_io.formats import ALTERNATING, HfFormat, register_format
from models.parts.attention import Attention
from models.parts.config import DecoderConfig, LayerKind
from models.parts.mlp import GatedMlp, gelu_gated
from models.parts.norms import Norm, offset_rms_norm
from stacked_remat.training.config_checks import Count, Positive


@dataclass(frozen=True)
class Gemma2Config(DecoderConfig):
    """A Gemma 2 decoder.

    Attributes:
        query_pre_attn_scalar: scores are divided by its square root.
        score_softcap: scores become `softcap * tanh(scores / softcap)`; null for not.
        output_softcap: the same of logits.
    """

    tie_word_embeddings: bool = True
    query_pre_attn_scalar: Count = 256
    score_softcap: Positive | None = 50.0
    output_softcap: Positive | None = 30.0

    @property
    def embedding_scale(self) -> float:
        """The square root of the width."""
        # The decoder rounds it to the dtype of activations, as transformers does.
        return self.hidden_dim**0.5

    @property
    def logit_softcap(self) -> float | None:
        """The bound of logits."""
        return self.output_softcap

    def init_norm(self) -> Norm:
        """Makes a norm over `Embed`."""
        return offset_rms_norm(self.Embed, self.rms_norm_eps)

    def init_layer(self, kind: LayerKind, *, key: PRNGKeyArray) -> Gemma3Layer:
        """Makes a layer of Gemma 3, whose queries and keys are not normalised."""
        attention_key, mlp_key = jax.random.split(key)
        return Gemma3Layer(
            input_norm=self.init_norm(),
            attention=Attention.init(
                self,
                rotary=self.rotary,
                window=kind.window,
                # Not by the width of a head, which is another number in the 27B model
                scale=self.query_pre_attn_scalar**-0.5,
                # Before the mask, which must stay minus infinity
                softcap=self.score_softcap,
                key=attention_key,
            ),
            attention_output_norm=self.init_norm(),
            post_attention_norm=self.init_norm(),
            mlp=GatedMlp.init(self, self.Mlp, gating=gelu_gated, key=mlp_key),
            mlp_output_norm=self.init_norm(),
        )


FIELDS = SIZES | {
    "attn_logit_softcapping": hf.Field("score_softcap", 50.0, nullable=True),
    "final_logit_softcapping": hf.Field("output_softcap", 30.0, nullable=True),
    "rope_theta": hf.Rotary(longest=8_192),
    "sliding_window": hf.Windows(4_096, period=2),
}

register_format(
    HfFormat(
        "gemma2",
        Gemma2Config,
        FIELDS,
        TENSORS,
        probe={
            "attention": ALTERNATING,
            "query_pre_attn_scalar": 9,
            "score_softcap": 0.1,
            "output_softcap": 1.0,
        },
        checksum=-0.46906,
    )
)
