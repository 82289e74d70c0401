"""The first example of a source, token by token: which of them are trained on."""

import itertools
from dataclasses import dataclass, replace

import numpy as np

from ..._messages import shortened, shown
from .encoding import Counts
from .records import read_records
from .token_cache import CacheRequest
from .tokenizers import Counted, Tokenizer, Tokens

_TRIED = 64  # records


@dataclass(frozen=True)
class FirstExample:
    """The first document of a source that has targets, or if none of its first records
    has any, the first document.

    Attributes:
        source: its name.
        place: file and line.
        runs: the text in runs of tokens that are all targets, or none of them, each
            with whether they are.
        num_tokens: of the document.
        num_targets: tokens that count as targets.
        is_text: whether it is a text, without a prompt or turns.
        has_unmarked_end: whether the targets lack what ends an answer.
        remarks: what is not read of its record, those before it and the chats after it,
            among the first 64; a line each.
    """

    source: str
    place: str
    runs: tuple[tuple[str, bool], ...]
    num_tokens: int
    num_targets: int
    is_text: bool
    has_unmarked_end: bool
    remarks: tuple[str, ...]

    def __str__(self) -> str:
        counted = f"{self.num_targets} of {self.num_tokens} tokens are targets"
        line = f"{self.source}: in the first example, {self.place}, {counted}"
        if self.num_targets == self.num_tokens:
            return line if self.is_text else f"{line}, those of prompts too"
        targets = [shown(text) for text, is_target in self.runs if is_target]
        if targets:
            line += f": {shortened(targets, most=3)}"
        if self.has_unmarked_end:
            line += "; none of them ends an answer"
        return line


def first_example(request: CacheRequest, *, reads_on: bool) -> FirstExample | None:
    """That of the request's files; None if none of the first records has a document.

    A DataError for a record that can't be read, unless those are skipped.

    Args:
        reads_on: whether chats after the example are read too, for their remarks.
    """
    records = itertools.chain.from_iterable(
        read_records(file, request.source) for file in request.files
    )
    counts = Counts()
    found: FirstExample | None = None
    # Some records, and not all: a source without any targets is refused later, by its
    # counts.
    for record in itertools.islice(records, _TRIED):
        if found is not None and found.num_targets:
            # Others than chats have no remarks, and may be whole files.
            if not reads_on or not isinstance(record.content, list):
                break
        encoded = request.encoder([record])
        counts += encoded.counts
        for tokens, counted in zip(encoded.tokens, encoded.counted, strict=True):
            is_target = np.ones(len(tokens), bool) if counted is None else counted
            num_targets = int(is_target.sum())
            if found is not None and (found.num_targets or not num_targets):
                continue
            found = FirstExample(
                request.name,
                record.place,
                _runs(tokens, is_target, request.tokenizer),
                len(tokens),
                num_targets,
                isinstance(record.content, str),
                encoded.counts.num_unmarked_ends > 0,
                (),
            )
    return found and replace(found, remarks=tuple(counts.names_unused()))


def _runs(
    tokens: Tokens, is_target: Counted, tokenizer: Tokenizer
) -> tuple[tuple[str, bool], ...]:
    starts = np.flatnonzero(np.diff(is_target)) + 1
    runs = []
    for run, first in zip(np.split(tokens, starts), [0, *starts], strict=True):
        runs.append((tokenizer.decode_shown(run), bool(is_target[first])))
    return tuple(runs)
