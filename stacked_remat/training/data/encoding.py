"""From records to tokens: chats are rendered, texts tokenized, and what was left out is
counted.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from ..data_config import SourceConfig
from ..errors import DataError
from .chat_template import ChatTemplateError, RenderedChat
from .record_forms import Completion, Content, Document
from .records import Record
from .tokenizers import Counted, Tokenizer, Tokens

_PROBLEMS_KEPT = 5
_UNREAD_KEPT = 20


@dataclass(frozen=True)
class Counts:
    """What became of records.

    Attributes:
        num_documents: documents with tokens.
        num_tokens: of all documents.
        num_empty: records without text, or of weight 0.
        num_malformed: records that were skipped.
        problems: why, for the first ones.
        unread: keys of records that nothing reads, in the order in which they came.
        num_open: chats whose last answer the template leaves open.
        num_unmarked_ends: chats whose answers lack their ends.
    """

    num_documents: int = 0
    num_tokens: int = 0
    num_empty: int = 0
    num_malformed: int = 0
    problems: Sequence[str] = ()
    unread: Sequence[str] = ()
    num_open: int = 0
    num_unmarked_ends: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        """The counts of both."""
        total = {}
        for entry in fields(self):
            one = getattr(self, entry.name)
            another = getattr(other, entry.name)
            if isinstance(one, int):
                total[entry.name] = one + another
            else:
                kept = tuple(dict.fromkeys([*one, *another]))
                most = _UNREAD_KEPT if entry.name == "unread" else _PROBLEMS_KEPT
                total[entry.name] = kept[:most]
        return Counts(**total)


@dataclass(frozen=True)
class EncodedRecords:
    """The documents of some records.

    Attributes:
        tokens: of each document.
        counted: which tokens count as targets, of each document; None if all do.
        keys: a hash of the content of each document.
        weights: of each document in the loss.
        records: of each document, the index of its record among those given.
        counts: of the records.
    """

    tokens: Sequence[Tokens]
    counted: Sequence[Counted | None]
    keys: Sequence[int]
    weights: Sequence[float]
    records: Sequence[int]
    counts: Counts


@dataclass(frozen=True)
class RecordEncoder:
    """Makes documents of the records of a source.

    Attributes:
        source: how records are read.
        tokenizer: makes tokens, and has the chat template.
        on_malformed: whether a record that can't be read is an error or is counted.
    """

    source: SourceConfig
    tokenizer: Tokenizer
    on_malformed: Literal["error", "skip"] = "error"

    @property
    def answers_only(self) -> bool:
        """Whether only answers count as targets."""
        return self.source.train_on == "answers"

    def __call__(self, records: Sequence[Record]) -> EncodedRecords:
        """The documents of records, in their order.

        Raises:
            DataError: a record is malformed, unless those are skipped; or the chat
                template can't be used.
        """
        texts: list[RenderedChat] = []
        keys = []
        weights = []
        of_record = []
        problems = []
        num_empty = 0
        unread: dict[str, None] = {}
        # Templates run in another process, which is asked once for all chats of the
        # group.
        rendered = self._rendered(records)
        for number, record in enumerate(records):
            own_texts, problem = self._texts_of(record, rendered.get(number))
            document = record.document
            if problem is not None or document is None:
                problems.append(str(problem))
            # A weight of 0 leaves a record out as a whole: its tokens would only take
            # room.
            elif not document.weight or not any(text.text for text in own_texts):
                num_empty += 1
            else:
                texts += own_texts
                keys += [_key(document.content)] * len(own_texts)
                weights += [document.weight] * len(own_texts)
                of_record += [number] * len(own_texts)
                unread |= dict.fromkeys(self._unread(document))
        # All texts at once: tokenizers work in parallel over them.
        documents = self.tokenizer.encode_chats(texts)
        tokens = [own for own, _ in documents]
        counts = Counts(
            num_documents=len(documents),
            num_tokens=sum(map(len, tokens)),
            num_empty=num_empty,
            num_malformed=len(problems),
            problems=tuple(problems),
            unread=tuple(unread),
            num_open=sum(text.is_open and not text.is_plain for text in texts),
            num_unmarked_ends=sum(text.has_unmarked_end for text in texts),
        )
        counted = [counted for _, counted in documents]
        return EncodedRecords(tokens, counted, keys, weights, of_record, counts)

    def _rendered(
        self, records: Sequence[Record]
    ) -> dict[int, list[RenderedChat] | ChatTemplateError | DataError]:
        """The texts, or the error, of each record that has a chat, by its index."""
        chats = {}
        for number, record in enumerate(records):
            document = record.document
            if document is not None and isinstance(document.content, list):
                chats[number] = document.content, self._variables(document)
        if not chats:
            return {}
        template = self.tokenizer.chat_template
        results = template.render_all([*chats.values()], answers=self.answers_only)
        return dict(zip(chats, results, strict=False))

    def _texts_of(
        self,
        record: Record,
        rendered: list[RenderedChat] | ChatTemplateError | DataError | None,
    ) -> tuple[Sequence[RenderedChat], str | None]:
        """The texts to tokenize, or why there are none."""
        problem = record.problem
        texts: Sequence[RenderedChat] = []
        if isinstance(rendered, DataError):
            raise DataError(f"{record.place}: {rendered}")
        if isinstance(rendered, ChatTemplateError):
            problem = f"{record.place} does not fit the chat template: {rendered}"
        elif rendered is not None:
            texts = rendered
        elif isinstance(record.content, str | Completion):
            texts = [self._plain(record.content)]
        # JSON may have half a surrogate pair (`\ud800`), which no tokenizer takes.
        try:
            "".join(text.text for text in texts).encode("utf-8")
        except UnicodeEncodeError:
            problem = (
                f"{record.place} has half a surrogate pair, which is not valid Unicode"
            )
        if problem is not None and self.on_malformed == "error":
            raise DataError(
                f"{problem}. Fix it, or skip such records with data.on_malformed: skip."
            )
        return texts, problem

    def _plain(self, content: str | Completion) -> RenderedChat:
        """A text, or a prompt with its completion."""
        answers = None
        text = "".join(content)
        if isinstance(content, Completion) and self.answers_only:
            answers = ((len(content.prompt), len(text)),)
        return RenderedChat(text, answers, is_open=True, is_plain=True)

    def _variables(self, document: Document) -> Mapping[str, Any]:
        """The chat template's variables for a chat."""
        return {**self.source.chat_template_kwargs, **document.variables}

    def _unread(self, document: Document) -> Iterator[str]:
        """Keys of a record that neither this library nor the chat template reads."""
        yield from document.unread
        if not isinstance(document.content, list):
            return
        words = self.tokenizer.chat_template.words
        # A template can't read a name that it doesn't have as a word; one that it has
        # may still not be read, which only running it would tell.
        for name in self._variables(document):
            if name not in words:
                yield f"{name}, for the chat template"
        for message in document.content:
            for name, value in message.items():
                if value is not None and name not in words:
                    yield f"{name} of messages"


def _key(content: Content) -> int:
    """A hash of a document that depends on nothing but its text or messages."""
    if isinstance(content, list):
        text = json.dumps(content, default=str)
    else:
        text = "".join(content)
    # The key decides whether a document is held out, so equal texts of any source are
    # on the same side of the split.
    return int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:8], "big")
