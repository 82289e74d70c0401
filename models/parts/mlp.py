"""The feed-forward half of a layer: what all kinds share, and the gated MLP."""

import abc
from collections.abc import Callable
from typing import TypeAlias

import equinox as eqx
import haliax.nn as hnn
import jax
from haliax import Axis, NamedArray
from jaxtyping import PRNGKeyArray

from models.parts.config import DecoderConfig
from models.parts.linear import linear, without_bias
from models.parts.norms import Norm
from models.parts.router_statistics import RouterStatistics, means
from models.parts.tokens import Tokens, has_positions
from stacked_remat import LayerStack, checkpoint_name, tiled
from stacked_remat.ops import ExpertLinear, apply_linear
from stacked_remat.training import POSITION_AXIS

Gating: TypeAlias = Callable[[NamedArray, NamedArray], NamedArray]
"""The products of `gate_proj` and `up_proj` to what `down_proj` is given."""


def silu_gated(gate: NamedArray, up: NamedArray) -> NamedArray:
    """`silu(gate) * up` (SwiGLU, Shazeer 2020)."""
    return hnn.silu(gate) * up


def gelu_gated(gate: NamedArray, up: NamedArray) -> NamedArray:
    """`gelu(gate) * up` (GEGLU, Shazeer 2020), with the approximation by tanh."""
    return hnn.gelu(gate, approximate=True) * up


class FeedForward(eqx.Module):
    """What maps each token by itself, so that it may be applied tile by tile.

    Attributes:
        tiles: into how many tiles of positions `__call__` cuts what it is given.
    """

    tiles: eqx.AbstractVar[int]
    Embed: eqx.AbstractVar[Axis]

    @abc.abstractmethod
    def apply(
        self, x: NamedArray, documents: NamedArray | None
    ) -> tuple[NamedArray, RouterStatistics | None]:
        """Maps tokens `[..., Embed]` to themselves, with the sums of a router, which
        leave out tokens whose document is 0.
        """

    def __call__(
        self, x: NamedArray, tokens: Tokens, norm: Norm | None = None
    ) -> tuple[NamedArray, RouterStatistics | None]:
        """Maps `[..., Embed]` to itself, with the statistics of a router, of which an
        MLP has none.

        `norm` is applied to `x` first, tile by tile too.
        """
        # With the norm in a tile, its output never exists for all positions.
        run = _normalise_and_apply
        own = self
        if self.tiles > 1 and has_positions(x):
            run = tiled(run, POSITION_AXIS, tiles=self.tiles, reduce="sum")
            # Each tile adds to the gradients of what it is given: not to those of all
            # layers.
            own = jax.tree.map(
                lambda node: node.layer if isinstance(node, LayerStack) else node,
                self,
                is_leaf=lambda node: isinstance(node, LayerStack),
            )
        # Sums, not means, come out of a tile: `reduce` adds them up.
        output, sums = run(own, norm, x, tokens.documents)
        if sums is None:
            return output, None
        return output, means(sums, x, self.Embed, tokens.documents)


def _normalise_and_apply(
    part: FeedForward, norm: Norm | None, x: NamedArray, documents: NamedArray | None
) -> tuple[NamedArray, RouterStatistics | None]:
    return part.apply(x if norm is None else norm(x), documents)


class GatedMlp(FeedForward):
    """`down(gating(gate(x), up(x)))`, of a dense layer or of one expert.

    Name for remat policies: `mlp_internals`, the products of `gate_proj` and `up_proj`.
    """

    gate_proj: hnn.Linear
    up_proj: hnn.Linear
    down_proj: hnn.Linear
    # A function, so that layers with another are of another kind
    gating: Gating = eqx.field(static=True)
    tiles: int = eqx.field(static=True)
    Embed: Axis = eqx.field(static=True)

    @staticmethod
    def init(
        config: DecoderConfig,
        Inner: Axis,
        *,
        gating: Gating = silu_gated,
        bias: bool = False,
        key: PRNGKeyArray,
    ) -> "GatedMlp":
        """Makes the three projections, to and from `Inner`, from `key`."""
        gate_key, up_key, down_key = jax.random.split(key, 3)
        return GatedMlp(
            gate_proj=linear(config, config.Embed, Inner, bias=bias, key=gate_key),
            up_proj=linear(config, config.Embed, Inner, bias=bias, key=up_key),
            down_proj=linear(config, Inner, config.Embed, bias=bias, key=down_key),
            gating=gating,
            tiles=config.tiles,
            Embed=config.Embed,
        )

    def apply(
        self, x: NamedArray, documents: NamedArray | None = None
    ) -> tuple[NamedArray, None]:
        """As the MLP of a layer."""
        # Both under one name: the activation's derivative reads both.
        products = checkpoint_name(self.products(x), "mlp_internals")
        return self.down(products).rearrange(x.axes), None

    def products(
        self, x: NamedArray, linear: ExpertLinear = apply_linear
    ) -> tuple[NamedArray, NamedArray]:
        """What `gate_proj` and `up_proj` make of `x`.

        `linear` applies a linear map: of this expert, or of each row's
        (`stacked_remat.ops.grouped_experts`).
        """
        return linear(self.gate_proj, x), linear(self.up_proj, x)

    def down(
        self,
        products: tuple[NamedArray, NamedArray],
        weight: NamedArray | None = None,
        linear: ExpertLinear = apply_linear,
    ) -> NamedArray:
        """The output by the products, times `weight` if given: that of an expert.

        The weight is applied before the last map, so that its gradient does not need
        that map's output.
        """
        hidden = self.gating(*products)
        if weight is None:
            return linear(self.down_proj, hidden)
        down, bias = without_bias(self.down_proj)
        output = linear(down, hidden * weight)
        return output if bias is None else output + linear(bias, weight)
