"""Generates text from prompts and chats, and streams it."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
from jaxtyping import PRNGKeyArray

from models.generation.decoding import Tokens, continued_tokens
from models.generation.sampling import Sampling
from models.parts.decoder import Decoder
from stacked_remat.training import ChatTemplateError, Tokenizer

Message: TypeAlias = Mapping[str, Any]
"""A turn of a chat, with `role` and `content`."""


class Piece(NamedTuple):
    """The next part of a prompt's continuation, and whether it is the last."""

    row: int
    text: str
    last: bool


def chat_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> Tokens:
    """The tokens of a chat, up to where the assistant's next message begins."""
    render = tokenizer.chat_template.render
    return tokenizer.encode_chat_beginning(
        render(messages, add_generation_prompt=True, variables=variables)
    )


_CONTENT = "\ue000"  # in no template
_ANSWERED = [{"role": role, "content": _CONTENT} for role in ("user", "assistant")]


def end_of_turn(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens with which the chat template ends an assistant's message; may be
    empty.

    They may differ from the tokenizer's end token, which for base models ends whole
    texts.
    """
    after = tokenizer.chat_template.render(_ANSWERED).rpartition(_CONTENT)[2]
    return tuple(int(token) for token in tokenizer.encode(after.strip()))


def begins_of_next_turn(tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """The tokens that begin a message after an assistant's, where `end_of_turn` is
    empty.
    """
    if end_of_turn(tokenizer):
        return []
    found = []
    for role in ("user", "tool"):
        with contextlib.suppress(ChatTemplateError):  # a template may know no tools
            text = tokenizer.chat_template.render(
                [*_ANSWERED, {"role": role, "content": _CONTENT}]
            )
            *_, between, _ = text.split(_CONTENT)
            found.append(
                tuple(int(token) for token in tokenizer.encode(between.strip()))
            )
    return [tokens for tokens in dict.fromkeys(found) if tokens]


def generate_text(
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[Tokens],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    key: PRNGKeyArray,
    stops: Sequence[Sequence[int]],
    stop_texts: Sequence[str] = (),
    rows: int | None = None,
) -> Iterator[Piece]:
    """Continues prompts, one batch after the other, and streams their text, until all
    have ended.

    Args:
        stops: sequences of tokens that end a text.
        stop_texts: texts that end one too, and are not part of it.
        rows: of every batch; as many as prompts if not given.

    Cost: that of `continued_tokens` for each batch.
    """
    rows = rows or len(prompts)
    for first in range(0, len(prompts), rows):
        batch = [*prompts[first : first + rows]]
        streams = [
            TextStream(tokenizer, prompt.tolist(), stops, stop_texts)
            for prompt in batch
        ]
        batch += batch[-1:] * (rows - len(batch))  # of as many rows as the others
        steps = continued_tokens(
            model,
            batch,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            key=key,
            first_row=first,
        )
        for tokens in steps:
            for row, stream in enumerate(streams):
                if not stream.ended:
                    text = stream.push(int(tokens[row]))
                    yield Piece(first + row, text, stream.ended)
            if all(stream.ended for stream in streams):
                break
        for row, stream in enumerate(streams):
            if not stream.ended:
                yield Piece(first + row, stream.rest(), True)


def in_order(pieces: Iterator[Piece], rows: int) -> Iterator[Piece]:
    """Streams the pieces of row 0, then those of row 1, and so on; later rows are held
    in memory.
    """
    waiting: list[list[Piece]] = [[] for _ in range(rows)]
    current = 0
    for piece in pieces:
        waiting[piece.row].append(piece)
        while current < rows and waiting[current]:
            ready = waiting[current]
            waiting[current] = []
            yield from ready
            if not ready[-1].last:
                break
            current += 1


# tokens before the first new one, because tokenizers may treat a beginning of text
# differently
_CONTEXT = 8


@final
class TextStream:
    """The text of one sequence's new tokens, in pieces.

    A piece is held back while a token ends within a character, and while the newest
    tokens may begin a stop.

    Attributes:
        ended: whether a stop has come, which is not part of the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stops: Iterable[Sequence[int]],
        stop_texts: Iterable[str] = (),
    ):
        """Starts after the tokens of `prompt`; each of `stops` is a sequence of
        tokens.
        """
        self.ended = False
        self._tokenizer = tokenizer
        self._stops = [[*stop] for stop in stops if stop]
        self._stop_texts = [stop for stop in stop_texts if stop]
        self._held = ""  # may begin one of them
        self._tokens = [int(token) for token in prompt[-_CONTEXT:]]
        self._new = len(self._tokens)  # where the new tokens begin
        # From where to decode, and what has been shown
        self._context = 0
        self._shown = self._new

    def push(self, token: int) -> str:
        """The text that can be shown after one more token."""
        assert not self.ended
        self._tokens.append(token)
        own = self._tokens[self._new :]
        if stop := next(
            (stop for stop in self._stops if own[-len(stop) :] == stop), None
        ):
            del self._tokens[-len(stop) :]
            self.ended = True
            return self.rest()
        # The newest tokens may be the beginning of a stop: they wait.
        until = len(self._tokens) - _begun(own, self._stops)
        return self._until_stop(self._release(until, whole=False))

    def rest(self) -> str:
        """The text that is held back, after the last token."""
        shown = self._until_stop(self._release(len(self._tokens), whole=True))
        shown = shown + self._held
        self._held = ""
        return shown

    def _until_stop(self, text: str) -> str:
        """The text before the first stop, or before what may begin one."""
        text = self._held + text
        found = [at for stop in self._stop_texts if (at := text.find(stop)) >= 0]
        if found:
            self.ended = True
            self._held = ""
            return text[: min(found)]
        until = len(text) - _begun(text, self._stop_texts)
        self._held = text[until:]
        return text[:until]

    def _release(self, until: int, *, whole: bool) -> str:
        """The text not shown yet up to a token; empty if its last character is
        incomplete.
        """
        # Of both the same context, so that the difference is what is new
        before = self._decode(self._context, self._shown)
        now = self._decode(self._context, until)
        if len(now) <= len(before) or (now.endswith("\ufffd") and not whole):
            return ""
        self._context = self._shown
        self._shown = until
        return now[len(before) :]

    def _decode(self, first: int, until: int) -> str:
        return self._tokenizer.decode(
            np.array(self._tokens[first:until], dtype=np.int64)
        )


def _begun(said: Any, stops: Sequence[Any]) -> int:
    """How many of the last tokens or characters may begin a stop."""
    lengths = (
        length
        for stop in stops
        for length in range(1, len(stop))
        if said[-length:] == stop[:length]
    )
    return max(lengths, default=0)
