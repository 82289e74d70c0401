"""Tests of stacked_remat/training/data/hugging_face_tokenizer.py."""

import numpy as np
import pytest

from stacked_remat.training import DataError, RenderedChat
from stacked_remat.training.data.hugging_face_tokenizer import HuggingFaceTokenizer

from .word_tokenizer import CHAT_TEMPLATE, word_tokenizer

CONFIG = {"eos_token": "</s>", "bos_token": {"content": "<s>"}}
PLAIN, WITH_BEGIN = (word_tokenizer(begin=begin).to_str() for begin in (False, True))
ID, ROWS = word_tokenizer().token_to_id, word_tokenizer().get_vocab_size()


def make(
    definition=PLAIN, config=CONFIG, template=CHAT_TEMPLATE, chat_date=None, rows=None
):
    return HuggingFaceTokenizer("words", definition, config, template, chat_date, rows)


def test_text_round_trips_and_merges_are_used():
    tokenizer = make()
    tokens = tokenizer.encode("never odd or even, né?")
    assert tokenizer.decode(tokens) == "never odd or even, né?"
    assert tokens[0] == ID("never") and tokens.dtype == np.uint16
    assert (
        tokenizer.vocab_size == word_tokenizer().get_vocab_size()
        and tokenizer.end == ID("</s>")
    )


def test_a_document_has_the_tokenizers_own_tokens_and_one_end_token():
    (plain,) = make().encode_documents(["odd"])
    assert plain.tolist() == [*make().encode("odd"), ID("</s>")]
    (begun,) = make(WITH_BEGIN).encode_documents(["odd"])
    assert begun.tolist() == [ID("<s>"), *plain]
    (added,) = make(config={**CONFIG, "add_bos_token": True}).encode_documents(["odd"])
    assert added.tolist() == begun.tolist()
    (once,) = make(WITH_BEGIN, {**CONFIG, "add_bos_token": True}).encode_documents(
        ["odd</s>"]
    )
    assert once.tolist() == begun.tolist()


def test_truncation_and_padding_of_the_file_are_ignored():
    tokenizer = word_tokenizer()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    (tokens,) = make(tokenizer.to_str()).encode_documents(["never odd or even"])
    assert tokens.tolist() == make().encode_documents(["never odd or even"])[0].tolist()


def test_a_chat_is_the_text_of_its_template_and_answers_count():
    tokenizer = make(WITH_BEGIN)
    chat = [
        {"role": "user", "content": "hello é"},
        {"role": "assistant", "content": "there"},
    ]
    (rendered,) = tokenizer.chat_template.render_with_answers(chat)
    assert rendered.text == "<turn>user hello é</turn><turn>assistant there</turn>"
    ((tokens, counted), (_, all_counted)) = tokenizer.encode_chats(
        [rendered, RenderedChat(rendered.text)]
    )
    assert tokens[0] == ID("<turn>") and (tokens == ID("</turn>")).sum() == 2
    answer = tokens[counted]
    assert answer[-1] == ID("</turn>") and tokenizer.decode(answer) == " there"
    assert not counted[: len(tokens) - len(answer)].any() and all_counted is None


def test_a_token_that_begins_before_an_answer_and_reaches_into_it_counts():
    # `or`, whose token takes in the space
    rendered = RenderedChat("assistant or even", ((10, 12),))
    ((tokens, counted),) = make().encode_chats([rendered])
    assert make().decode(tokens[counted]) == " or"


def test_the_template_can_use_special_tokens_and_is_needed_for_chats():
    assert (
        make(template="{{ bos_token }}{{ eos_token }}").chat_template.render([])
        == "<s></s>"
    )
    with pytest.raises(
        DataError,
        match=r"The tokenizer words has no chat template.*chat_template.jinja",
    ):
        _ = make(template=None).chat_template


def test_the_fingerprint_changes_with_everything_that_changes_tokens():
    other = word_tokenizer()
    other.add_special_tokens(["<new>"])
    own, limited = make(rows=ROWS), make(other.to_str(), rows=ROWS)
    variants = [
        make(),
        make(WITH_BEGIN),
        make(other.to_str()),
        limited,
        make(config={"eos_token": "<s>"}),
        make(config={**CONFIG, "add_bos_token": True}),
        make(template="x"),
        make(template=None),
        make(chat_date="2025-06-30"),
        make(chat_date="2025-07-01"),
    ]
    assert len({one.fingerprint for one in variants}) == len(variants)
    assert (
        make().fingerprint == own.fingerprint and own.vocab_size == limited.vocab_size
    )
    for encode in (
        lambda text: limited.encode_documents(["odd", text]),
        limited.encode,
    ):
        with pytest.raises(DataError, match=r"A text has <new> \(29"):
            encode("never<new>")


def test_the_end_token_is_that_of_the_config_or_a_usual_one():
    assert make(config={"eos_token": "</turn>"}).end == ID("</turn>")
    assert make(config={}).end == ID("</s>")
    with pytest.raises(
        DataError, match=r"its `eos_token` '<end>' is not in the vocabulary. Put a"
    ):
        make(config={"eos_token": "<end>"})
    unnamed = word_tokenizer().to_str().replace("</s>", "<stop>")
    with pytest.raises(
        DataError, match=r"it has no `eos_token`. Put a tokenizer_config.json"
    ):
        make(unnamed, {})
    for wrong in ({"eos_token": 3}, {"bos_token": ["<s>"]}, {"bos_token": {}}):
        with pytest.raises(DataError, match=r"`..._token` .* is .* not the text of a"):
            make(config={**CONFIG, **wrong})
    make(config={**CONFIG, "bos_token": None})


def test_the_beginning_of_a_document_has_no_end_token():
    plain, begun = make(), make(WITH_BEGIN)
    assert plain.encode_beginning("odd").tolist() == plain.encode("odd").tolist()
    assert begun.encode_beginning("odd").tolist() == [ID("<s>"), *plain.encode("odd")]
    assert begun.encode_beginning("odd</s>").tolist() == [
        ID("<s>"),
        *plain.encode("odd"),
        ID("</s>"),
    ]
    assert plain.encode_beginning("").tolist() == [] and begun.encode_beginning(
        ""
    ).tolist() == [ID("<s>")]
    written = "<turn>user hello</turn>"
    assert (
        begun.encode_chat_beginning(written).tolist() == begun.encode(written).tolist()
    )
    assert begun.encode_chat_beginning("a</s>")[-1] == ID("</s>")


def test_a_completion_is_a_text_whose_answer_and_end_count():
    rendered = RenderedChat("odd even", ((3, 8),), is_open=True, is_plain=True)
    for config in (CONFIG, {**CONFIG, "add_bos_token": True}):
        for definition in (PLAIN, WITH_BEGIN):
            tokenizer = make(definition, config)
            ((tokens, counted),) = tokenizer.encode_chats([rendered])
            (document,) = tokenizer.encode_documents(["odd even"])
            assert tokens.tolist() == document.tolist()
            answer = [*make().encode(" even"), ID("</s>")]
            assert tokens[counted].tolist() == answer
