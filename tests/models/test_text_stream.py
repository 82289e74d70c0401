"""Text that comes a token at a time: whole characters, no stops, nothing shown that a
stop takes back.
"""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from models.generation.text_generation import TextStream
from stacked_remat.training import ByteTokenizer, load_tokenizer

from ..training.data import word_tokenizer

BYTES = ByteTokenizer()
END = (BYTES.end,)


def streamed(text, *stops, tokenizer=BYTES, prompt="so ", stop_texts=()):
    """The pieces, with what is left at the end, and the stream."""
    stream = TextStream(
        tokenizer, tokenizer.encode_beginning(prompt).tolist(), stops, stop_texts
    )
    pieces = []
    for token in tokenizer.encode(text) if isinstance(text, str) else text:
        if stream.ended:
            break
        pieces.append(stream.push(int(token)))
    return [*pieces, "" if stream.ended else stream.rest()], stream


def test_a_character_is_shown_when_it_is_complete():
    pieces, _ = streamed("aé€b", END)
    assert pieces == ["a", "", "é", "", "", "€", "b", ""]


@settings(max_examples=40)
@given(st.text(), st.text(max_size=3))
def test_the_pieces_are_the_text(text, prompt):
    pieces, stream = streamed(text, END, prompt=prompt)
    assert "".join(pieces) == text and not stream.ended


def test_incomplete_characters_are_shown_at_the_end():
    pieces, _ = streamed([97, 0xE2, 0x82])
    assert "".join(pieces[:3]) == "a" and "".join(pieces) == "a\ufffd"


def test_the_end_token_ends_it():
    pieces, stream = streamed([97, BYTES.end, 98], END)
    assert pieces == ["a", "", ""] and stream.ended


def test_a_possible_stop_is_held_back():
    stop = tuple(BYTES.encode("<|end|>").tolist())
    pieces, stream = streamed("a <|e <|end|> b", END, stop)
    assert "".join(pieces) == "a <|e " and stream.ended
    assert pieces[2:6] == ["", "", "", "<|e "]
    pieces, stream = streamed("a <|en", END, stop)
    assert "".join(pieces) == "a <|en" and not stream.ended


def test_texts_that_stop_may_begin_within_tokens(tmp_path):
    pieces, stream = streamed("one, two", stop_texts=[", ", "o w"])
    assert "".join(pieces) == "one" and stream.ended and pieces[3] == ""
    pieces, stream = streamed("one,", stop_texts=[", "])
    assert "".join(pieces) == "one," and not stream.ended
    words = load_tokenizer(str(word_tokenizer.save(tmp_path)))
    pieces, stream = streamed(
        "never odd or even", tokenizer=words, prompt="hello", stop_texts=["dd o"]
    )
    assert "".join(pieces) == "never o" and stream.ended


def test_a_stop_in_the_prompt_counts_for_nothing():
    pieces, stream = streamed("|> yes", tuple(b"end|>"), prompt="<|end")
    assert "".join(pieces) == "|> yes" and not stream.ended


@pytest.mark.parametrize("text", ["never odd or even", " or even", "né</s>"])
def test_words_keep_their_spaces(tmp_path, text):
    tokenizer = load_tokenizer(str(word_tokenizer.save(tmp_path)))
    pieces, stream = streamed(
        text, (tokenizer.end,), tokenizer=tokenizer, prompt="hello"
    )
    assert "".join(pieces) == text.removesuffix(
        "</s>"
    ) and stream.ended == text.endswith("</s>")
    assert len(np.flatnonzero([bool(piece) for piece in pieces])) > 1
