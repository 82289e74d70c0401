"""Short causal convolutions over positions, of each channel by itself."""

import equinox as eqx
import haliax as hax
from haliax import Axis, AxisSpec, NamedArray
from haliax.axis import axis_spec_to_tuple
from jaxtyping import DTypeLike, PRNGKeyArray

from models.parts.tokens import Tokens, has_positions
from stacked_remat.ops import short_convolution, short_convolution_step
from stacked_remat.training import POSITION_AXIS


class ShortConvolution(eqx.Module):
    """Each channel of a token is a weighted sum of its last values, itself included.

    Attributes:
        weight: `[channels..., Tap]`; the last tap is of the token itself.
        bias: `[channels...]`; None for none.
    """

    weight: NamedArray
    bias: NamedArray | None
    Channels: tuple[Axis, ...] = eqx.field(static=True)
    Tap: Axis = eqx.field(static=True)

    @staticmethod
    def init(
        Channels: AxisSpec, size: int, *, bias: bool = False, key: PRNGKeyArray
    ) -> "ShortConvolution":
        """Makes a convolution of `size` tokens, with weights drawn from `key`."""
        # One tap more than the window has inputs: the last is the token itself.
        own = axis_spec_to_tuple(Channels)
        Tap = Axis("tap", size)
        # As PyTorch's convolutions: by how many values a sum has
        bound = size**-0.5
        weight = hax.random.uniform(key, (*own, Tap), minval=-bound, maxval=bound)
        return ShortConvolution(weight, hax.zeros(own) if bias else None, own, Tap)

    def __call__(
        self, x: NamedArray, tokens: Tokens, window: NamedArray | None
    ) -> tuple[NamedArray, NamedArray]:
        """Maps `[..., channels...]` to itself and a window to the next one.

        A window has the last inputs before the tokens, `[..., tap, channels...]`; None
        before the first.
        """
        if has_positions(x):
            y, window = short_convolution(
                x,
                self.weight,
                POSITION_AXIS,
                self.Tap,
                documents=tokens.documents,
                lengths=tokens.lengths,
                window=window,
            )
        else:
            assert window is not None
            y, window = short_convolution_step(x, self.weight, self.Tap, window)
        return (y if self.bias is None else y + self.bias), window

    def empty_window(self, Batch: Axis, dtype: DTypeLike) -> NamedArray:
        """The window of sequences of which nothing is read."""
        Before = self.Tap.resize(self.Tap.size - 1)
        return hax.zeros((Batch, Before, *self.Channels), dtype)
