"""What logs of scores say of a batch's examples: their ids, texts and tokens."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np

from ..ghost import TokenScores
from .batches import BATCH_AXIS, POSITION_AXIS, TokenBatch

Decode: TypeAlias = Callable[[np.ndarray], str]
"""The text of tokens."""

_PART_OF_CHARACTER = "\N{REPLACEMENT CHARACTER}"
_MOST_TOKENS = 4  # of a character: the bytes that UTF-8 has at most


def named_examples(batch: TokenBatch, decode: Decode) -> tuple[list[str], list[str]]:
    """The ids and the texts of a batch's examples, as logs of scores have them.

    Ids are hashes, the same in every epoch and run. Texts are of one document after the
    other.
    """
    ids = []
    texts = []
    for row in _rows(batch):
        # Of what the loss reads: rows that differ only in what is padding, or cut off,
        # are the same example.
        digest = hashlib.sha256()
        for name in ("tokens", "targets", "weights", "documents"):
            digest.update(row[name].tobytes() if name in row else b"none")
        ids.append(digest.hexdigest()[:16])
        texts.append("\n".join(decode(tokens) for tokens, _ in _documents(row)))
    return ids, texts


def examples_by_token(
    batch: TokenBatch, scores: np.ndarray, decode: Decode
) -> tuple[list[str], list[TokenScores]]:
    """The texts of a batch's examples, and the scores of their tokens, of those of the
    targets, `[batch, position]`.
    """
    pieces_of = _TokenTexts(decode)
    texts = []
    found = []
    for row, of_targets in zip(_rows(batch), scores, strict=True):
        pieces: list[str] = []
        of_tokens: list[np.ndarray] = []
        for tokens, positions in _documents(row):
            own = pieces_of(tokens)
            if pieces:
                own[0] = f"\n{own[0]}"
            pieces += own
            # The first token of a document is no target.
            of_tokens.append(np.append(np.zeros(1, np.float32), of_targets[positions]))
        ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int32)
        texts.append("".join(pieces))
        found.append(TokenScores(np.concatenate([*of_tokens, []]), ends))
    return texts, found


def _rows(batch: TokenBatch) -> Iterator[dict[str, np.ndarray]]:
    """The arrays of each sequence, without the padding that follows it."""
    arrays = {
        name: np.asarray(named.rearrange((BATCH_AXIS, POSITION_AXIS)).array)
        for name, named in vars(batch).items()
        if named is not None
    }
    for index, tokens in enumerate(arrays["tokens"]):
        stop = len(tokens)
        if "documents" in arrays:
            used = np.flatnonzero(arrays["documents"][index])
            stop = used[-1] + 1 if len(used) else 0
        yield {name: array[index, :stop] for name, array in arrays.items()}


def _documents(row: dict[str, np.ndarray]) -> Iterator[tuple[np.ndarray, Any]]:
    """The tokens of each document of a sequence, and its positions."""
    stop = len(row["tokens"])
    if not stop:
        return
    documents = row.get("documents", np.zeros(stop))
    ends = np.flatnonzero(np.diff(documents, append=-1)) + 1
    start = 0
    for end in ends:
        # A document's last target is no input, so it is added to its inputs.
        tokens = np.append(row["tokens"][start:end], row["targets"][end - 1])
        yield tokens, slice(start, end)
        start = end


class _TokenTexts:
    """The texts of single tokens, of a tokenizer that decodes several."""

    def __init__(self, decode: Decode):
        self._decode = decode
        self._known: dict[tuple[int, ...], str] = {}

    def __call__(self, tokens: np.ndarray) -> list[str]:
        """Together they are the document's text; a character of several tokens is in
        the last one's.
        """
        anchor: tuple[int, ...] = ()
        pieces: list[str] = []
        begun: list[int] = []  # tokens of a character that has not ended
        for token in tokens.tolist():
            piece = self._after(anchor, (*begun, token))
            is_part = _PART_OF_CHARACTER in piece and len(begun) < _MOST_TOKENS - 1
            if is_part:
                begun.append(token)
                pieces.append("")
                continue
            # Tokenizers of words write no space before the first one; one after another
            # has its own.
            if piece and not anchor:
                anchor = (*begun, token)
            begun = []
            pieces.append(piece)
        if begun:
            pieces[-1] = self._after(anchor, tuple(begun))
        return pieces

    def _after(self, anchor: tuple[int, ...], tokens: tuple[int, ...]) -> str:
        return self._text((*anchor, *tokens))[len(self._text(anchor)) :]

    def _text(self, tokens: tuple[int, ...]) -> str:
        text = self._known.get(tokens)
        if text is None:
            text = self._known[tokens] = self._decode(np.asarray(tokens, np.int64))
        return text
