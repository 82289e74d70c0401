"""Tests of stacked_remat/training/data/batch_stream.py."""

import numpy as np
import pytest

from stacked_remat.training import HeldOutBatches, PackedDocuments, ProcessShare, TokenizedDocuments


def source(num_sequences, first=0):
    documents = [np.full(4, first + number, np.uint16) for number in range(num_sequences)]
    return PackedDocuments(TokenizedDocuments.of(documents), 3, "split")


def rows(batches):
    """The number of each sequence, and whether it counts, over all batches."""
    found = [batches.batch(index) for index in range(len(batches))]
    tokens = np.concatenate([np.asarray(batch.tokens.array)[:, 0] for batch in found])
    weights = np.concatenate([np.asarray(batch.weights.array)[:, 0] for batch in found])
    return tokens[weights > 0], weights


def test_every_sequence_comes_once_and_the_rest_is_padding():
    batches = HeldOutBatches([source(7), source(4, first=50)], 4)
    assert len(batches) == 3 and batches.num_sequences == 11
    tokens, weights = rows(batches)
    assert sorted(tokens) == [0, 1, 2, 3, 4, 5, 6, 50, 51, 52, 53]
    assert weights.tolist() == [1.0] * 11 + [0.0]
    last = batches.batch(2)
    assert not np.asarray(last.documents.array)[-1].any() and last.tokens.array.shape == (4, 3)


def test_the_first_batches_are_a_sample_of_all_and_always_the_same():
    first, second = (HeldOutBatches([source(50), source(50, first=100)], 20).batch(0) for _ in range(2))
    tokens = np.asarray(first.tokens.array)[:, 0]
    np.testing.assert_array_equal(tokens, np.asarray(second.tokens.array)[:, 0])
    assert 4 <= (tokens >= 100).sum() <= 16


def test_processes_share_each_batch():
    whole = HeldOutBatches([source(11)], 4)
    shares = [HeldOutBatches([source(11)], 4, ProcessShare(index, 2)) for index in range(2)]
    for index in range(len(whole)):
        together = np.concatenate([np.asarray(share.batch(index).tokens.array) for share in shares])
        np.testing.assert_array_equal(together, np.asarray(whole.batch(index).tokens.array))


def test_an_index_out_of_range_is_refused():
    batches = HeldOutBatches([source(5)], 4)
    for index in (2, -1):
        with pytest.raises(IndexError, match=r"There are 2 held-out batches"):
            batches.batch(index)
