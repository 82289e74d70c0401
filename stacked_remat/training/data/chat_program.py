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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

# Noncharacters of Unicode, which are for a program's own use: here they enclose the
# assistant's answers.
_BEGIN = "\ufdd0"
_END = "\ufdd1"
_MARKS = re.compile(f"[{_BEGIN}{_END}]")
_PROBE = "\ue000"  # a private character, in no template
_CALLS = ("tool_calls", "function_call")  # fields of an answer, written after its text
_SHOWN = 1000  # characters of an error message


class _Refused(Exception):
    """A chat that the template does not take; the text is for the user."""


class _Fault(Exception):
    """A template that can't be used; the text says why: `date`, `length` or `syntax
    LINE: MESSAGE`.
    """


def _refuse_text_of(kind: str) -> NoReturn:
    fix = "test it with `is none` first" if kind == "a null" else "use `| tojson`"
    raise _Refused(f"the template writes {kind} where it expects text: {fix}")


class _Null:
    """The null of a message: a template may ask for it as for None, but not write
    it.
    """

    # Templates ask for a null in several ways: `if x`, `x == none`, `x is none`.
    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, _Null)

    def __hash__(self) -> int:
        return hash(None)

    def __repr__(self) -> NoReturn:
        _refuse_text_of("a null")


class _List(list[Any]):
    """A list of a message, which a template may read, but not write as Python would.

    Parts of it and sums with it are such lists too.
    """

    def __getitem__(self, index: Any) -> Any:
        selected = super().__getitem__(index)
        return _List(selected) if isinstance(index, slice) else selected

    def __add__(self, other: Any) -> Any:
        return _List(super().__add__(other))

    def __radd__(self, other: list[Any]) -> Any:
        return _List(other + list(self))

    # Python's own text of a list would be trained on as if it were JSON.
    def __repr__(self) -> NoReturn:
        _refuse_text_of("a list")


class _Object(dict[str, Any]):
    """An object of a message, which a template may read, but not write as Python
    would.
    """

    def get(self, name: str, default: Any = None) -> Any:
        value = super().get(name, default)
        return _NULL if value is None else value

    def __repr__(self) -> NoReturn:
        _refuse_text_of("an object")


_NULL = _Null()


def _unwritable(value: Any) -> Any:
    """The value of a message, of which a template can write only texts and numbers."""
    if value is None:
        return _NULL
    if isinstance(value, dict):
        return _Object((key, _unwritable(item)) for key, item in value.items())
    if isinstance(value, list):
        return _List(map(_unwritable, value))
    return value


class _Message(_Object):
    """A message without its fields that are null, as transformers gives them to
    templates.

    A template that asks `message['content'] is none`, as some do before they write tool
    calls, is told so. So are `message.content == none` and `message.get('content')`.
    """

    # Jinja's sandbox hides names that begin with an underscore from templates
    _null_names: frozenset[str] = frozenset()

    def __missing__(self, name: str) -> Any:
        if name in self._null_names:
            return _null_field()(obj=self, name=name)
        raise KeyError(name)

    def get(self, name: str, default: Any = None) -> Any:
        value = super().get(name, default)
        return self[name] if value == _NULL and name in self._null_names else value


@functools.cache
def _null_field() -> Any:
    from jinja2 import Undefined

    class NullField(Undefined):
        """What is written as nothing, like a field that is not there, and is none."""

        def __eq__(self, other: object) -> bool:
            return _is_null(other)

        def __hash__(self) -> int:
            return hash(None)

    return NullField


def _is_null(value: Any) -> bool:
    return value is None or isinstance(value, _Null | _null_field())


def _message(message: Any) -> Any:
    """The message, as a template may read it."""
    if not isinstance(message, dict):
        return _unwritable(message)
    readable = _Message(
        (name, _unwritable(value))
        for name, value in message.items()
        if value is not None
    )
    # Which fields were null is kept apart: transformers leaves them out, and a template
    # may ask for them all the same.
    readable._null_names = frozenset(
        name for name, value in message.items() if value is None
    )
    return readable


def _is_answer(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(message)


def _written(value: Any) -> Any:
    """What a template writes of a value, which has to be a text or a number."""
    from jinja2 import Undefined

    if isinstance(value, str | int | float | Undefined):
        return value
    if _is_null(value):
        _refuse_text_of("a null")
    if isinstance(value, Mapping):
        _refuse_text_of("an object")
    if isinstance(value, list | tuple):
        _refuse_text_of("a list")
    _refuse_text_of(f"Python's {type(value).__name__}")


def _with_unwritable_list(list_filter: Callable[..., list[Any]]) -> Any:
    """A filter of Jinja, whose list a template can't write as Python would."""

    @functools.wraps(list_filter)
    def filtered(*args: Any, **kwargs: Any) -> _List:
        return _List(list_filter(*args, **kwargs))

    return filtered


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
    if not _is_null(value):
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
    # These make plain lists of Python's, which a template could write.
    for name in ("list", "sort"):
        environment.filters[name] = _with_unwritable_list(environment.filters[name])
    environment.tests["none"] = _is_null
    return environment


class _Chat(NamedTuple):
    """A text of a chat, as `RenderedChat` has it."""

    text: str
    answers: list[tuple[int, int]] | None
    is_open: bool
    has_unmarked_end: bool


class _AnswerEnd(NamedTuple):
    """How a template ends an answer."""

    is_left_open: bool = False  # nothing is written, and the next turn's marker ends it
    is_unmarked: bool = False  # the end is not in {% generation %}, and the answer is


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
        self._source = source
        self._constants = constants
        self._longest = longest
        self._seconds = seconds
        self._dated = {}
        if date is not None:
            self._dated["strftime_now"] = datetime.datetime.fromisoformat(date).strftime

    def chats(
        self,
        messages: Sequence[Any],
        variables: Mapping[str, Any],
        answers: bool,
        prompt: bool,
    ) -> list[_Chat]:
        """The texts of a chat."""
        # A chat that has the marks itself could move the borders of its answers.
        if answers and _MARKS.search(
            json.dumps([messages, variables], ensure_ascii=False)
        ):
            raise _Refused(
                "the chat has U+FDD0 or U+FDD1, which are no characters of a text"
            )
        readable = _List(map(_message, messages))
        marked = self._run(readable, variables, prompt)
        text = _MARKS.sub("", marked)
        if not answers:
            is_open = False
            if messages and _is_answer(messages[-1]) and not prompt:
                is_open = self._answer_end(messages, variables).is_left_open
            return [_Chat(text, None, is_open, False)]
        if _BEGIN in marked:
            answers_of_texts = {text: _marked_answers(marked)}
        else:
            answers_of_texts = self._answers(readable, variables, text)
        answer_end = self._answer_end(messages, variables)
        return [
            _with_ends(text, spans, answer_end)
            for text, spans in answers_of_texts.items()
        ]

    def _answers(
        self, messages: Sequence[Any], variables: Mapping[str, Any], text: str
    ) -> dict[str, list[tuple[int, int]]]:
        """Texts that together have every answer, and the places of the answers in
        each.
        """
        answers: dict[str, list[tuple[int, int]]] = {text: []}
        # From the last answer: the text up to it has the earlier ones too, if the
        # template writes them the same there.
        for at in reversed(range(len(messages))):
            if not _is_answer(messages[at]):
                continue
            before = self._run(messages[:at], variables, True)
            chat = self._run(messages[: at + 1], variables, False)
            if not chat.startswith(before):
                raise _Refused(
                    f"the answer of message {at} does not follow the template's prompt"
                    " for an answer; train on all of the chat, or mark answers in the"
                    " template with {% generation %} and {% endgeneration %}"
                )
            whole = next((text for text in answers if text.startswith(chat)), chat)
            answers.setdefault(whole, []).insert(0, (len(before), len(chat)))
        with_answers = {text: spans for text, spans in answers.items() if spans}
        return with_answers or {text: []}

    def _answer_end(
        self, messages: Sequence[Any], variables: Mapping[str, Any]
    ) -> _AnswerEnd:
        """How the template ends the answers of this chat.

        It is asked to write the chat up to the last answer that has a content, with a
        probe at the end of that content: a template may refuse any other chat, or end
        it otherwise.
        """
        places = [at for at, message in enumerate(messages) if _is_answer(message)]
        if not places:
            return _AnswerEnd()
        with_content = [at for at in places if messages[at].get("content")]
        last = (with_content or places)[-1]
        probed = _List(map(_message, [*messages[:last], _probed(messages[last])]))
        try:
            marked = self._run(probed, variables, False)
        except (_Refused, _Fault):
            return _AnswerEnd()
        _, probe, after = marked.rpartition(_PROBE)
        if not probe:
            return _AnswerEnd()
        in_mark, mark, after_mark = after.partition(_END)
        return _AnswerEnd(
            is_left_open=not _MARKS.sub("", after).strip(),
            is_unmarked=bool(mark and not in_mark.strip() and after_mark.strip()),
        )

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
        variables_and_nulls = {
            "messages": messages,
            "add_generation_prompt": prompt,
            "tools": None,
            "documents": None,
            **self._constants,
            **variables,
            **self._dated,
        }
        values = {
            name: _NULL if value is None else value
            for name, value in variables_and_nulls.items()
        }
        pieces = []
        length = 0
        # Piece by piece, so that a template that writes without end is stopped before
        # it fills the memory.
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


def _probed(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The answer with a probe at the end of its content, and without the calls that
    would be written after it.
    """
    content = answer.get("content")
    if isinstance(content, str):
        content += _PROBE
    elif isinstance(content, list) and content:
        *parts, last = content
        if isinstance(last, dict):
            last = {**last, "text": f"{last.get('text', '')}{_PROBE}"}
        else:
            last = f"{last}{_PROBE}"
        content = [*parts, last]
    else:
        content = _PROBE
    fields = {name: value for name, value in answer.items() if name not in _CALLS}
    return {**fields, "content": content}


def _with_ends(
    text: str, spans: list[tuple[int, int]], answer_end: _AnswerEnd
) -> _Chat:
    """The answers with what ends each of them, if that is the beginning of the next
    turn.
    """
    if not answer_end.is_left_open:
        return _Chat(text, spans, False, bool(spans) and answer_end.is_unmarked)
    ended = []
    for first, stop in spans:
        space = len(text[stop:]) - len(text[stop:].lstrip())
        next_turn = stop + space
        ended.append((first, next_turn + 1 if next_turn < len(text) else stop))
    is_open = bool(spans) and not text[spans[-1][1] :].strip()
    return _Chat(text, ended, is_open, False)


def _marked_answers(marked: str) -> list[tuple[int, int]]:
    """The answers that a template marked, by their places in the text without marks."""
    spans = []
    length = 0
    # Marks come in pairs, so every second piece is an answer.
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
    except MemoryError:
        raise
    except RecursionError:
        return {"refused": "the chat is nested too deeply"}
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {str(error)[:_SHOWN]}"}


if __name__ == "__main__":
    _main(int(sys.argv[1]))
