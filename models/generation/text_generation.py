"""Generates text from prompts and chats, and streams it."""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from jaxtyping import PRNGKeyArray

from models.generation.decoding import Tokens, continued_tokens
from models.generation.sampling import Sampling
from models.generation.text_stream import TextStream
from models.lm import LanguageModel
from stacked_remat.training import Tokenizer

Stop: TypeAlias = tuple[int, ...]
"""A sequence of tokens that ends a text."""


class Piece(NamedTuple):
    """The next part of a prompt's continuation, and whether it is the last."""

    row: int
    text: str
    last: bool


def chat_prompt(tokenizer: Tokenizer, text: str) -> Tokens:
    """The tokens of a chat with the user's message `text`, up to where the assistant's begins.

    Raises:
        DataError, ChatTemplateError: the tokenizer has no template, or it refuses the message.
    """
    messages = [{"role": "user", "content": text}]
    return tokenizer.encode_chat_beginning(
        tokenizer.chat_template.render(messages, add_generation_prompt=True)
    )


def end_of_turn(tokenizer: Tokenizer) -> Stop:
    """The tokens with which the chat template ends an assistant's message; may be empty.

    They may differ from the tokenizer's end token, which for base models ends whole texts.
    """
    content = "\ue000"  # in no template
    messages = [{"role": role, "content": content} for role in ("user", "assistant")]
    after = tokenizer.chat_template.render(messages).rpartition(content)[2]
    return tuple(int(token) for token in tokenizer.encode(after.strip()))


def generate_text(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Tokens],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    key: PRNGKeyArray,
    ends: Collection[int],
    stops: Sequence[Stop] = (),
) -> Iterator[Piece]:
    """Continues all prompts as one batch and streams their text, until all have ended.

    Args:
        model: any causal language model.
        tokenizer: its tokens.
        prompts: tokens, at least one each.
        max_new_tokens: of each prompt, at most.
        sampling: how tokens are drawn.
        key: of the random numbers.
        ends: tokens that end a text.
        stops: sequences of tokens that end a text too.

    Cost: that of `continued_tokens`.
    """
    every_stop = [*((end,) for end in sorted(ends)), *stops]
    streams = [TextStream(tokenizer, prompt.tolist(), every_stop) for prompt in prompts]
    steps = continued_tokens(model, prompts, max_new_tokens=max_new_tokens, sampling=sampling, key=key)
    for tokens in steps:
        for row, stream in enumerate(streams):
            if not stream.ended:
                text = stream.push(int(tokens[row]))
                yield Piece(row, text, stream.ended)
        if all(stream.ended for stream in streams):
            return
    for row, stream in enumerate(streams):
        if not stream.ended:
            yield Piece(row, stream.rest(), True)


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
