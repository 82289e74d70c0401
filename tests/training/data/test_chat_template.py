"""Tests of stacked_remat/training/data/chat_template.py."""

from typing import Any, cast

import pytest

from stacked_remat.training import (
    ByteTokenizer,
    ChatTemplate,
    ChatTemplateError,
    DataError,
)
from stacked_remat.training.data import chat_template

CHAT = [
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "two."},
    {"role": "user", "content": "three?"},
    {"role": "assistant", "content": "four."},
]

MARKED = """{% for m in messages %}
{%- if m.role == 'assistant' -%}
<a>{% generation %}{{ m.content }}</a>{% endgeneration %}
{%- else -%}
<u>{{ m.content }}</u>
{%- endif -%}
{% endfor %}"""


def answers(chat):
    return [chat.text[first:stop] for first, stop in chat.answers]


def test_a_template_sees_messages_special_tokens_and_the_prompt():
    source = (
        "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content | trim }}{%"
        " endfor %}"
    )
    template = ChatTemplate(
        source + "{% if add_generation_prompt %}>{% endif %}", {"bos_token": "<s>"}
    )
    assert template.render(CHAT[:2]) == "<s>user:one?assistant:two."
    assert template.render(CHAT[:1], add_generation_prompt=True) == "<s>user:one?>"


def test_templates_are_rendered_with_the_usual_settings():
    """Blocks leave no newline and no indentation, loops can be left, JSON is not
    escaped.
    """
    source = """{% for m in messages %}
  {% if loop.index == 2 %}
{% break %}{% endif %}
{{ m | tojson }}
{% endfor %}"""
    assert ChatTemplate(source, {}).render([{"é": "<b>"}, {}]) == '{"é": "<b>"}\n'
    assert ChatTemplate("{{ strftime_now is defined }}", {}).render(CHAT) == "False"
    assert (
        ChatTemplate("{{ tools is none and documents is none }}", {}).render(CHAT)
        == "True"
    )


@pytest.mark.parametrize(
    "source",
    [None, b"x", ["x"], {"default": 1}, [{"name": "default", "template": "x"}]],
)
def test_a_source_that_is_no_program_is_refused(source):
    with pytest.raises(TypeError, match="`source` is the Jinja program as a text, or"):
        ChatTemplate(source, {})


def test_a_template_that_writes_todays_date_takes_it_from_the_config():
    source = "{{ strftime_now('%d %B %Y, %H:%M') }}{{ messages[0].content }}"
    assert (
        ChatTemplate(source, {}, "2025-06-30").render(CHAT) == "30 June 2025, 00:00one?"
    )
    with pytest.raises(
        DataError, match=r"writes today's date \(strftime_now\).*data.chat_date"
    ):
        ChatTemplate(source, {}).render(CHAT)


def test_answers_are_what_the_template_marks():
    (chat,) = ChatTemplate(MARKED, {}).render_with_answers(CHAT)
    assert chat.text == "<u>one?</u><a>two.</a><u>three?</u><a>four.</a>"
    assert answers(chat) == ["two.</a>", "four.</a>"]
    assert ChatTemplate(MARKED, {}).render(CHAT) == chat.text
    for content, variables in [("\ufdd0", {}), ("a", {"tools": [{"x": "\ufdd1"}]})]:
        with pytest.raises(ChatTemplateError, match="no characters of a text"):
            ChatTemplate(MARKED, {}).render_with_answers(
                [{"role": "user", "content": content}], variables
            )


def test_without_marks_answers_follow_the_generation_prompt():
    (chat,) = ByteTokenizer().chat_template.render_with_answers(CHAT)
    assert chat.text == ByteTokenizer().chat_template.render(CHAT)
    assert answers(chat) == ["two.<|im_end|>\n", "four.<|im_end|>\n"]


def test_an_answer_that_is_written_otherwise_before_others_has_a_text_of_its_own():
    source = """{%- for m in messages %}{{ '<' + m.role + '>' }}
    {%- if m.role == 'assistant' and loop.last %}<think>{% endif %}
    {{- m.content }}{% endfor %}{% if add_generation_prompt %}<assistant><think>{% endif %}"""  # noqa: E501
    first, second = reversed(ChatTemplate(source, {}).render_with_answers(CHAT))
    assert first.text == "<user>one?<assistant><think>two." and answers(first) == [
        "two."
    ]
    assert second.text == "<user>one?<assistant>two.<user>three?<assistant><think>four."
    assert answers(second) == ["four."]
    # A chat that ends with a question
    asked = ChatTemplate(source, {}).render_with_answers(CHAT[:3])
    assert [chat.text for chat in asked] == [first.text]
    assert ChatTemplate(source, {}).render_with_answers(CHAT[:1])[0].answers == ()


FORWARD = (
    "{% if add_generation_prompt %}>{% endif %}{% for m in messages %}{{ m.content }}{%"
    " endfor %}"
)
ENDLESS = (
    "{% for _ in range(90000) %}{% for _ in range(90000) %}{{ messages[0].content }}{%"
    " endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (
            "{{ raise_exception('roles must alternate') }}",
            ChatTemplateError,
            "roles must alternate",
        ),
        ("{{ messages[9].content.x }}", ChatTemplateError, "no element 9"),
        ("{{ ''.__class__.__mro__ }}", ChatTemplateError, "unsafe"),
        ("{{ messages.append(1) }}", ChatTemplateError, "unsafe"),
        (
            FORWARD,
            ChatTemplateError,
            r"the answer of message 3 does not follow.*generation",
        ),
        (ENDLESS, DataError, r"writes more than 1,000 characters for one chat\. Fix"),
        ("a\n{% for %}", DataError, r"chat template is not valid Jinja, line 2"),
    ],
)
def test_errors_of_templates_and_forbidden_access_are_raised(
    source, error, message, monkeypatch
):
    monkeypatch.setattr(chat_template, "_LONGEST", 1000)
    with pytest.raises(error, match=message):
        ChatTemplate(source, {}).render_with_answers(CHAT)


def test_a_template_has_limits_of_memory_and_time_and_the_next_chat_is_rendered(
    monkeypatch,
):
    monkeypatch.setattr(chat_template, "_SECONDS", 0.3)
    template = ByteTokenizer().chat_template
    for limit, source in {
        "MiB of memory": (
            "{{ (messages[0].content * 99) | center(messages | length * 900000000) }}"
        ),
        "MiB of memory for": "{{ '%0*d' % (999999999, 1) }}",
        "512 MiB of memory|seconds": (
            "{% set n = namespace(x='ab') %}{% for _ in range(60) %}"
            "{% set n.x = n.x ~ n.x %}{% endfor %}"
        ),
        "0.3 seconds of CPU time": (
            "{% for _ in range(9999) %}{% for _ in range(99999) %}{% endfor %}"
            "{% endfor %}"
        ),
        "0.3 seconds": "{{ 7 ** 99999999 }}",  # while it compiles
        "seconds of CPU time": "{{ range(9) | slice(99999999) | list | length }}",
    }.items():
        with pytest.raises(DataError, match=limit):
            ChatTemplate(source, {}).render(CHAT)
        assert template.render(CHAT[:1]) == "<|im_start|>user\none?<|im_end|>\n"


def test_of_many_chats_the_one_that_takes_too_much_is_found(monkeypatch):
    monkeypatch.setattr(chat_template, "_SECONDS", 0.3)
    source = (
        "{% if messages[0].content == 'x' %}{{ 'x' * 2000000000 }}{% endif %}{{"
        " messages[0].content }}"
    )
    chats = [([{"role": "user", "content": letter}], {}) for letter in "abxc"]
    first, second, third = cast(
        list[Any], ChatTemplate(source, {}).render_all(chats, answers=False)
    )
    assert [first[0].text, second[0].text] == ["a", "b"] and "memory" in str(third)
    refused = [([{"role": "user", "content": b"bytes"}], {}), (CHAT, {})]
    first, second = cast(
        list[Any], ByteTokenizer().chat_template.render_all(refused, answers=True)
    )
    assert isinstance(first, ChatTemplateError) and "bytes is no text" in str(first)
    assert answers(second[0]) == ["two.<|im_end|>\n", "four.<|im_end|>\n"]


def test_a_chat_that_the_program_cannot_take_is_refused_and_the_next_is_rendered():
    nested = {}
    for _ in range(400):
        nested = {"a": nested}
    strange = cast(
        list[Any],
        [[{"role": "user", "content": nested}], [{"content": "a"}], ["text"], CHAT],
    )
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    deep, no_role, text, chat = cast(
        list[Any],
        template.render_all([(messages, {}) for messages in strange], answers=True),
    )
    assert isinstance(deep, ChatTemplateError) and "nested too deeply" in str(deep)
    assert no_role[0].text == "a" and no_role[0].answers == ()
    assert text[0].text == "" and answers(chat[0]) == ["two.t", "four."]


def test_a_chat_that_is_interrupted_leaves_no_reply_for_the_next_one(monkeypatch):
    template, replies = ByteTokenizer().chat_template, chat_template._Renderer._replies

    def interrupted(renderer, lines):
        replies(renderer, lines)
        raise KeyboardInterrupt

    monkeypatch.setattr(chat_template._Renderer, "_replies", interrupted)
    with pytest.raises(KeyboardInterrupt):
        template.render(CHAT)
    monkeypatch.undo()
    assert template.render(CHAT[:1]) == "<|im_start|>user\none?<|im_end|>\n"


CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"a": None}],
    "refusal": None,
}
PARTS = {
    "role": "user",
    "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}],
}
PARTS_AS_JSON = '[{"type": "text", "text": "x"}]'
NULL = "{% set n = messages[0].tool_calls[0].a %}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("[{{ messages[0].content }}{{ messages[0].content | trim }}]", "[]"),
        (
            "{{ messages[0].content is defined }} {{ 'content' in messages[0] }}",
            "False False",
        ),
        (
            (
                "{{ messages[0]['content'] is none }} {{ messages[0].content is not"
                " none }}"
            ),
            "True False",
        ),
        (
            "{{ messages[0].name is none }} {{ messages[1].content is none }}",
            "False False",
        ),
        (
            "{{ messages[0] | tojson }}",
            '{"role": "assistant", "tool_calls": [{"a": null}]}',
        ),
        (
            NULL + "{{ n is none }} {{ n == none }} {{ n in [none] }} {{ n or 'no' }}",
            "True True True no",
        ),
        (
            NULL
            + "{{ n is string or n is mapping or n is iterable or n is undefined }}",
            "False",
        ),
        ("{% for p in messages[1].content %}{{ p['text'] }}{% endfor %}", "xy"),
        ("{{ messages[1].content | map(attribute='text') | join }}", "xy"),
        (
            "{{ messages[1].content is string or messages[1].content is mapping }}",
            "False",
        ),
        (
            (
                "{{ messages[0].content == none }} {{ messages[0].content != none }}"
                " {{ messages[0].name == none }} {{ messages[1].content == none }}"
            ),
            "True False False False",
        ),
        (
            (
                "{{ messages[0].get('content') ~ '' }}"
                "{{ messages[0].get('content') is none }}"
                " {{ messages[0].get('refusal', 'd') }} {{ messages[0].get('b', 'c') }}"
            ),
            "True d c",
        ),
        ("{{ (messages[1].content[:1] + []) | tojson }}", PARTS_AS_JSON),
        ("{{ messages[1].content | list | length }}", "2"),
        ("{{ tools is none }} {{ tools == none }} {{ tools or 'no' }}", "True True no"),
        ("{{ none_given is none }} {{ none_given | tojson }}", "True null"),
        ("{{ given | string }} {{ given ~ '' }}", "['a'] ['a']"),
        ("{{ 'a' + messages[0].content }}", None),
        ("{{ messages[0].get('name') }}", None),
        ("{{ messages[0].get('name') ~ '' }}", None),
        ("{{ messages[0].tool_calls[0].get('a') ~ '' }}", None),
        ("{{ tools ~ '' }}", None),
        ("{{ documents | string }}", None),
        ("{{ none_given ~ '' }}", None),
        ("{{ given }}", None),
        ("{{ messages[1].content[:1] }}", None),
        ("{{ messages[1].content[:1] | map(attribute='text') | list ~ '' }}", None),
        ("{{ messages[1].content | list }}", None),
        ("{{ messages[1].content | map(attribute='text') | sort | string }}", None),
        ("{{ messages[1].content | map(attribute='text') }}", None),
        ("{{ messages[1].content + [] }}", None),
        ("{{ ([] + messages[1].content) }}", None),
        ("{{ messages[1].keys() }}", None),
        ("{{ messages[1].copy() }}", None),
        ("{{ (messages[1].role, 1) }}", None),
        (NULL + "{{ n }}", None),
        (NULL + "{{ n | trim }}", None),
        (NULL + "{{ 'a' ~ n }}", None),
        (NULL + "{{ '%s' | format(n) }}", None),
        (NULL + "{{ [n] | string }}", None),
        ("{{ messages[1].content }}", None),
        ("{{ messages[1].content | join }}", None),
        ("{{ messages[1:] | string }}", None),
        ("{{ messages[0].tool_calls[0] }}", None),
    ],
)
def test_nulls_lists_and_objects_of_messages_are_read_and_not_written_as_python_would(
    source, expected
):
    template = ChatTemplate(source, {})
    variables = {"none_given": None, "given": ["a"]}
    if expected is not None:
        assert template.render([CALL, PARTS], variables=variables) == expected
    else:
        with pytest.raises(
            ChatTemplateError, match=r"where it expects text|is null|no attribute"
        ):
            template.render([CALL, PARTS], variables=variables)


def test_the_byte_template_writes_tools_calls_their_answers_and_parts():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": {"a": None}}}],
    }
    chat = [
        PARTS,
        call,
        {"role": "tool", "content": {"t": 4}},
        {"role": "assistant", "content": "four"},
    ]
    (rendered,) = ByteTokenizer().chat_template.render_with_answers(
        chat, {"tools": tools}
    )
    assert (
        rendered.text
        == '<|im_start|>tools\n[{"type": "function", "function": {"name": "f",'
        ' "parameters": {}}}]<|im_end|>\n'
        "<|im_start|>user\nxy<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>{"name": "f", "arguments": {"a": null}}'
        "</tool_call><|im_end|>\n"
        '<|im_start|>tool\n{"t": 4}<|im_end|>\n'
        "<|im_start|>assistant\nfour<|im_end|>\n"
    )
    assert [text[:11] for text in answers(rendered)] == ["<tool_call>", "four<|im_en"]
    with pytest.raises(ChatTemplateError, match="a part that is no text"):
        ByteTokenizer().chat_template.render(
            [{"role": "user", "content": [{"type": "image", "url": "x"}]}]
        )


OPEN = (
    "{% for m in messages %}[{{ m.role }}]\n{{ m.content }}{{ '\n' if not loop.last"
    " }}{% endfor %}"
)


@pytest.mark.parametrize(
    "marks", [("", ""), ("{% generation %}", "{% endgeneration %}")]
)
def test_the_next_turn_ends_an_answer_after_which_the_template_writes_nothing(marks):
    source = OPEN.replace("{{ m.content }}", "{{ m.content }}".join(marks))
    template = ChatTemplate(
        source + "{% if add_generation_prompt %}{{ '\n[assistant]\n' }}{% endif %}", {}
    )
    if marks[0]:  # all contents are marked
        assert answers(template.render_with_answers(CHAT)[0]) == [
            "one?\n[",
            "two.\n[",
            "three?\n[",
            "four.",
        ]
        return
    chat, *others = template.render_with_answers(CHAT)
    assert not others and answers(chat) == ["two.\n[", "four."] and chat.is_open
    (asked,) = template.render_with_answers(CHAT[:3])
    assert answers(asked) == ["two.\n["] and not asked.is_open
    assert (
        template.render_whole(CHAT).is_open
        and not template.render_whole(CHAT[:3]).is_open
    )
    (closed,) = ByteTokenizer().chat_template.render_with_answers(CHAT)
    assert (
        not closed.is_open
        and not ByteTokenizer().chat_template.render_whole(CHAT).is_open
    )


TURNS = (
    "{% for m in messages %}<{{ m.role }}>CONTENT{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WITH_SYSTEM = [{"role": "system", "content": "S"}, *CHAT]
AS_PARTS = [
    {**message, "content": [{"type": "text", "text": message["content"]}]}
    for message in CHAT
]
CALLED = [CHAT[0], {**CHAT[1], "tool_calls": [{"name": "f"}]}, *CHAT[2:]]
CALLED[3] = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}


@pytest.mark.parametrize(
    ("before", "content", "chat", "variables"),
    [
        ("", "{{ m.content }}", CHAT, {}),
        (
            "{% if messages[0].role != 'system' %}{{ raise_exception('') }}{% endif %}",
            "{{ m.content }}",
            WITH_SYSTEM,
            {},
        ),
        (
            "",
            "{% for part in m.content %}{{ part.text }}{% endfor %}",
            AS_PARTS,
            {},
        ),
        ("{{ tools[0].name }}", "{{ m.content }}", CHAT, {"tools": [{"name": "f"}]}),
        (
            "",
            "{{ m.content }}{% if not plain %}</s>{% endif %}",
            CHAT,
            {"plain": True},
        ),
        ("", "{{ m.content or '' }}{{ m.tool_calls | tojson }}", CALLED, {}),
    ],
)
def test_the_chat_itself_and_its_variables_say_whether_an_answer_is_left_open(
    before, content, chat, variables
):
    content = content.replace("{{ m.tool_calls | tojson }}", CALLS_AS_JSON)
    template = ChatTemplate(before + TURNS.replace("CONTENT", content), {})
    (rendered,) = template.render_with_answers(chat, variables)
    first, second = answers(rendered)
    assert first.startswith("two.") and first.endswith("<")
    assert second in ("four.", '[{"name": "f"}]')
    assert rendered.is_open and not rendered.has_unmarked_end
    assert template.render_whole(chat, variables).is_open
    closed = ChatTemplate(before + TURNS.replace("CONTENT", content + "</s>"), {})
    (rendered,) = closed.render_with_answers(chat, variables)
    assert not rendered.is_open and answers(rendered)[1] == second + "</s>"


CALLS_AS_JSON = "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"


def test_an_end_outside_of_the_marks_is_noticed():
    marked = "{% generation %}{{ m.content }}{% endgeneration %}</s>"
    template = ChatTemplate(TURNS.replace("CONTENT", marked), {})
    (chat,) = template.render_with_answers(CHAT)
    assert chat.has_unmarked_end and not chat.is_open
    assert not ChatTemplate(MARKED, {}).render_with_answers(CHAT)[0].has_unmarked_end


def test_variables_reach_the_template_in_answers_too():
    source = """{% for m in messages %}<{{ m.role }}>
    {%- if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }};{% endfor %}
    {%- if add_generation_prompt %}<assistant>{% if think is false %}<think></think>{% endif %}{% endif %}"""  # noqa: E501
    (plain,) = ChatTemplate(source, {}).render_with_answers(CHAT[:2])
    (without,) = ChatTemplate(source, {}).render_with_answers(
        CHAT[:2], {"think": False}
    )
    assert plain.text == without.text == "<user>one?;<assistant><think></think>two.;"
    assert (answers(plain), answers(without)) == (["<think></think>two.;"], ["two.;"])


def test_of_several_templates_tool_use_is_for_chats_with_tools():
    named = {"default": "d", "tool_use": "t {{ tools[0].name }}", "rag": "r"}
    template = ChatTemplate(named, {})
    assert (
        template.render(CHAT) == template.render(CHAT, variables={"tools": None}) == "d"
    )
    assert template.render(CHAT, variables={"tools": [{"name": "f"}]}) == "t f"
    with pytest.raises(
        DataError,
        match="templates named rag, and none is named `default`. Write the one",
    ):
        ChatTemplate({"rag": "r"}, {}).render(CHAT)
