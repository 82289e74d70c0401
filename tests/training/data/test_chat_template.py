"""Tests of stacked_remat/training/data/chat_template.py."""

import itertools
import re
from random import Random

import pytest

from stacked_remat.training import ByteTokenizer, ChatTemplate, ChatTemplateError, DataError
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
    source = "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content | trim }}{% endfor %}"
    template = ChatTemplate(source + "{% if add_generation_prompt %}>{% endif %}", {"bos_token": "<s>"})
    assert template.render(CHAT[:2]) == "<s>user:one?assistant:two."
    assert template.render(CHAT[:1], add_generation_prompt=True) == "<s>user:one?>"


def test_templates_are_rendered_with_the_usual_settings():
    """Blocks leave no newline and no indentation, loops can be left, JSON is not escaped."""
    source = """{% for m in messages %}
  {% if loop.index == 2 %}
{% break %}{% endif %}
{{ m | tojson }}
{% endfor %}"""
    assert ChatTemplate(source, {}).render([{"é": "<b>"}, {}]) == '{"é": "<b>"}\n'
    assert ChatTemplate("{{ strftime_now is defined }}", {}).render(CHAT) == "False"
    assert ChatTemplate("{{ tools is none and documents is none }}", {}).render(CHAT) == "True"


def test_a_template_that_writes_todays_date_takes_it_from_the_config():
    source = "{{ strftime_now('%d %B %Y, %H:%M') }}{{ messages[0].content }}"
    assert ChatTemplate(source, {}, "2025-06-30").render(CHAT) == "30 June 2025, 00:00one?"
    with pytest.raises(DataError, match=r"writes today's date \(strftime_now\).*data.chat_date"):
        ChatTemplate(source, {}).render(CHAT)


def test_answers_are_what_the_template_marks():
    chat = ChatTemplate(MARKED, {}).render_with_answers(CHAT)
    assert chat.text == "<u>one?</u><a>two.</a><u>three?</u><a>four.</a>"
    assert answers(chat) == ["two.</a>", "four.</a>"]
    assert ChatTemplate(MARKED, {}).render(CHAT) == chat.text


def test_without_marks_answers_follow_the_generation_prompt():
    chat = ByteTokenizer().chat_template.render_with_answers(CHAT)
    assert chat.text == ByteTokenizer().chat_template.render(CHAT)
    assert answers(chat) == ["two.<|im_end|>\n", "four.<|im_end|>\n"]


# Earlier answers lose their thoughts, and the last one may end otherwise.
WRITTEN_OTHERWISE = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{{- '<|' + m.role + '|>BREAK' }}
{%- if m.role != 'assistant' %}{{- m.contentTRIM + '<|end|>BREAK' }}{% else %}
{%- set parts = (m.content or '').split('</think>') %}
{%- set thinks = loop.index0 > ns.last and (loop.last or parts | length > 1) %}
{{- 'THINK' if thinks }}{% generation %}
{%- if thinks %}
{{- 'OPEN' + (parts[0].split('<think>')[-1] if parts | length > 1 else '') + '</think>BREAK' }}
{%- endif %}
{{- (parts | last)TRIM }}
{%- for call in m.tool_calls or [] %}{{- '<call>' + call + '</call>' }}{% endfor %}
{{- 'LAST' if loop.last and not add_generation_prompt else '<|end|>BREAK' }}{% endgeneration %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>BREAKTHINK' }}{% endif %}"""


def random_chat(random):
    """Turns of which some have thoughts, tools, spaces around them, or text that looks like a header."""

    def text():
        words = random.choices(
            ["one", "two.", "<|user|>", "<|end|>", "a\nb", "<think>"], k=random.randint(1, 3)
        )
        return random.choice(["", " ", "\n"]) + " ".join(words) + random.choice(["", "\n", "  "])

    def answer(**more):
        thoughts = random.choice(["", "<think>" + text() + "</think>"])
        return {"role": "assistant", "content": thoughts + text().replace("<think>", ""), **more}

    chat = [{"role": "system", "content": text()}] if random.random() < 0.3 else []
    for _ in range(random.randint(1, 4)):
        chat.append({"role": "user", "content": text() + random.choice(["", "<|assistant|>\n"])})
        for _ in range(random.choice([0, 0, 1, 2])):
            call = answer(tool_calls=["f()"])
            chat += [random.choice([call, {**call, "content": None}]), {"role": "tool", "content": text()}]
        chat.append(answer())
    return chat


def test_answers_are_found_where_templates_write_earlier_ones_otherwise():
    """Without marks, the answers are those of the same template with marks."""
    random = Random(0)
    for last, line, think, trim in itertools.product(
        ["<|end|>", "<|return|>"], ["\\n", ""], ["", "<think>"], ["", " | trim"]
    ):
        source = WRITTEN_OTHERWISE.replace("LAST", last + line * (last == "<|end|>")).replace("BREAK", line)
        source = source.replace("THINK", think).replace("OPEN", "" if think else "<think>")
        source = source.replace("TRIM", trim)
        without = ChatTemplate(re.sub(r"{% (end)?generation %}", "", source), {})
        for _ in range(8):
            chat = random_chat(random)
            assert without.render_with_answers(chat) == ChatTemplate(source, {}).render_with_answers(chat)


def test_answers_that_cannot_be_found_are_refused():
    forgets = (
        "{% for m in messages %}{% if loop.last or m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    with pytest.raises(ChatTemplateError, match=r"the answer of message 1 can't be found.*generation"):
        ChatTemplate(forgets, {}).render_with_answers(CHAT)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[9].content.x }}", "no element 9"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_errors_of_templates_and_forbidden_access_are_raised(source, message):
    with pytest.raises(ChatTemplateError, match=message):
        ChatTemplate(source, {}).render(CHAT)


def test_a_template_that_writes_too_much_is_stopped(monkeypatch):
    monkeypatch.setattr(chat_template, "_LONGEST", 1000)
    source = "{% for _ in range(90000) %}{% for _ in range(90000) %}{{ messages }}{% endfor %}{% endfor %}"
    with pytest.raises(DataError, match=r"writes more than 1,000 characters for one chat\. Fix"):
        ChatTemplate(source, {}).render(CHAT)
    with pytest.raises(DataError, match=r"chat template is not valid Jinja, line 2"):
        ChatTemplate("a\n{% for %}", {}).render(CHAT)
