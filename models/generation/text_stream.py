"""From tokens that come one at a time to text that can be shown at once, up to where it is to stop."""

import re
from collections.abc import Iterable, Sequence
from typing import final

import numpy as np

from stacked_remat.training import Tokenizer

# What a terminal obeys, or turns the text around it by: control characters, marks of direction.
_COMMANDS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    r"""The text with every character that a terminal would obey spelt out, such as `\x1b`.

    Newlines and tabs stay. Characters are looked at one by one, so it does not matter where a text is cut.
    """
    return _COMMANDS.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


_CONTEXT = 8  # tokens before the first new one, because tokenizers may treat a beginning of text differently


@final
class TextStream:
    """The text of one sequence's new tokens, piece by piece.

    A piece is given when it is certain: not while a token ends within a character, nor while the newest
    tokens may turn out to be the beginning of a stop.

    Attributes:
        ended: whether a stop has come. It is not part of the text, and nothing comes after it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Iterable[tuple[int, ...]]):
        """Begins after the tokens of `prompt`; each of `stops` is one or more tokens in a row."""
        self.ended = False
        self._tokenizer = tokenizer
        self._stops = [stop for stop in stops if stop]
        self._tokens = [int(token) for token in prompt[-_CONTEXT:]]
        self._new = len(self._tokens)  # where the new tokens begin
        self._context, self._shown = 0, self._new  # from where to decode, and what has been shown

    def push(self, token: int) -> str:
        """The text that has become certain with one more token."""
        assert not self.ended
        self._tokens.append(token)
        if any(self._matches(stop) for stop in self._stops):
            del self._tokens[-next(len(stop) for stop in self._stops if self._matches(stop)) :]
            self.ended = True
            return self.rest()
        return self._release(len(self._tokens) - self._undecided(), whole=False)

    def rest(self) -> str:
        """The text that was held back, when no more tokens come."""
        return self._release(len(self._tokens), whole=True)

    def _matches(self, stop: tuple[int, ...]) -> bool:
        return len(stop) <= len(self._tokens) - self._new and tuple(self._tokens[-len(stop) :]) == stop

    def _undecided(self) -> int:
        """How many of the newest tokens begin a stop."""
        begun = (
            length for stop in self._stops for length in range(1, len(stop)) if self._matches(stop[:length])
        )
        return max(begun, default=0)

    def _release(self, until: int, *, whole: bool) -> str:
        """The text up to a token that has not been shown; nothing if its last character lacks bytes."""
        before = self._decode(self._context, self._shown)
        now = self._decode(self._context, until)
        if len(now) <= len(before) or (now.endswith("\ufffd") and not whole):
            return ""
        self._context, self._shown = self._shown, until
        return now[len(before) :]

    def _decode(self, first: int, until: int) -> str:
        return self._tokenizer.decode(np.array(self._tokens[first:until], dtype=np.int64))
