"""Tests of stacked_remat/training/data/token_cache.py."""

import errno
import fcntl
import json
import os
import shutil
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest

from stacked_remat.training import (
    ByteTokenizer,
    DataError,
    PackedDocuments,
    ProcessShare,
    SourceConfig,
)
from stacked_remat.training.data import (
    checked_array,
    token_cache,
)
from stacked_remat.training.data.checked_array import CheckedArray
from stacked_remat.training.data.encoding_processes import EncodingProcesses
from stacked_remat.training.data.files import find_files
from stacked_remat.training.data.hugging_face_tokenizer import HuggingFaceTokenizer
from stacked_remat.training.data.token_cache import (
    CacheRequest,
    build_share,
)

from .caches import (
    CHAT,
    TOKENIZER,
    build,
    lines_in,
    of_parts,
    texts,
    write_parts,
    written,
)
from .silent import Silent
from .word_tokenizer import word_tokenizer


@pytest.fixture
def folder(tmp_path):
    """A folder of two JSONL files, 600 documents each, and a text."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in "ab":
        lines = [
            json.dumps({"text": f"{name} {number} " + "x" * (number % 17)})
            for number in range(600)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    (folder / "c.txt").write_text("c")
    return folder


def expected():
    return [
        f"{name} {number} " + "x" * (number % 17)
        for name in "ab"
        for number in range(600)
    ] + ["c"]


def test_the_second_time_nothing_is_tokenized(folder, tmp_path):
    first, second = Silent(), Silent()
    built = build(folder, tmp_path / "cache", first)
    before = written(tmp_path / "cache")
    opened = build(folder, tmp_path / "cache", second)
    assert first.works and not second.works and written(tmp_path / "cache") == before
    assert (
        texts(opened) == expected()
        and opened.documents.fingerprint == built.documents.fingerprint
    )
    assert opened.counts.num_documents == 1201 and opened.counts.num_tokens == sum(
        built.documents.lengths
    )
    what, done, total, status = zip(*first.works, strict=True)
    assert (
        set(what) == {"tokenizing te/xts"}
        and len(set(total)) == 1
        and status[-1].endswith(" tokens")
    )
    assert sorted(done) == list(done) and done[0] < done[-1] == total[0]
    assert total[0] == 1 + sum(path.stat().st_size for path in folder.iterdir())


def test_a_change_of_files_tokenizer_or_reading_builds_anew(folder, tmp_path):
    def caches():
        return len(list((tmp_path / "cache").iterdir()))

    def words():
        return HuggingFaceTokenizer("words", word_tokenizer().to_str(), {}, None)

    build(folder, tmp_path / "cache")
    assert (
        texts(build(folder, tmp_path / "cache", tokenizer=words()), words())
        == expected()
    )
    build(folder, tmp_path / "cache", on_malformed="skip")
    build(folder, tmp_path / "cache", train_on="answers")
    assert caches() == 4
    (folder / "c.txt").write_text("d")
    # The same size, and however coarse the clock, another time
    os.utime(folder / "c.txt", ns=(0, 0))
    assert texts(build(folder, tmp_path / "cache"))[-1] == "d"
    (folder / "d.txt").write_text("new")
    assert texts(build(folder, tmp_path / "cache"))[-2:] == ["d", "new"]
    assert caches() == 6


def test_a_killed_build_resumes_with_the_same_result(folder, tmp_path, monkeypatch):
    """The writer stops as a kill leaves it: with more in the files than the state
    says.
    """
    saved = []

    def save(writer, **options):
        if len(saved) == 2:
            for file in writer._files.values():
                file.write(b"half of it")
                file.flush()
            raise KeyboardInterrupt
        whole_save(writer, **options)
        saved.append(writer._state.counts.num_tokens)

    options = {"save_tokens": 3000, "train_on": "answers"}
    whole = build(folder, tmp_path / "whole", **options)
    whole_save = token_cache._Writer.save
    monkeypatch.setattr(token_cache._Writer, "save", save)
    with pytest.raises(KeyboardInterrupt):
        build(folder, tmp_path / "cache", **options)
    monkeypatch.undo()
    assert 3000 <= saved[0] < saved[1] < whole.counts.num_tokens
    progress = Silent()
    resumed = build(folder, tmp_path / "cache", progress, **options)
    assert progress.works[0][1] > 8000 and texts(resumed) == expected()
    for one, other in zip(
        *(sorted(written(tmp_path / name)) for name in ("cache", "whole")), strict=True
    ):
        assert one.is_dir() or one.read_bytes() == other.read_bytes()


@pytest.fixture
def parts(tmp_path, monkeypatch):
    return write_parts(tmp_path, monkeypatch)


def test_a_file_that_is_added_or_changed_builds_one_cache(parts, tmp_path):
    cache = tmp_path / "cache"
    whole = build(parts, cache)
    first = written(cache)
    count = len(list(cache.iterdir()))
    assert texts(whole) == of_parts() and 5 <= count <= 15
    assert whole.counts.num_documents == len(of_parts()) == len(whole.keys)
    assert len(set(whole.keys.tolist())) == len(whole.keys)
    (parts / "07c.txt").write_text("added")
    added = build(parts, cache)
    at = of_parts().index("small 8")
    assert texts(added) == [*of_parts()[:at], "added", *of_parts()[at:]]
    assert len(list(cache.iterdir())) == count + 1
    assert {path: written(cache)[path] for path in first} == first
    (parts / "30b.jsonl").write_text('{"text": "short"}')
    assert "short" in texts(build(parts, cache))
    fingerprints = {one.documents.fingerprint for one in (whole, added)}
    assert len(fingerprints) == 2
    with pytest.raises(AssertionError):  # a slice lies within one cache
        whole.documents.all_tokens[0 : len(whole.documents.all_tokens)]


def test_progress_goes_over_all_caches_that_are_missing(parts, tmp_path):
    progress = Silent()
    build(parts, tmp_path / "cache", progress)
    _, done, total, _ = zip(*progress.works, strict=True)
    assert set(total) == {1 + sum(path.stat().st_size for path in parts.iterdir())}
    assert sorted(done) == list(done) and done[-1] == total[0] and len(done) > 10
    (parts / "07c.txt").write_text("added")
    progress = Silent()
    build(parts, tmp_path / "cache", progress)
    assert progress.works[-1][2] < 2000


def test_each_of_several_processes_builds_its_share(parts, tmp_path):
    source, cache = SourceConfig(("-",)), tmp_path / "cache"
    request = CacheRequest("te/xts", find_files([str(parts)], "k"), source, TOKENIZER)
    with EncodingProcesses() as processes:
        for index in range(3):
            share = ProcessShare(index, 3)
            build_share(request, cache, Silent(), processes, share)
            built = sum(path.name == "checksums" for path in cache.rglob("*"))
            assert built == sum(
                len(request.parts()[other::3]) for other in range(index + 1)
            )
    progress = Silent()
    assert texts(build(parts, cache, progress)) == of_parts() and not progress.works


def test_one_process_builds_and_others_wait(folder, tmp_path):
    cache, progress, found = tmp_path / "cache", Silent(), []
    build(folder, cache)
    (state,) = cache.glob("*/state.json")
    state.rename(tmp_path / "state.json")  # as if the other were not done
    waiting = threading.Thread(
        target=lambda: found.append(build(folder, cache, progress))
    )
    with (state.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting.start()
        waiting.join(timeout=0.2)
        assert waiting.is_alive()
        (tmp_path / "state.json").rename(state)
    waiting.join()
    assert texts(found[0]) == expected() and not progress.works


def test_a_malformed_record_is_an_error_or_is_counted(tmp_path):
    lines = [
        '{"text": "good"}',
        "{",
        '{"text": ""}',
        '{"text": "half \\ud800"}',
        '{"text": "fine"}',
    ]
    folder = lines_in(tmp_path / "texts", *lines)
    with pytest.raises(
        DataError, match=r"texts/a.jsonl:2 is not JSON .* data.on_malformed: skip"
    ):
        build(folder, tmp_path / "cache")
    cached = build(folder, tmp_path / "cache", on_malformed="skip")
    assert texts(cached) == ["good", "fine"]
    assert (cached.counts.num_malformed, cached.counts.num_empty) == (2, 1)
    problems = cached.counts.problems
    assert [problem.split(" ")[0].rpartition("/")[2] for problem in problems] == [
        "a.jsonl:2",
        "a.jsonl:4",
    ]
    assert "surrogate" in problems[1]
    folder = lines_in(tmp_path / "none", '{"text": ""}', "{")
    with pytest.raises(
        DataError,
        match=r"no text in .*: 1 records have none.* and 1 can't .* First: .*:2",
    ):
        build(folder, tmp_path / "cache", on_malformed="skip")


def test_chats_go_through_the_template_and_only_answers_count_if_asked(tmp_path):
    folder = lines_in(
        tmp_path / "chats", '{"text": "plain"}', json.dumps({"messages": CHAT})
    )
    whole = build(folder, tmp_path / "cache")
    chat = "<|im_start|>user\nodd?<|im_end|>\n<|im_start|>assistant\neven<|im_end|>\n"
    assert texts(whole) == ["plain", chat] and whole.documents.weights(1, 0, 3) == 1.0
    documents = build(folder, tmp_path / "cache", train_on="answers").documents
    assert np.asarray(documents.weights(0, 0, int(documents.lengths[0]))).all()
    counted = np.asarray(documents.weights(1, 0, int(documents.lengths[1])), dtype=bool)
    tokens = documents.tokens(1, 0, int(documents.lengths[1]))
    assert ByteTokenizer().decode(tokens[counted]) == "even<|im_end|>\n"
    assert documents.num_counted == len("plain") + 1 + len("even<|im_end|>\n")
    refusing = "{{ raise_exception('system first') }}"
    tokenizer = HuggingFaceTokenizer("words", word_tokenizer().to_str(), {}, refusing)
    with pytest.raises(
        DataError, match=r"a.jsonl:2 does not fit the chat template: system first"
    ):
        build(folder, tmp_path / "cache", tokenizer=tokenizer)


def test_of_a_prompt_with_its_completion_the_completion_counts(tmp_path):
    record = json.dumps({"prompt": "2+2=", "completion": "4"})
    folder = lines_in(tmp_path / "sums", record)
    whole = build(folder, tmp_path / "cache")
    assert texts(whole) == ["2+2=4"] and whole.documents.counted is None
    documents = build(folder, tmp_path / "cache", train_on="answers").documents
    counted = np.asarray(documents.weights(0, 0, int(documents.lengths[0])), bool)
    assert documents.tokens(0, 0, 7)[counted].tolist() == [ord("4"), 256]


def test_records_have_weights_and_those_of_weight_zero_are_left_out(tmp_path):
    lines = [
        '{"text": "one", "weight": 0.5}',
        '{"text": "two", "weight": 0}',
        '{"text": "three"}',
        json.dumps({"messages": CHAT, "weight": 2}),
    ]
    folder = lines_in(tmp_path / "texts", *lines)
    plain = build(folder, tmp_path / "cache")
    assert plain.documents.weight_factors is None
    assert [*plain.counts.unread] == ["weight"]
    for train_on in ("all", "answers"):
        options = {"weight_key": "weight", "train_on": train_on}
        cached = build(folder, tmp_path / "cache", **options)
        documents = cached.documents
        assert texts(cached)[:2] == ["one", "three"] and cached.counts.num_empty == 1
        assert not cached.counts.unread
        weights = [
            np.max(documents.weights(at, 0, int(documents.lengths[at])))
            for at in range(3)
        ]
        assert weights == [0.5, 1.0, 2.0]
        chosen = documents.select(np.array([False, True, True]))
        assert chosen.weight_factors.tolist() == [1.0, 2.0]
        packed = PackedDocuments(chosen, 99, "split")
        assert set(packed[0]["weights"].tolist()) == {0.0, 1.0, 2.0}


def test_files_of_a_cache_that_are_cut_or_missing_are_named(folder, tmp_path):
    cache = tmp_path / "cache"
    build(folder, cache, train_on="answers")
    (root,) = cache.iterdir()
    for name in ("tokens", "lengths", "counted", "keys", "state.json"):
        whole = (root / name).read_bytes()
        for damaged in (whole[: len(whole) // 2], b"", None):
            (
                (root / name).unlink()
                if damaged is None
                else (root / name).write_bytes(damaged)
            )
            if (name, damaged) == ("state.json", None):
                continue  # as if it was killed before the first save
            with pytest.raises(
                DataError,
                match=rf"{root / name} is .*Delete the token cache {root}, and",
            ):
                build(folder, cache, train_on="answers")
        (root / name).write_bytes(whole)
    assert texts(build(folder, cache, train_on="answers")) == expected()


@pytest.mark.parametrize("name", ["tokens", "lengths", "counted", "keys", "checksums"])
def test_a_changed_bit_is_found_when_its_block_is_read(
    folder, tmp_path, monkeypatch, name
):
    monkeypatch.setattr(checked_array, "_BLOCK", 64)
    whole = build(folder, tmp_path / "cache", train_on="answers").documents
    (root,) = (tmp_path / "cache").iterdir()
    content = bytearray((root / name).read_bytes())
    content[-3] ^= 4
    (root / name).write_bytes(content)
    problem = (
        "is damaged"
        if name == "checksums"
        else r"is damaged: bytes [\d,]+ to [\d,]+ are not those"
    )
    with pytest.raises(
        DataError,
        match=rf"{root / name} {problem}.*Delete the token cache {root}, and the",
    ):
        opened = build(folder, tmp_path / "cache", train_on="answers").documents
        # What was read before is right: the damage is in the last block.
        assert opened.tokens(0, 0, 9).tolist() == whole.tokens(0, 0, 9).tolist()
        assert np.array_equal(opened.weights(0, 0, 9), whole.weights(0, 0, 9))
        last = len(opened) - 1
        opened.tokens(last, 0, int(opened.lengths[last]))
        assert opened.num_counted
    shutil.rmtree(root)
    assert texts(build(folder, tmp_path / "cache", train_on="answers")) == expected()


@pytest.mark.parametrize("name", ["tokens", "lengths", "counted", "keys"])
def test_damage_before_the_cache_is_complete_is_found(
    folder, tmp_path, monkeypatch, name
):
    """Between a save and a resumption, and while the process runs that writes it."""
    options, save = (
        {"save_tokens": 3000, "train_on": "answers"},
        token_cache._Writer.save,
    )

    def damage():
        (file,) = (tmp_path / "cache").glob(f"*/{name}")
        content = file.read_bytes()
        file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        return file

    def killed(writer, **options):
        save(writer, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(token_cache._Writer, "save", killed)
        build(folder, tmp_path / "cache", **options)
    root = damage().parent
    fix = f"Delete the token cache {root}, and the next run tokenizes its text again"
    refused = pytest.raises(DataError, match=rf"{root / name} is damaged: .*{fix}")
    with refused:
        build(folder, tmp_path / "cache", **options)
    damage()  # the bit as it was
    with monkeypatch.context() as patch, refused:
        complete = token_cache._Writer._complete
        patch.setattr(
            token_cache._Writer,
            "_complete",
            lambda writer: (damage(), complete(writer)),
        )
        build(folder, tmp_path / "cache", **options)
    damage()
    assert texts(build(folder, tmp_path / "cache", **options)) == expected()


@pytest.mark.parametrize(
    "changed",
    [
        {"counts": {"num_tokens": -1}},
        {"counts": {"num_documents": -1}},
        {"counts": {"num_tokens": 542.0}},
        {"next_record": True},
        {"fingerprint": None},
        {"complete": "no"},
        {"counts": {"unread": 3}},
        {"counts": {"problems": [1]}},
        {"counts": 3},
        {"counts": {"other": 1}},
        {"file_checksums": {"tokens": "1"}},
        {"other": 1},
        "[" * 100_000,
    ],
    ids=lambda changed: str(changed)[:40],
)
def test_a_state_that_no_cache_is_saved_with_is_damaged(folder, tmp_path, changed):
    build(folder, tmp_path / "cache")
    (root,) = (tmp_path / "cache").iterdir()
    text = changed
    if isinstance(changed, dict):
        saved = json.loads((root / "state.json").read_text())
        counts = changed.get("counts")
        if isinstance(counts, dict):
            changed = {"counts": saved["counts"] | counts}
        text = json.dumps(saved | changed)
    (root / "state.json").write_text(text)
    with pytest.raises(DataError, match="state.json is damaged. Delete the token"):
        build(folder, tmp_path / "cache")


def test_a_token_outside_of_the_vocabulary_names_the_file(
    folder, tmp_path, monkeypatch
):
    """It has the right checksum if what wrote it was wrong."""
    with monkeypatch.context() as patch:
        encode = ByteTokenizer.encode
        patch.setattr(
            ByteTokenizer,
            "encode",
            lambda self, text: encode(self, text) + np.uint16(200),
        )
        cached = build(folder, tmp_path / "cache").documents
    (root,) = (tmp_path / "cache").iterdir()
    with pytest.raises(
        DataError,
        match=(
            rf"{root / 'tokens'} has the token 3\d\d, and the vocabulary has 257."
            r" Delete"
        ),
    ):
        cached.tokens(0, 0, 3)


def test_a_block_is_checked_once(tmp_path, monkeypatch):
    monkeypatch.setattr(checked_array, "_BLOCK", 8)
    numbers = np.arange(13, dtype=np.uint16)
    (tmp_path / "numbers").write_bytes(numbers.tobytes())
    with (tmp_path / "numbers").open("rb") as file:
        checksums = [zlib.crc32(block) for block in checked_array.blocks_of(file)]
    array = CheckedArray(tmp_path / "numbers", np.uint16, checksums, count=13)
    checked, check = [], array._check
    monkeypatch.setattr(
        array, "_check", lambda block, own: (checked.append(block), check(block, own))
    )
    for first, stop, blocks in (
        (5, 7, [1]),
        (4, 8, []),
        (3, 4, [0]),
        (6, 6, []),
        (7, 13, [2, 3]),
    ):
        assert (
            array[first:stop].tolist() == list(range(first, stop)) and checked == blocks
        )
        checked.clear()
    assert (
        np.asarray(array).tolist() == numbers.tolist()
        and len(array) == 13
        and not checked
    )


@pytest.mark.parametrize(
    ("number", "fails"), [(errno.EROFS, "mkdir"), (errno.ENOSPC, "open")]
)
def test_a_full_or_read_only_disk_is_named(
    folder, tmp_path, monkeypatch, number, fails
):
    def fail(path, *_, **__):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, fails, fail)
    reason = (
        r"Can't write or read the token cache .*cache/te_xts-[^/]*:"
        rf" {os.strerror(number)}. .*free space"
    )
    with pytest.raises(DataError, match=reason):
        build(folder, tmp_path / "cache")
    monkeypatch.undo()
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    (tmp_path / "cache").write_text("a file in the way")
    with pytest.raises(
        DataError, match=r"Can't write or read the token cache .* Set data.cache_dir"
    ):
        build(folder, tmp_path / "cache")
