"""Builds token caches, and reads what is in them."""

import json

from stacked_remat.training import ByteTokenizer, SourceConfig
from stacked_remat.training.data import token_cache
from stacked_remat.training.data.encoding_processes import EncodingProcesses
from stacked_remat.training.data.files import find_files
from stacked_remat.training.data.token_cache import CacheRequest, open_token_cache

from .silent import Silent

TOKENIZER = ByteTokenizer()
CHAT = [{"role": "user", "content": "odd?"}, {"role": "assistant", "content": "even"}]


def build(
    folder,
    cache,
    progress=None,
    *,
    save_tokens=2**24,
    tokenizer=None,
    train_on="all",
    weight_key=None,
    processes=None,
    **changes,
):
    tokenizer = ByteTokenizer() if tokenizer is None else tokenizer
    progress = Silent() if progress is None else progress
    files = find_files([str(folder)], "key")
    source = SourceConfig(("-",), train_on=train_on, weight_key=weight_key)
    request = CacheRequest("te/xts", files, source, tokenizer, **changes)
    with EncodingProcesses(processes) as started:
        return open_token_cache(
            request, cache, progress, started, save_tokens=save_tokens
        )


def texts(cached, tokenizer=None):
    documents = cached.documents
    decode = (ByteTokenizer() if tokenizer is None else tokenizer).decode
    return [
        decode(documents.tokens(at, 0, int(documents.lengths[at])))
        for at in range(len(documents))
    ]


def written(cache):
    """The files of a cache and when they were written."""
    return {
        path: path.stat().st_mtime_ns
        for path in cache.rglob("*")
        if not path.name.startswith(".")
    }


def lines_in(folder, *lines):
    folder.mkdir()
    (folder / "a.jsonl").write_text("\n".join(lines))
    return folder


def write_parts(tmp_path, monkeypatch):
    """A folder of 40 small files and 2 large ones, for requests of several caches."""
    monkeypatch.setattr(token_cache, "_LARGE_FILE", 4000)
    monkeypatch.setattr(token_cache, "_FILES_TOGETHER", 8)
    folder = tmp_path / "parts"
    folder.mkdir()
    for number in range(40):
        record = {"text": f"small {number}", "weight": 1 + number % 2}
        (folder / f"{number:02d}.jsonl").write_text(json.dumps(record))
    for name in ("07b", "30b"):
        lines = [json.dumps({"text": f"{name} {line}"}) for line in range(300)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


def of_parts():
    found = []
    for number in range(40):
        found.append(f"small {number}")
        if number in (7, 30):
            found += [f"{number:02d}b {line}" for line in range(300)]
    return found
