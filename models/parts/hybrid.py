"""Hybrid decoders: layers with attention among layers with a mixer that keeps a
state.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from haliax import NamedArray

from models.parts.attention import CausalAttention
from models.parts.cache import LayerCache
from models.parts.config import DecoderConfig, LayerKind
from models.parts.decoder import DecoderLayer, LayerOutput, residual
from models.parts.delta_net import DELTA_NAMES, GatedDeltaNet
from models.parts.gated_convolution import GatedConvolution
from models.parts.mlp import FeedForward
from models.parts.norms import Norm
from models.parts.sections import FULL, LINEAR, LinearAttentionConfig
from models.parts.tokens import Tokens


@dataclass(frozen=True)
class HybridDecoderConfig(DecoderConfig):
    """A decoder whose layers have attention or a linear mixer.

    Of an architecture with experts this is the first base, and `SparseDecoderConfig`
    the second.

    Attributes:
        linear_names: the names for remat policies in a linear mixer.
        linear_heads: the axis over which its heads, or its channels, are independent.
        layer_types: of each layer `linear_attention`, which is what the type has beside
            attention (a gated delta net, a short convolution or Mamba-2), or
            `full_attention`; a shorter list repeats.
    """

    linear_names: ClassVar[tuple[str, ...]]
    linear_heads: ClassVar[str] = "key_heads"

    layer_types: tuple[Literal["linear_attention", "full_attention"], ...] = (
        LINEAR,
        LINEAR,
        LINEAR,
        FULL,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if {*self.layer_types} - {LINEAR, FULL} or not self.layer_types:
            raise ValueError(
                f"model.layer_types = {[*self.layer_types]} must have {LINEAR!r} or"
                f" {FULL!r} for each layer; a shorter list repeats."
            )
        if self.attention.window is not None or self.attention.layer_types is not None:
            raise ValueError(
                "Leave out model.attention.window and model.attention.layer_types:"
                " attention of a hybrid decoder sees all positions."
            )
        # The default repeats, and may be longer than a shallow decoder.
        types = self.layer_types
        default = HybridDecoderConfig.layer_types
        if len(types) > self.num_layers and types != default:
            raise ValueError(
                f"model.layer_types has {len(types)} entries for model.num_layers ="
                f" {self.num_layers}. Give at most one for each layer."
            )

    @property
    def types_of_layers(self) -> tuple[str, ...]:
        """`layer_types` with an entry for each layer."""
        types = self.layer_types
        return tuple(types[number % len(types)] for number in range(self.num_layers))

    def kind_of(self, number: int) -> LayerKind:
        """The kind of a layer."""
        # Whether a layer has experts is the base's to say.
        kind = super().kind_of(number)
        return replace(kind, linear=self.types_of_layers[number] == LINEAR)

    def mixer_names(self, kind: LayerKind) -> tuple[str, ...]:
        """The names inside the mixer of a layer of this kind."""
        return self.linear_names if kind.linear else super().mixer_names(kind)

    @property
    def head_axes(self) -> tuple[str, ...]:
        """The axes of heads in the layers that there are."""
        axes = dict.fromkeys(
            self.linear_heads if kind == LINEAR else self.KVHeads.name
            for kind in self.types_of_layers
        )
        return tuple(axes)


@dataclass(frozen=True)
class DeltaDecoderConfig(HybridDecoderConfig):
    """A hybrid decoder whose linear mixers are gated delta nets.

    Attributes:
        linear: sizes of layers with linear attention.
    """

    linear_names = DELTA_NAMES

    linear: LinearAttentionConfig = field(default_factory=LinearAttentionConfig)


class HybridLayer(DecoderLayer):
    """A layer of a hybrid decoder, with norms before its mixer and its MLP or experts.

    One of its mixers is there, and the others are None.
    """

    input_norm: Norm
    attention: CausalAttention | None
    linear_attention: GatedDeltaNet | None
    conv: GatedConvolution | None
    post_attention_norm: Norm
    mlp: FeedForward

    @staticmethod
    def init(
        config: DecoderConfig,
        mlp: FeedForward,
        *,
        attention: CausalAttention | None = None,
        linear_attention: GatedDeltaNet | None = None,
        conv: GatedConvolution | None = None,
    ) -> "HybridLayer":
        """Makes a layer of these parts, with norms of the decoder's kind."""
        return HybridLayer(
            input_norm=config.init_norm(),
            attention=attention,
            linear_attention=linear_attention,
            conv=conv,
            post_attention_norm=config.init_norm(),
            mlp=mlp,
        )

    def forward(
        self, x: NamedArray, tokens: Tokens, cache: LayerCache | None = None
    ) -> LayerOutput:
        """Adds the mixer, then the MLP or experts, each of normalised input."""
        mixed, cache = self.mixer(self.input_norm(x), tokens, cache)
        x = residual(x + mixed)
        output, statistics = self.mlp(x, tokens, norm=self.post_attention_norm)
        return x + output, cache, statistics
