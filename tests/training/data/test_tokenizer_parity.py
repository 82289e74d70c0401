"""Compares tokenizers with those of transformers; skipped where it is not installed."""

import pytest

from stacked_remat.training import load_tokenizer

from .word_tokenizer import save

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

TEMPLATE = """{% for m in messages %}
{%- if m.role == 'assistant' -%}
<turn>assistant {% generation %}{{ m.content }}</turn>{% endgeneration %}
{%- else -%}
<turn>{{ m.role }} {{ m.content }}</turn>
{%- endif -%}
{% endfor %}"""
CHAT = [
    {"role": "user", "content": "hello é 😀 there"},
    {"role": "assistant", "content": "never odd"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "or é even"},
]


@pytest.mark.parametrize("begin", [False, True])
def test_documents_and_chats_have_the_same_tokens_and_answers(tmp_path, begin):
    config = {"eos_token": "</s>", "bos_token": "<s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    folder = save(tmp_path, begin=begin, template=TEMPLATE, config=config)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(str(folder)), load_tokenizer(str(folder))
    (document,) = ours.encode_documents(["never odd é"])
    assert document.tolist() == [*theirs("never odd é")["input_ids"], theirs.eos_token_id]
    assert ours.vocab_size == len(theirs)
    (rendered,) = ours.chat_template.render_with_answers(CHAT)
    assert rendered.text == theirs.apply_chat_template(CHAT, tokenize=False)
    ((tokens, counted),) = ours.encode_chats([rendered])
    expected = theirs.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    assert tokens.tolist() == list(expected["input_ids"])
    assert counted.astype(int).tolist() == list(expected["assistant_masks"])
