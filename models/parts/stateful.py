"""Mixers that keep a state of one size, and read long sequences tile by tile."""

import abc

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.util import is_named_array

from models.parts.cache import Kept, LayerCache
from models.parts.linear import cast_floating
from models.parts.mixer import Mixer
from models.parts.tokens import Tokens
from stacked_remat import scan
from stacked_remat.ops import mesh_axes
from stacked_remat.training import POSITION_AXIS


class StatefulMixer(Mixer):
    """A mixer that keeps of the tokens before a state of one size.

    Attributes:
        tiles: into how many tiles of positions a sequence is cut in training. What is
            computed inside, projections too, exists for one tile at a time; positions
            that are divided over devices are not cut.
    """

    tiles: eqx.AbstractVar[int]

    @abc.abstractmethod
    def mix(
        self, x: NamedArray, tokens: Tokens, kept: Kept | None
    ) -> tuple[NamedArray, Kept]:
        """Maps tokens `[..., Embed]` to themselves, and what is kept of those before to
        what is kept of all; None before the first.

        What is kept has the document of the first token, and takes up no padding.
        """

    def __call__(
        self, x: NamedArray, tokens: Tokens, cache: LayerCache | None = None
    ) -> tuple[NamedArray, LayerCache | None]:
        """Maps `[..., Embed]` to itself, with the state of each sequence in the
        cache.
        """
        if cache is not None:
            output, kept = self.mix(x, tokens, cache.read())
            return output, cache.write(kept)
        # Tiles save memory of the backward pass, which there is without a cache alone.
        Pos = x.resolve_axis(POSITION_AXIS)
        if self.tiles > 1 and not mesh_axes(Pos):
            return self._mix_by_tiles(x, tokens.documents), None
        output, _ = self.mix(x, tokens, None)
        return output, None

    def _mix_by_tiles(self, x: NamedArray, documents: NamedArray | None) -> NamedArray:
        """The outputs of tiles of positions, one after the other, with what is kept as
        the carry of the loop.
        """
        Pos = x.resolve_axis(POSITION_AXIS)
        Tile = Pos.resize(-(-Pos.size // self.tiles))
        Tiles = Axis("tiles", -(-Pos.size // Tile.size))

        def cut(array: NamedArray) -> NamedArray:
            # Padding is after all tokens, so that no token reads it.
            padding = Tiles.size * Tile.size - Pos.size
            padded = hax.pad(array, {Pos: (0, padding)}) if padding else array
            return padded.unflatten_axis(POSITION_AXIS, (Tiles, Tile))

        # In float32, so that gradients are summed over tiles in it.
        wide = cast_floating(self, jnp.float32)

        def step(
            kept: Kept,
            x: NamedArray,
            documents: NamedArray | None,
            continues: NamedArray | None,
        ) -> tuple[Kept, NamedArray]:
            # A tile that begins a document has no state before it.
            if continues is not None:
                kept = jax.tree.map(
                    lambda one: hax.where(continues, one, 0.0).rearrange(one.axes),
                    kept,
                    is_leaf=is_named_array,
                )
            mixer = cast_floating(wide, x.dtype)
            output, kept = mixer.mix(x, Tokens(documents=documents), kept)
            return kept, output

        own = first = continues = None
        if documents is not None:
            own = cut(documents)
            first = own[Tiles, 0]
            # The document before each tile; before the first, whose state is zeros
            # anyway, it is another tile's.
            ends = hax.roll(own[POSITION_AXIS, -1], 1, Tiles)
            continues = own[POSITION_AXIS, 0] == ends
        tiles = cut(x)
        # Zeros of what `mix` keeps, which are what it has before the first token
        _, kept = eqx.filter_eval_shape(
            self.mix, tiles[Tiles, 0], Tokens(documents=first), None
        )
        start = jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), kept)
        _, outputs = scan(step, Tiles, remat=True)(start, tiles, own, continues)
        whole = outputs.rearrange(tiles.axes).flatten_axes((Tiles, Tile), POSITION_AXIS)
        return whole[POSITION_AXIS, : Pos.size]
