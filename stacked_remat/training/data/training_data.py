"""Opens the data of a run: a stream of training batches and the batches of held-out documents."""

import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np

from ..data_config import DataConfig, SourceConfig
from ..errors import DataError
from ..progress import Progress
from .batch_stream import BatchStream, HeldOutBatches, MixtureShare, ProcessShare
from .files import SourceFile, find_files, standard_library_files
from .packing import PackedDocuments
from .records import RecordFormat, format_of
from .token_cache import CachedTokens, CacheRequest, open_token_cache
from .tokenized import TokenizedDocuments
from .tokenizers import Tokenizer


@final
@dataclass(frozen=True)
class TrainingData:
    """The data of a run.

    Attributes:
        training: an endless stream of batches.
        held_out: batches of the held-out documents of all sources together.
        held_out_by_source: the same for each source.
        summary: one line for messages.
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
    """Finds the config's files, tokenizes what is not in the cache yet, and splits, packs and mixes it.

    Args:
        config: of the data.
        tokenizer: that of `config.tokenizer`, from `load_tokenizer`.
        seed: of the order of training.
        progress: shows the progress of tokenizing, and how many records were skipped.
        process: this process's share of every batch; all of it if not given.

    Raises:
        DataError: a path matches no file, a record can't be read, or there is too little text.
    """
    process = ProcessShare() if process is None else process
    training: dict[str, MixtureShare] = {}
    held_out: dict[str, PackedDocuments] = {}
    for source in _sources(config, progress):
        name = source.name
        documents = _split(source, config, tokenizer, progress)
        packed = [
            PackedDocuments(half, config.seq_len, config.packing, separate=config.separate_documents)
            for half in documents
        ]
        for half, what in zip(packed, ("train on", "hold out"), strict=True):
            if not half.num_counted:
                raise DataError(
                    f"data.sources.{name} has {half.num_targets} tokens to {what}, none of which counts as a "
                    f"target: with train_on: answers only messages of the role `assistant` do. Check the "
                    f"roles of its chats, or set train_on: all."
                )
        training[name] = MixtureShare(packed[0], source.config.weight)
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


@dataclass(frozen=True)
class _Source:
    """A source: files to train on, and to evaluate on if it names some."""

    name: str
    config: SourceConfig
    files: tuple[SourceFile, ...]
    held_out: tuple[SourceFile, ...] = ()

    @property
    def record_format(self) -> RecordFormat:
        return RecordFormat(self.config.format, self.config.text_key, self.config.messages_key)


def _sources(config: DataConfig, progress: Progress) -> list[_Source]:
    """All sources with their files, without those that any source holds out."""
    if not config.sources:
        files = standard_library_files()
        return [_Source("python-standard-library", SourceConfig(("*.py",), format="text"), files)]
    held_by: dict[str, str] = {}
    found, apart = {}, {}
    for name, source in config.sources.items():
        key = f"data.sources.{name}"
        found[name] = find_files(source.paths, f"{key}.paths", progress.message)
        apart[name] = find_files(source.held_out, f"{key}.held_out", progress.message)
        held_by |= {file.identity: key for file in apart[name]}
    names: dict[str, str] = {}  # a file is split by its name, which must be the same in all sources
    sources = []
    for name, source in config.sources.items():
        rest = tuple(file for file in found[name] if file.identity not in held_by)
        if not rest:
            holding = sorted({f"{held_by[file.identity]}.held_out" for file in found[name]})
            raise DataError(
                f"{' and '.join(holding)} holds out every file of data.sources.{name}.paths: nothing is left "
                f"to train on."
            )
        rest = tuple(
            dataclasses.replace(file, split_name=names.setdefault(file.identity, file.name)) for file in rest
        )
        sources.append(_Source(name, source, rest, apart[name]))
    return [_with_others(source, sources) for source in sources]


def _with_others(source: _Source, sources: list[_Source]) -> _Source:
    """The source, with `split_name` only for files of which it or another source holds out a fraction."""
    splitting = {
        file.identity: (other, file)
        for other in sources
        if other is not source and not other.held_out
        for file in other.files
    }
    for file in source.files:
        other, same = splitting.get(file.identity, (source, file))
        formats = [format_of(same, other.record_format), format_of(file, source.record_format)]
        if formats[0] != formats[1]:
            raise DataError(
                f"data.sources.{other.name} reads {file.place} as {formats[0]}, data.sources.{source.name} "
                f"as {formats[1]}, so the documents that one holds out can't be left out of the other. Give "
                f"both the same format, or name files to hold out under held_out."
            )
    if not source.held_out:
        return source
    files = (
        file if file.identity in splitting else dataclasses.replace(file, split_name="")
        for file in source.files
    )
    return dataclasses.replace(source, files=tuple(files))


def _split(
    source: _Source, config: DataConfig, tokenizer: Tokenizer, progress: Progress
) -> tuple[TokenizedDocuments, TokenizedDocuments]:
    """The documents of a source to train on, and those to hold out."""
    name, fraction = source.name, config.held_out_fraction
    cached = _cached(source, source.files, name, config, tokenizer, progress)
    documents, in_fraction = cached.documents, cached.keys < fraction * 2**32
    if source.held_out:
        if in_fraction.all():
            raise DataError(
                f"Other sources hold out all documents of data.sources.{name}: nothing is left to train on. "
                f"Name files to hold out under their held_out."
            )
        if in_fraction.any():
            digest = hashlib.sha256(np.packbits(in_fraction).tobytes()).hexdigest()
            documents = documents.select(~in_fraction, f"without what other sources hold out, {digest}")
        apart = _cached(source, source.held_out, f"{name}-held-out", config, tokenizer, progress)
        return documents, apart.documents
    if in_fraction.all() or not in_fraction.any():
        raise DataError(
            f"data.sources.{name} has {len(in_fraction)} documents: {(~in_fraction).sum()} to train on and "
            f"{in_fraction.sum()} held out at data.held_out_fraction = {fraction}. Both need at least one: "
            f"change the fraction, or name files to hold out under data.sources.{name}.held_out."
        )
    trained_on = documents.select(~in_fraction, f"trained on, {fraction} held out")
    return trained_on, documents.select(in_fraction, f"held out, {fraction} held out")


def _cached(
    source: _Source,
    files: tuple[SourceFile, ...],
    name: str,
    config: DataConfig,
    tokenizer: Tokenizer,
    progress: Progress,
) -> CachedTokens:
    how = dataclasses.replace(source.record_format, max_bytes=config.max_record_bytes)
    answers_only = source.config.train_on == "answers"
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
