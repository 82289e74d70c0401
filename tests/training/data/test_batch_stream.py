"""Tests of stacked_remat/training/data/batch_stream.py."""

import collections
import json

import numpy as np
import pytest

from stacked_remat.training import (
    BatchStream,
    DataError,
    HeldOutBatches,
    PackedDocuments,
    ProcessShare,
    TokenizedDocuments,
)


def source(num_sequences, first=0, seq_len=4, packing="split"):
    """Sequences of one document each; a sequence's tokens are its number."""
    documents = [
        np.full(seq_len + 1, first + number, np.uint16)
        for number in range(num_sequences)
    ]
    return PackedDocuments(TokenizedDocuments.of(documents), seq_len, packing)


def stream(sources=None, batch_size=3, seed=0, process=None, weights=None):
    sources = {"a": source(10)} if sources is None else sources
    return BatchStream(
        sources, weights=weights, batch_size=batch_size, seed=seed, process=process
    )


def numbers(batches, count):
    """The numbers of the sequences in the next `count` batches."""
    return np.array(
        [np.asarray(batches.next().tokens.array)[:, 0] for _ in range(count)]
    )


@pytest.mark.parametrize(
    ("num_sequences", "batch_size", "epochs"), [(1, 3, 2), (7, 2, 2), (12, 5, 1)]
)
def test_every_epoch_has_every_sequence_once(num_sequences, batch_size, epochs):
    batches = stream({"a": source(num_sequences)}, batch_size, seed=3)
    # `batch_size * epochs` epochs are a whole number of batches
    drawn = numbers(batches, num_sequences * epochs).ravel()
    for epoch in drawn.reshape(-1, num_sequences):
        assert sorted(epoch) == list(range(num_sequences))


def test_epochs_and_seeds_differ_in_order_and_a_seed_fixes_it():
    def epochs(seed):
        return numbers(stream(batch_size=10, seed=seed), 3)

    orders = {tuple(order) for seed in range(2) for order in epochs(seed)}
    assert len(orders) == 6  # no seed repeats another's epochs either
    np.testing.assert_array_equal(epochs(1), epochs(1))


@pytest.mark.parametrize("count", [2, 3])
def test_processes_share_the_batches_of_one(count):
    def mixed(**options):
        sources = {"a": source(10), "b": source(7, first=50)}
        return stream(sources, 6, weights={"b": 2.0}, **options)

    shares = [
        numbers(mixed(process=ProcessShare(index, count)), 4) for index in range(count)
    ]
    np.testing.assert_array_equal(np.concatenate(shares, axis=1), numbers(mixed(), 4))
    assert mixed(process=ProcessShare(0, count)).get_state() == mixed().get_state()


def test_a_saved_position_leads_to_the_next_batches():
    batches = stream()
    numbers(batches, 5)
    state = json.loads(json.dumps(batches.get_state()))
    expected = numbers(batches, 9)
    np.testing.assert_array_equal(numbers(batches, 1), numbers(_at(state, 9), 1))
    batches.set_state(state)
    np.testing.assert_array_equal(numbers(batches, 9), expected)
    np.testing.assert_array_equal(numbers(_at(state, 0), 9), expected)
    batches.close()


def _at(state, further):
    fresh = stream()
    fresh.set_state(state)
    numbers(fresh, further)
    return fresh


def test_a_mixture_follows_its_weights_evenly():
    sources = {"a": source(5), "b": source(5, first=50), "c": source(5, first=90)}
    drawn = numbers(stream(sources, 34, weights={"a": 3, "c": 4.5}), 1).ravel()
    names = np.where(drawn < 50, "a", np.where(drawn < 90, "b", "c"))
    assert collections.Counter(names) == {"a": 12, "b": 4, "c": 18}
    for name, share in {"a": 3 / 8.5, "b": 1 / 8.5, "c": 4.5 / 8.5}.items():
        assert (
            abs(np.cumsum(names == name) - share * np.arange(1, len(names) + 1)) < 2
        ).all()
    assert len(set(drawn[names == "a"][:5])) == len(set(drawn[names == "c"][5:10])) == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, r"other training data: seed was 0 and is 1"),
        ({"batch_size": 4}, r"batch_size was 3 and is 4"),
        (
            {"sources": {"a": source(10), "b": source(3)}},
            r"sources.b.tokens was not set and is \w+",
        ),
        ({"weights": {"a": 2.0}}, r"sources.a.weight was 1.0 and is 2.0"),
        ({"sources": {"a": source(10, packing="whole")}}, r"sources.a.tokens was"),
    ],
)
def test_a_position_in_other_data_is_refused(change, message):
    state = stream().get_state()
    with pytest.raises(DataError, match=message):
        stream(**change).set_state(state)


def held(num_sequences, first=0):
    return source(num_sequences, first, seq_len=3)


def rows(batches):
    """The number of each sequence, and whether it counts, over all batches."""
    found = [batches.batch(index) for index in range(len(batches))]
    tokens = np.concatenate([np.asarray(batch.tokens.array)[:, 0] for batch in found])
    weights = np.concatenate([np.asarray(batch.weights.array)[:, 0] for batch in found])
    return tokens[weights > 0], weights


def test_every_sequence_comes_once_and_the_rest_is_padding():
    batches = HeldOutBatches([held(7), held(4, first=50)], 4)
    assert len(batches) == 3
    tokens, weights = rows(batches)
    assert sorted(tokens) == [0, 1, 2, 3, 4, 5, 6, 50, 51, 52, 53]
    assert weights.tolist() == [1.0] * 11 + [0.0]
    last = batches.batch(2)
    assert not np.asarray(last.documents.array)[
        -1
    ].any() and last.tokens.array.shape == (4, 3)


def test_the_first_batches_are_a_sample_of_all_and_always_the_same():
    first, second = (
        HeldOutBatches([held(50), held(50, first=100)], 20).batch(0) for _ in range(2)
    )
    tokens = np.asarray(first.tokens.array)[:, 0]
    np.testing.assert_array_equal(tokens, np.asarray(second.tokens.array)[:, 0])
    assert 4 <= (tokens >= 100).sum() <= 16


def test_processes_share_each_batch():
    whole = HeldOutBatches([held(11)], 4)
    shares = [
        HeldOutBatches([held(11)], 4, ProcessShare(index, 2)) for index in range(2)
    ]
    for index in range(len(whole)):
        together = np.concatenate(
            [np.asarray(share.batch(index).tokens.array) for share in shares]
        )
        np.testing.assert_array_equal(
            together, np.asarray(whole.batch(index).tokens.array)
        )
