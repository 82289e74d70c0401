"""Folders of safetensors files are written whole and read by tensor."""

import collections
import errno
import json
import random
import re
import resource
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
from safetensors.numpy import save, save_file

from models.hf_io.safetensors_folder import (
    INDEX,
    SINGLE,
    Pending,
    SafetensorsFolder,
    WeightsError,
    weight_files,
    write_safetensors,
)


def pending(**arrays):
    return {
        name: Pending(array.nbytes, lambda array=array: array)
        for name, array in arrays.items()
    }


ARRAYS = {
    "a": np.arange(6.0).reshape(2, 3),
    "b": np.ones(4, np.float32),
    "c": np.zeros((0, 2), np.int32),
}


@pytest.mark.parametrize("max_file_bytes", [1, 50, 10_000])
def test_tensors_round_trip_in_any_number_of_files(tmp_path, max_file_bytes):
    root = tmp_path / "x"
    write_safetensors(
        root,
        pending(**ARRAYS),
        documents={"note.json": {"k": 1}},
        max_file_bytes=max_file_bytes,
    )
    folder = SafetensorsFolder.open(root)
    assert folder.shapes == {"a": (2, 3), "b": (4,), "c": (0, 2)}
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(folder.read(name), array)
        assert folder.read(name).dtype == array.dtype
    assert json.loads((root / "note.json").read_text()) == {"k": 1}


def test_the_file_size_decides_the_number_of_files(tmp_path):
    write_safetensors(
        tmp_path / "x", pending(**ARRAYS), documents={}, max_file_bytes=50
    )
    stored: Any = SafetensorsFolder.open(tmp_path / "x").stored
    assert [stored[name].path.name[6:11] for name in "abc"] == [
        "00001",
        "00002",
        "00002",
    ]
    index = json.loads((tmp_path / "x" / INDEX).read_text())
    assert index["metadata"]["total_size"] == 64


def test_a_file_is_opened_once_and_entries_of_any_dtype_alone(tmp_path, monkeypatch):
    integers = "int8 uint8 int16 uint16 int32 uint32 int64 uint64".split()
    dtypes = ["bool", *integers, "float16", "float32", "float64"]
    arrays = {name: np.arange(24).reshape(2, 3, 4).astype(name) for name in dtypes}
    arrays["bfloat16"] = np.arange(24).reshape(2, 3, 4).astype(jnp.bfloat16)
    write_safetensors(
        tmp_path / "x", pending(**arrays), documents={}, max_file_bytes=100
    )
    opened = collections.Counter()

    def count(event, args):
        if event == "open" and str(args[0]).startswith(str(tmp_path / "x" / "model-")):
            opened[str(args[0])] += 1

    # Which opens a file where Python does not see it
    monkeypatch.delattr(safetensors, "safe_open")
    sys.addaudithook(count)
    folder = SafetensorsFolder.open(tmp_path / "x")
    for name, array in arrays.items():
        for at in ((), (1,), (1, 2), (0, 1, 3)):
            found = folder.read(name, at)
            assert found.dtype == array.dtype
            np.testing.assert_array_equal(found, array[at])
    stored: Any = folder.stored
    assert opened == {str(tensor.path): 1 for tensor in stored.values()}
    path = stored["float64"].path
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(WeightsError, match="can't be read .*Fetch or save it again"):
        folder.read("float64")


@pytest.mark.parametrize("files", [[], None, {"a": 5}], ids=str)
def test_an_index_without_the_files_of_tensors_is_named(tmp_path, files):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": files}))
    with pytest.raises(
        WeightsError,
        match=f"weight_map in {tmp_path / INDEX} is not the file of each tensor",
    ):
        SafetensorsFolder.open(tmp_path)


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(
        FileExistsError, match=r"exists and is not an empty folder. Export to a new one"
    ):
        write_safetensors(tmp_path, pending(**ARRAYS), documents={})
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_missing_files_are_named(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=f"lacks {SINGLE}. Weights are read in the"
    ):
        SafetensorsFolder.open(tmp_path)
    write_safetensors(tmp_path / "x", pending(**ARRAYS), documents={}, max_file_bytes=1)
    (tmp_path / "x" / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(
        FileNotFoundError, match="lacks model-00002-of-00003.safetensors"
    ):
        SafetensorsFolder.open(tmp_path / "x")


def test_the_index_says_which_of_two_tensors_of_a_name_is_meant(tmp_path):
    save_file({"w": np.ones(2)}, tmp_path / "a.safetensors")
    save_file({"w": np.zeros(2), "v": np.zeros(2)}, tmp_path / "b.safetensors")
    index = {"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    np.testing.assert_array_equal(
        SafetensorsFolder.open(tmp_path).read("w"), np.ones(2)
    )


def test_a_text_may_be_in_a_folder_of_its_own(tmp_path):
    texts = {"templates/tool_use.jinja": "tools"}
    write_safetensors(tmp_path / "x", pending(**ARRAYS), documents={}, texts=texts)
    assert (tmp_path / "x/templates/tool_use.jinja").read_text() == "tools"


def test_a_full_disk_is_an_error_that_names_the_folder_and_leaves_nothing(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for arrays, texts in ((ARRAYS, {}), ({}, {"note.txt": "x" * 10_000})):
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
        try:
            with pytest.raises(OSError) as caught:
                write_safetensors(
                    tmp_path / "x", pending(**arrays), documents={}, texts=texts
                )
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert (caught.value.errno, caught.value.filename) == (
            errno.EFBIG,
            str(tmp_path / "x"),
        )
        assert not list(tmp_path.iterdir())


def damaged(whole: bytes):
    """A safetensors file cut short, with flipped bytes, and with headers that say
    something else.
    """
    length = int.from_bytes(whole[:8], "little")
    header, data = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    yield from (whole[:size] for size in range(len(whole)))
    draw = random.Random(0)
    for _ in range(500):
        flipped = bytearray(whole)
        flipped[draw.randrange(8 + length)] ^= 1 << draw.randrange(8)
        yield bytes(flipped)
    yield from (
        size.to_bytes(8, "little") + whole[8:] for size in (2**63, 2**40, 0, len(whole))
    )
    odd = [
        None,
        True,
        -1,
        1.5,
        10**30,
        "x",
        "F8_E5M2",
        [],
        {},
        [[]],
        [0, 8],
        [8, 0],
        [2**63, 2],
        [0, 10**9],
    ]
    for name in ("dtype", "shape", "data_offsets"):
        for value in odd:
            said = json.dumps(header | {"a": header["a"] | {name: value}}).encode()
            yield len(said).to_bytes(8, "little") + said + data


@pytest.mark.deep
def test_damaged_safetensors_files_are_refused_or_read(tmp_path):
    refused = 0
    for content in damaged(
        save({"a": ARRAYS["a"], "b": ARRAYS["b"]}, metadata={"format": "pt"})
    ):
        (tmp_path / SINGLE).write_bytes(content)
        try:
            folder = SafetensorsFolder.open(tmp_path)
            for name in folder.stored:
                folder.read(name)
        except WeightsError as error:
            refused += 1
            assert str(tmp_path / SINGLE) in str(error)
    assert refused > 400


@pytest.mark.parametrize(
    "name",
    [
        "../out.st",
        "a/../../out.st",
        "{out}",
        "sub/../../out.st",
        "..\\out.st",
        "link.st",
        "linked/out.st",
        "",
    ],
)
def test_an_index_names_only_files_of_its_folder(tmp_path, monkeypatch, name):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(ARRAYS, tmp_path / "out.st")
    (folder / "link.st").symlink_to(tmp_path / "out.st")
    (folder / "linked").symlink_to(tmp_path)
    name = name.format(out=tmp_path / "out.st")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    for opened in (
        lambda: SafetensorsFolder.open(folder),
        lambda: weight_files(folder),
    ):
        with pytest.raises(
            WeightsError,
            match=rf"names {re.escape(repr(name))}, which is not a file of that",
        ):
            opened()


def test_weights_in_one_file_are_no_link_out_of_their_folder(tmp_path):
    repository = tmp_path / "models--owner--name"
    mine, snapshot = tmp_path / "mine", repository / "snapshots" / "1a2b"
    blob, other = repository / "blobs" / "c3", tmp_path / "other.safetensors"
    for folder in (mine, snapshot, blob.parent):
        folder.mkdir(parents=True)
    for file in (blob, other):
        save_file(ARRAYS, file)
    (snapshot / "model.safetensors").symlink_to(blob)
    assert {*SafetensorsFolder.open(snapshot).shapes} == {*ARRAYS}
    (mine / "model.safetensors").symlink_to(other)
    with pytest.raises(WeightsError, match="model.safetensors is a link to a file out"):
        SafetensorsFolder.open(mine)


def test_files_in_a_folder_of_the_folder_and_links_of_the_hubs_cache_are_read(tmp_path):
    repository = tmp_path / "models--owner--name"
    snapshot, blobs = repository / "snapshots" / "1a2b", repository / "blobs"
    for folder in (snapshot / "more", blobs):
        folder.mkdir(parents=True)
    for blob, names in (("c3", "ab"), ("d4", "c")):
        save_file({name: ARRAYS[name] for name in names}, blobs / blob)
    (snapshot / "1.safetensors").symlink_to("../../blobs/c3")
    (snapshot / "more/2.safetensors").symlink_to("../../../blobs/d4")
    files = {"a": "1.safetensors", "b": "1.safetensors", "c": "more/2.safetensors"}
    (snapshot / INDEX).write_text(json.dumps({"weight_map": files}))
    assert {*SafetensorsFolder.open(snapshot).shapes} == {*ARRAYS}
    with pytest.raises(
        WeightsError, match="not a file of that folder"
    ):  # the links of another repository
        (snapshot / "more/2.safetensors").unlink()
        (snapshot / "more/2.safetensors").symlink_to(
            tmp_path / "models--owner--other/blobs/d4"
        )
        SafetensorsFolder.open(snapshot)
