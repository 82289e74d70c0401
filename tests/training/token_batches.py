"""Batches of a few tokens, without files."""

from stacked_remat.training import PackedHeldOut, PackedStream, PackedTokens


def stream_of(tokens, seq_len, batch_size, seed):
    return PackedStream(PackedTokens(tokens, seq_len, batch_size, seed))


def held_out_of(tokens, seq_len, batch_size):
    return PackedHeldOut(PackedTokens(tokens, seq_len, batch_size, 0))
