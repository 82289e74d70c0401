"""Chat templates, the Jinja programs of tokenizers that turn messages into one text."""

import atexit
import contextlib
import importlib.util
import json
import multiprocessing
import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, final

from .chat_answers import find_answers
from .chat_template_worker import BEGIN, END
from .data_error import DataError

_MARKS = re.compile(f"[{BEGIN}{END}]")

_SECONDS = 10  # for one chat; milliseconds are usual
_MEMORY = 2**31  # bytes of the process that runs templates
_LONGEST = 2**28  # bytes of an answer


class ChatTemplateError(ValueError):
    """A chat template raised an error for the messages that it was given."""


@dataclass(frozen=True)
class RenderedChat:
    """A chat as text.

    Attributes:
        text: all of it.
        answers: first character of each of the assistant's turns, and the one after its last (the end of the
            turn is included); None if they were not asked for.
    """

    text: str
    answers: tuple[tuple[int, int], ...] | None = None


@final
class ChatTemplate:
    """A chat template.

    Templates are untrusted programs. They run in Jinja's sandbox, in a process of their own that is killed
    when a chat takes 10 seconds or 2 GiB. The same messages always give the same text: the date is given.

    Attributes:
        source: the Jinja program.
        special_tokens: values of the names that the program may use, such as `bos_token`.
        date: the day that `strftime_now` takes for today, as `2025-06-30`, at midnight; None to leave that
            function undefined.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], date: str | None = None):
        self.source = source
        self.special_tokens = dict(special_tokens)
        self.date = date

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False) -> str:
        """The text of a chat.

        Args:
            messages: turns with `role`, `content` and any other fields that the program reads.
            add_generation_prompt: whether to end with the beginning of an answer.

        Raises:
            ChatTemplateError: the template raised an error for these messages.
            DataError: Jinja is not installed, or the template is not valid Jinja, asks for a date that is not
                given, takes too long or takes too much memory.
        """
        return _MARKS.sub("", self._run(messages, add_generation_prompt))

    def render_with_answers(self, messages: Sequence[Mapping[str, Any]]) -> RenderedChat:
        """The text of a chat, and the positions of the assistant's answers in it.

        Answers are what the template marks with `{% generation %}`. A template without such marks is run
        twice more for each answer: on the messages before it, and on those up to and including it. Earlier
        answers may lack their thoughts in the whole chat, or end otherwise.

        Raises:
            ChatTemplateError: as for `render`; or there are no marks, and an answer can't be found in the
                text.
            DataError: as for `render`.
        """
        marked = self._run(messages, False)
        if BEGIN in marked:
            return _without_marks(marked)
        answers = find_answers(self._render, messages, marked)
        lost = [at for at, answer in answers.items() if answer is None]
        if lost:
            raise ChatTemplateError(
                f"the answer of message {lost[0]} can't be found in the text, because the template changes "
                f"it when others follow; train on all of the chat, or mark answers in the template with "
                f"{{% generation %}} and {{% endgeneration %}}"
            )
        return RenderedChat(marked, tuple(answer for answer in answers.values() if answer is not None))

    def _render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        return self.render(messages, add_generation_prompt=add_generation_prompt)

    def _run(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        values = {
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
            **self.special_tokens,
        }
        answer = _worker.ask(self.source, values, self.date)
        if "text" in answer:
            return answer["text"]
        if "limit" in answer:
            raise DataError(
                f"The tokenizer's chat template was stopped: it took more than "
                f"{f'{_SECONDS} seconds' if answer['limit'] == 'time' else f'{_MEMORY / 2**30:g} GiB'} for "
                f"one chat. Fix the template (chat_template.jinja, or `chat_template` in "
                f"tokenizer_config.json), or use another tokenizer."
            )
        if "line" in answer:
            raise DataError(
                f"The tokenizer's chat template is not valid Jinja, line {answer['line']}: {answer['error']}"
            )
        if answer["error"] == "'strftime_now' is undefined":
            raise DataError(
                "The tokenizer's chat template writes today's date (strftime_now), with which runs would not "
                "repeat. Give one: data.chat_date (--chat_date of models.generate), such as 2025-06-30."
            )
        raise ChatTemplateError(answer["error"])


def _without_marks(marked: str) -> RenderedChat:
    if any(mark != (BEGIN, END)[number % 2] for number, mark in enumerate(_MARKS.findall(marked))):
        raise ChatTemplateError(
            "the messages contain the Unicode noncharacters U+FDD0 or U+FDD1, which mark answers here"
        )
    text, answers = "", []
    for number, piece in enumerate(_MARKS.split(marked)):
        if number % 2:
            answers.append((len(text), len(text) + len(piece)))
        text += piece
    return RenderedChat(text, tuple(answers))


@final
class _Worker:
    """The process that runs templates, one request at a time; started by the first request."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._owner = 0

    def ask(self, source: str, values: Mapping[str, Any], date: str | None) -> dict[str, Any]:
        """The answer of `chat_template_worker.py`, or the limit that was exceeded."""
        answer: dict[str, Any] = {"limit": "memory"}  # which a process that ended has exceeded
        with self._lock:
            connection = self._running()
            try:
                with contextlib.suppress(EOFError, OSError):
                    connection.send((source, dict(values), date))
                    in_time = connection.poll(_SECONDS)
                    answer = json.loads(connection.recv_bytes(_LONGEST)) if in_time else {"limit": "time"}
            finally:  # also for an interrupt: a late answer must not be taken for the next request's
                if "limit" in answer:
                    self.close()
        return answer

    def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is not None and self._connection is not None:
            self._connection.close()
            if self._owner == os.getpid():
                process.kill()
                process.wait()

    def _running(self) -> Connection:
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            assert self._connection is not None
            return self._connection
        if importlib.util.find_spec("jinja2") is None:
            raise DataError(
                "Chat templates need jinja2, which is not installed: pip install 'stacked_remat[data]'."
            )
        self.close()
        self._owner = os.getpid()
        program = str(Path(__file__).with_name("chat_template_worker.py"))
        self._connection, other_end = multiprocessing.Pipe()
        with other_end:
            self._process = subprocess.Popen(
                [sys.executable, "-P", program, *map(str, (other_end.fileno(), _MEMORY, _SECONDS))],
                pass_fds=[other_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                start_new_session=True,  # Ctrl-C is for the process that asks
            )
        return self._connection


_worker = _Worker()
atexit.register(_worker.close)
