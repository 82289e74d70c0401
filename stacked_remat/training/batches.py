"""What a training step receives."""

import equinox as eqx
import haliax as hax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jaxtyping import Float, Int
from numpy import ndarray

BATCH_AXIS = "batch"
POSITION_AXIS = "position"


class TokenBatch(eqx.Module):
    """One step's data, every array over the axes `batch` and `position`.

    Attributes:
        tokens: int32 inputs.
        targets: int32, the token that follows each input in its document.
        weights: float32, 0 where there is no target and 1 elsewhere.
        documents: int32; positions of a row with the same number are of the same document, and see no others.
            Counted from 1; padding, at the end of a row, has 0. None where every row is one document: padding
            is then known by its weight alone, like tokens that are not to be learnt.
        positions: int32, counted from 0 in every document of a row. None where every row is one document.
    """

    tokens: NamedArray
    targets: NamedArray
    weights: NamedArray
    documents: NamedArray | None = None
    positions: NamedArray | None = None

    @property
    def num_tokens(self) -> int:
        """Positions in the batch, padding included."""
        return self.tokens.array.size

    @staticmethod
    def of(
        tokens: Int[ndarray, "batch position"],
        targets: Int[ndarray, "batch position"],
        weights: Float[ndarray, "batch position"],
        documents: Int[ndarray, "batch position"] | None = None,
        positions: Int[ndarray, "batch position"] | None = None,
    ) -> "TokenBatch":
        """The batch of these arrays, on the default device."""
        axes = (Axis(BATCH_AXIS, tokens.shape[0]), Axis(POSITION_AXIS, tokens.shape[1]))

        def named(array: ndarray) -> NamedArray:
            return hax.named(jnp.asarray(array), axes)

        return TokenBatch(
            named(tokens),
            named(targets),
            named(weights),
            None if documents is None else named(documents),
            None if positions is None else named(positions),
        )
