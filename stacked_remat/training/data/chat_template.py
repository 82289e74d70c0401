"""Chat templates, which come with tokenizers as Jinja programs: from messages to one text."""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from .data_error import DataError

# Unicode keeps these noncharacters for a program's own use: here they enclose what the assistant says.
_BEGIN, _END = "\ufdd0", "\ufdd1"
_MARKS = re.compile(f"[{_BEGIN}{_END}]")


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

    Templates are programs by others and run in Jinja's sandbox. What depends on the clock (`strftime_now`) is
    not defined for them, so that the same messages always give the same text.

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
            DataError: Jinja is not installed, or the program is none.
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
        compiled = _compile(self.source)
        try:
            return compiled.render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self.special_tokens,
            )
        except Exception as error:  # whatever a program of others can raise
            raise ChatTemplateError(str(error)) from error


def _without_marks(marked: str) -> RenderedChat:
    if any(mark != (_BEGIN, _END)[number % 2] for number, mark in enumerate(_MARKS.findall(marked))):
        raise ChatTemplateError("the messages hold Unicode noncharacters, which mark answers here")
    text, answers = "", []
    for number, piece in enumerate(_MARKS.split(marked)):
        if number % 2:
            answers.append((len(text), len(text) + len(piece)))
        text += piece
    return RenderedChat(text, tuple(answers))


@functools.lru_cache(maxsize=8)
def _compile(source: str) -> Any:
    try:
        import jinja2.exceptions
        import jinja2.ext
        import jinja2.nodes
        import jinja2.sandbox
    except ImportError as error:
        raise DataError(
            "Chats take jinja2 for their template, which is not installed: pip install 'stacked_remat[data]'."
        ) from error

    class Generation(jinja2.ext.Extension):
        """Knows the tags that some templates put around what the assistant says."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return f"{_BEGIN}{caller()}{_END}"

    def refuse(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.globals["raise_exception"] = refuse
    environment.filters["tojson"] = _as_json
    try:
        return environment.from_string(source)
    except jinja2.exceptions.TemplateSyntaxError as error:
        raise DataError(f"The tokenizer's chat template is no Jinja, line {error.lineno}: {error}") from error


def _as_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Plain JSON; Jinja's own filter escapes what would be HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)
