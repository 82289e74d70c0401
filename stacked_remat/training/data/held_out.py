"""The fixed batches of held-out documents, for evaluation."""

from collections.abc import Sequence
from typing import final

import numpy as np

from ..batches import TokenBatch
from .batch_stream import ProcessShare
from .packing import PackedDocuments


@final
class HeldOutBatches:
    """The sequences of held-out documents, each once, as batches.

    Their order is shuffled in the same way in every run, whatever its seed, so that the first few batches
    are a fair sample. The last batch is padded with rows of weight 0.

    Attributes:
        batch_size: sequences in a batch, over all processes.
        seq_len: positions in a sequence.
        num_sequences: sequences in all batches.
    """

    def __init__(
        self, sources: Sequence[PackedDocuments], batch_size: int, process: ProcessShare | None = None
    ):
        process = ProcessShare() if process is None else process
        rows = process.rows(batch_size)
        self.batch_size = batch_size
        self.seq_len = sources[0].seq_len
        places = [(packed, index) for packed in sources for index in range(len(packed))]
        self.num_sequences = len(places)
        self._places = [places[at] for at in np.random.default_rng(0).permutation(self.num_sequences)]
        self._own = slice(process.index * rows, (process.index + 1) * rows)

    def __len__(self) -> int:
        """Number of batches; the last may have rows of weight 0."""
        return -(-self.num_sequences // self.batch_size)

    def batch(self, index: int) -> TokenBatch:
        """The batch of this index, or this process's rows of it.

        Raises:
            IndexError: there are fewer batches.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"There are {len(self)} held-out batches; got index {index}.")
        places = self._places[index * self.batch_size :][: self.batch_size]
        rows = [packed[at] for packed, at in places]
        empty = {name: np.zeros_like(array) for name, array in rows[0].items()}
        own = (rows + [empty] * (self.batch_size - len(rows)))[self._own]
        arrays = {name: np.stack([row[name] for row in own]) for name in empty}
        return TokenBatch.of(**arrays, on_host=True)
