"""All data of a run: from its config to a stream of training batches and the batches to evaluate on."""

from dataclasses import dataclass
from pathlib import Path
from typing import final

from ..data_config import DataConfig, SourceConfig
from ..progress import Progress
from .batch_stream import BatchStream, MixtureShare, ProcessShare
from .data_error import DataError
from .files import SourceFile, find_files, standard_library_files
from .held_out import HeldOutBatches
from .packing import PackedDocuments
from .records import RecordFormat
from .token_cache import CachedTokens, CacheRequest, open_token_cache
from .tokenized import TokenizedDocuments
from .tokenizers import Tokenizer

_STANDARD_LIBRARY = "python-standard-library"


@final
@dataclass(frozen=True)
class TrainingData:
    """What a run trains on and is evaluated on.

    Attributes:
        training: batches without end.
        held_out: batches of the held-out documents of all sources together.
        held_out_by_source: the same for each source.
        summary: for people, a line.
    """

    training: BatchStream
    held_out: HeldOutBatches
    held_out_by_source: dict[str, HeldOutBatches]
    summary: str


def open_training_data(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    seed: int,
    progress: Progress,
    process: ProcessShare | None = None,
) -> TrainingData:
    """Finds the config's files, tokenizes what is not in the cache yet, splits, packs and mixes it.

    Args:
        config: what to read.
        tokenizer: what `config.tokenizer` names, from `load_tokenizer`.
        seed: of the order of training.
        progress: shows tokenizing, and says how many records were left out.
        process: this process's share of every batch; all of it if not given.

    Raises:
        DataError: a path that stands for no file, a record that can't be read, or too little text.
    """
    training: dict[str, MixtureShare] = {}
    held_out: dict[str, PackedDocuments] = {}
    sources = config.sources or {_STANDARD_LIBRARY: None}
    for name, source in sources.items():
        documents = _split(name, source, config, tokenizer, progress)
        packed = [
            PackedDocuments(half, config.seq_len, config.packing, separate=config.separate_documents)
            for half in documents
        ]
        for half, what in zip(packed, ("train on", "hold out"), strict=True):
            if not half.num_counted:
                raise DataError(
                    f"data.sources.{name} has {half.num_targets} tokens to {what}, and none of them counts "
                    f"as a target: under train_on: answers that is what the role `assistant` says. Check the "
                    f"roles of its chats, or write train_on: all."
                )
        training[name] = MixtureShare(packed[0], 1.0 if source is None else source.weight)
        held_out[name] = packed[1]
    stream = BatchStream(
        training, batch_size=config.batch_size, seed=seed, process=process, prefetch=config.prefetch
    )
    return TrainingData(
        training=stream,
        held_out=HeldOutBatches(list(held_out.values()), config.batch_size, process),
        held_out_by_source={
            name: HeldOutBatches([packed], config.batch_size, process) for name, packed in held_out.items()
        },
        summary=_summary([share.sequences for share in training.values()], list(held_out.values())),
    )


def _split(
    name: str, source: SourceConfig | None, config: DataConfig, tokenizer: Tokenizer, progress: Progress
) -> tuple[TokenizedDocuments, TokenizedDocuments]:
    """The documents of a source that are trained on, and those that are held out."""
    if source is None:
        files = standard_library_files()
    else:
        files = find_files(source.paths, f"data.sources.{name}.paths")
    if source is not None and source.held_out:
        apart = find_files(source.held_out, f"data.sources.{name}.held_out")
        held_out = {file.url for file in apart}
        rest = tuple(file for file in files if file.url not in held_out)
        if not rest:
            raise DataError(
                f"data.sources.{name}.held_out holds out every file that data.sources.{name}.paths stands "
                f"for: there is nothing left to train on."
            )
        trained_on, held = (
            _cached(which, some, source, config, tokenizer, progress).documents
            for which, some in ((name, rest), (f"{name}-held-out", apart))
        )
        return trained_on, held
    cached = _cached(name, files, source, config, tokenizer, progress)
    held = cached.keys < config.held_out_fraction * 2**32
    if held.all() or not held.any():
        raise DataError(
            f"data.sources.{name} has {len(held)} documents: {(~held).sum()} to train on and {held.sum()} "
            f"held out at data.held_out_fraction = {config.held_out_fraction}. Both need at least one: "
            f"change the fraction, or name files to hold out under data.sources.{name}.held_out."
        )
    return tuple(  # pyright: ignore[reportReturnType]
        cached.documents.select(chosen, f"{half}, {config.held_out_fraction} held out")
        for half, chosen in (("trained on", ~held), ("held out", held))
    )


def _cached(
    name: str,
    files: tuple[SourceFile, ...],
    source: SourceConfig | None,
    config: DataConfig,
    tokenizer: Tokenizer,
    progress: Progress,
) -> CachedTokens:
    how = RecordFormat(format="text")
    if source is not None:
        how = RecordFormat(source.format, source.text_key, source.messages_key)
    answers_only = source is not None and source.train_on == "answers"
    request = CacheRequest(name, files, how, tokenizer, answers_only, config.on_malformed)
    cached = open_token_cache(request, Path(config.cache_dir), progress)
    if cached.counts.num_malformed:
        progress.message(
            f"{name}: {cached.counts.num_malformed} records can't be read and were skipped, such as "
            f"{'; '.join(cached.counts.problems)}"
        )
    return cached


def _summary(training: list[PackedDocuments], held_out: list[PackedDocuments]) -> str:
    def count(halves: list[PackedDocuments]) -> tuple[int, int]:
        return sum(half.num_counted for half in halves), sum(half.num_documents for half in halves)

    (tokens, documents), (held_tokens, held_documents) = count(training), count(held_out)
    return (
        f"{tokens:,} tokens in {documents:,} documents to train on, {held_tokens:,} in {held_documents:,} "
        f"held out"
    )
