"""Compares tokenizers with those of transformers; skipped where it is not installed."""

import json

import pytest

from stacked_remat.training import SourceConfig, load_tokenizer
from stacked_remat.training.data.files import find_files
from stacked_remat.training.data.records import read_records

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
    config = {
        "eos_token": "</s>",
        "bos_token": "<s>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    folder = save(tmp_path, begin=begin, template=TEMPLATE, config=config)
    theirs, ours = (
        transformers.AutoTokenizer.from_pretrained(str(folder)),
        load_tokenizer(str(folder)),
    )
    (document,) = ours.encode_documents(["never odd é"])
    assert document.tolist() == [
        *theirs("never odd é")["input_ids"],
        theirs.eos_token_id,
    ]
    assert ours.vocab_size == len(theirs)
    (rendered,) = ours.chat_template.render_with_answers(CHAT)
    assert rendered.text == theirs.apply_chat_template(CHAT, tokenize=False)
    ((tokens, counted),) = ours.encode_chats([rendered])
    expected = theirs.apply_chat_template(
        CHAT, return_dict=True, return_assistant_tokens_mask=True
    )
    assert tokens.tolist() == list(expected["input_ids"])
    assert counted.astype(int).tolist() == list(expected["assistant_masks"])


WITH_VARIABLES = """{%- if tools %}{{ '<turn>tools' }}
{%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}{{ '</turn>' }}{% endif %}
{%- for d in documents or [] %}{{ '<turn>document ' + d.title + ': ' + d['text'] + '</turn>' }}{% endfor %}
{%- for m in messages %}{{ '<turn>' + m.role + ' ' }}
    {%- if m.content is none or m.content is undefined %}{{ m.content }}
    {%- elif m.content is string %}{{ m.content }}
    {%- else %}{% for part in m.content %}{{ part.text | trim }}{% endfor %}{% endif %}
    {%- for call in m.tool_calls or [] %}
    {{- call.function.name }}{{ call | tojson(sort_keys=true) }}{% endfor %}
    {%- if m.role == 'assistant' and enable_thinking is defined and not enable_thinking %}
    {{- ' quiet' }}{% endif %}
    {{- '</turn>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<turn>assistant ' }}{% endif %}"""  # noqa: E501
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "größe",
            "parameters": {"type": "object", "properties": {"a": {"default": None}}},
        },
    },
    {"name": "flat <b>", "description": "'quoted' & \"so\""},
]
CALL = {
    "type": "function",
    "function": {"name": "größe", "arguments": {"a": None, "b": [1.5, True, "é"]}},
}
CALLS = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": " hello "},
            {"type": "text", "text": "there"},
        ],
    },
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "odd", "name": "größe"},
    {"role": "assistant", "content": "even"},
]


@pytest.mark.parametrize("tools", [None, [], TOOLS])
@pytest.mark.parametrize(
    "given",
    [{}, {"documents": [{"title": "t", "text": "x"}]}, {"enable_thinking": False}],
)
def test_variables_of_a_record_give_the_same_text(tmp_path, tools, given):
    config = {"eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    folder = save(tmp_path / "words", template=WITH_VARIABLES, config=dict(config))
    theirs, ours = (
        transformers.AutoTokenizer.from_pretrained(str(folder)),
        load_tokenizer(str(folder)),
    )
    expected = theirs.apply_chat_template(CALLS, tools=tools, tokenize=False, **given)
    thinking = {name: value for name, value in given.items() if name != "documents"}
    record = {"messages": CALLS, "tools": tools, "chat_template_kwargs": thinking}
    record |= {name: value for name, value in given.items() if name == "documents"}
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    (file,) = find_files([str(tmp_path / "a.jsonl")], "key")
    (read,) = read_records(file, SourceConfig(("-",)))
    chats = ours.chat_template.render_with_answers(
        read.content, read.document.variables
    )
    assert [chat.text for chat in chats] == [expected]
    answers = [expected[first:stop] for first, stop in chats[0].answers or ()]
    assert (
        len(answers) == 2
        and answers[0].startswith("größe{")
        and answers[1].startswith("even")
    )

    several = [
        {"name": name, "template": f"{name} {WITH_VARIABLES}"}
        for name in ("default", "tool_use", "rag")
    ]
    save(tmp_path / "words", template=several, config=dict(config))
    theirs, ours = (
        transformers.AutoTokenizer.from_pretrained(str(folder)),
        load_tokenizer(str(folder)),
    )
    expected = theirs.apply_chat_template(CALLS, tools=tools, tokenize=False, **given)
    assert (
        ours.chat_template.render(read.content, variables=read.document.variables)
        == expected
    )
