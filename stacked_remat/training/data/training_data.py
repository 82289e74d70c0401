"""Opens the data of a run: a stream of training batches and the batches of held-out
documents.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, final

import jax
import numpy as np

from ..data_config import DataConfig, SourceConfig
from ..errors import DataError
from ..progress import ConsoleProgress
from .batch_stream import BatchStream, HeldOutBatches, ProcessShare
from .encoding_processes import EncodingProcesses
from .files import find_files, standard_library_files
from .first_example import FirstExample, first_example
from .packing import PackedDocuments, TokenizedDocuments
from .token_cache import CachedTokens, CacheRequest, build_share, open_token_cache
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
    progress: ConsoleProgress,
    process: ProcessShare | None = None,
) -> TrainingData:
    """Finds the config's files, tokenizes what is not in the cache yet, and splits,
    packs and mixes it.

    Args:
        config: of the data.
        tokenizer: that of `config.tokenizer`, from `load_tokenizer`.
        seed: of the order of training.
        progress: shows the progress of tokenizing, and how many records were skipped.
        process: this process's share of every batch; all of it if not given.

    Raises:
        DataError: a path matches no file, a record can't be read, or there is too
            little text.

    Cost: each file is tokenized once, into `config.cache_dir`, and read from there.
    Memory: 24 bytes a document, and with `packing: whole` up to 16 more for each piece
    of one.
    """
    requests = _requests(config, tokenizer)
    # Before hours of tokenizing: what a user sees here is often a mistake in the
    # config.
    for example in _first_examples(requests, reads_on=False):
        if not example.is_text:
            progress.message(str(example))
    # Started once for all sources, and ended before training begins.
    with EncodingProcesses(config.tokenizing_processes) as processes:
        sources = _tokenized(requests, config, progress, processes)
    training: dict[str, PackedDocuments] = {}
    held_out: dict[str, PackedDocuments] = {}
    for name, (own, apart) in _split(sources, config, progress).items():
        training[name] = _packed(name, own, config, "train on", progress)
        _check_targets(name, training[name], config, progress)
        if len(apart):
            held_out[name] = _packed(name, apart, config, "hold out", progress)
        elif config.held_out_fraction:
            progress.message(
                f"{name}: none of its {len(own)} documents is held out by"
                f" data.held_out_fraction = {config.held_out_fraction}; name some under"
                f" data.sources.{name}.held_out to evaluate on"
            )

    def batches(*texts: PackedDocuments) -> HeldOutBatches:
        return HeldOutBatches(texts, config.batch_size, process)

    return TrainingData(
        training=BatchStream(
            training,
            weights={name: source.weight for name, source in config.sources.items()},
            batch_size=config.batch_size,
            seed=seed,
            process=process,
        ),
        held_out=batches(*held_out.values()),
        held_out_by_source={name: batches(text) for name, text in held_out.items()},
        summary=_summary(list(training.values()), list(held_out.values())),
    )


def _packed(
    name: str,
    text: TokenizedDocuments,
    config: DataConfig,
    what: str,
    progress: ConsoleProgress,
) -> PackedDocuments:
    """The sequences of a source's documents; a DataError if none has a target.

    Says how many documents are cut, where `packing: whole` may let a user think that
    none is.
    """
    packed = PackedDocuments(
        text, config.seq_len, config.packing, separate=config.separate_documents
    )
    if not packed.num_counted:
        raise DataError(
            f"data.sources.{name} has text to {what}, but no token of it counts as a"
            " target: with train_on: answers only messages of the role `assistant` do."
            " Check the roles of its chats, or set train_on: all."
        )
    if config.packing == "whole" and packed.num_cut:
        progress.message(
            f"{name}: {packed.num_cut} of {packed.num_documents} documents to {what}"
            f" are longer than data.seq_len = {config.seq_len} and are cut into parts"
            " that do not see each other; data.seq_len:"
            f" {packed.longest} would cut none"
        )
    return packed


_MOST_LEFT_OUT = 0.5  # share of a source's sequences


def _check_targets(
    name: str, text: PackedDocuments, config: DataConfig, progress: ConsoleProgress
) -> None:
    """Says how many sequences of a source have no target; refuses a source most of
    whose have none.
    """
    if not text.num_left_out:
        return
    total = len(text) + text.num_left_out
    what = f"{text.num_left_out} of {total} sequences have no target"
    if text.num_left_out > _MOST_LEFT_OUT * total:
        why = (
            "since its chats have no turn of the role `assistant`. Check their roles,"
            " leave such chats out, or set train_on: all."
        )
        if text.num_cut:
            why = (
                f"since prompts are longer than data.seq_len = {config.seq_len}, whose"
                " answers would be trained on without them, or chats have no turn of"
                " the role `assistant`. Make seq_len larger, shorten the prompts, check"
                " the roles, or set train_on: all."
            )
        raise DataError(f"data.sources.{name}: {what}, {why}")
    progress.message(f"{name}: {what} and are left out")


_Source: TypeAlias = tuple[CachedTokens, CachedTokens | None]
"""The documents of a source, and those of the files that it names to hold out, if it
does.
"""


_Requests: TypeAlias = dict[str, tuple[CacheRequest, CacheRequest | None]]
"""What each source asks of the cache: its files, and those that it names to hold out,
if it does.
"""


def _requests(config: DataConfig, tokenizer: Tokenizer) -> _Requests:
    if not config.sources:
        library = SourceConfig(("*.py",), format="text")
        name = "python-standard-library"
        files = standard_library_files()
        request = CacheRequest(name, files, library, tokenizer, config.on_malformed)
        return {name: (request, None)}
    found: _Requests = {}
    for name, source in config.sources.items():
        how = (source, tokenizer, config.on_malformed)
        files = find_files(source.paths, f"data.sources.{name}.paths")
        apart = find_files(source.held_out, f"data.sources.{name}.held_out")
        held_out = CacheRequest(f"{name}-held-out", apart, *how) if apart else None
        found[name] = CacheRequest(name, files, *how), held_out
    return found


def first_examples(config: DataConfig, tokenizer: Tokenizer) -> Iterator[FirstExample]:
    """The first example of each source, of which up to 64 records are read.

    Raises:
        DataError: as `open_training_data`.
    """
    return _first_examples(_requests(config, tokenizer), reads_on=True)


def _first_examples(requests: _Requests, *, reads_on: bool) -> Iterator[FirstExample]:
    for request, _ in requests.values():
        if (example := first_example(request, reads_on=reads_on)) is not None:
            yield example


def tokenize_share(
    config: DataConfig,
    tokenizer: Tokenizer,
    progress: ConsoleProgress,
) -> None:
    """Tokenizes the config's files into the cache, before `open_training_data`: in each
    of several processes, which see one `cache_dir`, a share of them.

    Raises:
        DataError: as `open_training_data`.
    """
    share = ProcessShare(jax.process_index(), jax.process_count())
    with EncodingProcesses(config.tokenizing_processes) as processes:
        for requests in _requests(config, tokenizer).values():
            for request in filter(None, requests):
                folder = Path(config.cache_dir)
                build_share(request, folder, progress, processes, share)


def _tokenized(
    requests: _Requests,
    config: DataConfig,
    progress: ConsoleProgress,
    processes: EncodingProcesses,
) -> dict[str, _Source]:
    def cached(request: CacheRequest) -> CachedTokens:
        folder = Path(config.cache_dir)
        tokens = open_token_cache(request, folder, progress, processes)
        for remark in tokens.counts.remarks():
            progress.message(f"{request.name}: {remark}")
        return tokens

    sources = {}
    for name, (request, apart) in requests.items():
        held_out = None if apart is None else cached(apart)
        sources[name] = cached(request), held_out
    return sources


def _split(
    sources: dict[str, _Source], config: DataConfig, progress: ConsoleProgress
) -> dict[str, tuple[TokenizedDocuments, TokenizedDocuments]]:
    """The documents of each source to train on, and those to hold out; no text is in
    both, of any sources.

    Of a source whose documents are so few that the fraction has all of them, none is
    held out.
    """
    # Keys are hashes, evenly spread over 64 bits: those below this share of them are
    # the fraction, the same ones however files are ordered or added.
    fraction = config.held_out_fraction
    lowest = np.uint64(fraction * 2**64)
    apart: dict[str, CachedTokens] = {}
    for name, (own, named) in sources.items():
        is_low = own.keys < lowest
        # Of two documents both may be low by chance, and then there would be none to
        # train on.
        is_apart = is_low & ~is_low.all()
        apart[name] = own.select(is_apart) if named is None else named
    held = np.concatenate([text.keys for text in apart.values()])
    found = {}
    for name, (own, named) in sources.items():
        # By key and over all sources: a text that is in two files must not be trained
        # on where the other is held out.
        is_held = np.isin(own.keys, held)
        if is_held.all():
            raise DataError(
                f"data.sources.{name} has {len(own.keys)} documents, and none to train"
                " on: all are held out, by its own or another source's held_out or by"
                f" data.held_out_fraction = {fraction}. Give it more documents, or"
                " change what is held out."
            )
        num_equal = np.count_nonzero(is_held)
        if named is None:  # its own held-out documents are among these
            num_equal -= len(apart[name].keys)
        if num_equal:
            progress.message(
                f"{name}: {num_equal} documents equal held-out ones and are left out"
            )
        found[name] = own.documents.select(~is_held), apart[name].documents
    return found


def _summary(training: list[PackedDocuments], held_out: list[PackedDocuments]) -> str:
    def count(halves: list[PackedDocuments]) -> tuple[int, int]:
        return sum(half.num_counted for half in halves), sum(
            half.num_documents for half in halves
        )

    targets, documents = count(training)
    held_targets, held_documents = count(held_out)
    return (
        f"{targets:,} targets in {documents:,} documents to train on,"
        f" {held_targets:,} in {held_documents:,} held out"
    )
