"""The batch of tokens that a training step receives."""

from typing import Any

import equinox as eqx
from haliax import Axis, NamedArray
from jaxtyping import Float, Int
from numpy import ndarray

BATCH_AXIS = "batch"
POSITION_AXIS = "position"


class TokenBatch(eqx.Module):
    """One step's data; every array has the axes `batch` and `position`.

    Attributes:
        tokens: int32 inputs.
        targets: int32, the token that follows each input in its document.
        weights: float32, weight of each target in the loss: 0 for padding and tokens that are not trained on,
            1 elsewhere.
        documents: int32 number of each position's document in its row, from 1; 0 for padding, at the end of a
            row. Positions attend only within their document. None where every row is one document.
        positions: int32 position in its document, from 0. None where every row is one document.
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
        """A batch of these arrays, which stay on the host until a program or `shard_batch` takes them."""
        axes = (Axis(BATCH_AXIS, tokens.shape[0]), Axis(POSITION_AXIS, tokens.shape[1]))

        def named(array: Any) -> Any:
            return None if array is None else NamedArray(array, axes)

        return TokenBatch(named(tokens), named(targets), named(weights), named(documents), named(positions))
