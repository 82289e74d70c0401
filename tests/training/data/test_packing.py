"""Tests of stacked_remat/training/data/packing.py."""

import collections
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from stacked_remat.training import DataError, PackedDocuments, TokenizedDocuments

PACKINGS = ("split", "whole")
LENGTHS = st.lists(st.integers(1, 14), min_size=1, max_size=30).filter(
    lambda found: max(found) > 1
)


def numbered(lengths):
    """Documents whose tokens tell which they are: 100 times the document's number, and
    the place.
    """
    return TokenizedDocuments.of(
        [
            100 * number + np.arange(length, dtype=np.uint16)
            for number, length in enumerate(lengths)
        ]
    )


def sequences(packed):
    return [packed[index] for index in range(len(packed))]


def places(packed):
    """Every (input, target) of weight 1 in the sequences."""
    return [
        (int(token), int(target))
        for sequence in sequences(packed)
        for token, target, weight in zip(
            sequence["tokens"], sequence["targets"], sequence["weights"], strict=True
        )
        if weight
    ]


@pytest.mark.parametrize("packing", PACKINGS)
@settings(max_examples=25)
@given(lengths=LENGTHS, seq_len=st.integers(1, 9))
def test_every_token_is_a_target_exactly_once(packing, lengths, seq_len):
    packed = PackedDocuments(numbered(lengths), seq_len, packing)
    expected = [
        (100 * number + at, 100 * number + at + 1)
        for number, length in enumerate(lengths)
        for at in range(length - 1)
    ]
    assert sorted(places(packed)) == expected
    assert packed.num_counted == len(expected)
    assert packed.num_documents == sum(length > 1 for length in lengths)


@pytest.mark.parametrize("packing", PACKINGS)
@settings(max_examples=25)
@given(lengths=LENGTHS, seq_len=st.integers(1, 9))
def test_documents_and_positions_separate_pieces(packing, lengths, seq_len):
    for sequence in sequences(PackedDocuments(numbered(lengths), seq_len, packing)):
        assert all(field.shape == (seq_len,) for field in sequence.values())
        counts = sequence["weights"] > 0
        # Padding is at the end
        assert (np.diff(counts.astype(int)) <= 0).all() and counts[0]
        for field in sequence.values():
            assert not field[~counts].any()
        pieces = collections.defaultdict(list)
        for token, piece, position in zip(
            *(sequence[name][counts] for name in ("tokens", "documents", "positions")),
            strict=True,
        ):
            pieces[int(piece)].append((int(token), int(position)))
        assert list(pieces) == list(range(1, len(pieces) + 1))
        for piece in pieces.values():
            assert [position for _, position in piece] == list(range(len(piece)))
            first = piece[0][0]
            assert [token for token, _ in piece] == list(
                range(first, first + len(piece))
            )


@settings(max_examples=25)
@given(lengths=LENGTHS, seq_len=st.integers(1, 9))
def test_whole_cuts_no_document_that_fits_and_no_two_sequences_are_half_empty(
    lengths, seq_len
):
    packed = PackedDocuments(numbered(lengths), seq_len, "whole")
    pieces = collections.Counter()
    filled = []
    for sequence in sequences(packed):
        counts = sequence["weights"] > 0
        filled.append(int(counts.sum()))
        pieces.update({int(token) // 100 for token in sequence["tokens"][counts]})
    for number, length in enumerate(lengths):
        assert pieces[number] == -(-(length - 1) // seq_len)
    assert packed.num_cut == sum(count > 1 for count in pieces.values())
    assert packed.longest == max(lengths) - 1
    # best fit opens a sequence only for what fits in no other, so any two together
    # overflow one
    assert all(
        a + b > seq_len
        for a, b in zip(sorted(filled), sorted(filled)[1:], strict=False)
    )


def test_tokens_that_do_not_count_have_weight_zero():
    tokens = np.arange(8, dtype=np.uint16)
    counted = np.array([0, 0, 1, 1, 0, 0, 1, 0], dtype=bool)
    documents = TokenizedDocuments(
        tokens, counted, np.array([0, 5]), np.array([5, 3]), "x"
    )
    (sequence,) = sequences(PackedDocuments(documents, 8, "split"))
    assert sequence["targets"].tolist() == [1, 2, 3, 4, 6, 7, 0, 0]
    assert sequence["weights"].tolist() == [0, 1, 1, 0, 1, 0, 0, 0]


def test_documents_without_targets_are_refused():
    with pytest.raises(DataError, match=r"None of the 2 documents has two tokens"):
        PackedDocuments(numbered([1, 1]), 4, "split")


def test_the_fingerprint_changes_with_tokens_length_and_packing():
    made = [
        PackedDocuments(numbered([4, 5]), 4, "split"),
        PackedDocuments(numbered([5, 4]), 4, "split"),
        PackedDocuments(numbered([4, 5]), 5, "split"),
        PackedDocuments(numbered([4, 5]), 4, "whole"),
        PackedDocuments(numbered([4, 5]).select(np.array([True, False])), 4, "split"),
    ]
    assert len({one.fingerprint for one in made}) == len(made)
    assert (
        made[0].fingerprint == PackedDocuments(numbered([4, 5]), 4, "split").fingerprint
    )


def test_fields_of_boundaries_can_be_left_out():
    apart = sequences(PackedDocuments(numbered([4, 9, 2, 7]), 5, "split"))
    joined = sequences(
        PackedDocuments(numbered([4, 9, 2, 7]), 5, "split", separate=False)
    )
    for one, other in zip(apart, joined, strict=True):
        assert set(one) - set(other) == {"documents", "positions"}
        assert all((one[name] == other[name]).all() for name in other)


@pytest.mark.parametrize("packing", ["split", "whole"])
def test_sequences_without_a_target_are_left_out_and_no_target_is_lost(packing):
    random = np.random.default_rng(7)
    lengths = random.integers(2, 30, 60)
    starts = np.cumsum(lengths) - lengths
    tokens, counted = np.arange(lengths.sum()), random.random(lengths.sum()) < 0.05
    documents = TokenizedDocuments(tokens, counted, starts, lengths, "")
    packed = PackedDocuments(documents, 8, packing)
    everything = PackedDocuments(
        TokenizedDocuments(tokens, None, starts, lengths, ""), 8, packing
    )
    found = [packed[at] for at in range(len(packed))]
    assert all(one["weights"].any() for one in found)
    targets = np.concatenate([one["targets"][one["weights"] > 0] for one in found])
    assert sorted(targets) == sorted(np.setdiff1d(tokens[counted], starts))
    assert packed.num_counted == len(targets)
    assert (
        packed.num_left_out == len(everything) - len(packed) > 10
        and everything.num_left_out == 0
    )


@pytest.mark.parametrize(("packing", "most"), [("split", 32), ("whole", 40)])
def test_tables_take_few_bytes_a_document(packing, most):
    """Sixteen are of the documents themselves; a sequence has one or two of them."""
    count = 20_000
    lengths = np.random.default_rng(0).integers(5, 10, count)
    tokens = np.broadcast_to(np.uint16(0), lengths.sum())
    tracemalloc.start()
    try:
        starts = np.cumsum(lengths) - lengths
        documents = TokenizedDocuments(tokens, None, starts, lengths.copy(), "")
        packed = PackedDocuments(documents, 10, packing)
        del documents, starts
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(packed) >= count // 2 and taken <= most * count + 2**14
