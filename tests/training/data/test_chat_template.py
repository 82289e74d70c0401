"""Tests of stacked_remat/training/data/chat_template.py."""

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
    (chat,) = ChatTemplate(MARKED, {}).render_with_answers(CHAT)
    assert chat.text == "<u>one?</u><a>two.</a><u>three?</u><a>four.</a>"
    assert answers(chat) == ["two.</a>", "four.</a>"]
    assert ChatTemplate(MARKED, {}).render(CHAT) == chat.text
    with pytest.raises(ChatTemplateError, match="which are no characters of a text"):
        ChatTemplate(MARKED, {}).render_with_answers([{"role": "user", "content": "\ufdd0"}])


def test_without_marks_answers_follow_the_generation_prompt():
    (chat,) = ByteTokenizer().chat_template.render_with_answers(CHAT)
    assert chat.text == ByteTokenizer().chat_template.render(CHAT)
    assert answers(chat) == ["two.<|im_end|>\n", "four.<|im_end|>\n"]


def test_an_answer_that_is_written_otherwise_where_others_follow_has_a_text_of_its_own():
    source = """{%- for m in messages %}{{ '<' + m.role + '>' }}
    {%- if m.role == 'assistant' and loop.last %}<think>{% endif %}
    {{- m.content }}{% endfor %}{% if add_generation_prompt %}<assistant><think>{% endif %}"""
    first, second = reversed(ChatTemplate(source, {}).render_with_answers(CHAT))
    assert first.text == "<user>one?<assistant><think>two." and answers(first) == ["two."]
    assert second.text == "<user>one?<assistant>two.<user>three?<assistant><think>four."
    assert answers(second) == ["four."]
    asked = ChatTemplate(source, {}).render_with_answers(CHAT[:3])  # a chat that ends with a question
    assert [chat.text for chat in asked] == [first.text]
    assert ChatTemplate(source, {}).render_with_answers(CHAT[:1])[0].answers == ()


FORWARD = "{% if add_generation_prompt %}>{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
ENDLESS = (
    "{% for _ in range(90000) %}{% for _ in range(90000) %}{{ messages[0].content }}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", ChatTemplateError, "roles must alternate"),
        ("{{ messages[9].content.x }}", ChatTemplateError, "no element 9"),
        ("{{ ''.__class__.__mro__ }}", ChatTemplateError, "unsafe"),
        ("{{ messages.append(1) }}", ChatTemplateError, "unsafe"),
        (FORWARD, ChatTemplateError, r"the answer of message 3 does not follow.*generation"),
        (ENDLESS, DataError, r"writes more than 1,000 characters for one chat\. Fix"),
        ("a\n{% for %}", DataError, r"chat template is not valid Jinja, line 2"),
    ],
)
def test_errors_of_templates_and_forbidden_access_are_raised(source, error, message, monkeypatch):
    monkeypatch.setattr(chat_template, "_LONGEST", 1000)
    with pytest.raises(error, match=message):
        ChatTemplate(source, {}).render_with_answers(CHAT)
