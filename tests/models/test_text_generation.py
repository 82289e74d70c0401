"""From prompts to text: what goes in, when each row ends, in which order pieces are
shown.
"""

import itertools

import jax
import numpy as np
import pytest

import models.generation.text_generation as text_generation
from models.generation.sampling import Sampling
from models.generation.text_generation import (
    Piece,
    begins_of_next_turn,
    chat_prompt,
    end_of_turn,
    generate_text,
    in_order,
)
from stacked_remat.training import ByteTokenizer, load_tokenizer

from ..training.data import word_tokenizer

BYTES = ByteTokenizer()
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def written(monkeypatch):
    """Lets the model write what is asked, a letter of each row at a time; returns the
    rows of each step.
    """

    def write(*texts):
        steps = []

        def tokens(model, prompts, *, max_new_tokens, sampling, key, first_row):
            rows = len(prompts)
            own = [*texts[first_row : first_row + rows], *["."] * rows][:rows]
            for letters in itertools.zip_longest(
                *(text[:max_new_tokens] for text in own), fillvalue="."
            ):
                steps.append((first_row, rows))
                yield np.array(
                    [BYTES.end if letter == "." else ord(letter) for letter in letters]
                )

        monkeypatch.setattr(text_generation, "continued_tokens", tokens)
        return steps

    return write


def pieces_of(*texts, stops=((BYTES.end,),), max_new_tokens=99, **options):
    prompts = [BYTES.encode_beginning("so") for _ in texts]
    found = generate_text(
        None,
        BYTES,
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=Sampling(),
        key=jax.random.key(0),
        stops=stops,
        **options,
    )
    return list(found)


def text_of(pieces, row):
    own = [piece for piece in pieces if piece.row == row]
    assert [piece.last for piece in own] == [False] * (len(own) - 1) + [True]
    return "".join(piece.text for piece in own)


def test_generation_stops_when_all_rows_have_ended(written):
    texts = ("ab.xyzxyz", "abcd.zzzz")
    steps = written(*texts)
    pieces = pieces_of(*texts)
    assert [text_of(pieces, row) for row in range(2)] == ["ab", "abcd"]
    assert len(steps) == 5


def test_every_end_and_every_stop_ends(written):
    texts = ("ab!cd", "abc<>")
    written(*texts)
    pieces = pieces_of(*texts, stops=[(), tuple(b"<>"), (BYTES.end,), tuple(b"!")])
    assert [text_of(pieces, row) for row in range(2)] == ["ab", "abc"]


def test_prompts_are_continued_in_batches_of_as_many_rows(written):
    texts = ("ab.", "abcd.", "x", "uv.w", "abc.")
    steps = written(*texts)
    pieces = pieces_of(*texts, rows=2, stop_texts=["cd"])
    assert list(dict.fromkeys(steps)) == [(0, 2), (2, 2), (4, 2)]
    assert [text_of(pieces, row) for row in range(5)] == ["ab", "ab", "x", "uv", "abc"]


def test_the_first_row_is_streamed_and_the_others_follow():
    pulled = []

    def source():
        for piece in (
            Piece(0, "a", False),
            Piece(1, "x", False),
            Piece(2, "s", True),
            Piece(0, "b", True),
            Piece(1, "y", True),
        ):
            pulled.append(piece)
            yield piece

    ordered = in_order(source(), 3)
    assert next(ordered).text == "a" and len(pulled) == 1
    assert [piece.text for piece in ordered] == ["b", "x", "y", "s"]


def test_chat_prompts_and_ends_follow_the_template(tmp_path):
    shown = BYTES.decode(chat_prompt(BYTES, HI))
    assert shown == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert chat_prompt(BYTES, HI)[0] == BYTES.end
    assert bytes(end_of_turn(BYTES)) == b"<|im_end|>"
    words = load_tokenizer(str(word_tokenizer.save(tmp_path)))
    assert end_of_turn(words) == (
        word_tokenizer.word_tokenizer().token_to_id("</turn>"),
    )
    silent = word_tokenizer.save(
        tmp_path / "silent",
        template="{% for m in messages %}{{ m.content }}{% endfor %}",
    )
    assert end_of_turn(load_tokenizer(str(silent))) == ()


def test_where_nothing_ends_an_answer_the_next_turn_does(tmp_path):
    source = "{% for m in messages %}"
    source += (
        "{{ {'user': '<s>u ', 'tool': '<turn>'}.get(m.role, '</turn>') }}\n{{"
        " m.content }}"
    )
    saved = word_tokenizer.save(
        tmp_path, template=source + "{% if not loop.last %}\n{% endif %}{% endfor %}"
    )
    words = load_tokenizer(str(saved))
    assert begins_of_next_turn(words) == [
        tuple(words.encode(text)) for text in ("<s>u", "<turn>")
    ]
    assert begins_of_next_turn(BYTES) == []
