"""Gemma 2 (Gemma team 2024, arXiv:2408.00118): a window in every second layer, and
bounded scores and logits.
"""

from dataclasses import dataclass

from jaxtyping import PRNGKeyArray

from models.gemma import SIZES, TENSORS, GemmaLayer, ScaledConfig
from models.hf_io import config_fields as hf
from models.hf_io.formats import ALTERNATING, HfFormat, register_format
from models.parts.config import LayerKind
from stacked_remat.training.config_checks import Positive


@dataclass(frozen=True)
class Gemma2Config(ScaledConfig):
    """A Gemma 2 decoder.

    Attributes:
        score_softcap: scores become `softcap * tanh(scores / softcap)`; null for not.
        output_softcap: the same of logits.
    """

    score_softcap: Positive | None = 50.0
    output_softcap: Positive | None = 30.0

    @property
    def logit_softcap(self) -> float | None:
        """The bound of logits."""
        return self.output_softcap

    def init_layer(self, kind: LayerKind, *, key: PRNGKeyArray) -> GemmaLayer:
        """Makes a layer from `key`."""
        # The softcap is before the mask, which must stay minus infinity.
        return GemmaLayer.init(
            self, kind, rotary=self.rotary, softcap=self.score_softcap, key=key
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
