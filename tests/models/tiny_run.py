"""A tiny training run: its config, its text, and the command that trains it; what other
commands print.
"""

import io
import re
from pathlib import Path

import jax
from rich.console import Console

from models.train_lm import main

STEPS = 60
CONFIG = f"""
model:
  type: qwen3_moe
  hidden_dim: 16
  num_layers: 2
  num_heads: 2
  num_kv_heads: 1
  initializer_range: 0.1
  experts: {{num_experts: 2, experts_per_token: 1, intermediate_dim: 8}}
vocab_size: 260
remat: nested
data: {{held_out_fraction: 0.3, seq_len: 16, batch_size: 4}}
optimizer: {{learning_rate: 0.02, warmup: 2}}
trainer: {{num_steps: {STEPS}, log_every: 1, eval_batches: 2,
          mesh: {{axes: {{data: 1}}}}}}
"""


def make_workplace(folder):
    """A config file and forty files: a letter of its own, the same text three times,
    and the end.
    """
    (folder / "text").mkdir()
    for number in range(40):
        (folder / "text" / f"{number}.txt").write_text(
            chr(ord("!") + number) + "abcd" * 3
        )
    (folder / "config.yaml").write_text(CONFIG)
    return folder


def arguments_of(workplace, *overrides, run="run"):
    """The arguments of a run; the last of overrides of one key, or of a section that
    has it, counts.
    """
    given = {
        "--config_path": str(workplace / "config.yaml"),
        "--data.sources.text.paths": f"[{workplace}/text/*.txt]",
        "--data.cache_dir": str(workplace / "cache"),
        "--trainer.run_dir": str(workplace / run),
    }
    remaining = [*overrides]
    while remaining:
        key = remaining.pop(0)
        is_alone = not remaining or remaining[0].startswith("--")
        below = [name for name in given if f"{name}.".startswith(f"{key}.")]
        for name in below:
            del given[name]
        given[key] = None if is_alone else remaining.pop(0)
    pairs = ([key] if own is None else [key, own] for key, own in given.items())
    return [part for pair in pairs for part in pair]


def train(workplace, *overrides, run="run"):
    """The exit status; optax's Adam needs the standard promotion."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return main(arguments_of(workplace, *overrides, run=run))


def is_place_of(place, text):
    """Whether a place has as many pieces of files of a workplace as the text has lines,
    and the letters of their beginnings that the text has.
    """
    pieces = [part for of_file in place.split("; ") for part in of_file.split(", ")]
    files = re.findall(r"(/[^:;]+\.txt):1", place)
    letters = {letter for letter in text if letter not in "abcd\n"}
    begun = {Path(file).read_text()[0] for file in files}
    return len(pieces) == len(text.split("\n")) and letters <= begun


def printed(command, *arguments, width=200):
    """The exit status of a command and what it prints."""
    text = io.StringIO()
    status = command(
        [str(argument) for argument in arguments], Console(file=text, width=width)
    )
    return status, text.getvalue()
