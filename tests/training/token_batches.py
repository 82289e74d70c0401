"""Batches of a few tokens, as one document, without files."""

from stacked_remat.training import (
    BatchStream,
    HeldOutBatches,
    PackedDocuments,
    TokenizedDocuments,
)


def packed(tokens, seq_len):
    return PackedDocuments(TokenizedDocuments.of([tokens]), seq_len, "split")


def stream_of(tokens, seq_len, batch_size, seed):
    return BatchStream(
        {"tokens": packed(tokens, seq_len)}, batch_size=batch_size, seed=seed
    )


def held_out_of(tokens, seq_len, batch_size):
    return HeldOutBatches([packed(tokens, seq_len)], batch_size)
