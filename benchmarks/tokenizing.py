"""Tokenizing in one process, and in two.

    python -m benchmarks.tokenizing --mebibytes 1024

The text is the Python standard library's, over and over with another number in each
record, as records of JSON lines in temporary files of 64 MiB; the tokenizer a byte-pair
encoding of 8,192 tokens that is trained on a twentieth of it. Each round builds the
cache anew with each number of processes, in turn, and `rate` is the median over rounds.
`ratio` is the median, over rounds, of a rate divided by that of the first number.
`apart` is what it would be if processes had nothing to do with each other: that of as
many runs at once, each of one process with a cache of its own. Cores that share a
physical core give much less than their number. Writes `results/tokenizing.json`.
"""

import itertools
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import tokenizers
from rich.console import Console
from tokenizers import decoders, pre_tokenizers, trainers

from stacked_remat.training import (
    ConsoleProgress,
    DataConfig,
    SourceConfig,
    load_tokenizer,
    open_training_data,
)
from stacked_remat.training.data.files import standard_library_files

from .command import Rows, benchmark

_FILE_BYTES = 2**26


@benchmark("tokenizing")
def main(
    mebibytes: int = 1024,
    processes: tuple[int, ...] = (1, 2),
    rounds: int = 3,
) -> Rows:
    """The rate in MiB of text a second for each number of processes."""
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        texts = [
            Path(file.place).read_text("utf-8", "replace")
            for file in standard_library_files()
        ]
        tokenizer = _write_tokenizer(root / "tokenizer.json", texts)
        written = _write_records(root / "texts", texts, mebibytes * 2**20)
        rates: dict[int, list[float]] = {count: [] for count in processes}
        apart: dict[int, list[float]] = {count: [] for count in processes}
        for _, count in itertools.product(range(rounds), processes):
            seconds = _seconds(root, tokenizer, count)
            rates[count].append(written / 2**20 / seconds)
            seconds = _seconds_apart(root, tokenizer, count)
            apart[count].append(count * written / 2**20 / seconds)
        first = rates[processes[0]]
        for count, of_count in rates.items():
            ratios = [a / b for a, b in zip(of_count, first, strict=True)]
            of_apart = zip(apart[count], apart[processes[0]], strict=True)
            yield {
                "processes": count,
                "mebibytes": written >> 20,
                "rate": round(statistics.median(of_count), 2),
                "ratio": round(statistics.median(ratios), 2),
                "least_ratio": round(min(ratios), 2),
                "apart": round(statistics.median(a / b for a, b in of_apart), 2),
            }


def _write_tokenizer(path: Path, texts: list[str]) -> Path:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8_192,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts[::20], trainer)
    tokenizer.save(str(path))
    path.with_name("tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    return path


def _write_records(folder: Path, texts: list[str], size: int) -> int:
    """Write files of records with about so many bytes of text; the bytes."""
    folder.mkdir()
    written = 0
    records = _records(texts)
    number = 0
    while written < size:
        until = min(written + _FILE_BYTES, size)
        with (folder / f"{number:04}.jsonl").open("w") as file:
            while written < until:
                text = next(records)
                file.write(json.dumps({"text": text}) + "\n")
                written += len(text.encode())
        number += 1
    return written


def _records(texts: list[str]) -> Iterator[str]:
    for number in itertools.count():
        for text in texts:
            yield f"# {number}\n{text}"


def _seconds(root: Path, tokenizer: Path, processes: int) -> float:
    """The time to build the cache of all texts."""
    with tempfile.TemporaryDirectory(dir=root) as cache:
        config = DataConfig(
            sources={"texts": SourceConfig((str(root / "texts"),))},
            tokenizer=str(tokenizer),
            cache_dir=cache,
            tokenizing_processes=processes,
        )
        began = time.monotonic()
        data = open_training_data(
            config,
            load_tokenizer(str(tokenizer)),
            seed=0,
            progress=ConsoleProgress(Console(quiet=True)),
        )
        seconds = time.monotonic() - began
        data.training.close()
        return seconds


def _seconds_apart(root: Path, tokenizer: Path, runs: int) -> float:
    """The longest time of so many runs at once, each of one process."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(runs, spawn) as pool:
        # Import what they need
        list(pool.map(abs, range(runs)))
        found = [pool.submit(_seconds, root, tokenizer, 1) for _ in range(runs)]
        return max(one.result() for one in found)


if __name__ == "__main__":
    main()
