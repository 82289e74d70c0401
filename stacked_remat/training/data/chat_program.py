"""Renders chats in a process of its own, whose memory and time have limits.

`chat_template.py` runs this file as a script, which therefore imports nothing of the
library. A line on its standard input is a template, or a list of chats with the numbers
of their templates, which is answered by a line with a list of replies. A render that
takes too long ends the process by SIGPROF; one that takes too much memory ends it with
status 1.
"""

import contextlib
import datetime
import functools
import json
import re
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

# Noncharacters of Unicode, which are for a program's own use: here they enclose the
# assistant's answers.
_BEGIN, _END = "\ufdd0", "\ufdd1"
_MARKS = re.compile(f"[{_BEGIN}{_END}]")
_PROBE = "\ue000"  # a private character, in no template
_SHOWN = 1000  # characters of an error message


class _Refused(Exception):
    """A chat that the template does not take; the text is for the user."""


class _Fault(Exception):
    """A template that can't be used; the text says why: `date`, `length` or `syntax
    LINE: MESSAGE`.
    """


def _refuse_text_of(kind: str) -> NoReturn:
    raise _Refused(f"the template writes {kind} of a message where it expects text")


class _Null:
    """The null of a message: a template may ask for it as for None, but not write
    it.
    """

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, _Null)

    def __hash__(self) -> int:
        return hash(None)

    def __repr__(self) -> NoReturn:
        _refuse_text_of("a null")


class _List(list[Any]):
    """A list of a message, which a template may read, but not write as Python would."""

    def __repr__(self) -> NoReturn:
        _refuse_text_of("a list")


class _Object(dict[str, Any]):
    """An object of a message, which a template may read, but not write as Python
    would.
    """

    def __repr__(self) -> NoReturn:
        _refuse_text_of("an object")


_NULL = _Null()


def _unwritable(value: Any) -> Any:
    """The value of a message, of which a template can write only texts and numbers."""
    if value is None:
        return _NULL
    if isinstance(value, dict):
        return _Object((key, _unwritable(own)) for key, own in value.items())
    if isinstance(value, list):
        return _List(map(_unwritable, value))
    return value


class _Message(_Object):
    """A message without its fields that are null, as transformers gives them to
    templates.

    A template that asks `message['content'] is none`, as some do before they write tool
    calls, is told so.
    """

    nulls: frozenset[str] = frozenset()

    def __missing__(self, name: str) -> Any:
        if name in self.nulls:
            return _null_field()(obj=self, name=name)
        raise KeyError(name)


@functools.cache
def _null_field() -> Any:
    from jinja2 import Undefined

    return type("NullField", (Undefined,), {})


def _message(message: Any) -> Any:
    """The message, as a template may read it."""
    if not isinstance(message, dict):
        return _unwritable(message)
    found = _Message(
        (name, _unwritable(value))
        for name, value in message.items()
        if value is not None
    )
    found.nulls = frozenset(name for name, value in message.items() if value is None)
    return found


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(message)


def _written(value: Any) -> Any:
    """What a template writes of a value."""
    if value is None:
        raise _Refused("the template writes a value that is null")
    return value


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter escapes HTML."""
    options: Any = {
        "ensure_ascii": ensure_ascii,
        "indent": indent,
        "separators": separators,
    }
    return json.dumps(value, sort_keys=sort_keys, default=_json_of_null, **options)


def _json_of_null(value: Any) -> None:
    if not isinstance(value, _Null):
        raise TypeError(f"{type(value).__name__} is no value of JSON")


@functools.cache
def _environment() -> Any:
    from jinja2 import ext, nodes, sandbox

    class Generation(ext.Extension):
        """The tags that some templates put around the assistant's answers."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(
                line
            )

        def _mark(self, caller: Any) -> str:
            return f"{_BEGIN}{caller()}{_END}"

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_written,
        extensions=[Generation, ext.loopcontrols],
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.filters["tojson"] = _to_json
    environment.tests["none"] = lambda value: (
        value is None or isinstance(value, _Null | _null_field())
    )
    return environment


class Template:
    """A chat template, with what it needs beside the messages."""

    def __init__(
        self,
        source: str,
        constants: Mapping[str, str],
        date: str | None,
        longest: int,
        seconds: float,
    ):
        self._source, self._constants, self._longest, self._seconds = (
            source,
            constants,
            longest,
            seconds,
        )
        self._dated = {}
        if date is not None:
            self._dated["strftime_now"] = datetime.datetime.fromisoformat(date).strftime

    def chats(
        self,
        messages: Sequence[Any],
        variables: Mapping[str, Any],
        answers: bool,
        prompt: bool,
    ) -> list[tuple[str, list[tuple[int, int]] | None, bool]]:
        """The texts of a chat, the places of the answers in each, and whether its last
        turn is left open.
        """
        if answers and _MARKS.search(json.dumps(messages, ensure_ascii=False)):
            raise _Refused(
                "a message has U+FDD0 or U+FDD1, which are no characters of a text"
            )
        messages = _List(map(_message, messages))
        marked = self._run(messages, variables, prompt)
        text = _MARKS.sub("", marked)
        if not answers:
            ends_in_answer = (
                bool(messages)
                and not prompt
                and messages[-1].get("role") == "assistant"
            )
            return [(text, None, ends_in_answer and self._leaves_turns_open)]
        if _BEGIN in marked:
            found = {text: _marked_answers(marked)}
        else:
            found = self._answers(messages, variables, text)
        return [self._with_ends(text, spans) for text, spans in found.items()]

    def _answers(
        self, messages: Sequence[Any], variables: Mapping[str, Any], text: str
    ) -> dict[str, list[tuple[int, int]]]:
        """Texts that together have every answer, and the places of the answers in
        each.
        """
        found: dict[str, list[tuple[int, int]]] = {text: []}
        for at in reversed(range(len(messages))):
            if messages[at]["role"] != "assistant":
                continue
            before = self._run(_List(messages[:at]), variables, True)
            chat = self._run(_List(messages[: at + 1]), variables, False)
            if not chat.startswith(before):
                raise _Refused(
                    f"the answer of message {at} does not follow the template's prompt"
                    " for an answer; train on all of the chat, or mark answers in the"
                    " template with {% generation %} and {% endgeneration %}"
                )
            whole = next((text for text in found if text.startswith(chat)), chat)
            found.setdefault(whole, []).insert(0, (len(before), len(chat)))
        with_answers = {text: spans for text, spans in found.items() if spans}
        return with_answers or {text: []}

    def _with_ends(
        self, text: str, spans: list[tuple[int, int]]
    ) -> tuple[str, list[tuple[int, int]], bool]:
        """The answers with what ends each of them, if that is the beginning of the next
        turn.
        """
        if not self._leaves_turns_open:
            return text, spans, False
        ended = []
        for first, stop in spans:
            space = len(text[stop:]) - len(text[stop:].lstrip())
            next_turn = stop + space
            ended.append((first, next_turn + 1 if next_turn < len(text) else stop))
        return text, ended, bool(spans) and not text[spans[-1][1] :].strip()

    @functools.cached_property
    def _leaves_turns_open(self) -> bool:
        """Whether the template writes nothing after an answer, so that the next turn's
        marker ends it.
        """
        turns = [{"role": role, "content": _PROBE} for role in ("user", "assistant")]
        try:
            text = _MARKS.sub("", self._run(_unwritable(turns), {}, False))
        except (_Refused, _Fault):
            return False
        _, content, after = text.rpartition(_PROBE)
        return bool(content) and not after.strip()

    def _run(self, messages: Any, variables: Mapping[str, Any], prompt: bool) -> str:
        # Without a handler the signal ends the process
        signal.setitimer(signal.ITIMER_PROF, self._seconds)
        try:
            return self._rendered(messages, variables, prompt)
        except (MemoryError, _Fault):
            raise
        except Exception as error:  # templates can raise anything
            if str(error) == "'strftime_now' is undefined":
                raise _Fault("date") from error
            raise _Refused(str(error)[:_SHOWN]) from error
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def _rendered(
        self, messages: Any, variables: Mapping[str, Any], prompt: bool
    ) -> str:
        values = {
            "messages": messages,
            "add_generation_prompt": prompt,
            "tools": None,
            "documents": None,
            **self._constants,
            **variables,
            **self._dated,
        }
        pieces, length = [], 0
        for piece in self._compiled.generate(**values):
            length += len(piece)
            if length > self._longest:
                raise _Fault("length")
            pieces.append(piece)
        return "".join(pieces)

    @functools.cached_property
    def _compiled(self) -> Any:
        try:
            return _environment().from_string(self._source)
        except MemoryError:
            raise
        except Exception as error:  # Jinja also evaluates constants while it compiles
            raise _Fault(
                f"syntax {getattr(error, 'lineno', 1)}: {str(error)[:_SHOWN]}"
            ) from error


def _marked_answers(marked: str) -> list[tuple[int, int]]:
    """The answers that a template marked, by their places in the text without marks."""
    spans, length = [], 0
    for number, piece in enumerate(_MARKS.split(marked)):
        if number % 2:
            spans.append((length, length + len(piece)))
        length += len(piece)
    return spans


def _limit_memory(num_bytes: int) -> None:
    """Limits the process's memory, where the system can: macOS knows this limit and
    does not enforce it.
    """
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))


def _main(max_bytes: int) -> None:
    # Which a terminal sends to this process too
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _limit_memory(max_bytes)
    templates: list[Template] = []
    for line in sys.stdin.buffer:
        request = json.loads(line)
        if isinstance(request, dict):
            templates.append(Template(**request))
            continue
        replies = [_reply(templates[number], chat) for number, chat in request]
        text = json.dumps(replies, ensure_ascii=False)
        sys.stdout.buffer.write(text.encode("utf-8", "surrogatepass") + b"\n")
        sys.stdout.buffer.flush()


def _reply(template: Template, chat: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {"chats": template.chats(**chat)}
    except _Refused as error:
        return {"refused": str(error)}
    except _Fault as error:
        return {"fault": str(error)}


if __name__ == "__main__":
    _main(int(sys.argv[1]))
