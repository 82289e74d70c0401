"""Chat templates, the Jinja programs of tokenizers that turn messages into one text.

Templates come with downloaded tokenizers, so they run in `chat_program.py`, in a
process of its own: Jinja's sandbox denies them files and Python's internals, and the
system limits their memory and time.
"""

import atexit
import datetime
import decimal
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

from ..._messages import shown
from ..errors import DataError
from ..extra import optional

_LONGEST = 2**24  # characters of a chat
_MEMORY = 2**29  # bytes of the process, of which Python and Jinja take about 50 MiB
_SECONDS = 2.0  # of CPU time to render a chat once
_PROGRAM = Path(__file__).with_name("chat_program.py")
_FIX = (
    "Fix the template (chat_template.jinja, or `chat_template` in"
    " tokenizer_config.json), or use another tokenizer."
)


class ChatTemplateError(ValueError):
    """A chat template raised an error for the messages that it was given."""


@dataclass(frozen=True)
class RenderedChat:
    """A chat, or a prompt with its completion, as text.

    Attributes:
        text: all of it.
        answers: first character of each of the assistant's turns, and the one after its
            last (what ends the turn is included); None if they were not asked for.
        is_open: whether its last turn is an answer that the template leaves open, so
            that the tokenizer's end token has to end it.
        has_unmarked_end: whether its answers lack what ends them, because the template
            writes that outside of `{% generation %}`.
        is_plain: whether no template wrote it, so that it gets the tokens that the
            tokenizer adds to a text.
    """

    text: str
    answers: tuple[tuple[int, int], ...] | None = None
    is_open: bool = False
    has_unmarked_end: bool = False
    is_plain: bool = False


@final
class ChatTemplate:
    """A chat template.

    Templates have no access to files and Python's internals. One may write 2**24
    characters, and take 2 seconds of CPU time and, on Linux, 512 MiB of memory. The
    same messages always give the same text: the date is given.

    Messages are plain values of JSON. A template that writes a null, a list or an
    object as Python would (`None`, `[...]`, `{...}`) is refused for that chat; only
    `tools` and `documents` may be made texts so (`tools | string`).

    Attributes:
        sources: the Jinja programs by name. As in transformers, `tool_use` renders
            chats with `tools` if there is one, and `default` all others.
        special_tokens: values of the names that the programs may use, such as
            `bos_token`.
        date: the day that `strftime_now` takes for today, as `2025-06-30`, at midnight;
            None to leave that function undefined.
    """

    def __init__(
        self,
        source: str | Mapping[str, str],
        special_tokens: Mapping[str, str],
        date: str | None = None,
    ):
        """`source` is the program, or several by name; a `TypeError` for others."""
        sources = {"default": source} if isinstance(source, str) else source
        is_by_name = isinstance(sources, Mapping) and all(
            isinstance(text, str) for entry in sources.items() for text in entry
        )
        if not is_by_name:
            raise TypeError(
                "ChatTemplate: `source` is the Jinja program as a text, or a dict of"
                f" such texts by name; got {shown(source)}. Write the list of a"
                " tokenizer_config.json as {entry['name']: entry['template'] for entry"
                " in it}."
            )
        self.sources = dict(sources)
        self.special_tokens = dict(special_tokens)
        self.date = date

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The text of a chat.

        Args:
            messages: turns with `role`, `content` and any other fields that the program
                reads.
            add_generation_prompt: whether to end with the beginning of an answer.
            variables: further ones of the program, such as `tools` and
                `enable_thinking`.

        Raises:
            ChatTemplateError: the template raised an error for these messages, or
                writes a null, a list or an object.
            DataError: Jinja is not installed, there is no template for such chats, or
                the template is not valid Jinja, asks for a date that is not given, or
                takes too much memory or time.
        """
        (chat,) = self._one(
            self._request(messages, variables, prompt=add_generation_prompt)
        )
        return chat.text

    def render_whole(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> RenderedChat:
        """A chat all of which is trained on; errors as `render`."""
        (chat,) = self._one(self._request(messages, variables))
        return chat

    def render_with_answers(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[RenderedChat]:
        """A chat as texts that together have each of the assistant's answers once, and
        where.

        Answers are what the template marks with `{% generation %}`. A template without
        such marks is run twice more for each answer: on the messages before it, with
        the prompt for an answer, and on those up to it. An answer that is written
        otherwise where other messages follow, such as without its thoughts, is that of
        the chat up to it, which is a text of its own.

        Where the template writes nothing after an answer, the first character of the
        next turn ends it and belongs to it, and a last answer `is_open`.

        Raises:
            ChatTemplateError: as for `render`; or there are no marks, and an answer
                does not follow the prompt.
            DataError: as for `render`.
        """
        return self._one(self._request(messages, variables, answers=True))

    def words_for(self, variables: Mapping[str, Any]) -> frozenset[str]:
        """All words of the program for a chat with these variables; it can't ask for a
        variable or field whose name is not among them.
        """
        return _words(self.source_for(variables))

    def source_for(self, variables: Mapping[str, Any] = MappingProxyType({})) -> str:
        """The program for a chat with these variables."""
        # As transformers chooses among several templates
        if variables.get("tools") is not None and "tool_use" in self.sources:
            return self.sources["tool_use"]
        if "default" not in self.sources:
            raise DataError(
                "The tokenizer has chat templates named"
                f" {', '.join(self.sources) or 'nothing'}, and none is named `default`."
                " Write the one to use to a chat_template.jinja beside its"
                " tokenizer.json."
            )
        return self.sources["default"]

    def render_all(
        self,
        chats: Sequence[tuple[Sequence[Mapping[str, Any]], Mapping[str, Any]]],
        *,
        answers: bool,
    ) -> list[list[RenderedChat] | ChatTemplateError | DataError]:
        """Many chats at once, which is faster.

        Args:
            chats: messages and variables of each.
            answers: as `render_with_answers`, or else as `render_whole`.

        Returns:
            For each chat its texts, or the error that those would raise. Chats after
            one that takes too much memory or time are left out.
        """
        return self._rendered([self._request(*chat, answers=answers) for chat in chats])

    def _request(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        *,
        answers: bool = False,
        prompt: bool = False,
    ) -> tuple[str, dict[str, Any]]:
        """The template for a chat, and what `chat_program.py` needs beside it."""
        chat = {
            "messages": list(messages),
            "variables": dict(variables),
            "answers": answers,
            "prompt": prompt,
        }
        return self.source_for(variables), chat

    def _one(self, request: tuple[str, dict[str, Any]]) -> list[RenderedChat]:
        (chats,) = self._rendered([request])
        if isinstance(chats, Exception):
            raise chats
        return chats

    def _rendered(
        self, requests: Sequence[tuple[str, dict[str, Any]]]
    ) -> list[list[RenderedChat] | ChatTemplateError | DataError]:
        options = {"constants": self.special_tokens, "date": self.date}
        options |= {"longest": _LONGEST, "seconds": _SECONDS}
        templates = {
            source: json.dumps({"source": source, **options}) for source, _ in requests
        }
        try:
            replies = _renderer(os.getpid()).ask(
                [(templates[source], chat) for source, chat in requests]
            )
        # One of the chats is to blame, and only asking for each alone tells which.
        except (ChatTemplateError, DataError) as error:
            if len(requests) == 1:
                return [error]
            return self._one_by_one(requests)
        return [_of_reply(reply) for reply in replies]

    def _one_by_one(
        self, requests: Sequence[tuple[str, dict[str, Any]]]
    ) -> list[list[RenderedChat] | ChatTemplateError | DataError]:
        """The results up to the first DataError, to find which of the chats ended the
        program.
        """
        results = []
        for request in requests:
            results += self._rendered([request])
            if isinstance(results[-1], DataError):
                break
        return results


@functools.cache
def _words(source: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", source))


def _of_reply(
    reply: Mapping[str, Any],
) -> list[RenderedChat] | ChatTemplateError | DataError:
    """The texts of a chat, or the error, that `chat_program.py` replied."""
    if "refused" in reply:
        return ChatTemplateError(reply["refused"])
    if "fault" in reply:
        return _error_of_fault(reply["fault"])
    return [
        RenderedChat(
            text,
            None if spans is None else tuple((first, stop) for first, stop in spans),
            is_open,
            has_unmarked_end,
        )
        for text, spans, is_open, has_unmarked_end in reply["chats"]
    ]


def _error_of_fault(fault: str) -> DataError:
    """The error for a template that `chat_program.py` can't use."""
    if fault == "date":
        return DataError(
            "The tokenizer's chat template writes today's date (strftime_now), with"
            " which runs would not repeat. Give one: data.chat_date, such as"
            " 2025-06-30."
        )
    if fault == "length":
        return DataError(
            f"The tokenizer's chat template writes more than {_LONGEST:,} characters"
            f" for one chat. {_FIX}"
        )
    line_and_message = fault.removeprefix("syntax ")
    return DataError(
        f"The tokenizer's chat template is not valid Jinja, line {line_and_message}"
    )


@final
class _Renderer:
    """A running `chat_program.py`."""

    def __init__(self) -> None:
        optional("jinja2", "A chat template")
        # The program finds Jinja where this process does, and nothing in its own
        # folder.
        paths = os.pathsep.join(path for path in sys.path if path)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_PROGRAM), str(_MEMORY)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": paths},
            )
        except OSError as error:
            raise DataError(
                f"Can't start the process that runs chat templates: {error.strerror}."
            ) from error
        # A forked process has the pipes too, and must neither write to them nor end the
        # program.
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._numbers: dict[str, int] = {}  # of the templates that the program has
        atexit.register(self.close)

    def ask(
        self, chats: Sequence[tuple[str, Mapping[str, Any]]]
    ) -> list[dict[str, Any]]:
        """The program's replies for chats, each with its template in JSON.

        Raises ChatTemplateError if one of the chats is not JSON, and DataError if one
        ended the program.
        """
        with self._lock:
            # A template is sent once, and named by its number from then on.
            new = [
                template
                for template in dict.fromkeys(template for template, _ in chats)
                if template not in self._numbers
            ]
            numbers = self._numbers | {
                template: len(self._numbers) + at for at, template in enumerate(new)
            }
            try:
                request = json.dumps(
                    [(numbers[template], chat) for template, chat in chats],
                    default=_plain,
                )
            except (TypeError, ValueError, RecursionError) as error:
                raise ChatTemplateError(
                    f"the chat can't be written as JSON: {error}"
                ) from error
            self._numbers = numbers
            try:
                replies = self._replies([*new, request])
            except BaseException:  # else a later chat would get the reply for this one
                self.close()
                raise
        if not replies:
            raise self._error_of_end()
        return json.loads(replies.decode("utf-8", "surrogatepass"))

    def _replies(self, lines: Sequence[str]) -> bytes:
        """A line of replies; empty if the program ended."""
        to_program = self._process.stdin
        from_program = self._process.stdout
        assert to_program is not None and from_program is not None
        try:
            to_program.writelines(line.encode() + b"\n" for line in lines)
            to_program.flush()
        except BrokenPipeError:
            return b""
        return from_program.readline()

    def _error_of_end(self) -> DataError:
        """What ended the program; the next chat gets a new one."""
        status = self._process.wait()
        self.close()
        if status == -signal.SIGPROF:
            limit = f"{_SECONDS:g} seconds of CPU time"
        else:
            limit = f"{_MEMORY >> 20:,} MiB of memory"
        return DataError(
            f"The tokenizer's chat template takes more than {limit} for one chat."
            f" {_FIX}"
        )

    def close(self) -> None:
        """Ends the program."""
        atexit.unregister(self.close)
        _renderer.cache_clear()
        if os.getpid() == self._owner:  # not in a process that was forked
            self._process.kill()
            self._process.communicate()


@functools.cache
def _renderer(pid: int) -> _Renderer:
    """The renderer of this process, whose number a fork changes."""
    return _Renderer()


def _plain(value: Any) -> str:
    """The text of a value that Parquet has and JSON lacks."""
    if isinstance(value, datetime.date | datetime.time | decimal.Decimal):
        return str(value)
    raise TypeError(f"{type(value).__name__} is no text")
