"""The gated short convolution, a mixer that reads the last few tokens alone."""

import equinox as eqx
import haliax.nn as hnn
import jax
from haliax import Axis, NamedArray
from jaxtyping import DTypeLike, PRNGKeyArray

from models.parts.cache import Kept
from models.parts.config import DecoderConfig
from models.parts.convolution import ShortConvolution
from models.parts.linear import linear
from models.parts.stateful import StatefulMixer
from models.parts.tokens import Tokens
from stacked_remat import checkpoint_name

CONVOLUTION_NAMES = ("convolution_internals",)
"""The names in a `GatedConvolution`."""


class GatedConvolution(StatefulMixer):
    """`out(after * conv(before * x))`, where `before`, `after` and `x` are projections
    of a token (Liquid AI 2025, arXiv:2511.23404).

    Name for remat policies: `convolution_internals`, the three projections. The cache
    keeps the window of the convolution.
    """

    in_proj: hnn.Linear
    conv: ShortConvolution
    out_proj: hnn.Linear
    tiles: int = eqx.field(static=True)
    rotary: None = eqx.field(static=True, default=None)

    @staticmethod
    def init(
        config: DecoderConfig, size: int, *, bias: bool, key: PRNGKeyArray
    ) -> "GatedConvolution":
        """Makes the projections and a convolution of `size` tokens from `key`; all have
        biases, or none.
        """
        in_key, conv_key, out_key = jax.random.split(key, 3)
        Part = Axis("part", 3)
        Channels = Axis("channels", config.hidden_dim)
        Embed = config.Embed
        Parts = (Part, Channels)
        return GatedConvolution(
            in_proj=linear(config, Embed, Parts, bias=bias, key=in_key),
            conv=ShortConvolution.init(Channels, size, bias=bias, key=conv_key),
            out_proj=linear(config, Channels, Embed, bias=bias, key=out_key),
            tiles=config.tiles,
        )

    def mix(
        self, x: NamedArray, tokens: Tokens, kept: Kept | None
    ) -> tuple[NamedArray, Kept]:
        """The convolution of the tokens and of those in the window."""
        parts = checkpoint_name(self.in_proj(x), "convolution_internals")
        # B, C and x of Lfm2ShortConv of transformers, in this order in one tensor
        before, after, values = (parts["part", number] for number in range(3))
        # Linear but for the gates: no activation is in between.
        mixed, window = self.conv(before * values, tokens, kept)
        return self.out_proj(after * mixed).rearrange(x.axes), window

    def empty_cache(self, Batch: Axis, slots: int, dtype: DTypeLike) -> Kept:
        """The window of the convolution."""
        return self.conv.empty_window(Batch, dtype)
