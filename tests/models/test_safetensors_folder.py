import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from models.safetensors_folder import (
    INDEX,
    SINGLE,
    Pending,
    SafetensorsFolder,
    WeightsError,
    write_safetensors,
)


def pending(**arrays):
    return {name: Pending(array.nbytes, lambda array=array: array) for name, array in arrays.items()}


ARRAYS = {"a": np.arange(6.0).reshape(2, 3), "b": np.ones(4, np.float32), "c": np.zeros((0, 2), np.int32)}


@pytest.mark.parametrize("max_file_bytes", [1, 50, 10_000])
def test_tensors_come_back_whatever_the_files(tmp_path, max_file_bytes):
    root = tmp_path / "x"
    write_safetensors(
        root, pending(**ARRAYS), documents={"note.json": {"k": 1}}, max_file_bytes=max_file_bytes
    )
    folder = SafetensorsFolder.open(root)
    assert folder.shapes == {"a": (2, 3), "b": (4,), "c": (0, 2)}
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(folder.read(name), array)
        assert folder.read(name).dtype == array.dtype
    assert json.loads((root / "note.json").read_text()) == {"k": 1}


def test_there_are_as_many_files_as_the_size_says(tmp_path):
    write_safetensors(tmp_path / "x", pending(**ARRAYS), documents={}, max_file_bytes=50)
    files = SafetensorsFolder.open(tmp_path / "x").files
    assert [files[name].name[6:11] for name in "abc"] == ["00001", "00002", "00002"]
    index = json.loads((tmp_path / "x" / INDEX).read_text())
    assert index["metadata"]["total_size"] == 64


def test_a_failure_leaves_nothing_behind(tmp_path):
    def fail():
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        write_safetensors(tmp_path / "x", {**pending(**ARRAYS), "d": Pending(1, fail)}, documents={})
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"exists and is not an empty folder. Export to a new one"):
        write_safetensors(tmp_path, pending(**ARRAYS), documents={})
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_an_empty_folder_is_used(tmp_path):
    (tmp_path / "x").mkdir()
    write_safetensors(tmp_path / "x", pending(**ARRAYS), documents={})
    assert (tmp_path / "x" / SINGLE).is_file()


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"neither {SINGLE} nor {INDEX} in"):
        SafetensorsFolder.open(tmp_path)
    write_safetensors(tmp_path / "x", pending(**ARRAYS), documents={}, max_file_bytes=1)
    (tmp_path / "x" / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="lacks model-00002-of-00003.safetensors, which its"):
        SafetensorsFolder.open(tmp_path / "x")


def test_files_that_are_cut_short_are_named(tmp_path):
    write_safetensors(tmp_path / "x", pending(**ARRAYS), documents={})
    path = tmp_path / "x" / SINGLE
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(WeightsError, match=f"{SINGLE} can't be read as a safetensors file .* cut short"):
        SafetensorsFolder.open(tmp_path / "x")


def test_an_index_that_promises_too_much_is_told(tmp_path):
    write_safetensors(tmp_path / "x", pending(**ARRAYS), documents={}, max_file_bytes=50)
    path = tmp_path / "x" / INDEX
    path.write_text(path.read_text().replace('"c"', '"d"'))
    assert list(SafetensorsFolder.open(tmp_path / "x").absent) == ["d"]
    path.write_text("[]")
    with pytest.raises(WeightsError, match=f"{INDEX} is no index of safetensors files"):
        SafetensorsFolder.open(tmp_path / "x")


def test_the_index_says_which_of_two_tensors_of_a_name_is_meant(tmp_path):
    save_file({"w": np.ones(2)}, tmp_path / "a.safetensors")
    save_file({"w": np.zeros(2), "v": np.zeros(2)}, tmp_path / "b.safetensors")
    index = {"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    np.testing.assert_array_equal(SafetensorsFolder.open(tmp_path).read("w"), np.ones(2))


def test_an_index_may_name_files_in_other_folders(tmp_path):
    (tmp_path / "parts").mkdir()
    save_file({"w": np.ones(2)}, tmp_path / "parts/a.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": "parts/a.safetensors"}}))
    folder = SafetensorsFolder.open(tmp_path)
    np.testing.assert_array_equal(folder.read("w"), np.ones(2))
    assert not folder.absent


def test_a_tensor_in_two_files_that_the_index_does_not_name_is_refused(tmp_path):
    save_file({"w": np.ones(2), "x": np.ones(1)}, tmp_path / "a.safetensors")
    save_file({"w": np.zeros(2), "v": np.zeros(2)}, tmp_path / "b.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": "a.safetensors", "v": "b.safetensors"}}))
    with pytest.raises(WeightsError, match=r"a.safetensors and .*b.safetensors both have w"):
        SafetensorsFolder.open(tmp_path)
