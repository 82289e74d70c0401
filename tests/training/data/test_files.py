"""Tests of stacked_remat/training/data/files.py."""

import os
import sysconfig
import traceback
from pathlib import Path

import fsspec
import pytest

from stacked_remat.training import (
    ByteTokenizer,
    DataConfig,
    DataError,
    SourceConfig,
    config_as_dict,
)
from stacked_remat.training.data.files import (
    SourceFile,
    find_files,
    standard_library_files,
)
from stacked_remat.training.data.records import read_records
from stacked_remat.training.data.token_cache import CacheRequest


@pytest.fixture
def folder(tmp_path):
    for name in (
        "b.txt",
        "a.txt",
        "sub/c.txt",
        "sub/d.md",
        ".hidden/e.txt",
        "sub/.f.txt",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


@pytest.fixture
def memory():
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe({"/texts/a.txt": b"one", "/texts/sub/b.txt": b"three"})
    yield filesystem
    filesystem.rm(filesystem.ls("/", detail=False), recursive=True)


def names(*paths):
    return [file.name for file in find_files(paths, "key")]


def test_a_folder_stands_for_all_files_below_it_except_hidden_ones(folder):
    assert names(str(folder)) == ["a.txt", "b.txt", "sub/c.txt", "sub/d.md"]
    assert names(f"{folder}/") == names(f"file://{folder}") == names(str(folder))
    assert names(f"{folder}/.hidden/e.txt", f"{folder}/sub/.f.txt") == [
        ".f.txt",
        "e.txt",
    ]


def test_names_of_a_glob_begin_after_its_fixed_part(folder):
    assert names(f"{folder}/**/*.txt") == ["a.txt", "b.txt", "sub/c.txt"]
    assert names(f"{folder}/sub/[cd].*") == ["c.txt", "d.md"]
    files = find_files(
        [f"{folder}/b.txt", f"{folder}/*.txt", str(folder / "b.txt")], "key"
    )
    assert [(file.name, file.size) for file in files] == [("a.txt", 5), ("b.txt", 5)]


class Web:
    """The part of a web file system that is asked here."""

    def isdir(self, place):
        return False

    def exists(self, place):
        return True

    def info(self, place):
        return {"size": None}

    def ukey(self, place):
        return f"key of {place}"

    def unstrip_protocol(self, place):
        return place


def test_a_query_in_a_url_is_neither_a_glob_nor_part_of_the_name(monkeypatch):
    url = "https://host/folder/a.jsonl.gz?download=true"
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda path: (Web(), path))
    (file,) = find_files([url], "key")
    assert (file.url, file.name, file.size) == (
        url,
        "a.jsonl.gz",
        0,
    ) and "key of https" in file.version


def test_remote_files_have_names_below_their_folder(memory):
    for name in ("a#1", "b%20c", "d//e", "k?v=1", "m*", "n:80"):
        memory.pipe(f"/odd/{name}.txt", name.encode())
    files = find_files(["memory://odd"], "key")
    read = {memory.cat_file(file.url).decode(): file.name for file in files}
    assert read == {
        name: f"{name}.txt" for name in ("a#1", "b%20c", "d//e", "k?v=1", "m*", "n:80")
    }
    assert names("memory://texts") == ["a.txt", "sub/b.txt"]
    assert names("memory://texts/*.txt", "memory://texts/sub/b.txt") == [
        "a.txt",
        "b.txt",
    ]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing.txt", r"'.*missing.txt' in data.sources.x.paths matches no file"),
        (
            "*.nothing",
            r"matches no file. Give a file that exists, a folder with files, or a glob",
        ),
        (
            "nowhere://x",
            (
                r"Can't look for the files of 'nowhere://x' in data.sources.x.paths:"
                r" .*nowhere"
            ),
        ),
    ],
)
def test_paths_without_files_are_refused(folder, path, message):
    with pytest.raises(DataError, match=message):
        find_files(
            [path if "://" in path else str(folder / path)], "data.sources.x.paths"
        )
    (folder / "empty").mkdir()
    with pytest.raises(DataError, match="no file"):
        find_files([str(folder / "empty")], "key")


def test_the_standard_library_is_sources_without_tests():
    files = standard_library_files()
    found = {file.name for file in files}
    assert {"json/decoder.py", "heapq.py"} <= found and len(files) > 300
    assert not any(
        {"test", "tests", "site-packages"} & set(name.split("/")) for name in found
    )
    assert all(
        Path(str(file.local_path)).is_relative_to(sysconfig.get_path("stdlib"))
        for file in files
    )
    assert [file.name for file in files] == sorted(found)


def test_links_are_followed_and_a_file_comes_once(folder):
    (folder / "sub").joinpath("link.txt").symlink_to(folder / "b.txt")
    (folder / "links").symlink_to(folder)
    paths = (
        folder / "b.txt",
        folder / "sub/link.txt",
        folder / "links/links/b.txt",
        f"file://{folder}/b.txt",
    )
    (file,) = find_files([str(path) for path in paths], "key")
    assert file.name == "b.txt"
    assert names(str(folder)) == ["a.txt", "b.txt", "sub/c.txt", "sub/d.md"]


def test_one_odd_file_does_not_block_a_folder(folder):
    for name in (
        "a::b.txt",
        "[1].txt",
        "c?.txt",
        "http:",
        b"\xff.txt".decode("utf-8", "surrogateescape"),
    ):
        (folder / name).write_text(name.encode("utf-8", "replace").decode())
    (folder / "gone.txt").symlink_to(folder / "nothing")
    (folder / "itself.txt").symlink_to(folder / "itself.txt")
    (folder / "folder.txt").mkdir()
    (folder / "folder.txt" / "e.txt").write_text("e")
    os.mkfifo(folder / "pipe.txt")
    found = find_files([str(folder)], "key")
    read = [
        next(read_records(file, SourceConfig(("-",), format="text"))).content
        for file in found
    ]
    assert {"a::b.txt", "[1].txt", "c?.txt", "?.txt", "http:", "e", "sub/c.txt"} < set(
        read
    ) and len(read) == 10
    assert names(f"{folder}/[1].txt", f"{folder}/a::b.txt") == ["[1].txt", "a::b.txt"]
    assert "c?.txt" in names(f"{folder}/*.txt")
    for path in ("gone.txt", "pipe.txt"):
        with pytest.raises(DataError, match="matches no file"):
            find_files([str(folder / path)], "key")


def test_messages_and_saved_files_hold_no_credentials(tmp_path, monkeypatch):
    url = "https://me:pa55@host/folder/*.jsonl?token=s3cret&X-Amz-Signature=s1gn"
    file = SourceFile(url, "a.jsonl", 1, "v")
    assert file.place == "https://***@host/folder/*.jsonl?token=***&X-Amz-Signature=***"

    class Refusing(Web):
        def glob(self, root, **_):
            raise Exception(f"401, url='{url}'")  # aiohttp's errors are not OSErrors

        open = glob

    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda path: (Refusing(), path))
    with pytest.raises(DataError, match="401") as found:
        find_files([url], "key")
    with pytest.raises(DataError, match="401") as read:
        list(read_records(file, SourceConfig(("-",))))
    request = CacheRequest("web", (file,), SourceConfig(("-",)), ByteTokenizer())
    config = DataConfig(sources={"web": SourceConfig((url,), held_out=(url,))})
    texts = [
        "".join(traceback.format_exception(error.value)) for error in (found, read)
    ]
    for text in (*texts, str(request.identity()), str(config_as_dict(config))):
        assert not any(secret in text for secret in ("me:", "pa55", "s3cret", "s1gn"))
