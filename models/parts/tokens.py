"""What the layers of a decoder know of the tokens that they are given."""

from typing import Any

import equinox as eqx
from haliax import NamedArray

from stacked_remat.training import POSITION_AXIS


class Tokens(eqx.Module):
    """What layers know of tokens besides their residual stream.

    In training and in prefill, layers are given sequences `[..., position]`; in
    decoding, a token of each sequence, `[Batch]`.

    Attributes:
        rotary: the cosines and sines of their positions, a `RotaryTable`; None in
            layers that rotate nothing.
        documents: integers like the tokens; a position sees only positions with its
            own. 0 is padding. None for one document and no padding.
        lengths: in prefill, how many tokens each sequence has, `[Batch]`; the rest is
            padding at its end.
        positions: the position of each token in its document, in decoding `[Batch]`;
            of whole sequences only for layers that ask for them.
    """

    # A table for each kind of layers, which the fold hands out, or one for all
    rotary: Any = None
    documents: NamedArray | None = None
    lengths: NamedArray | None = None
    positions: NamedArray | None = None


def has_positions(x: NamedArray) -> bool:
    """Whether tokens are sequences, and not one of each sequence."""
    return POSITION_AXIS in [axis.name for axis in x.axes]
