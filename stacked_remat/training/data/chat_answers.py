"""Find the assistant's answers in the text of a chat whose template does not mark them.

A template may write an earlier answer otherwise than the last one: without its thoughts, or with another end.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

Messages: TypeAlias = Sequence[Mapping[str, Any]]
Render: TypeAlias = Callable[[Messages, bool], str]
"""(messages, whether to end with the beginning of an answer) to the text of a chat."""

Span: TypeAlias = tuple[int, int]

# Two more of Unicode's noncharacters, around the number of the message that they are added to.
_PROBE = re.compile("\ufdd2(\\d+)\ufdd3")


def find_answers(render: Render, messages: Messages, text: str) -> dict[int, Span | None]:
    """Where each answer begins in `text`, all of the chat, and the place after its end; None if not found.

    Cost: runs the template twice for each answer, and twice more for each that is written otherwise in `text`
        than at the end of a chat.
    """
    answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    found: dict[int, Span | None] = {}
    for at in answers:
        prompt, chat = render(messages[:at], True), render(messages[: at + 1], False)
        if text.startswith(chat) and chat.startswith(prompt):
            found[at] = (len(prompt), len(chat))
        else:
            found[at] = None
    if None in found.values():
        probed, bare = _probe(render, messages, False), _probe(render, messages, True)
        if probed[0] == text:  # else the template looks at more of a message than that it is there
            for at in (at for at in answers if found[at] is None):
                found[at] = _find_answer(render, messages, at, probed, bare)
    return found


def _find_answer(
    render: Render, messages: Messages, at: int, probed: "_Probed", bare: "_Probed"
) -> Span | None:
    """An answer that the template writes otherwise in the whole chat than at the end of one.

    `probed` is the whole chat, and `bare` one in which the contents of answers are empty.
    """
    text, ends = probed
    before, prompted = render(messages[:at], False), render(messages[:at], True)
    prompt = prompted[len(before) :] if prompted.startswith(before) else ""
    start = _start(at, prompt, probed, bare)
    if start is None:
        return None
    chats = [render(messages[: at + 1], False)]
    prompted = render(messages[: at + 1], True)
    if prompt and prompted.endswith(prompt):
        chats.append(prompted.removesuffix(prompt))
    stops = [start + _overlap(chat, text, start) for chat in chats]
    stop = next((stop for stop in stops if stop > start and stop >= ends.get(at, start)), None)
    return None if stop is None else (start, stop)


def _start(at: int, prompt: str, probed: "_Probed", bare: "_Probed") -> int | None:
    """After what the template writes between a message before the answer and an answer without content.

    If the prompt for an answer is in that, then after the prompt.
    """
    (text, ends), (bare_text, bare_ends) = probed, bare
    known = [other for other in range(at) if other in ends and other in bare_ends]
    if at not in bare_ends or not known:
        return None
    header = bare_text[bare_ends[known[-1]] : bare_ends[at]]
    if prompt and prompt in header:
        header = header[: header.rindex(prompt) + len(prompt)]
    if not text.startswith(header, ends[known[-1]]):
        return None
    start = ends[known[-1]] + len(header)
    begun = next(n for n in range(len(prompt), -1, -1) if header.endswith(prompt[:n]))
    # A prompt may begin thoughts, which the answer has, and one without content lacks.
    return start + len(prompt) - begun if begun and text.startswith(prompt, start - begun) else start


def _overlap(chat: str, text: str, start: int) -> int:
    """Length of the longest end of `chat` that `text` has at `start`."""
    at = chat.find(text[start : start + 1], max(0, len(chat) - (len(text) - start)))
    while at >= 0 and not text.startswith(chat[at:], start):
        at = chat.find(text[start], at + 1)
    return 0 if at < 0 else len(chat) - at


_Probed: TypeAlias = tuple[str, dict[int, int]]
"""A text without its probes, and where the probe of each message was: the end of its content."""


def _probe(render: Render, messages: Messages, bare: bool) -> _Probed:
    """Render with a probe behind each content that is a text, or with `bare` in place of those of answers."""
    probes = []
    for at, message in enumerate(messages):
        content, probe = message.get("content"), f"\ufdd2{at}\ufdd3"
        if bare and message["role"] == "assistant":
            message = {**message, "content": probe}
        elif isinstance(content, str) and content.strip():
            visible = content.rstrip()  # templates may strip what follows
            message = {**message, "content": visible + probe + content[len(visible) :]}
        probes.append(message)
    text, ends = "", {}
    pieces = _PROBE.split(render(probes, False))
    for piece, number in zip(pieces[::2], [*pieces[1::2], None], strict=True):
        text += piece
        if number is not None:
            ends[int(number)] = len(text)
    return text, ends
