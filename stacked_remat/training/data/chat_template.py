"""Chat templates, which come with tokenizers as Jinja programs: from messages to one text."""

import atexit
import importlib.util
import json
import os
import pickle
import re
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from .data_error import DataError

# Unicode keeps these noncharacters for a program's own use: here they enclose what the assistant says.
_BEGIN, _END = "\ufdd0", "\ufdd1"
_MARKS = re.compile(f"[{_BEGIN}{_END}]")

_SECONDS = 10  # that one chat may take; milliseconds are usual
_MEMORY = 2**31  # bytes of the process that runs templates
_LONGEST = 2**28  # bytes of its answer


class ChatTemplateError(ValueError):
    """A chat template that refuses the messages it is given, or fails on them."""


@dataclass(frozen=True)
class RenderedChat:
    """A chat as text.

    Attributes:
        text: all of it.
        answers: of each turn of the assistant, the first letter and the one after its last, with what ends
            the turn; None where they were not asked for.
    """

    text: str
    answers: tuple[tuple[int, int], ...] | None = None


@final
class ChatTemplate:
    """A chat template.

    Templates are programs by others. They run in Jinja's sandbox, in a process of their own that is ended
    when a chat takes 10 seconds or 2 GiB. What depends on the clock (`strftime_now`) is not defined for them,
    so that the same messages always give the same text.

    Attributes:
        source: the Jinja program.
        special_tokens: what the program may refer to, such as `bos_token`.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        self.source = source
        self.special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False) -> str:
        """The text of a chat.

        Args:
            messages: turns with `role`, `content` and what else the program reads.
            add_generation_prompt: whether to end with what begins an answer.

        Raises:
            ChatTemplateError: the template refuses the messages, with its reason.
            DataError: Jinja is not installed, the program is none, or it takes too long or too much memory.
        """
        return _MARKS.sub("", self._run(messages, add_generation_prompt))

    def render_with_answers(self, messages: Sequence[Mapping[str, Any]]) -> RenderedChat:
        """The text of a chat, and where the assistant speaks in it.

        That is what the template marks with `{% generation %}`. One without such marks is run once more for
        the messages up to each answer, and once for those up to its end.

        Raises:
            ChatTemplateError: as for `render`; or there are no marks, and the template writes a turn
                otherwise once another follows.
            DataError: as for `render`.
        """
        marked = self._run(messages, False)
        if _BEGIN in marked:
            return _without_marks(marked)
        answers = []
        for at, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self.render(messages[:at], add_generation_prompt=True)
                after = self.render(messages[: at + 1])
                if not (marked.startswith(after) and after.startswith(before)):
                    raise ChatTemplateError(
                        f"where the answer of message {at} stands can't be told, because the template "
                        f"writes messages otherwise once others follow; train on all of the chat, or mark "
                        f"answers in the template with {{% generation %}} and {{% endgeneration %}}"
                    )
                answers.append((len(before), len(after)))
        return RenderedChat(marked, tuple(answers))

    def _run(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        values = {
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
            **self.special_tokens,
        }
        answer = _worker.ask(self.source, values)
        if "text" in answer:
            return answer["text"]
        if "limit" in answer:
            raise DataError(
                f"The tokenizer's chat template was stopped: for one chat it takes more than "
                f"{f'{_SECONDS} seconds' if answer['limit'] == 'time' else f'{_MEMORY / 2**30:g} GiB'}. "
                f"It is a program that came with the tokenizer (chat_template.jinja, or `chat_template` in "
                f"tokenizer_config.json): mend it, or take another tokenizer."
            )
        if "line" in answer:
            raise DataError(
                f"The tokenizer's chat template is no Jinja, line {answer['line']}: {answer['error']}"
            )
        raise ChatTemplateError(answer["error"])


def _without_marks(marked: str) -> RenderedChat:
    if any(mark != (_BEGIN, _END)[number % 2] for number, mark in enumerate(_MARKS.findall(marked))):
        raise ChatTemplateError("the messages hold Unicode noncharacters, which mark answers here")
    text, answers = "", []
    for number, piece in enumerate(_MARKS.split(marked)):
        if number % 2:
            answers.append((len(text), len(text) + len(piece)))
        text += piece
    return RenderedChat(text, tuple(answers))


@final
class _Worker:
    """The process that runs templates, one request after the other; started when it is first asked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def ask(self, source: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """What `chat_template_worker.py` answers; a limit that was passed if it does not in time."""
        request = pickle.dumps((source, dict(values)))
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            try:
                process.stdin.write(len(request).to_bytes(8, "little") + request)
                process.stdin.flush()
                return json.loads(self._read(process))
            except TimeoutError:
                self.close()
                return {"limit": "time"}
            except (EOFError, BrokenPipeError):  # it was ended for the memory that it took
                self.close()
                return {"limit": "memory"}
            except BaseException:  # an interrupt: what it answers later would be taken for another's answer
                self.close()
                raise

    def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return self._process
        if importlib.util.find_spec("jinja2") is None:
            raise DataError(
                "Chats take jinja2 for their template, which is not installed: pip install "
                "'stacked_remat[data]'."
            )
        self.close()
        program = str(Path(__file__).with_name("chat_template_worker.py"))
        self._owner = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-P", program, str(_MEMORY), str(_SECONDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,  # Ctrl-C is for the process that asks
        )
        return self._process

    def _read(self, process: subprocess.Popen[bytes]) -> bytes:
        """The next answer."""
        assert process.stdout is not None
        deadline = time.monotonic() + _SECONDS
        found = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while len(found) < 8 or len(found) < 8 + int.from_bytes(found[:8], "little"):
                if not selector.select(deadline - time.monotonic()):
                    raise TimeoutError
                piece = os.read(process.stdout.fileno(), 2**20)
                if not piece or len(found) > _LONGEST:
                    raise EOFError
                found += piece
        return bytes(found[8:])


_worker = _Worker()
atexit.register(_worker.close)
