"""The axes and sizes of a batch of tokens."""

import numpy as np

from stacked_remat.training import TokenBatch


def test_a_batch_has_named_axes_and_counts_its_positions():
    integers, weights = np.arange(6, dtype=np.int32).reshape(2, 3), np.ones((2, 3), np.float32)
    batch = TokenBatch.of(integers, integers + 1, weights, integers + 2, integers + 3)
    for named in (batch.tokens, batch.targets, batch.weights, batch.documents, batch.positions):
        assert [(axis.name, axis.size) for axis in named.axes] == [("batch", 2), ("position", 3)]
    assert [int(x.array[0, 0]) for x in (batch.tokens, batch.targets, batch.documents, batch.positions)] == [
        0,
        1,
        2,
        3,
    ]
    assert batch.weights.dtype == np.float32 and batch.num_tokens == 6
