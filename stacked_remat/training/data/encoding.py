"""From records to tokens: chats are rendered, texts tokenized, and what was left out is
counted.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from ..._messages import did_you_mean, shown
from ..data_config import SourceConfig
from ..errors import DataError
from .chat_template import ChatTemplateError, RenderedChat
from .record_forms import Completion, Content, Document
from .records import Record
from .tokenizers import Counted, Tokenizer, Tokens

_KEPT = {"problems": 5, "unread": 20, "roles": 20}
"""The most texts in these fields of `Counts`."""

_KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool")
_CALLS = ("tool_calls", "function_call")  # fields of an answer that calls tools


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
        roles: those of messages that are none of the usual ones and not named by the
            chat template, in the order in which they came.
        num_open: chats whose last answer the template leaves open.
        num_unmarked_ends: chats whose answers lack their ends.
    """

    num_documents: int = 0
    num_tokens: int = 0
    num_empty: int = 0
    num_malformed: int = 0
    problems: Sequence[str] = ()
    unread: Sequence[str] = ()
    roles: Sequence[str] = ()
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
                total[entry.name] = kept[: _KEPT[entry.name]]
        return Counts(**total)

    def remarks(self) -> Iterator[str]:
        """What a user has to know of the records, a line each."""
        if self.num_malformed:
            problems = "; ".join(self.problems)
            yield (
                f"{self.num_malformed} records can't be read and were skipped, such as"
                f" {problems}"
            )
        if self.num_empty:
            yield f"{self.num_empty} records have no text, or the weight 0: left out"
        yield from self.names_unused()
        if self.num_open:
            yield (
                "the chat template writes nothing after an answer: the next turn's"
                " first token is trained on as its end, and the tokenizer's end token"
                f" ends {self.num_open} chats"
            )
        if self.num_unmarked_ends:
            yield (
                "the chat template ends answers after {% endgeneration %}, so"
                f" {self.num_unmarked_ends} chats do not teach the model to end them:"
                " move the end into the mark"
            )

    def names_unused(self) -> Iterator[str]:
        """The lines of `remarks` that name what is not read, or may be misspelt."""
        if self.unread:
            yield f"keys of records that are not read: {', '.join(self.unread)}"
        if self.roles:
            meant = dict.fromkeys(
                did_you_mean(role, _KNOWN_ROLES) for role in self.roles
            )
            yield (
                "roles of messages that the chat template does not name:"
                f" {', '.join(self.roles)}.{''.join(meant)} Only turns of the role"
                " `assistant` are answers."
            )


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
        roles: dict[str, None] = {}
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
                roles |= dict.fromkeys(self._unknown_roles(document))
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
            roles=tuple(roles),
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
            problem = self._lost_calls(record, texts)
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

    def _lost_calls(self, record: Record, texts: Sequence[RenderedChat]) -> str | None:
        """Why a chat can't be trained on: an answer calls tools, and the chat template
        writes no calls; None if none does, or they are written.
        """
        document = record.document
        assert document is not None and isinstance(document.content, list)
        variables = self._variables(document)
        words = self.tokenizer.chat_template.words_for(variables)
        for at, message in enumerate(document.content):
            calls = [name for name in _CALLS if message.get(name)]
            if message["role"] != "assistant" or not calls:
                continue
            # A template that writes whole messages, by `tojson`, names no field.
            is_written = any(name in text.text for name in calls for text in texts)
            if words.isdisjoint(calls) and not is_written:
                return (
                    f"{record.place} calls tools in message {at}, and the tokenizer's"
                    f" chat template does not read {' or '.join(calls)}: the answer"
                    " would be trained on without its calls. Use a tokenizer whose"
                    " template writes them, or write them in `content`"
                )
        return None

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
        words = self.tokenizer.chat_template.words_for(self._variables(document))
        # A template can't read a name that it doesn't have as a word; one that it has
        # may still not be read, which only running it would tell.
        for name in self._variables(document):
            if name not in words:
                yield f"{name}, for the chat template"
        # One that names neither writes whole messages.
        if words.isdisjoint(("role", "content")):
            return
        for message in document.content:
            for name, value in message.items():
                if value is not None and name not in words:
                    yield f"{name} of messages"

    def _unknown_roles(self, document: Document) -> Iterator[str]:
        """The roles of a chat's messages that may be misspelt."""
        if not isinstance(document.content, list):
            return
        words = self.tokenizer.chat_template.words_for(self._variables(document))
        for message in document.content:
            role = message["role"]
            if role not in _KNOWN_ROLES and role not in words:
                yield shown(role)


def _key(content: Content) -> int:
    """A hash of a document that depends on nothing but its text or messages."""
    if isinstance(content, list):
        text = json.dumps(content, default=str)
    else:
        text = "".join(content)
    # The key decides whether a document is held out, so equal texts of any source are
    # on the same side of the split.
    return int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:8], "big")
