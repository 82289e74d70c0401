import os
import sysconfig
from pathlib import Path

import fsspec
import pytest

from stacked_remat.training import DataError
from stacked_remat.training.data.files import find_files, standard_library_files


@pytest.fixture
def folder(tmp_path):
    for name in ("b.txt", "a.txt", "sub/c.txt", "sub/d.md", ".hidden/e.txt", "sub/.f.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


@pytest.fixture
def memory():
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe({"/texts/a.txt": b"one", "/texts/sub/b.txt": b"three"})
    yield filesystem
    filesystem.rm("/texts", recursive=True)


def names(*paths):
    return [file.name for file in find_files(paths, "key")]


def test_a_folder_is_all_below_it_but_what_is_hidden(folder):
    assert names(str(folder)) == ["a.txt", "b.txt", "sub/c.txt", "sub/d.md"]
    assert names(f"{folder}/") == names(f"file://{folder}") == names(str(folder))


def test_a_glob_is_what_it_matches_and_names_begin_after_its_fixed_part(folder):
    assert names(f"{folder}/**/*.txt") == ["a.txt", "b.txt", "sub/c.txt"]
    assert names(f"{folder}/sub/[cd].*") == ["c.txt", "d.md"]


def test_a_file_is_itself_and_comes_once_however_often_it_is_found(folder):
    files = find_files([f"{folder}/b.txt", f"{folder}/*.txt", str(folder / "b.txt")], "key")
    assert [file.name for file in files] == ["a.txt", "b.txt"]
    assert files[1].size == 5 and Path(files[1].url.removeprefix("file://")).read_text() == "b.txt"


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


def test_a_query_in_a_web_address_is_no_glob_and_no_part_of_the_name(monkeypatch):
    url = "https://host/folder/a.jsonl.gz?download=true"
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda path: (Web(), path))
    (file,) = find_files([url], "key")
    assert (file.url, file.name, file.size) == (url, "a.jsonl.gz", 0) and "key of https" in file.version


def test_names_do_not_depend_on_where_the_folder_lies(folder, memory):
    assert names("memory://texts") == ["a.txt", "sub/b.txt"]
    assert names("memory://texts/*.txt") == ["a.txt"]
    assert names("memory://texts/sub/b.txt") == ["b.txt"]


def test_versions_change_with_size_time_and_what_a_remote_file_system_says(folder, memory):
    def version(path):
        return find_files([str(path)], "key")[0].version

    file = folder / "a.txt"
    first = version(file)
    assert version(file) == first
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 5_000_000))
    second = version(file)
    file.write_text("longer")
    assert len({first, second, version(file)}) == 3
    before = version("memory://texts/a.txt")
    memory.pipe("/texts/a.txt", b"two")
    assert version("memory://texts/a.txt") != before


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing.txt", r"'.*missing.txt' in data.sources.x.paths stands for no file"),
        ("*.nothing", r"stands for no file. Give a file that exists, a folder with files, or a glob"),
        ("nowhere://x", r"Can't look for the files of 'nowhere://x' in data.sources.x.paths: .*nowhere"),
    ],
)
def test_paths_without_files_are_refused(folder, path, message):
    with pytest.raises(DataError, match=message):
        find_files([path if "://" in path else str(folder / path)], "data.sources.x.paths")
    (folder / "empty").mkdir()
    with pytest.raises(DataError, match="no file"):
        find_files([str(folder / "empty")], "key")


def test_the_standard_library_is_sources_without_tests():
    files = standard_library_files()
    found = {file.name for file in files}
    assert {"json/decoder.py", "heapq.py"} <= found and len(files) > 300
    assert not any({"test", "tests", "site-packages"} & set(name.split("/")) for name in found)
    assert all(Path(file.url).is_relative_to(sysconfig.get_path("stdlib")) for file in files)
    assert [file.name for file in files] == sorted(found)
