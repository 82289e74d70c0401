"""Decodes a stream of tokens to text that can be shown at once, up to a stop."""

from collections.abc import Iterable, Sequence
from typing import final

import numpy as np

from stacked_remat.training import Tokenizer

_CONTEXT = 8  # tokens before the first new one, because tokenizers may treat a beginning of text differently


@final
class TextStream:
    """The text of one sequence's new tokens, in pieces.

    A piece is held back while a token ends within a character, and while the newest tokens may begin a stop.

    Attributes:
        ended: whether a stop has come, which is not part of the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stops: Iterable[tuple[int, ...]],
        stop_texts: Iterable[str] = (),
    ):
        """Starts after the tokens of `prompt`; each of `stops` is a sequence of tokens."""
        self.ended = False
        self._tokenizer = tokenizer
        self._stops = [stop for stop in stops if stop]
        self._stop_texts = [stop for stop in stop_texts if stop]
        self._held = ""  # may begin one of them
        self._tokens = [int(token) for token in prompt[-_CONTEXT:]]
        self._new = len(self._tokens)  # where the new tokens begin
        self._context, self._shown = 0, self._new  # from where to decode, and what has been shown

    def push(self, token: int) -> str:
        """The text that can be shown after one more token."""
        assert not self.ended
        self._tokens.append(token)
        if stop := next((stop for stop in self._stops if self._matches(stop)), None):
            del self._tokens[-len(stop) :]
            self.ended = True
            return self.rest()
        return self._until_stop(self._release(len(self._tokens) - self._undecided(), whole=False))

    def rest(self) -> str:
        """The text that is held back, after the last token."""
        shown = self._until_stop(self._release(len(self._tokens), whole=True))
        shown, self._held = shown + self._held, ""
        return shown

    def _until_stop(self, text: str) -> str:
        """The text before the first stop, or before what may begin one."""
        text = self._held + text
        found = [at for stop in self._stop_texts if (at := text.find(stop)) >= 0]
        if found:
            self.ended, self._held = True, ""
            return text[: min(found)]
        begun = (
            length
            for stop in self._stop_texts
            for length in range(1, len(stop))
            if text.endswith(stop[:length])
        )
        until = len(text) - max(begun, default=0)
        self._held = text[until:]
        return text[:until]

    def _matches(self, stop: tuple[int, ...]) -> bool:
        return len(stop) <= len(self._tokens) - self._new and tuple(self._tokens[-len(stop) :]) == stop

    def _undecided(self) -> int:
        """How many of the newest tokens may begin a stop."""
        begun = (
            length for stop in self._stops for length in range(1, len(stop)) if self._matches(stop[:length])
        )
        return max(begun, default=0)

    def _release(self, until: int, *, whole: bool) -> str:
        """The text not shown yet up to a token; empty if its last character is incomplete."""
        before = self._decode(self._context, self._shown)
        now = self._decode(self._context, until)
        if len(now) <= len(before) or (now.endswith("\ufffd") and not whole):
            return ""
        self._context, self._shown = self._shown, until
        return now[len(before) :]

    def _decode(self, first: int, until: int) -> str:
        return self._tokenizer.decode(np.array(self._tokens[first:until], dtype=np.int64))
