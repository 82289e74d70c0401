"""Plants corrupted examples in real text, trains on it, and finds them again by their scores.

    python -m benchmarks.planted_examples

The text is pieces of the source files of the Python standard library. The letters of every tenth piece are
shuffled. A small decoder is trained on all of them with a `ghost` section in its config, which scores the
sequences against held-out pieces. Writes `results/planted_examples.json`, with the area under the ROC curve
(AUC) of the scores, and a picture of them. The run folder is kept for `python -m stacked_remat.ghost`.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from models.train_lm import main as train_lm
from stacked_remat.ghost.log import log_folder, read_scores
from stacked_remat.ghost.ranking import Selection, rank_examples
from stacked_remat.training.data.files import standard_library_files

from .record import RESULTS, write_results

LETTERS = 127  # of a piece: with a token before and after it, a sequence of 128 tokens and their targets
PLANTED = 0.1
CONFIG = """
model: {type: qwen3, hidden_dim: 64, num_layers: 2, num_heads: 4, num_kv_heads: 2, mlp_dim: 192}
data: {seq_len: 128, batch_size: 32, packing: whole}
optimizer: {learning_rate: 5.0e-3, warmup_steps: 10}
ghost: {method: grad_dot, token_mean: batch, every: 4, validation: {batches: 2}}
trainer: {num_steps: 240, eval_batches: 2, mesh: {axes: {data: 1}}}
"""


def main(arguments: Sequence[str] | None = None) -> Path:
    """The command; returns the file of results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pieces", type=int, default=4000, help="to train on (4000)")
    parser.add_argument("--steps", type=int, default=240, help="of training (240)")
    parser.add_argument(
        "--run-dir", type=Path, default=Path("runs/planted"), help="run folder (runs/planted)"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    given = parser.parse_args(arguments)
    planted = run(given.run_dir, pieces=given.pieces, steps=given.steps)
    found = scores_of(given.run_dir, planted)
    plot(found, given.out / "planted_examples.png")
    path = given.out / "planted_examples.json"
    write_results(
        path, pieces=given.pieces, steps=given.steps, config=yaml.safe_load(CONFIG), **found.summary
    )
    print(json.dumps(found.summary, indent=1))
    return path


def run(folder: Path, *, pieces: int, steps: int, options: Sequence[str] = ()) -> set[str]:
    """Trains on pieces of text, some of them shuffled, and returns these.

    Raises:
        RuntimeError: the run failed; its message is on standard output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    texts = _pieces(pieces + pieces // 10, generator)
    count = int(PLANTED * pieces)
    shuffled = ["".join(generator.permutation(list(text))) for text in texts[:count]]
    training, held_out = [*shuffled, *texts[count:pieces]], texts[pieces:]
    for name, lines in (("training", training), ("held_out", held_out)):
        rows = [json.dumps({"text": text}) + "\n" for text in lines]
        (folder / f"{name}.jsonl").write_text("".join(rows), encoding="utf-8")
    (folder / "planted.yaml").write_text(CONFIG, encoding="utf-8")
    source = {"paths": [f"{folder}/training.jsonl"], "held_out": [f"{folder}/held_out.jsonl"]}
    status = train_lm(
        [
            *("--config_path", f"{folder}/planted.yaml", "--data.sources.library", yaml.safe_dump(source)),
            *("--data.cache_dir", f"{folder}/tokens", "--trainer.run_dir", str(folder)),
            *("--trainer.num_steps", str(steps), "--trainer.checkpoint.overwrite", "true", *options),
        ]
    )
    if status:
        raise RuntimeError(f"The run in {folder} ended with exit status {status}.")
    return set(shuffled)


class Found:
    """The mean scores of the scored examples, from the highest to the lowest, and which were planted."""

    def __init__(self, scores: np.ndarray, planted: np.ndarray):
        self.scores, self.planted = scores, planted
        count = int(planted.sum())
        ranks = np.arange(len(planted))[planted]
        # The share of pairs of a planted and another example in which the planted one has the lower score.
        above = ranks - np.arange(count)
        self.summary: dict[str, Any] = {
            "scored": len(planted),
            "planted": count,
            "auc": round(float(above.sum() / (count * (len(planted) - count))), 4),
            "planted_among_as_many_lowest": int(planted[-count:].sum()),
        }


def scores_of(folder: Path, planted: set[str], *, steps: tuple[int, int] | None = None) -> Found:
    """The scores in the log of a run, each step's divided by the sum of its absolute scores."""
    log = log_folder(folder)
    ranked = rank_examples(Selection(log, steps))
    rows = read_scores(log, ["example", "text"])
    texts = dict(zip(rows["example"].to_pylist(), rows["text"].to_pylist(), strict=True))
    return Found(ranked.scores, np.array([texts[name] in planted for name in ranked.ids]))


def _pieces(count: int, generator: np.random.Generator) -> list[str]:
    """So many different pieces of the standard library, all of one length and of ASCII letters."""
    files = standard_library_files()
    found: dict[str, None] = {}
    while len(found) < count:
        file = files[generator.integers(len(files))]
        text = Path(file.url.removeprefix("file://")).read_text(encoding="utf-8", errors="replace")
        if len(text) > LETTERS:
            start = int(generator.integers(len(text) - LETTERS))
            piece = text[start : start + LETTERS]
            if piece.isascii():
                found[piece] = None
    return list(found)


def plot(found: Found, path: Path) -> None:
    """Plots the scores of planted and other examples, and how many planted ones are among the lowest."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    edges = np.linspace(*np.quantile(found.scores, [0.002, 0.998]), 60)
    left.hist(found.scores[~found.planted], edges, color="C0", alpha=0.7, label="text as it is")
    left.hist(found.scores[found.planted], edges, color="C3", alpha=0.7, label="letters shuffled")
    left.axvline(0, color="black", linewidth=0.8)
    left.set_xlabel("mean score")
    left.set_ylabel("examples")
    left.set_yscale("log")
    left.legend()
    looked_at = np.arange(1, len(found.planted) + 1) / len(found.planted)
    right.plot(looked_at, np.cumsum(found.planted[::-1]) / found.planted.sum(), color="C3")
    right.plot([0, 1], [0, 1], ":", color="gray")
    right.set_xlabel("share of the examples, from the lowest score")
    right.set_ylabel("share of the shuffled examples among them")
    right.set_title(f"AUC {found.summary['auc']:.3f}")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path)


if __name__ == "__main__":
    print(main())
