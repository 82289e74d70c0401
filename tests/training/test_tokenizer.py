import numpy as np
from hypothesis import given, strategies as st

from stacked_remat.training import ByteTokenizer

TOKENIZER = ByteTokenizer()


@given(st.text())
def test_text_comes_back(text):
    tokens = TOKENIZER.encode(text)
    assert tokens.ndim == 1 and len(tokens) == len(text.encode())
    assert TOKENIZER.decode(tokens) == text


def test_bytes_are_their_own_tokens():
    assert TOKENIZER.encode(bytes(range(256))).tolist() == list(range(256))
    assert TOKENIZER.vocab_size == TOKENIZER.separator + 1 == 257


def test_separators_and_broken_text_can_be_decoded():
    assert TOKENIZER.decode(np.array([65, TOKENIZER.separator, 66])) == "AB"
    assert TOKENIZER.decode(np.array([65, 0xFF])) == "A\ufffd"
