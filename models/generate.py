"""Continues prompts with what a run trained, or with a model in Hugging Face's format.

    python -m models.generate --checkpoint runs/mine --prompt "Once upon a time"
    python -m models.generate --model exported --chat --prompt "Who are you?" --temperature 0

The first reads the latest checkpoint of a run folder of `models.train_lm`, its adapters included; the second
a folder such as `models.export_hf` writes, or a name on the Hugging Face Hub. Prompts are continued as one
batch, and the text of the first is streamed, then that of the others.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import jax
from rich.console import Console
from rich.segment import Segment, Segments

from models.command import encodable, escaped, local_path, run_command, shown_on
from models.generation.sampling import Sampling
from models.generation.text_generation import (
    Piece,
    Stop,
    Tokens,
    chat_prompt,
    end_of_turn,
    generate_text,
    in_order,
)
from models.generator_source import Dtype, GeneratorSource, source_of_folder, source_of_run
from stacked_remat.training import ChatTemplateError, ConfigError, Tokenizer
from stacked_remat.training.config_checks import check_date


def main(arguments: Sequence[str], console: Console | None = None) -> int:
    """The command.

    Returns:
        0 when all prompts have been continued, 1 after an error, 130 or 143 when SIGINT (Ctrl-C)
        or SIGTERM ended it.
    """
    console = Console() if console is None else console
    return run_command(lambda arguments, _: _generate(arguments, console), arguments, shown_on(console))


def _generate(arguments: Sequence[str], console: Console) -> int:
    options = _parser().parse_args(arguments)
    sampling, texts = _sampling(options), _prompts(options)
    source = _source(options)
    name = options.tokenizer or options.model or f"of the run {options.checkpoint}"
    prompts, stops = _encoded(source.tokenizer, name, texts, chat=options.chat)
    source.check_memory(len(prompts), max(map(len, prompts)) + options.max_new_tokens)
    pieces = generate_text(
        source.read(),
        source.tokenizer,
        prompts,
        max_new_tokens=options.max_new_tokens,
        sampling=sampling,
        key=jax.random.key(options.seed),
        ends=source.ends,
        stops=stops,
    )
    try:
        _show(_writer(console, raw=options.raw), texts, in_order(pieces, len(texts)), chat=options.chat)
    except KeyboardInterrupt:
        console.out("")  # ends the line of the text so far
        raise
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m models.generate", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--checkpoint", type=local_path, metavar="RUN_FOLDER", help="a run folder of models.train_lm"
    )
    source.add_argument("--model", help="a folder in Hugging Face's format, or owner/model on its Hub")
    add("--step", type=int, help="of the checkpoint; the latest if not given")
    add(
        "--tokenizer",
        help="replaces the run's or the model's: byte, a folder, a file, a name on the Hub",
    )
    add("--dtype", choices=("float32", "bfloat16"), help="of --model; what its config.json says if not given")
    add("--prompt", action="append", default=[], help="a text to continue; may be given several times")
    add("--prompts", type=local_path, metavar="FILE", help="a file with a prompt on each line")
    add("--chat", action="store_true", help="prompts are what the user says, put into the chat template")
    add("--chat_date", help="with --chat: today for the template, such as 2025-06-30; the run's if not given")
    add("--max_new_tokens", type=int, default=128, help="for each prompt, at the most (default 128)")
    add(
        "--temperature", type=float, default=1.0, help="divides logits (default 1); 0 for the likeliest token"
    )
    add("--top_k", type=int, help="sample from the K likeliest tokens")
    add("--top_p", type=float, help="draw among the fewest tokens whose probabilities reach this")
    add("--debug", action="store_true", help="show the traceback of an error")
    add(
        "--raw",
        action="store_true",
        help="write texts unchanged, for pipes and files; otherwise control characters are escaped",
    )
    add("--seed", type=int, default=0, help="of the random numbers (default 0)")
    return parser


def _source(options: argparse.Namespace) -> GeneratorSource:
    if options.step is not None and options.checkpoint is None:
        raise ConfigError("--step has no effect with --model, which has no steps. Leave it out.")
    if options.dtype is not None and options.model is None:
        raise ConfigError(
            "--dtype has no effect with --checkpoint, which computes as the run did (model.compute_dtype). "
            "Leave it out."
        )
    if options.chat_date is not None and not options.chat:
        raise ConfigError("--chat_date has no effect without --chat. Leave it out.")
    try:
        check_date("--chat_date", options.chat_date)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    named = {"tokenizer": options.tokenizer, "chat_date": options.chat_date}
    if options.checkpoint is not None:
        return source_of_run(options.checkpoint, step=options.step, **named)
    return source_of_folder(options.model, dtype=cast(Dtype | None, options.dtype), **named)


def _sampling(options: argparse.Namespace) -> Sampling:
    if options.max_new_tokens < 1:
        raise ConfigError(f"--max_new_tokens must be at least 1, got {options.max_new_tokens}.")
    if not 0 <= options.seed < 2**32:  # what JAX makes a key of; it drops further bits
        raise ConfigError(f"--seed must be from 0 to {2**32 - 1}, got {options.seed}.")
    try:
        return Sampling(options.temperature, options.top_k, options.top_p)
    except ValueError as error:
        raise ConfigError(f"--{error}") from error


def _prompts(options: argparse.Namespace) -> list[str]:
    texts = list(options.prompt)
    if options.prompts is not None:
        try:
            lines = options.prompts.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise ConfigError(f"--prompts {options.prompts} is not UTF-8: {error}. Convert it.") from error
        texts += [line for line in lines if line.strip()]
    for text in texts:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:  # Python passes on bytes of a command line as lone surrogates
            raise ConfigError(f"--prompt {text!r} is not valid UTF-8.") from error
    if not texts:
        raise ConfigError("There is nothing to continue: give --prompt TEXT, or --prompts FILE with lines.")
    return texts


def _encoded(
    tokenizer: Tokenizer, name: str, texts: Sequence[str], *, chat: bool
) -> tuple[list[Tokens], tuple[Stop, ...]]:
    """The tokens of the prompts, and further sequences of tokens that end a continuation."""
    if chat:
        try:
            return [chat_prompt(tokenizer, text) for text in texts], (end_of_turn(tokenizer),)
        except ChatTemplateError as error:
            raise ConfigError(
                f"The chat template of the tokenizer {name} does not take a user's message and an answer: "
                f"{error}. Correct it (chat_template.jinja, or `chat_template` in tokenizer_config.json), or "
                f"leave --chat out and write the prompt as the model expects it."
            ) from error
    prompts = [tokenizer.encode_beginning(text) for text in texts]
    if not all(len(prompt) for prompt in prompts):
        raise ConfigError(
            "A prompt is empty, and the tokenizer has no token that begins a text. Begin the text yourself."
        )
    return prompts, ()


def _writer(console: Console, *, raw: bool) -> Callable[[str, str], None]:
    """A function that writes a text in a style: printable for a terminal, or `raw` and unchanged."""

    def write(text: str, style: str) -> None:
        safe = encodable(escaped(text), console)
        # A segment is written unchanged; rich would replace the tabs of a text.
        segments = Segments([Segment(safe, console.get_style(style))])
        console.print(segments, end="", soft_wrap=True)

    def write_raw(text: str, style: str) -> None:
        stream = getattr(console.file, "buffer", None)
        console.file.write(text) if stream is None else stream.write(text.encode("utf-8"))
        console.file.flush()

    return write_raw if raw else write


def _show(
    write: Callable[[str, str], None], texts: Sequence[str], pieces: Iterator[Piece], *, chat: bool
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
