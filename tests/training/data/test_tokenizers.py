"""Tests of stacked_remat/training/data/tokenizers.py."""

import numpy as np
import pytest

from stacked_remat.training import ByteTokenizer, RenderedChat

TOKENIZER = ByteTokenizer()


@pytest.mark.parametrize("text", ["", "é\u0000\n", "😀 \ufffd"])
def test_text_survives_encoding_and_decoding(text):
    tokens = TOKENIZER.encode(text)
    assert tokens.ndim == 1 and len(tokens) == len(text.encode())
    assert TOKENIZER.decode(tokens) == text


def test_bytes_are_their_own_tokens():
    assert TOKENIZER.encode(bytes(range(256))).tolist() == list(range(256))
    assert TOKENIZER.vocab_size == TOKENIZER.end + 1 == 257
    assert TOKENIZER.dtype is np.uint16


def test_a_document_begins_and_ends_with_the_separator():
    one, two = TOKENIZER.encode_documents(["AB", ""])
    assert one.tolist() == [256, 65, 66, 256] and two.tolist() == [256, 256]
    assert (
        one.dtype == np.uint16 and TOKENIZER.decode(np.append(one, 0xFF)) == "AB\ufffd"
    )


def test_the_bytes_of_answers_are_counted():
    chats = [RenderedChat("é:ab\n", ((2, 4),)), RenderedChat("ab")]
    (tokens, counted), (_, all_counted) = TOKENIZER.encode_chats(chats)
    assert TOKENIZER.decode(tokens[counted]) == "ab"
    assert len(counted) == len(tokens) == 8 and all_counted is None
