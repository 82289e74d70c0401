"""Continues prompts with what a run trained, or with a model in Hugging Face's format,
or talks with it.

    python -m models.generate --run_dir runs/mine --prompt "Once upon a time"
    python -m models.generate --model exported --chat --prompt "Who are you?"
        --temperature 0
    python -m models.generate --model exported --chat

The first reads the latest checkpoint of a run folder of `models.train_lm`, its adapters
included; the others a folder such as `models.export_hf` writes, or a name on the
Hugging Face Hub. Prompts are continued in batches, and the text of the first is
streamed, then that of the others. A chat without prompts is a conversation: each line
of the standard input is what the user says next.
"""

import argparse
import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import yaml
from rich.console import Console
from rich.segment import Segment, Segments

from models.command import (
    check_counts,
    command_parser,
    encodable,
    escaped,
    local_path,
    run_command,
    shown_on,
)
from models.generation.decoding import padded_length
from models.generation.sampling import Sampling
from models.generation.text_generation import (
    Message,
    Piece,
    Tokens,
    begins_of_next_turn,
    chat_prompt,
    end_of_turn,
    generate_text,
    in_order,
)
from models.loading import (
    add_model_arguments,
    load_model,
    model_of_arguments,
    rows_that_fit,
)
from models.run_config import FoundModel
from stacked_remat.training import ChatTemplateError, ConfigError


def main(arguments: Sequence[str], console: Console | None = None) -> int:
    """The command: returns the exit status."""
    console = Console() if console is None else console
    return run_command(
        lambda arguments, _: _generate(arguments, console), arguments, shown_on(console)
    )


def _generate(arguments: Sequence[str], console: Console) -> int:
    options = _parser().parse_args(arguments)
    _check(options)
    texts = _texts(options)
    write = _writer(console)
    begun = _chat_beginning(options)
    variables = _mapping(options.chat_template_kwargs)
    sampling = _sampling(options)
    found = model_of_arguments(options)
    # Weights are read when the first prompt has been put together.
    load = functools.cache(lambda: load_model(found))
    # Any of the tokens that end a text; in a chat also what ends a turn
    stops = [(end,) for end in found.ends]
    if options.chat:
        with _template_errors(found):
            stops += [
                end_of_turn(found.tokenizer),
                *begins_of_next_turn(found.tokenizer),
            ]

    def pieces(prompts: Sequence[Tokens]) -> Iterator[Piece]:
        fitting = rows_that_fit(
            found, padded_length(max(map(len, prompts))) + options.max_new_tokens
        )
        return in_order(
            generate_text(
                load(),
                found.tokenizer,
                prompts,
                max_new_tokens=options.max_new_tokens,
                sampling=sampling,
                key=jax.random.key(options.seed),
                stops=stops,
                stop_texts=options.stop,
                rows=min(options.batch_size, fitting, len(prompts)),
            ),
            len(prompts),
        )

    def chat(said: Sequence[Message]) -> Tokens:
        with _template_errors(found):
            return chat_prompt(found.tokenizer, [*begun, *said], variables)

    try:
        if texts:
            prompts = [
                chat([_said("user", one)]) if options.chat else _prompt(found, one)
                for one in texts
            ]
            _show(write, texts, pieces(prompts), chat=options.chat)
        elif options.chat:
            # A turn a line, until the input ends
            history: list[Message] = []
            for line in sys.stdin:
                history.append(_said("user", _utf8(line.rstrip("\n"))))
                answer = ""
                for piece in pieces([chat(history)]):
                    write(piece.text + ("\n" if piece.last else ""), "none")
                    answer += piece.text
                history.append(_said("assistant", answer))
    except KeyboardInterrupt:
        console.out("")  # ends the line of the text so far
        raise
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("generate", __doc__)
    add_model_arguments(parser)
    add = parser.add_argument
    add(
        "--prompt",
        action="append",
        default=[],
        help="a text to continue; may be given several times",
    )
    add(
        "--prompts",
        type=local_path,
        metavar="FILE",
        help="a file with a prompt on each line",
    )
    add(
        "--chat",
        action="store_true",
        help="prompts are what the user says, put into the chat template",
    )
    add("--system", help="with --chat: the first message, of the system")
    add(
        "--messages",
        type=local_path,
        metavar="FILE",
        help="with --chat: JSON, a list of earlier messages",
    )
    add(
        "--chat_template_kwargs",
        help="with --chat: the template's variables: '{enable_thinking: false}'",
    )
    add(
        "--stop",
        action="append",
        default=[],
        help="a text that ends one; may be given several times",
    )
    add(
        "--max_new_tokens",
        type=int,
        default=128,
        help="for each prompt, at the most (default 128)",
    )
    add(
        "--temperature",
        type=float,
        default=1.0,
        help="divides logits (default 1); 0 for the likeliest",
    )
    add("--top_k", type=int, help="sample from the K likeliest tokens")
    add(
        "--top_p",
        type=float,
        help="draw among the fewest tokens whose probabilities reach this",
    )
    add(
        "--batch_size",
        type=int,
        default=16,
        help="prompts at once, or fewer that fit (default 16)",
    )
    add("--seed", type=int, default=0, help="of the random numbers (default 0)")
    return parser


def _check(options: argparse.Namespace) -> None:
    for name in ("system", "messages", "chat_template_kwargs"):
        if getattr(options, name) is not None and not options.chat:
            raise ConfigError(f"--{name} has no effect without --chat. Leave it out.")
    check_counts(options, "max_new_tokens", "batch_size")
    if "" in options.stop:
        raise ConfigError("--stop needs a text, and got an empty one. Leave it out.")
    if not 0 <= options.seed < 2**32:  # what JAX makes a key of; it drops further bits
        raise ConfigError(f"--seed must be from 0 to {2**32 - 1}, got {options.seed}.")


def _sampling(options: argparse.Namespace) -> Sampling:
    try:
        return Sampling(options.temperature, options.top_k, options.top_p)
    except ValueError as error:
        raise ConfigError(f"--{error}") from error


def _utf8(text: str) -> str:
    # Bytes that are not UTF-8 are lone surrogates in Python.
    return text.encode("utf-8", "replace").decode("utf-8")


def _texts(options: argparse.Namespace) -> list[str]:
    texts = [_utf8(text) for text in options.prompt]
    if options.prompts is not None:
        lines = options.prompts.read_text(
            encoding="utf-8", errors="replace"
        ).splitlines()
        texts += [line for line in lines if line.strip()]
    if not texts and (options.prompts is not None or not options.chat):
        raise ConfigError(
            "There is nothing to continue: give --prompt TEXT, or --prompts FILE with"
            " lines."
        )
    return texts


def _said(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def _chat_beginning(options: argparse.Namespace) -> list[Message]:
    messages = [] if options.system is None else [_said("system", options.system)]
    if options.messages is None:
        return messages
    try:
        return messages + [
            *map(dict, json.loads(options.messages.read_text(encoding="utf-8")))
        ]
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"--messages {options.messages} is no JSON list of messages with role and"
            f" content: {error}."
        ) from error


def _mapping(text: str | None) -> Mapping[str, Any]:
    try:
        found = dict(yaml.safe_load(text or "{}"))
    except (yaml.YAMLError, TypeError, ValueError) as error:
        raise ConfigError(
            f"--chat_template_kwargs {text!r} is no mapping such as {{enable_thinking:"
            " false}."
        ) from error
    for name in found:
        if not isinstance(name, str) or name in ("messages", "add_generation_prompt"):
            raise ConfigError(
                f"--chat_template_kwargs has {name!r}, which no variable may be called."
            )
    return found


@contextlib.contextmanager
def _template_errors(found: FoundModel) -> Iterator[None]:
    try:
        yield
    except ChatTemplateError as error:
        raise ConfigError(
            f"The chat template of the tokenizer {found.tokenizer_name} does not take a"
            f" user's message and an answer: {error}. Correct it (chat_template.jinja,"
            " or `chat_template` in tokenizer_config.json), or leave --chat out and"
            " write the prompt as the model expects it."
        ) from error


def _prompt(found: FoundModel, text: str) -> Tokens:
    prompt = found.tokenizer.encode_beginning(text)
    if not len(prompt):
        raise ConfigError(
            "A prompt is empty, and the tokenizer has no token that begins a text."
            " Begin the text yourself."
        )
    return prompt


def _writer(console: Console) -> Callable[[str, str], None]:
    """A function that writes a text in a style: printable for a terminal, unchanged for
    pipes and files.
    """

    def write(text: str, style: str) -> None:
        safe = encodable(escaped(text), console)
        # A segment is written unchanged; rich would replace the tabs of a text.
        # So that no markup of a text is taken for rich's
        segments = Segments([Segment(safe, console.get_style(style))])
        console.print(segments, end="", soft_wrap=True)

    def write_unchanged(text: str, style: str) -> None:
        stream = getattr(console.file, "buffer", None)
        (
            console.file.write(text)
            if stream is None
            else stream.write(text.encode("utf-8"))
        )
        console.file.flush()

    return write if console.is_terminal else write_unchanged


def _show(
    write: Callable[[str, str], None],
    texts: Sequence[str],
    pieces: Iterator[Piece],
    *,
    chat: bool,
) -> None:
    begun = -1
    for piece in pieces:
        if piece.row != begun:
            begun = piece.row
            write(f"--- {begun + 1} of {len(texts)}\n" if len(texts) > 1 else "", "dim")
            write(texts[begun] + ("\n" if chat else ""), "dim")
        write(piece.text + ("\n" if piece.last else ""), "none")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
