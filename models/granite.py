"""Granite 3 (Granite team 2024): a Llama with four factors."""

from dataclasses import dataclass

import equinox as eqx
import jax
from haliax import NamedArray
from jaxtyping import PRNGKeyArray

from models.hf_io import config_fields as hf
from models.hf_io.formats import HfFormat, register_format
from models.parts.attention import Attention
from models.parts.cache import LayerCache
from models.parts.config import DecoderConfig, LayerKind
from models.parts.decoder import DecoderLayer, LayerOutput, residual
from models.parts.mamba2 import Mamba2
from models.parts.mlp import FeedForward, GatedMlp
from models.parts.norms import Norm
from models.parts.tokens import Tokens
from stacked_remat.training.config_checks import Positive


class GraniteLayer(DecoderLayer):
    """A layer of Granite, with attention, or in Granite 4 with Mamba-2."""

    input_norm: Norm
    attention: Attention | None
    mamba: Mamba2 | None
    post_attention_norm: Norm
    mlp: FeedForward
    factor: float = eqx.field(static=True)

    def forward(
        self, x: NamedArray, tokens: Tokens, cache: LayerCache | None = None
    ) -> LayerOutput:
        """Adds the mixer, then the MLP or experts, each of normalised input and times
        a factor.
        """
        # GraniteDecoderLayer of transformers. The factor is a Python number, so the
        # product has the dtype of activations.
        attended, cache = self.mixer(self.input_norm(x), tokens, cache)
        x = residual(x + attended * self.factor)
        mixed, statistics = self.mlp(x, tokens, norm=self.post_attention_norm)
        return x + mixed * self.factor, cache, statistics


@dataclass(frozen=True)
class MultipliedConfig(DecoderConfig):
    """What decoders of Granite share.

    Attributes:
        embedding_multiplier: factor of the embedded tokens.
        attention_multiplier: factor of attention's scores.
        residual_multiplier: factor of what layers add to the residual stream.
        logits_scaling: by which logits are divided.
    """

    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: Positive = 1.0

    @property
    def embedding_scale(self) -> float:
        """Factor of the embedded tokens."""
        return self.embedding_multiplier

    @property
    def logit_factor(self) -> float:
        """Factor of the logits."""
        # GraniteForCausalLM divides; a cross entropy takes a factor.
        return 1 / self.logits_scaling


@dataclass(frozen=True)
class GraniteConfig(MultipliedConfig):
    """A Granite decoder."""

    def init_layer(self, kind: LayerKind, *, key: PRNGKeyArray) -> GraniteLayer:
        """Makes a layer from `key`."""
        attention_key, mlp_key = jax.random.split(key)
        return GraniteLayer(
            input_norm=self.init_norm(),
            attention=Attention.init(
                self,
                rotary=self.rotary,
                window=kind.window,
                # In place of `head_dim ** -0.5`, not besides
                scale=self.attention_multiplier,
                key=attention_key,
            ),
            mamba=None,
            post_attention_norm=self.init_norm(),
            mlp=GatedMlp.init(self, self.Mlp, key=mlp_key),
            factor=self.residual_multiplier,
        )


MULTIPLIERS = {
    "embedding_multiplier": hf.Field("embedding_multiplier", 1.0),
    "attention_multiplier": hf.Field("attention_multiplier", 1.0),
    "residual_multiplier": hf.Field("residual_multiplier", 1.0),
    "logits_scaling": hf.Field("logits_scaling", 1.0),
}
# Each other than 1, with which a factor that is left out would not be seen
PROBE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
}
FIELDS = hf.DENSE_SIZES | MULTIPLIERS | {"rope_theta": hf.Rotary(longest=2_048)}

register_format(
    HfFormat("granite", GraniteConfig, FIELDS, probe=PROBE, checksum=-0.59671)
)
