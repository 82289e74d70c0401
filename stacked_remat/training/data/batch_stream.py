"""An endless stream of training batches, whose position can be saved, and fixed batches
of held-out text.

Grain is imported where it is used: help and errors in configs do not wait for it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from ..batches import TokenBatch
from ..errors import DataError
from ..run_folder import config_changes
from .packing import PackedDocuments, PackedSequence

# Sequences in an endless stream. Grain 0.2.18 divides the length of its own endless
# datasets by the batch size in floating point, which overflows for a batch size of 1.
_ENDLESS = 2**44


@dataclass(frozen=True)
class ProcessShare:
    """Which rows of each batch belong to this process.

    Attributes:
        index: `jax.process_index()`.
        count: `jax.process_count()`.
    """

    index: int = 0
    count: int = 1

    def rows(self, batch_size: int) -> int:
        """This process's number of rows of a batch, which divides into equal shares."""
        assert not batch_size % self.count
        return batch_size // self.count


@final
class BatchStream:
    """Batches from a mixture of sources, each repeated epoch after epoch.

    Every epoch of a source has each of its sequences once, in an order of its own.
    Sources alternate evenly by their weights, not at random: in any number of sequences
    each source has its share, to within one sequence and a percent of the smallest
    weight. Batches depend on the sources, the seed and the batch size, not on the
    number of processes.

    Args:
        sources: the sequences of each source, by name; the order of the names matters.
        weights: shares of all sequences, relative to each other; 1 for a source without
            one.
        batch_size: sequences in a batch, over all processes.
        seed: of the order; not negative.
        process: this process, which reads only its own rows.
    """

    def __init__(
        self,
        sources: Mapping[str, PackedDocuments],
        *,
        weights: Mapping[str, float] | None = None,
        batch_size: int,
        seed: int,
        process: ProcessShare | None = None,
    ):
        import grain

        self._process = ProcessShare() if process is None else process
        self._rows = self._process.rows(batch_size)
        orders = np.random.SeedSequence(seed).generate_state(len(sources))
        shares = [float((weights or {}).get(name, 1.0)) for name in sources]
        # Rows go to processes batch by batch, so that the batches of a run don't depend
        # on the number of its processes.
        own = (
            _mixed(sources.values(), orders, shares)
            .batch(self._rows)
            .slice(slice(self._process.index, None, self._process.count))
        )
        # The names of the sequences, in the same order
        self._names = _mixed(map(_Names, sources.values()), orders, shares)
        ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
        self._iterator = iter(own.to_iter_dataset(ahead))
        self._delivered = 0
        self._identity = {
            "seed": seed,
            "batch_size": batch_size,
            "sources": {
                name: {"weight": share, "tokens": packed.fingerprint}
                for (name, packed), share in zip(sources.items(), shares, strict=True)
            },
        }

    def next(self) -> TokenBatch:
        """The next batch, or this process's rows of it."""
        arrays = next(self._iterator)
        self._delivered += 1
        return TokenBatch.of(**arrays, on_host=True)

    def get_state(self) -> dict[str, Any]:
        """The position after the last batch of `next`, and the identity of the data, as
        JSON.
        """
        return {"batches": self._delivered, "data": self._identity}

    def names(self, state: Mapping[str, Any]) -> list[str]:
        """The files and lines of the rows of the batch that came last before a position
        that `get_state` returned, as `PackedDocuments.name`; of all processes.
        """
        size = self._identity["batch_size"]
        first = (int(state["batches"]) - 1) * size
        return [self._names[first + row] for row in range(size)]

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Moves to a position that `get_state` returned.

        Raises:
            DataError: the state belongs to other data or another order; the message
                says what differs.
        """
        import grain

        saved = state["data"]
        orders = [list(data["sources"]) for data in (saved, self._identity)]
        differences = config_changes(saved, self._identity)
        if orders[0] != orders[1]:
            differences.append(
                f"the order of sources was {orders[0]} and is {orders[1]}"
            )
        if differences:
            raise DataError(
                f"The saved position belongs to other training data: {differences[0]}."
                " Resume with the data that the run began with, or start a new run."
            )
        grain.experimental.set_next_index(self._iterator, int(state["batches"]))
        self._delivered = int(state["batches"])

    def close(self) -> None:
        """Ends the thread that makes batches in advance."""
        self._iterator.close()


def _mixed(
    sources: Iterable[Any], orders: Iterable[int], shares: Sequence[float]
) -> Any:
    """An endless Grain dataset: every epoch has the entries of a source in an order of
    its own, and sources are mixed by their shares.
    """
    import grain

    endless = [
        grain.MapDataset.source(source)
        .shuffle(int(order))
        .repeat(-(-_ENDLESS // len(source)))
        for source, order in zip(sources, orders, strict=True)
    ]
    if len(endless) > 1:
        return grain.MapDataset.mix(endless, shares).slice(slice(_ENDLESS))
    return endless[0].slice(slice(_ENDLESS))


@dataclass(frozen=True)
class _Names:
    """The names of the sequences of a source, a random-access source for Grain."""

    packed: PackedDocuments

    def __len__(self) -> int:
        return len(self.packed)

    def __getitem__(self, index: int) -> str:
        return self.packed.name(index)


@final
class HeldOutBatches:
    """The sequences of held-out documents, each once, as batches.

    Their order is shuffled in the same way in every run, whatever its seed, so that the
    first few batches are a fair sample. The last batch is padded with rows of weight 0.

    Memory: 8 bytes a sequence.
    """

    def __init__(
        self,
        sources: Sequence[PackedDocuments],
        batch_size: int,
        process: ProcessShare | None = None,
    ):
        process = ProcessShare() if process is None else process
        rows = process.rows(batch_size)
        self._batch_size = batch_size
        self._sources = sources
        # Where the sequences of each source end among those of all
        self._stops = np.cumsum([len(packed) for packed in sources], dtype=np.int64)
        count = sum(map(len, sources))
        # Not by the run's seed: losses of runs with other seeds are on the same text.
        self._order = np.random.default_rng(0).permutation(count)
        self._own = slice(process.index * rows, (process.index + 1) * rows)

    def __len__(self) -> int:
        """Number of batches; the last may have rows of weight 0."""
        return -(-len(self._order) // self._batch_size)

    def batch(self, index: int) -> TokenBatch:
        """The batch of this index, or this process's rows of it."""
        chosen = self._order[index * self._batch_size :][: self._batch_size]
        rows = [self._sequence(at) for at in chosen.tolist()]
        empty = {name: np.zeros_like(array) for name, array in rows[0].items()}
        own = (rows + [empty] * (self._batch_size - len(rows)))[self._own]
        arrays = {name: np.stack([row[name] for row in own]) for name in empty}
        return TokenBatch.of(**arrays, on_host=True)

    def _sequence(self, at: int) -> PackedSequence:
        """The sequence of an index among those of all sources."""
        source = int(np.searchsorted(self._stops, at, side="right"))
        packed = self._sources[source]
        # `_stops` has the ends: the first sequence of a source is at its end minus its
        # length.
        return packed[at - int(self._stops[source]) + len(packed)]
