"""Tests of stacked_remat/_files.py."""

import errno
import json

import pytest

from stacked_remat._files import read_json_fields, replaced_whole, written_safetensors


def test_a_failed_write_leaves_what_was_there(tmp_path):
    file = tmp_path / "a"
    file.write_text("old")
    with pytest.raises(OSError, match="a full disk") as raised:
        with replaced_whole(file) as unfinished:
            unfinished.write_text("half")
            raise OSError(errno.ENOSPC, "a full disk")
    assert raised.value.filename == str(file)
    with pytest.raises(FileNotFoundError) as raised:
        with replaced_whole(file):
            (tmp_path / "other").read_text()
    assert raised.value.filename == str(tmp_path / "other")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [
        ("a", "old")
    ]


def test_leftovers_of_a_write_by_one_process(tmp_path):
    """They are removed by the next one, unless others write the file as well."""
    left = tmp_path / ".a.unfinished"
    left.write_text("half")
    with replaced_whole(tmp_path / "a", shared=True) as unfinished:
        unfinished.write_text("by several")
    assert left.exists()
    with replaced_whole(tmp_path / "a") as unfinished:
        assert not left.exists()
        unfinished.write_text("by one")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["by one"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"a": 1', "is not valid JSON: .* may be truncated"),
        ("[" * 100_000, "is not valid JSON"),
        ("[1]", "holds a list; a JSON object was expected"),
        ('"a"', "holds a str; a JSON object was expected"),
    ],
)
def test_files_without_a_json_object(tmp_path, text, problem):
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=f"config.json {problem}"):
        read_json_fields(file)


def test_the_fields_of_a_json_file(tmp_path):
    fields = {"a": [1, None], "b": {}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert read_json_fields(tmp_path / "config.json") == fields


def test_errors_of_the_system_while_safetensors_are_written(tmp_path):
    safetensors = pytest.importorskip("safetensors")
    of_a_full_disk = "I/O error: No space left on device (os error 28)"
    for error, number in [
        (safetensors.SafetensorError(of_a_full_disk), errno.ENOSPC),
        (safetensors.SafetensorError("of another kind"), errno.EIO),
        (PermissionError(errno.EACCES, "denied"), errno.EACCES),
    ]:
        with pytest.raises(OSError, match=str(tmp_path)) as raised:
            with written_safetensors(tmp_path):
                raise error
        assert raised.value.errno == number
        assert raised.value.filename == str(tmp_path)
