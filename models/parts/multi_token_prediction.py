"""Layers that predict further tokens than the next one (multi-token prediction).

As in section 2.2 of arXiv:2412.19437, a decoder has `depths` layers after its last.
With `h[0]` what the decoder's head reads, and depths k = 1, 2, ...,

    joined[k][i] = M_k (norm(embedding(token[i + k])), norm(h[k - 1][i]))
    h[k] = norm(layer_k(joined[k]))

and from `h[k][i]` the decoder's own head predicts `token[i + k + 1]`. The loss of all
depths is `weight / depths * sum_k(sum_i(cross_entropy[k][i])) / targets`, with the
number of targets of the next token at every depth, as in the paper. So losses of
microbatches add up to that of a batch.

Every depth has all positions, of which the last k of each document have no target: no
others see them, and their weight in the loss is zero.
"""

from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.util import is_named_array
from jax.sharding import AxisType
from jaxtyping import Array, PRNGKeyArray

from models.parts.config import DecoderConfig
from models.parts.linear import cast_floating, linear
from models.parts.norms import Norm
from models.parts.router_statistics import RouterStatistics
from models.parts.tokens import Tokens
from stacked_remat.training import POSITION_AXIS, TokenBatch

DEPTHS_AXIS = "depths"
_BOTH = "both"  # the axis of the two inputs of a depth


class MtpLayer(eqx.Module):
    """One depth: a layer of the decoder's own kind, and what joins its two inputs.

    Attributes:
        embedding_norm: of the embedded token that is as many positions ahead.
        hidden_norm: of the hidden state of the depth before.
        eh_proj: from both, the embedding first, to the residual stream.
        layer: the layer, a `models.parts.decoder.Layer`.
        norm: of its output, before the head.
    """

    embedding_norm: Norm
    hidden_norm: Norm
    eh_proj: hnn.Linear
    layer: Any
    norm: Norm
    Embed: Axis = eqx.field(static=True)

    @staticmethod
    def init(config: DecoderConfig, *, key: PRNGKeyArray) -> "MtpLayer":
        """Makes a depth from `key`."""
        projection_key, layer_key = jax.random.split(key)
        Embed = config.Embed
        Both = Axis(_BOTH, 2 * config.hidden_dim)
        return MtpLayer(
            embedding_norm=config.init_norm(),
            hidden_norm=config.init_norm(),
            # Named as in published files: e is the embedding, h the hidden state.
            eh_proj=linear(config, Both, Embed, key=projection_key),
            layer=config.init_layer(config.further_kind, key=layer_key),
            norm=config.init_norm(),
            Embed=Embed,
        )

    def __call__(
        self,
        before: tuple[NamedArray, NamedArray],
        positions: NamedArray,
        documents: NamedArray | None,
    ) -> tuple[tuple[NamedArray, NamedArray], tuple[NamedArray, Any]]:
        """A step of a scan over the depths.

        Args:
            before: the hidden states of the depth before, and the embedded tokens that
                it was given, both `[..., position, Embed]`.
            positions, documents: as `Decoder.hidden_states` takes them.

        Returns:
            The same of this depth; and its hidden states, and the statistics of its
            router, None without one.
        """
        hidden, embedded = before
        # One more than at the depth before, whose tokens are what is carried
        embedded = _ahead(embedded, 1)
        # Parameters stay in their own dtype outside, as those of other layers.
        own = cast_floating(self, hidden.dtype)
        normalised = own.embedding_norm(embedded), own.hidden_norm(hidden)
        joined = [part.rename({self.Embed.name: _BOTH}) for part in normalised]
        x = own.eh_proj(hax.concatenate(_BOTH, joined)).rearrange(hidden.axes)
        # A token keeps its own position, though the embedding is of one further on.
        rotary = own.layer.rotary
        table = None if rotary is None else rotary.table(positions)
        x, _, statistics = own.layer.forward(
            x, Tokens(table, documents, positions=positions)
        )
        hidden = own.norm(x)
        return (hidden, embedded), (hidden, statistics)


def targets_ahead(batch: TokenBatch, depth: int) -> tuple[NamedArray, NamedArray]:
    """What a depth, from 1 on, is to predict: the targets that many positions ahead,
    and their weights, which are 0 where that position is not in the same document.
    """
    Pos = batch.tokens.resolve_axis(POSITION_AXIS)

    # What is rolled over the end of a sequence is of its beginning.
    is_inside = hax.arange(Pos) < Pos.size - depth
    if batch.documents is not None:
        is_inside = is_inside & (_ahead(batch.documents, depth) == batch.documents)
    weights = hax.where(is_inside, _ahead(batch.weights, depth), 0.0)
    return _ahead(batch.targets, depth), weights


def _ahead(x: NamedArray, steps: int) -> NamedArray:
    """What is so many positions ahead of each; the first positions follow the last."""
    axis = x.axis_indices(POSITION_AXIS)

    def roll(array: Array) -> Array:
        return jnp.roll(array, -steps, axis)

    rolled: Any = roll
    if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
        # JAX refuses slices of positions that such an axis divides.
        sharding = jax.typeof(x.array).sharding
        rolled = jax.sharding.auto_axes(roll, out_sharding=sharding)
    return NamedArray(rolled(x.array), x.axes)


def with_further(
    statistics: RouterStatistics | None, further: RouterStatistics | None
) -> RouterStatistics | None:
    """The statistics of the routers of all layers, `[layers, ...]`, those of the depths
    last; None where no layer has a router.
    """
    if further is None:
        return statistics

    def in_layers(one: NamedArray) -> NamedArray:
        return one.rename({DEPTHS_AXIS: "layers"})

    own = jax.tree.map(in_layers, further, is_leaf=is_named_array)
    if statistics is None:
        return own

    def join(*both: NamedArray) -> NamedArray:
        return hax.concatenate("layers", both)

    return jax.tree.map(join, statistics, own, is_leaf=is_named_array)
