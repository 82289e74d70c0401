"""Evaluates a model with EleutherAI's lm-eval.

    python -m models.eval_lm --run_dir runs/mine --tasks hellaswag,arc_easy
        --num_fewshot 5
    python -m models.eval_lm --model Qwen/Qwen3-0.6B --tasks gsm8k
        --apply_chat_template --output_path scores

Other options are those of lm-eval's own command (`lm-eval run --help`). Texts are
scored and continued in batches, with a cache, and over devices with `--mesh`. Scores
are those of its `hf` model, up to rounding.
"""

import functools
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from jaxtyping import Array
from rich.console import Console

from models.command import (
    USER_ERRORS,
    check_counts,
    command_parser,
    run_command,
    shown_on,
)
from models.generation.decoding import padded_length
from models.generation.sampling import Sampling
from models.generation.text_generation import generate_text
from models.loading import (
    add_model_arguments,
    load_model,
    model_of_arguments,
    rows_that_fit,
)
from models.parts.decoder import Decoder
from models.run_config import FoundModel
from stacked_remat.training import (
    BATCH_AXIS,
    POSITION_AXIS,
    ConfigError,
    MeshConfig,
    Partitioning,
    parse_config,
)
from stacked_remat.training.progress import lasting_console

_POSITIONS_AT_ONCE = 64  # whose logits exist at the same time


class ModelToEvaluate:
    """What lm-eval's `TemplateLM` asks of a model; `lm_class` makes it one.

    Attributes:
        max_length: the most tokens of a text and what continues it; earlier ones are
            left out.
        batch_size: rows of a batch.
    """

    backend = "causal"

    def __init__(
        self,
        found: FoundModel,
        model: Decoder,
        *,
        batch_size: int = 16,
        max_length: int | None = None,
        partitioning: Partitioning | None = None,
    ):
        super().__init__()
        self.tokenizer = found.tokenizer
        self._found = found
        self._model = model
        self._partitioning = partitioning or Partitioning.of(
            MeshConfig({"data": 1}, {}, {})
        )
        rows = self._partitioning.parts_of(BATCH_AXIS)
        # Every device gets as many rows.
        self.batch_size = -(-batch_size // rows) * rows
        self.max_length = max_length or found.config.rotary.max_position_embeddings

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self.tokenizer.end

    @property
    def prefix_token_id(self) -> int:
        """The token before a text of which all is scored."""
        return (
            self.tokenizer.end if self.tokenizer.begin is None else self.tokenizer.begin
        )

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """The tokens of a text, after those that begin one unless it has them."""
        tokens = self.tokenizer.encode(string)
        if add_special_tokens is not False and (
            not len(tokens) or tokens[0] != self.prefix_token_id
        ):
            tokens = self.tokenizer.encode_beginning(string)
        return [int(token) for token in tokens]

    @property
    def tokenizer_name(self) -> str:
        """For caches of requests."""
        return self._found.tokenizer_name.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template, if it is to be used."""
        return self.tokenizer.chat_template.source_for() if chat_template else None

    def apply_chat_template(
        self,
        chat_history: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
    ) -> str:
        """The text of a chat; without a prompt for the next message it ends within the
        last one.
        """
        text = self.tokenizer.chat_template.render(
            chat_history, add_generation_prompt=add_generation_prompt
        )
        if add_generation_prompt:
            return text
        last = str(chat_history[-1]["content"]).strip()
        return text[: text.rindex(last) + len(last)]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """For each continuation its log-likelihood, and whether all of its tokens are
        the likeliest.
        """
        if (
            most := max((len(own) for _, _, own in requests), default=0)
        ) > self.max_length:
            raise ConfigError(
                f"A continuation has {most} tokens, more than --max_length"
                f" {self.max_length}."
            )
        # One token more than fit: the last is only predicted.
        texts = [
            (context + own)[-(self.max_length + 1) :] for _, context, own in requests
        ]
        # The longest first: what does not fit fails at once. Rows of a batch are then
        # of nearly one length.
        order = sorted(range(len(texts)), key=lambda at: -len(texts[at]))
        found = {}
        for first in range(0, len(order), self.batch_size):
            batch = order[first : first + self.batch_size]
            tokens = np.zeros(
                (self.batch_size, padded_length(len(texts[batch[0]]) - 1) + 1), np.int32
            )
            # Rows that are left over are padding, whose scores nothing reads.
            for row, at in enumerate(batch):
                tokens[row, : len(texts[at])] = texts[at]
            with self._partitioning.active():
                likelihoods, greedy = map(
                    np.asarray, _scores(self._model, tokens[:, :-1], tokens[:, 1:])
                )
            for row, at in enumerate(batch):
                # The score of a token is at the position before it.
                end = len(texts[at]) - 1
                own = slice(end - min(len(requests[at][2]), end), end)
                found[at] = (
                    float(likelihoods[row, own].sum()),
                    bool(greedy[row, own].all()),
                )
        return [found[at] for at in range(len(texts))]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-likelihood of each text, of which every window of `max_length` is
        scored once.
        """
        windows = []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            for first in range(0, len(tokens), self.max_length):
                # Each token is scored once, with as many before it as fit.
                own = tokens[first : first + self.max_length]
                known = (
                    tokens[max(0, first + len(own) - self.max_length - 1) : first]
                    if first
                    else []
                )
                context = known or [self.prefix_token_id]
                windows.append((number, (None, context, own)))
        scores = self._loglikelihood_tokens([window for _, window in windows])
        found = [0.0] * len(requests)
        for (number, _), (likelihood, _) in zip(windows, scores, strict=True):
            found[number] += likelihood
        return found

    def generate_until(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[str]:
        """Continues each text up to a stop."""
        # Requests of a batch are drawn alike and end alike.
        groups: dict[str, list[int]] = {}
        for at, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1]), []).append(at)
        found = [""] * len(requests)
        for options, members in groups.items():
            most, sampling, until = _generation(json.loads(options))
            if most >= self.max_length:
                raise ConfigError(
                    f"--max_length {self.max_length} has no room for a prompt before"
                    f" {most} new tokens."
                )
            kept = slice(most - self.max_length, None)
            one = [self.prefix_token_id]
            prompts = {
                at: np.asarray((self.tok_encode(requests[at].args[0]) or one)[kept])
                for at in members
            }
            members.sort(key=lambda at: -len(prompts[at]))
            with self._partitioning.active():
                for piece in generate_text(
                    self._model,
                    self.tokenizer,
                    [prompts[at] for at in members],
                    max_new_tokens=most,
                    sampling=sampling,
                    key=jax.random.key(0),
                    stops=[(end,) for end in self._found.ends],
                    stop_texts=until,
                    rows=self.batch_size,
                ):
                    found[members[piece.row]] += piece.text
        return found


def _generation(options: Mapping[str, Any]) -> tuple[int, Sampling, list[str]]:
    """The most new tokens, how they are drawn, and the texts that end one, by lm-eval's
    `gen_kwargs`.
    """
    names = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
    sampling = Sampling(0.0)
    until = options.get("until") or []
    try:
        most = next(
            (int(options[name]) for name in names if options.get(name) is not None), 256
        )
        if most < 1:
            raise ValueError(f"{most} new tokens are none.")
        temperature = float(options.get("temperature", 0.0))
        if options.get("do_sample", temperature > 0):
            sampling = Sampling(
                temperature or 1.0, options.get("top_k") or None, options.get("top_p")
            )
    except ValueError as error:
        raise ConfigError(f"The gen_kwargs of a task can't be used: {error}") from error
    return most, sampling, [until] if isinstance(until, str) else until


@eqx.filter_jit
def _scores(model: Decoder, tokens: Any, targets: Any) -> tuple[Array, Array]:
    """The log-likelihood of every target `[batch, position]`, and whether it is the
    likeliest token.
    """
    Batch = Axis(BATCH_AXIS, tokens.shape[0])
    Pos = Axis(POSITION_AXIS, tokens.shape[1])
    hidden, _ = model.hidden_states(hax.named(tokens, (Batch, Pos)))
    Embed = model.config.Embed

    def of_position(given: tuple[Array, Array]) -> tuple[Array, Array]:
        own, target = given
        logits = (
            model.logits(NamedArray(own, (Batch, Embed)))
            .rearrange((Batch, model.Vocab))
            .array
        )
        chosen = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
        return chosen - jax.nn.logsumexp(logits, axis=-1), target == jnp.argmax(
            logits, axis=-1
        )

    # Logits of all positions would not fit.
    by_position = hidden.rearrange((Pos, Batch, Embed)).array, targets.T
    likelihoods, greedy = jax.lax.map(
        of_position, by_position, batch_size=_POSITIONS_AT_ONCE
    )
    return likelihoods.T, greedy.T


@functools.cache
def lm_class() -> Any:
    """`ModelToEvaluate` as a class of lm-eval."""
    try:
        from lm_eval.api.model import (  # pyright: ignore[reportMissingImports]
            TemplateLM,
        )
    except ImportError as error:
        raise ConfigError(
            "models.eval_lm needs lm-eval: pip install 'stacked_remat[eval]'."
        ) from error
    return type("EvaluatedModel", (ModelToEvaluate, TemplateLM), {})


def main(arguments: Sequence[str], console: Console | None = None) -> int:
    """The command: returns the exit status."""
    show = shown_on(lasting_console() if console is None else console)
    return run_command(lambda arguments, _: _evaluate(arguments), arguments, show)


def _evaluate(arguments: Sequence[str]) -> int:
    parser = command_parser("eval_lm", __doc__)
    add_model_arguments(parser)
    add = parser.add_argument
    add(
        "--max_length",
        type=int,
        help="most tokens of a row; what the model was made for if not given",
    )
    add(
        "--batch_size",
        "-b",
        type=int,
        help="rows of a batch (default 16; with --config the file's, or 1)",
    )
    add(
        "--mesh",
        help=(
            "axes of devices, as trainer.mesh.axes has them: '{data: 8}'; one if not"
            " given"
        ),
    )
    options, others = parser.parse_known_args(arguments)
    check_counts(options, "max_length", "batch_size")
    mesh = (
        None
        if options.mesh is None
        else parse_config(MeshConfig, ["--axes", options.mesh])
    )
    partitioning = mesh and Partitioning.of(mesh)
    evaluated = lm_class()
    import lm_eval.__main__  # pyright: ignore[reportMissingImports]
    import lm_eval.api.registry  # pyright: ignore[reportMissingImports]

    def make(model_args: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
        ignored = {"trust_remote_code"}  # is of data sets
        if settings["max_batch_size"] or model_args.keys() - ignored:
            raise ConfigError(
                "model_args and max_batch_size have no effect; give --dtype and"
                " --batch_size."
            )
        found = model_of_arguments(options)
        if partitioning is None:
            rows_that_fit(found, 1)
        sizes = {
            "batch_size": int(settings["batch_size"]),
            "max_length": options.max_length,
        }
        return evaluated(
            found, load_model(found, partitioning), partitioning=partitioning, **sizes
        )

    # lm-eval makes the model by this, when it has read all its arguments.
    evaluated.create_from_arg_obj = make
    lm_eval.api.registry.register_model("stacked_remat")(evaluated)
    # lm-eval's own command, which reads its arguments from here
    sys.argv = ["lm-eval", "run", "--model", "stacked_remat", *others]
    if options.batch_size is not None or not any(
        one.startswith(("--config", "-C")) for one in others
    ):
        sys.argv.insert(2, f"--batch_size={options.batch_size or 16}")
    try:
        lm_eval.__main__.cli_evaluate()
    except USER_ERRORS:
        raise
    except ValueError as error:
        raise ConfigError(
            f"lm-eval: {error} (`lm-eval ls tasks` lists what --tasks takes.)"
        ) from error
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
