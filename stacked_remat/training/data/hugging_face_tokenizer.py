"""Tokenizers of pretrained models, run by the `tokenizers` package."""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import numpy as np

from ..errors import DataError
from .chat_template import ChatTemplate, RenderedChat
from .tokenizers import Counted, Tokenizer, Tokens

# Names of the end-of-text token where no config names it.
_USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")


@final
class HuggingFaceTokenizer(Tokenizer):
    """A fast tokenizer of the `tokenizers` package, which runs in parallel over documents.

    Attributes:
        vocab_size: one more than the largest token; a model's embedding may be larger.
        begin: the `bos_token` of its config, whether or not it begins documents.
        end: the `eos_token` of its config.
        fingerprint: a hash of its files, and of the date of its chat template.
    """

    def __init__(
        self,
        name: str,
        definition: str,
        config: Mapping[str, Any],
        template: str | None,
        chat_date: str | None = None,
    ):
        self._name = name
        self._tokenizer = _parse(name, definition)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise DataError(
                f"The tokenizer.json of data.tokenizer = {name!r} has no token in its vocabulary."
            )
        self.vocab_size = max(vocabulary.values()) + 1
        specials = {
            key: _content(name, key, config[key])
            for key in config
            if key.endswith("_token") and config[key] and not isinstance(config[key], bool)
        }
        self.end = _find_end(name, specials.get("eos_token"), vocabulary)
        self.begin = vocabulary.get(specials.get("bos_token", ""))
        self._begin = self.begin if config.get("add_bos_token") else None
        self._template = None if template is None else ChatTemplate(template, specials, chat_date)
        parts = [definition, self._begin, self.end, template, specials]
        dated = [] if chat_date is None else [chat_date]
        self.fingerprint = hashlib.sha256(json.dumps(parts + dated, sort_keys=True).encode()).hexdigest()

    def encode(self, text: str) -> Tokens:
        """The tokens of a text, with none added at its ends."""
        with self._running():
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return np.asarray(encoding.ids, dtype=self.dtype)

    def decode(self, tokens: Tokens) -> str:
        """The text of tokens, special ones left out."""
        with self._running():
            return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=True)

    def encode_documents(self, texts: Sequence[str]) -> list[Tokens]:
        """Each text after the tokenizer's post-processing, with the end token appended if it is missing."""
        found = []
        with self._running():
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=True)
        for encoding in encodings:
            ids = encoding.ids
            if self._begin is not None and ids[:1] != [self._begin]:
                ids = [self._begin, *ids]
            found.append(np.asarray(ids if ids[-1:] == [self.end] else [*ids, self.end], dtype=self.dtype))
        return found

    def encode_chats(self, chats: Sequence[RenderedChat]) -> list[tuple[Tokens, Counted | None]]:
        """The tokens of rendered chats, with none added."""
        with self._running():
            encodings = self._tokenizer.encode_batch([chat.text for chat in chats], add_special_tokens=False)
        return [
            (np.asarray(encoding.ids, dtype=self.dtype), _in_answers(chat, encoding.offsets))
            for encoding, chat in zip(encodings, chats, strict=True)
        ]

    def _running(self) -> contextlib.AbstractContextManager[None]:
        return _in_package(f"The tokenizer.json of data.tokenizer = {self._name!r} can't be used")

    @property
    def chat_template(self) -> ChatTemplate:
        """The template that came with the tokenizer."""
        if self._template is None:
            raise DataError(
                f"The tokenizer {self._name} has no chat template, which chats need. Name the tokenizer of a "
                f"chat model, or put a chat_template.jinja beside its tokenizer.json."
            )
        return self._template


def _in_answers(chat: RenderedChat, offsets: Sequence[tuple[int, int]]) -> Counted | None:
    if chat.answers is None:
        return None
    starts, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    counted = np.zeros(len(starts), dtype=bool)
    for first, stop in chat.answers:
        counted |= (starts < stop) & (first < ends)  # a token may include a space before the answer
    return counted


def _parse(name: str, definition: str) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise DataError(
            f"data.tokenizer = {name!r} needs the tokenizers package, which is not installed: "
            f"pip install 'stacked_remat[data]'."
        ) from error
    with _in_package(f"The tokenizer.json of data.tokenizer = {name!r} can't be read"):
        tokenizer = tokenizers.Tokenizer.from_str(definition)
    tokenizer.no_truncation()  # a tokenizer.json may contain a length to cut or pad to
    tokenizer.no_padding()
    return tokenizer


@contextlib.contextmanager
def _in_package(problem: str) -> Iterator[None]:
    """Turns the package's errors, which are of class `Exception` or Rust's panics, into a DataError."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise DataError(f"{problem}: {error}. Get it again, or use another tokenizer.") from error
        raise


def _content(name: str, key: str, token: Any) -> str:
    text = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(text, str):
        raise DataError(
            f"`{key}` in the config of data.tokenizer = {name!r} is {token!r:.100}; expected a text, or an "
            f"object with its `content`."
        )
    return text


def _find_end(name: str, end: str | None, vocabulary: Mapping[str, int]) -> int:
    candidates = _USUAL_ENDS if end is None else (end,)
    for candidate in candidates:
        if candidate in vocabulary:
            return vocabulary[candidate]
    raise DataError(
        f"data.tokenizer = {name!r} has no end-of-text token: "
        + (f"its `eos_token` {end!r} is not in the vocabulary." if end else "it has no `eos_token`.")
        + ' Put a tokenizer_config.json beside it with {"eos_token": "<one of its tokens>"}.'
    )
