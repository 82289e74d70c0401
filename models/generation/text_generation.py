"""Generates text from prompts and chats, and streams it."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from jaxtyping import PRNGKeyArray

from models.decoder.decoder import Decoder
from models.generation.decoding import Tokens, continued_tokens
from models.generation.sampling import Sampling
from models.generation.text_stream import TextStream
from stacked_remat.training import Tokenizer

Message: TypeAlias = Mapping[str, Any]
"""A turn of a chat, with `role` and `content`."""

Stop: TypeAlias = tuple[int, ...]
"""A sequence of tokens that ends a text."""


class Piece(NamedTuple):
    """The next part of a prompt's continuation, and whether it is the last."""

    row: int
    text: str
    last: bool


def chat_prompt(
    tokenizer: Tokenizer, messages: Sequence[Message], variables: Mapping[str, Any] = MappingProxyType({})
) -> Tokens:
    """The tokens of a chat, up to where the assistant's next message begins.

    Raises:
        DataError, ChatTemplateError: the tokenizer has no template, or it refuses the messages.
    """
    render = tokenizer.chat_template.render
    return tokenizer.encode_chat_beginning(render(messages, add_generation_prompt=True, variables=variables))


def end_of_turn(tokenizer: Tokenizer) -> Stop:
    """The tokens with which the chat template ends an assistant's message; may be empty.

    They may differ from the tokenizer's end token, which for base models ends whole texts.
    """
    content = "\ue000"  # in no template
    messages = [{"role": role, "content": content} for role in ("user", "assistant")]
    after = tokenizer.chat_template.render(messages).rpartition(content)[2]
    return tuple(int(token) for token in tokenizer.encode(after.strip()))


def generate_text(
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[Tokens],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    key: PRNGKeyArray,
    ends: Collection[int],
    stops: Sequence[Stop] = (),
    stop_texts: Sequence[str] = (),
    rows: int | None = None,
) -> Iterator[Piece]:
    """Continues prompts, one batch after the other, and streams their text, until all have ended.

    Args:
        model: the decoder.
        tokenizer: its tokens.
        prompts: tokens, at least one each.
        max_new_tokens: of each prompt, at most.
        sampling: how tokens are drawn.
        key: of the random numbers.
        ends: tokens that end a text.
        stops: sequences of tokens that end a text too.
        stop_texts: texts that end one too, and are not part of it.
        rows: of every batch; as many as prompts if not given.

    Cost: that of `continued_tokens` for each batch.
    """
    every_stop = [*((end,) for end in sorted(ends)), *stops]
    rows = rows or len(prompts)
    for first in range(0, len(prompts), rows):
        batch = [*prompts[first : first + rows]]
        streams = [TextStream(tokenizer, prompt.tolist(), every_stop, stop_texts) for prompt in batch]
        batch += batch[-1:] * (rows - len(batch))  # of as many rows as the others
        steps = continued_tokens(
            model, batch, max_new_tokens=max_new_tokens, sampling=sampling, key=key, first_row=first
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
    """Streams the pieces of row 0, then those of row 1, and so on; later rows are held in memory."""
    waiting: list[list[Piece]] = [[] for _ in range(rows)]
    current = 0
    for piece in pieces:
        waiting[piece.row].append(piece)
        while current < rows and waiting[current]:
            ready, waiting[current] = waiting[current], []
            yield from ready
            if not ready[-1].last:
                break
            current += 1
