"""The rotary position embedding of a layer."""

import dataclasses

import haliax as hax
from haliax import Axis, NamedArray

from models.parts.sections import RotaryConfig
from models.parts.tokens import Tokens
from stacked_remat.ops import RotaryTable, apply_rotary, rotary_table


@dataclasses.dataclass(frozen=True)
class RotaryEmbedding:
    """What the queries and keys of a layer are rotated by (Su et al. 2021,
    arXiv:2104.09864): pair i at position p by the angle `p * theta^(-2i / Dim.size)`.

    Attributes:
        config: base and scaling of the wavelengths.
        Dim: the first coordinates of a head, which are rotated.
        interleaved: whether coordinates 2i and 2i + 1 are a pair, which come out at i
            and i + half, for queries and keys alike.
    """

    config: RotaryConfig
    Dim: Axis
    interleaved: bool = False

    def table(self, positions: NamedArray) -> RotaryTable:
        """The cosines and sines of these positions."""
        theta = self.config.theta
        scaling = self.config.scaling
        return rotary_table(positions, self.Dim, theta=theta, scaling=scaling)

    def __call__(self, heads: NamedArray, tokens: Tokens) -> NamedArray:
        """Rotates `[..., HeadDim]` by the positions of the tokens."""
        name = self.Dim.name
        size = self.Dim.size
        # Of a whole head no slice is taken, which would be a copy.
        is_whole = heads.resolve_axis(name).size == size
        x = heads if is_whole else heads[name, :size]
        if self.interleaved:
            # Scores are the same in any order that queries and keys share.
            x = hax.concatenate(name, [x[name, 0::2], x[name, 1::2]])
        x = apply_rotary(x, tokens.rotary, self.Dim)
        return x if is_whole else hax.concatenate(name, [x, heads[name, size:]])
