"""Tests of stacked_remat/training/data/outdated_caches.py."""

import pytest

from stacked_remat.training import ByteTokenizer
from stacked_remat.training.data import token_cache
from stacked_remat.training.data.files import find_files
from stacked_remat.training.data.outdated_caches import hold
from stacked_remat.training.data.records import RecordFormat
from stacked_remat.training.data.token_cache import CacheRequest, open_token_cache

from .silent import Silent


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of two texts; this process holds no cache, as if each were opened by one of its own."""
    monkeypatch.setattr(token_cache, "hold", lambda folder: None)
    (tmp_path / "texts").mkdir()
    for name in "ab":
        (tmp_path / "texts" / f"{name}.txt").write_text(name)
    return tmp_path / "texts"


def build(folder, *, name="texts", tokenizer=None, only=""):
    progress = Silent()
    files = find_files([str(folder / only)], "key")
    request = CacheRequest(name, files, RecordFormat(), tokenizer or ByteTokenizer())
    open_token_cache(request, folder.parent / "cache", progress)
    return progress.messages


def caches(folder):
    return {path.name for path in (folder.parent / "cache").iterdir()}


def change(folder):
    (folder / "a.txt").write_text("another a")


def test_a_cache_of_earlier_versions_is_removed_by_the_new_one(folder):
    assert build(folder) == []
    (old,) = caches(folder)
    assert build(folder) == [] and caches(folder) == {old}
    change(folder)
    (message,) = build(folder)
    assert message == f"removed token caches of earlier versions of the files of texts: {old}"
    assert len(caches(folder)) == 1 and old not in caches(folder)


def test_caches_that_another_run_may_use_stay(folder):
    build(folder)
    other = ByteTokenizer()
    vars(other)["fingerprint"] = "another"
    build(folder, tokenizer=other)
    build(folder, only="b.txt")
    assert build(folder, name="texts-2") == [] and len(caches(folder)) == 4
    change(folder)
    (message,) = build(folder)
    # Both tokenizers' caches of all files went, neither b's alone nor that of a source of another name.
    assert message.count("texts-") == 2 and len(caches(folder)) == 3
    (folder / "c.txt").write_text("c")
    assert build(folder) == [] and len(caches(folder)) == 4  # one file more is no other version


def test_an_unfinished_cache_is_removed_too(folder):
    build(folder)
    (old,) = (folder.parent / "cache").iterdir()
    (old / "complete.json").rename(old / "unfinished.json")
    change(folder)
    assert len(build(folder)) == 1 and not old.exists()


@pytest.mark.parametrize("spoil", ["notes", "no identity", "strange identity"])
def test_folders_with_other_files_stay(folder, spoil):
    build(folder)
    (old,) = (folder.parent / "cache").iterdir()
    if spoil == "notes":
        (old / "notes.txt").write_text("mine")
    else:
        (old / "complete.json").write_text({"no identity": "{", "strange identity": '{"files": [3]}'}[spoil])
    change(folder)
    assert build(folder) == [] and old.exists()


def test_a_cache_that_a_process_has_open_stays(folder):
    build(folder)
    (old,) = (folder.parent / "cache").iterdir()
    hold(old)
    change(folder)
    assert build(folder) == [] and old.exists()


def test_opening_a_cache_holds_it(tmp_path, monkeypatch):
    held = []
    monkeypatch.setattr(token_cache, "hold", held.append)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a")
    for _ in range(2):
        build(tmp_path / "texts")
    assert held == list((tmp_path / "cache").iterdir()) * 2
