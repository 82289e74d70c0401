"""Sequences of equal length cut from a stream of tokens, in batches whose order a seed fixes."""

import functools
from dataclasses import dataclass

import equinox as eqx
import haliax as hax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from jaxtyping import Integer

BATCH_AXIS = "batch"
POSITION_AXIS = "position"


class TokenBatch(eqx.Module):
    """One step's data, every array over the axes `batch` and `position`.

    Attributes:
        tokens: integer inputs.
        targets: the token that follows each input.
        weights: float32, 0 where there is no target and 1 elsewhere.
    """

    tokens: NamedArray
    targets: NamedArray
    weights: NamedArray

    @property
    def num_tokens(self) -> int:
        """Positions in the batch, padding included."""
        return self.tokens.array.size


@dataclass(frozen=True)
class PackedTokens:
    """A stream of tokens as sequences: every token but the first is a target exactly once an epoch.

    The last sequence is padded with targets of weight 0. Batches are drawn from one epoch after the other
    without a gap, each epoch in an order of its own; a batch is a function of its index, so a run can start
    anywhere.

    Attributes:
        stream: the tokens, one dimension.
        seq_len: positions in a sequence.
        batch_size: sequences in a batch.
        seed: of the order.
    """

    stream: Integer[np.ndarray, " tokens"]
    seq_len: int
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        if self.stream.ndim != 1 or self.stream.size < 2:
            raise ValueError(
                f"A stream to pack needs one dimension and two tokens or more, got shape {self.stream.shape}."
            )

    def __len__(self) -> int:
        """Sequences in an epoch."""
        return -(-(self.stream.size - 1) // self.seq_len)

    def batch(self, index: int) -> TokenBatch:
        """The batch of this index, counted from the start of training."""
        chosen = [self._sequence_at(index * self.batch_size + row) for row in range(self.batch_size)]
        starts = np.array(chosen)[:, None] * self.seq_len
        places = starts + np.arange(self.seq_len + 1)
        window = self.stream[np.minimum(places, self.stream.size - 1)].astype(np.int32)
        weights = (places[:, 1:] < self.stream.size).astype(np.float32)
        axes = (Axis(BATCH_AXIS, self.batch_size), Axis(POSITION_AXIS, self.seq_len))
        arrays = (window[:, :-1], window[:, 1:], weights)
        return TokenBatch(*(hax.named(jnp.asarray(array), axes) for array in arrays))

    def _sequence_at(self, place: int) -> int:
        epoch, within = divmod(place, len(self))
        return int(_epoch_order(len(self), self.seed, epoch)[within])


@functools.lru_cache(maxsize=4)
def _epoch_order(num_sequences: int, seed: int, epoch: int) -> Integer[np.ndarray, " sequences"]:
    return np.random.default_rng((seed, epoch)).permutation(num_sequences)
