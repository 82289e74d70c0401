"""The interface of tokenizers, and the one whose tokens are bytes."""

import abc
from collections.abc import Sequence
from typing import ClassVar, final

import numpy as np
from jaxtyping import Bool, Integer

from .chat_template import ChatTemplate, RenderedChat

Tokens = Integer[np.ndarray, " tokens"]
Counted = Bool[np.ndarray, " tokens"]
"""Whether each token counts where it is a target."""


class Tokenizer(abc.ABC):
    """Converts text to tokens and back.

    Attributes:
        vocab_size: one more than the largest token.
        begin: the token that can begin a document; None if there is none.
        end: the token that ends a document.
        fingerprint: changes whenever the same text would give other tokens.
    """

    vocab_size: int
    begin: int | None
    end: int
    fingerprint: str

    @property
    def dtype(self) -> type[np.unsignedinteger]:
        """The smallest unsigned type that holds every token."""
        return np.uint16 if self.vocab_size <= 2**16 else np.uint32

    @abc.abstractmethod
    def encode(self, text: str) -> Tokens:
        """The tokens of a text, with none added; special tokens written in the text are
        recognized.
        """

    @abc.abstractmethod
    def decode(self, tokens: Tokens) -> str:
        """The text of tokens, without special ones; invalid UTF-8 becomes U+FFFD."""

    def decode_shown(self, tokens: Tokens) -> str:
        """The text of tokens with special ones, where the tokenizer can write them."""
        return self.decode(tokens)

    def encode_documents(self, texts: Sequence[str]) -> list[Tokens]:
        """The tokens of whole documents, with the tokenizer's beginning token, if any,
        and end token.
        """
        documents = [RenderedChat(text, is_open=True, is_plain=True) for text in texts]
        return [tokens for tokens, _ in self.encode_chats(documents)]

    @abc.abstractmethod
    def encode_chats(
        self, chats: Sequence[RenderedChat]
    ) -> list[tuple[Tokens, Counted | None]]:
        """The tokens of whole chats, and which overlap an answer; None for a chat
        without `answers`.

        The end token ends a chat that `is_open`, and belongs to its last answer. What
        `is_plain` has the tokens that the tokenizer adds to a text.
        """

    def encode_beginning(self, text: str) -> Tokens:
        """The tokens of the beginning of a document, without an end token."""
        (document,) = self.encode_documents([text])
        return self._unended(document, text)

    def encode_chat_beginning(self, text: str) -> Tokens:
        """The tokens of the beginning of a rendered chat, without an end token."""
        ((chat, _),) = self.encode_chats([RenderedChat(text)])
        return self._unended(chat, text)

    def _unended(self, tokens: Tokens, text: str) -> Tokens:
        """The tokens without an end token that is not in the text itself."""
        of_text = self.encode(text)
        # A text may end with the end token itself, as a chat does.
        added = tokens[-1:] == self.end and not (
            len(of_text) and of_text[-1] == self.end
        )
        return tokens[:-1] if added else tokens

    @property
    @abc.abstractmethod
    def chat_template(self) -> ChatTemplate:
        """Renders chats as text.

        Raises:
            DataError: the tokenizer has none.
        """


# The ChatML layout, which most chat models use, with tools and their calls as JSON. No
# special tokens needed.
_BYTE_CHAT = ChatTemplate(
    """{% macro text(content) %}
{% if content is string %}
{{ content }}
{%- elif content is mapping %}
{{ content | tojson }}
{%- elif content is not none and content is defined %}
{% for part in content %}
{% if part is not string and part.text is not string %}
{{ raise_exception('a message has a part that is no text') }}
{% endif %}
{{ part if part is string else part.text }}
{%- endfor %}
{% endif %}
{% endmacro %}
{% if tools %}<|im_start|>tools
{{ tools | tojson }}<|im_end|>
{% endif %}
{% for message in messages %}<|im_start|>{{ message.role }}
{{ text(message.content) }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.get('function', call) | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",  # noqa: E501
    {},
)


@final
class ByteTokenizer(Tokenizer):
    """Tokens 0 to 255 are the bytes of UTF-8 text; 256 begins and ends a document."""

    vocab_size: ClassVar[int] = 257
    begin: ClassVar[int] = 256
    end: ClassVar[int] = 256
    fingerprint: ClassVar[str] = "bytes, 1"

    def encode(self, text: str | bytes) -> Tokens:
        """One token per byte."""
        raw = text.encode("utf-8") if isinstance(text, str) else text
        return np.frombuffer(raw, dtype=np.uint8).astype(np.uint16)

    def decode(self, tokens: Tokens) -> str:
        """The text of tokens, without separators; invalid UTF-8 becomes U+FFFD."""
        kept = np.asarray(tokens)[np.asarray(tokens) < 256]
        return kept.astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def decode_shown(self, tokens: Tokens) -> str:
        """The text of tokens, with `<|end|>` for separators."""
        parts = np.split(tokens, np.flatnonzero(tokens == self.end))
        return "<|end|>".join(map(self.decode, parts))

    def encode_chats(
        self, chats: Sequence[RenderedChat]
    ) -> list[tuple[Tokens, Counted | None]]:
        """One token per byte, between two of token 256, which belong to no answer
        unless the chat is open.
        """
        separator = np.array([self.end], dtype=np.uint16)
        found = []
        for chat in chats:
            tokens = np.concatenate([separator, self.encode(chat.text), separator])
            found.append((tokens, _in_answers(chat, len(tokens))))
        return found

    @property
    def chat_template(self) -> ChatTemplate:
        """The ChatML layout, with its marks as bytes."""
        return _BYTE_CHAT


def _in_answers(chat: RenderedChat, num_tokens: int) -> Counted | None:
    if chat.answers is None:
        return None
    counted = np.zeros(num_tokens, dtype=bool)
    counted[-1] = chat.is_open
    for first, stop in chat.answers:
        start = 1 + len(chat.text[:first].encode("utf-8"))  # after the separator
        counted[start : start + len(chat.text[first:stop].encode("utf-8"))] = True
    return counted
