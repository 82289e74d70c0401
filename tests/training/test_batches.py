import numpy as np
import pytest
from hypothesis import given, strategies as st

from stacked_remat.training import PackedTokens


def pack(size, seq_len=4, batch_size=3, seed=0):
    return PackedTokens(np.arange(size, dtype=np.uint16), seq_len, batch_size, seed)


def targets_of(packed, batches):
    """The targets of these batches that count."""
    found = [packed.batch(index) for index in batches]
    return [
        int(target)
        for batch in found
        for target, weight in zip(
            np.asarray(batch.targets.array).flat, np.asarray(batch.weights.array).flat, strict=True
        )
        if weight
    ]


def test_axes_and_dtypes():
    batch = pack(50).batch(0)
    for named in (batch.tokens, batch.targets, batch.weights):
        assert [(axis.name, axis.size) for axis in named.axes] == [("batch", 3), ("position", 4)]
    assert batch.tokens.dtype == batch.targets.dtype == np.int32 and batch.weights.dtype == np.float32
    assert batch.num_tokens == 12


def test_a_target_is_the_next_token():
    batch = pack(50).batch(2)
    counts = np.asarray(batch.weights.array) > 0
    follows = np.asarray(batch.targets.array) == np.asarray(batch.tokens.array) + 1
    assert counts.any() and follows[counts].all()


@given(
    size=st.integers(2, 60),
    seq_len=st.integers(1, 9),
    batch_size=st.integers(1, 5),
    seed=st.integers(0, 3),
)
def test_an_epoch_predicts_every_token_but_the_first_once(size, seq_len, batch_size, seed):
    packed = pack(size, seq_len, batch_size, seed)
    # as many batches as sequences are `batch_size` epochs exactly
    targets = targets_of(packed, range(len(packed)))
    assert sorted(targets) == sorted(list(range(1, size)) * batch_size)


def test_epochs_follow_without_a_gap_and_differ_in_order():
    packed = pack(41, seq_len=4, batch_size=5)  # 10 sequences, 2 batches an epoch
    first, second = targets_of(packed, (0, 1)), targets_of(packed, (2, 3))
    assert sorted(first) == sorted(second) == list(range(1, 41))
    assert first != second


def test_a_batch_depends_on_index_and_seed_alone():
    np.testing.assert_array_equal(pack(99).batch(7).tokens.array, pack(99).batch(7).tokens.array)
    assert (pack(99).batch(0).tokens.array != pack(99, seed=1).batch(0).tokens.array).any()
    assert (pack(99).batch(0).tokens.array != pack(99).batch(1).tokens.array).any()


@pytest.mark.parametrize("stream", [np.arange(1), np.zeros((2, 2))])
def test_what_is_no_stream_is_refused(stream):
    with pytest.raises(ValueError, match=r"one dimension and two tokens or more, got shape"):
        PackedTokens(stream, 4, 2, 0)
