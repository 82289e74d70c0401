"""What records hold: a text, a prompt and its completion, or a chat in one of the forms
that people write.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from ..data_config import RESERVED_VARIABLES, SourceConfig

Message: TypeAlias = dict[str, Any]
"""One turn of a chat: `role`, `content`, and any other fields that the chat template
reads.
"""


class Completion(NamedTuple):
    """A text whose beginning is a prompt; no chat template formats it."""

    prompt: str
    completion: str


Content: TypeAlias = str | Completion | list[Message]

TEMPLATE_KEYS = ("tools", "documents", "chat_template_kwargs")
"""Keys of a record with a chat that the chat template gets as variables, the last one
as several.
"""
NESTED_KEYS = (*TEMPLATE_KEYS, "prompt", "completion", "conversations", "history")
"""Keys beside that of messages whose values are nested in some records."""


@dataclass(frozen=True)
class Document:
    """What a record holds.

    Attributes:
        content: a text, a prompt with its completion, or a chat.
        variables: of the chat template, for this chat.
        unread: keys of the record that are not read.
        weight: of its tokens in the loss.
    """

    content: Content
    variables: Mapping[str, Any] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    weight: float = 1.0


class MalformedRecord(Exception):
    """Why a record has no document: the rest of a sentence that begins with its place.

    Attributes:
        place: where that is, if not the place of the record.
    """

    def __init__(self, problem: str, place: str | None = None):
        super().__init__(problem)
        self.place = place


def document_of(fields: Any, how: SourceConfig) -> Document:
    """The document of a record, by its keys; a `MalformedRecord` if there is none."""
    if not isinstance(fields, dict):
        raise MalformedRecord(
            f"holds {type(fields).__name__}, not an object with keys: write one object"
            " a line"
        )
    content, read = _content(fields, how)
    variables: Mapping[str, Any] = {}
    if isinstance(content, list):
        variables = _variables(fields)
        read = (*read, *TEMPLATE_KEYS)
    read = (*read, how.weight_key)
    unread = [key for key, own in fields.items() if key not in read and own is not None]
    return Document(content, variables, tuple(unread), _weight(fields, how.weight_key))


def _content(
    fields: Mapping[str, Any], how: SourceConfig
) -> tuple[Content, tuple[str | None, ...]]:
    """The content of a record, and the keys that hold it."""
    # What the config names comes before forms that are only known by their keys.
    text = fields.get(how.text_key)
    messages = fields.get(how.messages_key)
    if text is not None:
        return _text(fields, how.text_key), (how.text_key,)
    if messages is not None:
        _check_chat(messages, how.messages_key)
        return messages, (how.messages_key,)
    # A table has null in the columns of other forms.
    for form in _FORMS:
        if all(fields.get(key) is not None for key in form.keys):
            return form.read(fields), (*form.keys, *form.more)
    if nulls := [key for key in (how.text_key, how.messages_key) if key in fields]:
        raise MalformedRecord(f"has null in {nulls[0]!r}")
    has = ", ".join(map(repr, fields)) or "no key"
    others = "; ".join(" and ".join(form.keys) for form in _FORMS)
    raise MalformedRecord(
        f"has neither {how.text_key!r} nor {how.messages_key!r}, but {has}: name its"
        f" key as data.sources.NAME.text_key or messages_key, or write {others}"
    )


def _completion(fields: Mapping[str, Any]) -> Content:
    prompt = fields["prompt"]
    completion = fields["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        _check_chat(prompt, "prompt")
        _check_chat(completion, "completion")
        return prompt + completion
    return Completion(_text(fields, "prompt"), _text(fields, "completion"))


_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""The roles of the speakers in `conversations`."""


def _share_gpt(fields: Mapping[str, Any]) -> Content:
    """The chat of turns with `from` and `value`; those of a record with `role` and
    `content` are messages.
    """
    turns = fields["conversations"]
    messages: list[Any] = []
    for turn in turns if isinstance(turns, list) else []:
        if not isinstance(turn, dict) or "from" not in turn:
            messages.append(turn)
            continue
        # A speaker that is not known might be the one whose answers are trained on.
        if turn["from"] not in _ROLES:
            raise MalformedRecord(
                f"has a turn from {turn['from']!r} in 'conversations'; known are"
                f" {', '.join(_ROLES)}"
            )
        message = {"role": _ROLES[turn["from"]], "content": turn.get("value")}
        rest = {key: own for key, own in turn.items() if key not in ("from", "value")}
        messages.append(message | rest)
    _check_chat(messages, "conversations")
    return _system(fields) + messages


def _alpaca(fields: Mapping[str, Any]) -> Content:
    """The chat of an instruction, whose input follows in a line of its own, and its
    output.
    """
    messages = _system(fields)
    history = fields.get("history") or []
    for turn in history:
        if not isinstance(turn, list) or [type(text) for text in turn] != [str, str]:
            raise MalformedRecord("has no list of pairs of texts in 'history'")
        messages += _turn(*turn)
    request = _text(fields, "instruction")
    if fields.get("input"):
        request += "\n" + _text(fields, "input")
    return messages + _turn(request, _text(fields, "output"))


def _turn(request: str, answer: str) -> list[Message]:
    return [
        {"role": "user", "content": request},
        {"role": "assistant", "content": answer},
    ]


def _system(fields: Mapping[str, Any]) -> list[Message]:
    if not fields.get("system"):
        return []
    return [{"role": "system", "content": _text(fields, "system")}]


class _Form(NamedTuple):
    """A form of records that is known by its keys."""

    keys: tuple[str, ...]  # all of which a record of this form has
    more: tuple[str, ...]  # which it may have
    read: Callable[[Mapping[str, Any]], Content]


_FORMS = (
    _Form(("prompt", "completion"), (), _completion),
    _Form(("conversations",), ("system",), _share_gpt),
    _Form(("instruction", "output"), ("input", "system", "history"), _alpaca),
)


def columns_of(names: list[str], how: SourceConfig) -> list[str]:
    """The columns of a table that may be read; none if no record has a document."""
    found = {how.text_key, how.messages_key}.intersection(names)
    for form in _FORMS:
        if set(form.keys) <= set(names):
            found |= {*form.keys, *form.more}
    # A large column that no record's document needs, such as an image, is never read.
    if found:
        found |= {*TEMPLATE_KEYS, how.weight_key}
    return [name for name in names if name in found]


def _text(fields: Mapping[str, Any], key: str) -> str:
    text = fields[key]
    if not isinstance(text, str):
        raise MalformedRecord(f"has {type(text).__name__}, not text, in {key!r}")
    return text


def _weight(fields: Mapping[str, Any], key: str | None) -> float:
    weight = 1.0 if key is None else fields.get(key, 1.0)
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    # A record must not be worth a whole epoch by a slip of a decimal point, nor make
    # the sum of weights, by which losses are divided, vanish.
    if not is_number or not (weight == 0 or 0.01 <= weight <= 100):
        raise MalformedRecord(
            f"has {weight!r} in {key!r}; a weight is 0, or a number from 0.01 to 100"
        )
    return float(weight)


def _check_chat(messages: Any, key: str) -> None:
    no_chat = f"has no chat in {key!r}:"
    if not isinstance(messages, list) or not messages:
        raise MalformedRecord(
            f"{no_chat} expected a list of messages that is not empty"
        )
    for at, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            fix = ""
            if isinstance(message, dict) and {"from", "value"} <= message.keys():
                fix = ". Turns with `from` and `value` are under `conversations`"
            raise MalformedRecord(f"{no_chat} message {at} lacks a `role`{fix}")
        content = message.get("content")
        # An answer that only calls tools has no content.
        if content is None and not message.get("tool_calls"):
            raise MalformedRecord(f"{no_chat} message {at} lacks its `content`")
        if isinstance(content, list):
            for part in content:
                _check_part(part, f"{no_chat} message {at}")
        elif not isinstance(content, str | dict | None):
            raise MalformedRecord(
                f"{no_chat} message {at} has {type(content).__name__}, not text, as"
                " `content`"
            )


def _check_part(part: Any, place: str) -> None:
    """Refuses parts of a message other than texts, such as images, which a text model
    does not see.
    """
    kind = part.get("type", "text") if isinstance(part, dict) else "text"
    text = part.get("text") if isinstance(part, dict) else part
    if not isinstance(text, str) or kind not in ("text", "input_text", "output_text"):
        shown_kind = kind if isinstance(kind, str) else type(part).__name__
        raise MalformedRecord(
            f"{place} has a part of the type {shown_kind!r} in its `content`; only"
            " texts are read"
        )


def _variables(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What a record with a chat gives the chat template beside its messages."""
    found: dict[str, Any] = {}
    for key in ("tools", "documents"):
        value = _parsed(fields, key)
        if value is None:
            continue
        if not isinstance(value, list) or not all(
            isinstance(own, dict) for own in value
        ):
            raise MalformedRecord(f"has no list of objects in {key!r}")
        found[key] = value
    given = _parsed(fields, "chat_template_kwargs")
    if given is None:
        return found
    if not isinstance(given, dict):
        raise MalformedRecord("has no object in 'chat_template_kwargs'")
    if taken := [name for name in given if name in RESERVED_VARIABLES or name in found]:
        raise MalformedRecord(
            f"has {taken[0]!r} in 'chat_template_kwargs', which the record itself gives"
        )
    return found | given


def _parsed(fields: Mapping[str, Any], key: str) -> Any:
    """A value that may be a text of JSON, as tables have it whose rows have tools of
    several shapes.
    """
    value = fields.get(key)
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise MalformedRecord(
            f"has a text in {key!r} that is not JSON ({error})"
        ) from error
