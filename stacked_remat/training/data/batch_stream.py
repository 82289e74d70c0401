"""Training batches without end, in an order that a seed fixes, from a place that can be saved."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import grain
import numpy as np

from ..batches import TokenBatch
from .data_error import DataError
from .packing import PackedDocuments

# Sequences in what goes on without end. Grain 0.2.18 divides the length of its own endless datasets by the
# batch size in floating point, which overflows for a batch size of 1.
_ENDLESS = 2**44


@dataclass(frozen=True)
class ProcessShare:
    """Which rows of each batch belong to this process.

    Attributes:
        index: of this process, as `jax.process_index()` says.
        count: of all, as `jax.process_count()` says.
    """

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(f"process {self.index} of {self.count}: indices run from 0 to the count - 1.")

    def rows(self, batch_size: int) -> int:
        """Rows of this process in a batch of `batch_size`.

        Raises:
            DataError: the processes cannot have equal shares.
        """
        if batch_size % self.count:
            raise DataError(
                f"data.batch_size = {batch_size} can't be shared equally by {self.count} processes: make it "
                f"a multiple of {self.count}."
            )
        return batch_size // self.count


@dataclass(frozen=True)
class MixtureShare:
    """One source in a mixture.

    Attributes:
        sequences: what it holds.
        weight: its share of all sequences, relative to the others' weights.
    """

    sequences: PackedDocuments
    weight: float = 1.0


@final
class BatchStream:
    """Batches from a mixture of sources, one epoch of each source after the other without a gap.

    Every epoch of a source has each of its sequences once, in an order of its own. Which source comes next
    follows the weights evenly, not by chance: among any number of sequences each source has its share, to one
    sequence and a percent of the smallest weight. Batches depend on the sources, the seed and the batch size,
    and not on how many processes share them.

    Args:
        sources: by name; the order of the names matters.
        batch_size: sequences in a batch, over all processes.
        seed: of the order; any integer from 0 on.
        process: this process reads its rows, and no others.
        prefetch: batches made in advance, in a thread.
    """

    def __init__(
        self,
        sources: Mapping[str, MixtureShare],
        *,
        batch_size: int,
        seed: int,
        process: ProcessShare | None = None,
        prefetch: int = 2,
    ):
        process = ProcessShare() if process is None else process
        if not sources:
            raise ValueError("A stream of batches needs at least one source, got none.")
        rows = process.rows(batch_size)
        orders = np.random.SeedSequence(seed).generate_state(len(sources))
        endless = [
            grain.MapDataset.source(source.sequences)
            .shuffle(int(order))
            .repeat(-(-_ENDLESS // len(source.sequences)))
            for source, order in zip(sources.values(), orders, strict=True)
        ]
        weights = [source.weight for source in sources.values()]
        mixed = endless[0] if len(endless) == 1 else grain.MapDataset.mix(endless, weights)
        own = mixed.slice(slice(_ENDLESS)).batch(rows).slice(slice(process.index, None, process.count))
        ahead = grain.ReadOptions(num_threads=min(prefetch, 1), prefetch_buffer_size=prefetch)
        self._iterator = iter(own.to_iter_dataset(ahead))
        self._delivered = 0
        self._identity = {
            "seed": seed,
            "batch_size": batch_size,
            "sources": {
                name: {"weight": source.weight, "tokens": source.sequences.fingerprint}
                for name, source in sources.items()
            },
        }

    def next(self) -> TokenBatch:
        """The next batch, or this process's rows of it."""
        arrays = next(self._iterator)
        self._delivered += 1
        return TokenBatch.of(**arrays)

    def get_state(self) -> dict[str, Any]:
        """The place after the last batch that `next` gave, as JSON has it, and what identifies the data."""
        return {"batches": self._delivered, "data": self._identity}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes to a place: the next batch is the one that came after `get_state` was asked.

        Raises:
            DataError: the state is of other data, or of another order of them; says what differs.
        """
        difference = _difference(state["data"], self._identity, "")
        if difference is not None:
            raise DataError(
                f"The saved position is one in other training data: {difference}. Go on with the data that "
                f"the run began with, or begin a new run."
            )
        grain.experimental.set_next_index(self._iterator, int(state["batches"]))
        self._delivered = int(state["batches"])

    def close(self) -> None:
        """Ends the thread that makes batches in advance."""
        self._iterator.close()


def _difference(saved: Any, here: Any, path: str) -> str | None:
    """The first thing in which two nested mappings differ, in words."""
    if isinstance(saved, Mapping) and isinstance(here, Mapping):
        for key in dict.fromkeys((*saved, *here)):
            name = f"{path}.{key}" if path else str(key)
            if (key in saved) != (key in here):
                return f"{name} was {'there' if key in saved else 'not there'} then"
            found = _difference(saved[key], here[key], name)
            if found is not None:
                return found
        if list(saved) != list(here):
            return f"the order of {path or 'the entries'} was {list(saved)} and is {list(here)}"
        return None
    return None if saved == here else f"{path} was {saved!r} and is {here!r}"
