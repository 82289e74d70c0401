"""The batch of tokens that a training step receives, and protocols of what gives
batches.
"""

from typing import Any, Protocol

import equinox as eqx
import haliax as hax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jaxtyping import Array, Float, Int
from numpy import ndarray

BATCH_AXIS = "batch"
POSITION_AXIS = "position"


class TokenBatch(eqx.Module):
    """One step's data; every array has the axes `batch` and `position`.

    Attributes:
        tokens: int32 inputs.
        targets: int32, the token that follows each input in its document.
        weights: float32, weight of each target in the loss: 0 for padding and tokens
            that are not trained on, elsewhere 1 or the weight of its record.
        documents: int32 number of each position's document in its row, from 1; 0 for
            padding, at the end of a row. Positions attend only within their document.
            None where every row is one document.
        positions: int32 position in its document, from 0. None where every row is one
            document.
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

    @property
    def total_weight(self) -> Float[Array, ""]:
        """The sum of the weights, by which a mean loss divides its sum; 1 for a batch
        without targets, whose sum is 0.
        """
        total = hax.sum(self.weights).scalar()
        # Not at least 1: weights of records may be small, and there the means of
        # microbatches by their shares would not be that of the batch.
        return jnp.where(total > 0, total, 1.0)

    @staticmethod
    def of(
        tokens: Int[ndarray, "batch position"],
        targets: Int[ndarray, "batch position"],
        weights: Float[ndarray, "batch position"],
        documents: Int[ndarray, "batch position"] | None = None,
        positions: Int[ndarray, "batch position"] | None = None,
        *,
        on_host: bool = False,
    ) -> "TokenBatch":
        """A batch from NumPy arrays, on the default device, or left in NumPy for
        `shard_batch`.
        """
        axes = (Axis(BATCH_AXIS, tokens.shape[0]), Axis(POSITION_AXIS, tokens.shape[1]))

        def named(array: Any) -> Any:
            return (
                None
                if array is None
                else NamedArray(array if on_host else jnp.asarray(array), axes)
            )

        return TokenBatch(
            named(tokens),
            named(targets),
            named(weights),
            named(documents),
            named(positions),
        )


class TokenStream(Protocol):
    """An endless stream of batches to train on."""

    def next(self) -> TokenBatch:
        """The batch at the stream's position, which advances by one."""
        ...

    def get_state(self) -> dict[str, Any]:
        """The position, as a small JSON object."""
        ...

    def set_state(self, state: dict[str, Any]) -> None:
        """Sets the position to one that `get_state` returned."""
        ...


class HeldOutSet(Protocol):
    """A fixed list of batches that are never trained on."""

    def __len__(self) -> int:
        """The number of batches."""
        ...

    def batch(self, index: int) -> TokenBatch:
        """The batch of this index."""
        ...
