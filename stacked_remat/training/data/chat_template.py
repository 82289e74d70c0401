"""Chat templates, the Jinja programs of tokenizers that turn messages into one text."""

import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, final

from ..errors import DataError
from ..extra import optional

# Noncharacters of Unicode, which are for a program's own use: here they enclose the assistant's answers.
_BEGIN, _END = "\ufdd0", "\ufdd1"
_MARKS = re.compile(f"[{_BEGIN}{_END}]")
_LONGEST = 2**28  # characters of a chat
_SHOWN = 1000  # characters of an error message


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

    Templates run in Jinja's sandbox, which denies them files and Python's internals, and may write 2**28
    characters. The same messages always give the same text: the date is given.

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

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The text of a chat.

        Args:
            messages: turns with `role`, `content` and any other fields that the program reads.
            add_generation_prompt: whether to end with the beginning of an answer.
            variables: further ones of the program, such as `enable_thinking`.

        Raises:
            ChatTemplateError: the template raised an error for these messages.
            DataError: Jinja is not installed, or the template is not valid Jinja, asks for a date that is not
                given, or writes too much.
        """
        return _MARKS.sub("", self._run(messages, add_generation_prompt, variables))

    def render_with_answers(self, messages: Sequence[Mapping[str, Any]]) -> list[RenderedChat]:
        """A chat as texts that together have each of the assistant's answers once, and where.

        Answers are what the template marks with `{% generation %}`. A template without such marks is run
        twice more for each answer: on the messages before it, with the prompt for an answer, and on those up
        to it. An answer that is written otherwise where other messages follow, such as without its thoughts,
        is that of the chat up to it, which is a text of its own.

        Raises:
            ChatTemplateError: as for `render`; or there are no marks, and an answer does not follow the
                prompt.
            DataError: as for `render`.
        """
        if _MARKS.search(json.dumps(messages, ensure_ascii=False, default=str)):
            raise ChatTemplateError("a message has U+FDD0 or U+FDD1, which are no characters of a text")
        marked = self._run(messages, False, {})
        if _BEGIN in marked:
            text, found = "", []
            for number, piece in enumerate(_MARKS.split(marked)):
                if number % 2:
                    found.append((len(text), len(text) + len(piece)))
                text += piece
            return [RenderedChat(text, tuple(found))]
        texts: dict[str, list[tuple[int, int]]] = {marked: []}
        for at in reversed([at for at, message in enumerate(messages) if message["role"] == "assistant"]):
            prompt = self.render(messages[:at], add_generation_prompt=True)
            chat = self.render(messages[: at + 1])
            if not chat.startswith(prompt):
                raise ChatTemplateError(
                    f"the answer of message {at} does not follow the template's prompt for an answer; train "
                    f"on all of the chat, or mark answers in the template with {{% generation %}} and "
                    f"{{% endgeneration %}}"
                )
            whole = next((text for text in texts if text.startswith(chat)), chat)
            texts.setdefault(whole, []).insert(0, (len(prompt), len(chat)))
        found = [RenderedChat(text, tuple(spans)) for text, spans in texts.items() if spans]
        return found or [RenderedChat(marked, ())]

    def _run(self, messages: Sequence[Mapping[str, Any]], prompt: bool, variables: Mapping[str, Any]) -> str:
        values = {
            "messages": list(messages),
            "add_generation_prompt": prompt,
            "tools": None,
            "documents": None,
            **self.special_tokens,
            **variables,
        }
        if self.date is not None:
            values["strftime_now"] = datetime.datetime.fromisoformat(self.date).strftime
        template, text, is_long = _compiled(self.source), "", False
        try:
            for piece in template.generate(**values):
                if is_long := len(text) + len(piece) > _LONGEST:
                    break
                text += piece
        except Exception as error:  # templates can raise anything
            if str(error) == "'strftime_now' is undefined":
                raise DataError(
                    "The tokenizer's chat template writes today's date (strftime_now), with which runs would "
                    "not repeat. Give one: data.chat_date, such as 2025-06-30."
                ) from error
            raise ChatTemplateError(str(error)[:_SHOWN]) from error
        if is_long:
            raise DataError(
                f"The tokenizer's chat template writes more than {_LONGEST:,} characters for one chat. Fix "
                f"the template (chat_template.jinja, or `chat_template` in tokenizer_config.json), or use "
                f"another tokenizer."
            )
        return text


@functools.lru_cache(maxsize=8)
def _compiled(source: str) -> Any:
    environment = _environment()
    try:
        return environment.from_string(source)
    except Exception as error:  # Jinja also evaluates constants while it compiles
        raise DataError(
            f"The tokenizer's chat template is not valid Jinja, line {getattr(error, 'lineno', 1)}: "
            f"{str(error)[:_SHOWN]}"
        ) from error


@functools.cache
def _environment() -> Any:
    names = ("jinja2", "jinja2.ext", "jinja2.nodes", "jinja2.sandbox")
    jinja2, ext, nodes, sandbox = (optional(name, "A chat template") for name in names)

    class Generation(ext.Extension):
        """The tags that some templates put around the assistant's answers."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return f"{_BEGIN}{caller()}{_END}"

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.globals["raise_exception"] = refuse
    # Plain JSON; Jinja's own filter escapes HTML.
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    return environment
