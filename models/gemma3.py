"""The text decoder of Gemma 3 (Gemma team 2025): a window in five layers of six, and
norms of queries and keys.
"""

from dataclasses import dataclass, replace

from jaxtyping import PRNGKeyArray

from models.gemma import SIZES, TENSORS, GemmaLayer, ScaledConfig
from models.hf_io import config_fields as hf
from models.hf_io.formats import ALTERNATING, HfFormat, register_format
from models.parts.config import LayerKind
from models.parts.norms import offset_rms_norm


@dataclass(frozen=True)
class Gemma3Config(ScaledConfig):
    """A Gemma 3 decoder.

    Attributes:
        local_theta: the base of the wavelengths in layers with a window.
    """

    local_theta: float = 10_000.0

    def init_layer(self, kind: LayerKind, *, key: PRNGKeyArray) -> GemmaLayer:
        """Makes a layer from `key`."""
        # Windows are short: wavelengths of their own, not stretched
        rotary = self.rotary
        if kind.window is not None:
            rotary = replace(rotary, theta=self.local_theta, scaling=None)
        return GemmaLayer.init(
            self,
            kind,
            rotary=rotary,
            # In place of the softcap of scores in Gemma 2
            q_norm=offset_rms_norm(self.HeadDim, self.rms_norm_eps),
            k_norm=offset_rms_norm(self.HeadDim, self.rms_norm_eps),
            key=key,
        )


FIELDS = SIZES | {
    "rope_theta": hf.RotaryByKind(1_000_000.0, 131_072, local_theta="local_theta"),
    "sliding_window": hf.Windows(4_096, period=6, period_name="sliding_window_pattern"),
}

register_format(
    HfFormat(
        "gemma3_text",
        Gemma3Config,
        FIELDS,
        TENSORS,
        probe={"attention": ALTERNATING, "query_pre_attn_scalar": 9},
        checksum=4.84197,
    )
)
