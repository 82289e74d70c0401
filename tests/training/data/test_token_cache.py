"""Tests of stacked_remat/training/data/token_cache.py."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from stacked_remat.training import ByteTokenizer, DataError
from stacked_remat.training.data import token_cache, tokenized
from stacked_remat.training.data.files import find_files
from stacked_remat.training.data.hugging_face_tokenizer import HuggingFaceTokenizer
from stacked_remat.training.data.records import RecordFormat
from stacked_remat.training.data.token_cache import CacheRequest, open_token_cache

from .silent import Silent
from .word_tokenizer import word_tokenizer

ROOT = Path(__file__).resolve().parents[3]
CHAT = [{"role": "user", "content": "odd?"}, {"role": "assistant", "content": "even"}]


def request(folder, tokenizer=None, **changes):
    tokenizer = ByteTokenizer() if tokenizer is None else tokenizer
    fields = {"name": "texts", "files": find_files([str(folder)], "key"), "how": RecordFormat(), **changes}
    return CacheRequest(tokenizer=tokenizer, **fields)


def build(folder, cache, progress=None, *, shard_tokens=2**24, **changes):
    progress = Silent() if progress is None else progress
    return open_token_cache(request(folder, **changes), cache, progress, shard_tokens=shard_tokens)


def texts(cached, tokenizer=None):
    documents = cached.documents
    decode = (ByteTokenizer() if tokenizer is None else tokenizer).decode
    return [decode(documents.tokens(at, 0, int(documents.lengths[at]))) for at in range(len(documents))]


@pytest.fixture
def folder(tmp_path):
    """A folder of two JSONL files, 900 documents each, and a text."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in "ab":
        lines = [json.dumps({"text": f"{name} {number} " + "x" * (number % 17)}) for number in range(900)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    (folder / "c.txt").write_text("c")
    return folder


def expected():
    return [f"{name} {number} " + "x" * (number % 17) for name in "ab" for number in range(900)] + ["c"]


def shards(cache):
    return sorted(cache.glob("*/shard-*"))


def test_the_order_of_documents_does_not_depend_on_shards(folder, tmp_path):
    one, many = build(folder, tmp_path / "one"), build(folder, tmp_path / "many", shard_tokens=3000)
    assert texts(one) == texts(many) == expected()
    assert (len(shards(tmp_path / "one")), len(shards(tmp_path / "many"))) == (1, 8)
    np.testing.assert_array_equal(one.keys, many.keys)
    assert one.counts.num_documents == 1801 and one.counts.num_tokens == one.documents.num_tokens


def test_the_second_time_nothing_is_tokenized(folder, tmp_path):
    first, second = Silent(), Silent()
    built = build(folder, tmp_path / "cache", first)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.npy")}
    opened = build(folder, tmp_path / "cache", second)
    assert first.works and not second.works
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.npy")} == before
    next((tmp_path / "cache").glob("*/complete.json")).unlink()  # killed at the very end
    build(folder, tmp_path / "cache")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.npy")} == before
    assert texts(opened) == expected() and opened.documents.fingerprint == built.documents.fingerprint


def test_progress_is_in_bytes_and_ends_at_the_end(folder, tmp_path):
    progress = Silent()
    build(folder, tmp_path / "cache", progress)
    what, done, total, status = zip(*progress.works, strict=True)
    assert set(what) == {"tokenizing texts"} and len(set(total)) == 1
    assert sorted(done) == list(done) and done[0] < done[-1] == total[0]
    assert total[0] == 1 + sum(path.stat().st_size for path in folder.iterdir())
    assert status[-1].endswith(" tokens")


def test_a_change_of_files_tokenizer_or_reading_builds_anew(folder, tmp_path):
    def caches():
        return len(list((tmp_path / "cache").iterdir()))

    def words():
        return HuggingFaceTokenizer("words", word_tokenizer().to_str(), {}, None)

    build(folder, tmp_path / "cache")
    build(folder, tmp_path / "cache")
    assert caches() == 1
    assert texts(build(folder, tmp_path / "cache", tokenizer=words()), words()) == expected()
    assert caches() == 2
    build(folder, tmp_path / "cache", on_malformed="skip")
    build(folder, tmp_path / "cache", answers_only=True)
    assert caches() == 4
    (folder / "c.txt").write_text("d")
    os.utime(folder / "c.txt", ns=(0, 0))  # the same size, and however coarse the clock, another time
    assert texts(build(folder, tmp_path / "cache"))[-1] == "d"
    (folder / "d.txt").write_text("new")
    assert texts(build(folder, tmp_path / "cache"))[-2:] == ["d", "new"]
    assert caches() == 6


BUILD = """
import sys
from pathlib import Path
import stacked_remat.training.data.token_cache as token_cache
from stacked_remat.training import ByteTokenizer, ConsoleProgress
from stacked_remat.training.data.files import find_files
from stacked_remat.training.data.records import RecordFormat

write = token_cache._Shard.write

def slowly(*arguments):
    write(*arguments)
    print("a shard", flush=True)
    sys.stdin.readline()

class Silent(ConsoleProgress):
    def work(self, *_):
        pass

token_cache._Shard.write = slowly
files = find_files([sys.argv[1]], "key")
request = token_cache.CacheRequest("texts", files, RecordFormat(), ByteTokenizer())
token_cache.open_token_cache(request, Path(sys.argv[2]), Silent(), shard_tokens=3000)
"""


def test_a_killed_build_resumes_after_the_last_whole_shard(folder, tmp_path):
    cache = tmp_path / "cache"
    command = [sys.executable, "-c", BUILD, str(folder), str(cache)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as process:
        for _ in range(3):
            assert process.stdout.readline() == "a shard\n"
            process.stdin.write("go on\n")
            process.stdin.flush()
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    written = {shard: (shard / "tokens.npy").stat().st_mtime_ns for shard in shards(cache)}
    assert len(written) == 4 and not list(cache.glob("*/complete.json"))
    half = shards(cache)[0].with_name(
        ".shard-00004.unfinished"
    )  # as a kill while a shard is written leaves it
    half.mkdir()
    (half / "tokens.npy").write_bytes(b"half")
    resumed = build(folder, cache, shard_tokens=3000)
    assert not half.exists()
    assert {shard: (shard / "tokens.npy").stat().st_mtime_ns for shard in shards(cache)[:4]} == written
    whole = build(folder, tmp_path / "whole", shard_tokens=3000)
    assert texts(resumed) == expected()
    assert resumed.documents.fingerprint == whole.documents.fingerprint
    np.testing.assert_array_equal(resumed.keys, whole.keys)
    for one, other in zip(shards(cache), shards(tmp_path / "whole"), strict=True):
        assert all((one / file.name).read_bytes() == file.read_bytes() for file in other.iterdir())


def test_one_process_builds_and_others_wait(folder, tmp_path):
    cache, progress, found = tmp_path / "cache", Silent(), []
    build(folder, cache)
    (complete,) = cache.glob("*/complete.json")
    complete.rename(tmp_path / "complete.json")  # as if the other were not done
    waiting = threading.Thread(target=lambda: found.append(build(folder, cache, progress)))
    with token_cache._locked(complete.parent):
        waiting.start()
        waiting.join(timeout=0.2)
        assert waiting.is_alive()
        (tmp_path / "complete.json").rename(complete)
    waiting.join()
    assert texts(found[0]) == expected() and not progress.works


def test_a_malformed_record_is_an_error_or_is_counted(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    lines = ['{"text": "good"}', "{", '{"text": ""}', '{"text": "half \\ud800"}', '{"text": "fine"}']
    (folder / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"texts/a.jsonl:2 is not JSON .* data.on_malformed: skip"):
        build(folder, tmp_path / "cache")
    cached = build(folder, tmp_path / "cache", on_malformed="skip")
    assert texts(cached) == ["good", "fine"]
    assert (cached.counts.num_malformed, cached.counts.num_empty) == (2, 1)
    assert [problem.split(" ")[0].rpartition("/")[2] for problem in cached.counts.problems] == [
        "a.jsonl:2",
        "a.jsonl:4",
    ]
    assert "surrogate" in cached.counts.problems[1]


def test_chats_go_through_the_template_and_only_answers_count_if_asked(tmp_path):
    folder = tmp_path / "chats"
    folder.mkdir()
    objects = [{"text": "plain"}, {"messages": CHAT}]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, objects)))
    whole = build(folder, tmp_path / "cache")
    assert texts(whole) == [
        "plain",
        "<|im_start|>user\nodd?<|im_end|>\n<|im_start|>assistant\neven<|im_end|>\n",
    ]
    assert whole.documents.weights(1, 0, 3) == 1.0
    documents = build(folder, tmp_path / "cache", answers_only=True).documents
    assert np.asarray(documents.weights(0, 0, int(documents.lengths[0]))).all()
    counted = np.asarray(documents.weights(1, 0, int(documents.lengths[1])), dtype=bool)
    tokens = documents.tokens(1, 0, int(documents.lengths[1]))
    assert ByteTokenizer().decode(tokens[counted]) == "even<|im_end|>\n"


def test_a_chat_that_its_template_refuses_is_malformed(tmp_path):
    folder = tmp_path / "chats"
    folder.mkdir()
    (folder / "a.jsonl").write_text(json.dumps({"messages": CHAT}))
    template = "{{ raise_exception('system first') }}"
    tokenizer = HuggingFaceTokenizer("words", word_tokenizer().to_str(), {}, template)
    with pytest.raises(DataError, match=r"a.jsonl:1 does not fit the chat template: system first"):
        build(folder, tmp_path / "cache", tokenizer=tokenizer)


def test_keys_do_not_depend_on_the_location_of_the_folder(folder, tmp_path):
    before = build(folder, tmp_path / "cache")
    keys = dict(zip(texts(before), before.keys, strict=True))
    folder.rename(tmp_path / "moved")
    (tmp_path / "moved" / "a.jsonl").unlink()
    after = build(tmp_path / "moved", tmp_path / "cache")
    assert len(after.keys) == 901
    assert all(keys[text] == key for text, key in zip(texts(after), after.keys, strict=True))
    assert 0.4 < np.mean(before.keys < 2**31) < 0.6 and len(set(keys.values())) > 1795


def test_a_cache_that_cannot_be_written_is_named(folder, tmp_path):
    (tmp_path / "cache").write_text("a file in the way")
    with pytest.raises(
        DataError, match=r"Can't write or read the token cache .*cache/texts-.* Set data.cache_dir"
    ):
        build(folder, tmp_path / "cache")


def test_files_without_text_are_refused(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": ""}\n{')
    with pytest.raises(
        DataError, match=r"have no text: 1 documents are empty and 1 can't be read. First: .*:2"
    ):
        build(folder, tmp_path / "cache", on_malformed="skip")


def test_files_of_a_cache_that_are_cut_or_missing_are_found(tmp_path, monkeypatch):
    folder, cache = tmp_path / "chats", tmp_path / "cache"
    folder.mkdir()
    objects = [{"messages": [{**CHAT[0], "content": str(n)}, CHAT[1]]} for n in range(60)]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, objects)))

    def read():
        cached = build(folder, cache, answers_only=True, shard_tokens=2000)
        weights = [np.asarray(cached.documents.weights(at, 0, 9**9)).tolist() for at in range(60)]
        return texts(cached), weights, cached.keys.tolist(), cached.documents.num_counted

    monkeypatch.setattr(token_cache, "_GROUP_RECORDS", 32)
    good = read()
    assert len(shards(cache)) == 2
    files = [path for path in sorted(cache.rglob("*")) if path.is_file() and not path.name.startswith(".")]
    assert {path.name for path in files} == {
        *("tokens.npy", "lengths.npy", "counted.npy", "keys.npy", "shard.json", "complete.json")
    }
    for path in files:
        written = path.read_bytes()
        for damage in (lambda whole: whole[: len(whole) // 2], lambda _: b"", None):
            if damage is None and path.name == "complete.json":
                continue  # as if it was killed at the very end
            path.unlink() if damage is None else path.write_bytes(damage(written))
            tokenized._mapped.cache_clear()
            with pytest.raises(
                DataError, match=rf"{path} is .*Delete the token cache .*/cache/texts-\w+, and"
            ):
                read()
            path.write_bytes(written)
    assert read() == good
    last = files[-1].parent
    last.rename(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=rf"{last} is missing"):
        read()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("fails", ["mkdir", "write_text", "open"])
def test_a_full_or_read_only_disk_is_named(folder, tmp_path, monkeypatch, number, fails):
    def fail(path, *_, **__):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, fails, fail)
    expected = (
        rf"Can't write or read the token cache .*cache/texts-[^/]*: {os.strerror(number)}. .*has free space"
    )
    with pytest.raises(DataError, match=expected):
        build(folder, tmp_path / "cache")
