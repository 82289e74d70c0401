"""Tokenizers of pretrained models, run by the `tokenizers` package."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np

from ..errors import DataError
from ..extra import optional
from .chat_template import ChatTemplate, RenderedChat
from .tokenizers import Counted, Tokenizer, Tokens

# Names of the end-of-text token where no config names it.
_USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")


@final
class HuggingFaceTokenizer(Tokenizer):
    """A fast tokenizer of the `tokenizers` package, which runs in parallel over
    documents.

    `begin` is the `bos_token` of its config, whether or not it begins documents, and
    `end` the `eos_token`. Tokens that were added to its vocabulary beyond the `rows` of
    a model's embedding, as a text model may have those of images, are refused where a
    text has one.
    """

    def __init__(
        self,
        name: str,
        definition: str,
        config: Mapping[str, Any],
        template: str | Mapping[str, str] | None,
        chat_date: str | None = None,
        rows: int | None = None,
    ):
        self._name = name
        tokenizers = optional("tokenizers", f"data.tokenizer = {name!r}")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(definition)
        except Exception as error:  # which is the class of the package's errors
            raise DataError(
                f"The tokenizer.json of data.tokenizer = {name!r} can't be read:"
                f" {error}. Get it again, or use another tokenizer."
            ) from error
        # a tokenizer.json may contain a length to cut or pad to
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        specials = _special_tokens(name, config)
        end = specials.get("eos_token")
        ends = [
            vocabulary[token]
            for token in ((end,) if end else _USUAL_ENDS)
            if token in vocabulary
        ]
        if not ends:
            raise DataError(
                f"data.tokenizer = {name!r} has no end-of-text token: "
                + (
                    f"its `eos_token` {end!r} is not in the vocabulary."
                    if end
                    else "it has no `eos_token`."
                )
                + ' Put a tokenizer_config.json beside it with {"eos_token": "<one of'
                ' its tokens>"}.'
            )
        self.end = ends[0]
        self.begin = vocabulary.get(specials.get("bos_token", ""))
        # Most tokenizers add it themselves in post-processing; the key is for those
        # that left it to the Python class of transformers.
        self._begin = self.begin if config.get("add_bos_token") else None
        self._template = (
            None if template is None else ChatTemplate(template, specials, chat_date)
        )
        every = {*vocabulary.values()}
        core = self._tokenizer.get_vocab(with_added_tokens=False).values()
        # Tokens beyond the embedding's rows are refused where they occur, and don't
        # count for the size; those that the model must have do, so that a short
        # embedding is noticed.
        kept = {token for token in every if rows is None or token < rows} | {
            *core,
            self.begin or 0,
            self.end,
        }
        self.vocab_size = 1 + max(kept)
        parts = [definition, self._begin, self.end, template, specials]
        parts += filter(None, (chat_date, rows if kept < every else None))
        self.fingerprint = hashlib.sha256(
            json.dumps(parts, sort_keys=True).encode()
        ).hexdigest()

    def encode(self, text: str) -> Tokens:
        """The tokens of a text, with none added at its ends."""
        return self._array(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Tokens) -> str:
        """The text of tokens, special ones left out."""
        return self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True)

    def decode_shown(self, tokens: Tokens) -> str:
        """The text of tokens with special ones."""
        return self._tokenizer.decode(tokens.tolist(), skip_special_tokens=False)

    def encode_chats(
        self, chats: Sequence[RenderedChat]
    ) -> list[tuple[Tokens, Counted | None]]:
        """The tokens of rendered chats, with none added but an end token to one that is
        open; those of a plain text after the tokenizer's post-processing.
        """
        asked = any(chat.answers is not None for chat in chats)
        encode = (
            # Without the places of tokens, for which only answers ask
            self._tokenizer.encode_batch if asked else self._tokenizer.encode_batch_fast
        )
        encodings = {}
        for is_plain in (True, False):
            # A template writes its own special tokens: post-processing would add them
            # twice.
            texts = [chat.text for chat in chats if chat.is_plain == is_plain]
            encodings[is_plain] = iter(encode(texts, add_special_tokens=is_plain))
        return [self._ended(next(encodings[chat.is_plain]), chat) for chat in chats]

    def _ended(
        self, encoding: Any, chat: RenderedChat
    ) -> tuple[Tokens, Counted | None]:
        """The tokens with those that begin and end the text, if it lacks them."""
        ids = encoding.ids
        counted = None
        if chat.answers is not None:
            counted = _in_answers(chat.answers, encoding.offsets)
        if chat.is_plain and self._begin is not None and ids[:1] != [self._begin]:
            ids = [self._begin, *ids]
            counted = None if counted is None else np.insert(counted, 0, False)
        if chat.is_open:
            if ids[-1:] != [self.end]:
                ids = [*ids, self.end]
                counted = None if counted is None else np.append(counted, True)
            elif counted is not None:
                counted[-1] = True
        return self._array(ids), counted

    def _array(self, tokens: Sequence[int]) -> Tokens:
        if max(tokens, default=0) >= self.vocab_size:
            beyond = sorted({token for token in tokens if token >= self.vocab_size})
            names = ", ".join(
                f"{self._tokenizer.id_to_token(token)} ({token})" for token in beyond
            )
            raise DataError(
                f"A text has {names}, and the embedding of the model has no row for it."
                " Leave it out of the text, or use a model that has one."
            )
        return np.asarray(tokens, dtype=self.dtype)

    @property
    def chat_template(self) -> ChatTemplate:
        """The template that came with the tokenizer."""
        if self._template is None:
            raise DataError(
                f"The tokenizer {self._name} has no chat template, which chats need."
                " Name the tokenizer of a chat model, or put a chat_template.jinja"
                " beside its tokenizer.json."
            )
        return self._template


def _special_tokens(name: str, config: Mapping[str, Any]) -> dict[str, str]:
    """The texts of a config's special tokens, by their keys such as `eos_token`.

    A DataError if the one that begins or ends texts is no text.
    """
    specials = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if key.endswith("_token") and isinstance(text, str):
            specials[key] = text
        elif key in ("bos_token", "eos_token") and value is not None:
            raise DataError(
                f"data.tokenizer = {name!r}: `{key}` in its tokenizer_config.json or"
                f" special_tokens_map.json is {json.dumps(value)}, and not the text of"
                ' a token, such as "</s>". Correct it.'
            )
    return specials


def _in_answers(
    answers: Sequence[tuple[int, int]], offsets: Sequence[tuple[int, int]]
) -> Counted:
    starts, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    counted = np.zeros(len(starts), dtype=bool)
    for first, stop in answers:
        # A token may include a space before the answer
        counted |= (starts < stop) & (first < ends)
    return counted
