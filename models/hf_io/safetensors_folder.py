"""A folder in Hugging Face's format: safetensors files, with an index where there are
several, and JSON.

Opening a folder reads the headers; tensors are read one at a time. Files are not
trusted: a damaged one is a `WeightsError` that names it.
"""

import contextlib
import json
import math
import mmap
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np
from huggingface_hub import split_state_dict_into_shards_factory
from jaxtyping import Shaped
from safetensors.numpy import save_file

from models.hf_io import quantized
from models.hf_io.quantized import BLOCKS, FP8, FP8_SCALES, SCALES
from stacked_remat._files import read_json_fields, replaced_whole, written_safetensors
from stacked_remat._messages import shortened, shown

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class WeightsError(ValueError):
    """Weights that can't be used; the message names the folder, the tensors and the
    fix.
    """


def read_json(path: Path) -> dict[str, Any]:
    """The fields of a JSON file; raises WeightsError if it is not a JSON object."""
    try:
        return read_json_fields(path)
    except ValueError as error:
        raise WeightsError(str(error)) from error


@dataclass(frozen=True)
class SafetensorsFolder:
    """The tensors of a folder, by name; the two of a tensor in MXFP4 or FP8 are one
    here, of bfloat16 values.

    Attributes:
        dtypes: what the format calls the dtype of every tensor: `BF16`, `I64`, ...
        files: in which the tensors are.
    """

    root: Path
    stored: Mapping[str, "StoredTensor | JoinedTensor"]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    files: Set[mmap.mmap]

    @property
    def paths(self) -> Set[Path]:
        """The files in which the tensors are."""
        return {path for tensor in self.stored.values() for path in tensor.paths}

    @staticmethod
    def open(root: Path) -> "SafetensorsFolder":
        """Reads the index, if there is one, and the headers of the files; no tensor."""
        files = weight_files(root)
        named = _weight_map(root)
        if missing := [file for file in files if not (root / file).is_file()]:
            raise FileNotFoundError(
                f"{root} lacks {shortened(missing)}. Weights are read in the"
                " safetensors format only; if the folder was downloaded, fetch it"
                " again."
            )
        stored = {
            name: tensor
            for file in files
            for name, tensor in _tensors(root / file).items()
            if named.get(name, file) == file  # else the index names another file for it
        }
        shapes = {name: tensor.shape for name, tensor in stored.items()}
        dtypes = {name: tensor.dtype for name, tensor in stored.items()}
        # From here on names are those of the model's tensors.
        quantized.join_pairs(shapes, dtypes)
        return SafetensorsFolder(
            root, stored, shapes, dtypes, {one.mapped for one in stored.values()}
        )

    def renamed(self, rename: Callable[[str], str]) -> "SafetensorsFolder":
        """The same tensors under other names."""

        def under_new(named: Mapping[str, Any]) -> dict[str, Any]:
            return {rename(name): value for name, value in named.items()}

        new = under_new(self.stored), under_new(self.shapes), under_new(self.dtypes)
        return SafetensorsFolder(self.root, *new, self.files)

    def joined(self, wholes: Mapping[str, Sequence[str]]) -> "SafetensorsFolder":
        """The same tensors, but that some are one, joined along their first axis.

        `wholes` has for a part of a name, that of the joined tensor, the parts in its
        place in the names of the others.
        """
        stored: dict[str, StoredTensor | JoinedTensor] = dict(self.stored)
        for whole, parts in wholes.items():
            first = f".{parts[0]}."
            for name in [name for name in stored if first in name]:
                names = [name.replace(first, f".{part}.") for part in parts]
                if all(own in stored for own in names):
                    tensors = [stored.pop(own) for own in names]
                    joined = JoinedTensor(tuple(tensors))
                    stored[name.replace(first, f".{whole}.")] = joined
        shapes = {name: tensor.shape for name, tensor in stored.items()}
        dtypes = {name: tensor.dtype for name, tensor in stored.items()}
        return replace(self, stored=stored, shapes=shapes, dtypes=dtypes)

    def are_equal(self, first: str, second: str) -> bool:
        """Whether two tensors have the same values. Cost: reads both, some rows at a
        time.
        """
        if self.shapes[first] != self.shapes[second]:
            return False
        one = self.read(first)
        other = self.read(second)
        # Some rows at a time: a head has gigabytes.
        starts = range(0, len(one), _ROWS_COMPARED)
        return all(
            np.array_equal(
                one[at : at + _ROWS_COMPARED], other[at : at + _ROWS_COMPARED]
            )
            for at in starts
        )

    def read(self, name: str, at: tuple[int, ...] = ()) -> Shaped[np.ndarray, "..."]:
        """One tensor, or its entry at indices of its first axes: a view of the file.

        What is quantized is read, and in float32.
        """
        if name not in self.stored:
            return quantized.from_mxfp4(
                self.read(name + BLOCKS, at), self.read(name + SCALES, at)
            )
        for (
            file
        ) in self.files:  # else all that was read would count as memory of the process
            file.madvise(mmap.MADV_DONTNEED)
        tensor = self.stored[name].view()
        if self.stored[name].dtype == FP8:
            tensor = quantized.from_fp8(tensor, self.stored[name + FP8_SCALES].view())
        return tensor[at]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file, from its first byte on, as the file's header
    describes it.
    """

    path: Path
    mapped: mmap.mmap = field(repr=False)
    offset: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def paths(self) -> tuple[Path, ...]:
        """The file that it is in."""
        return (self.path,)

    def view(self) -> Shaped[np.ndarray, "..."]:
        """The tensor, of which only what is used is read."""
        with _errors_of(self.path):
            # Reading beyond the end of a mapped file kills the process.
            if self.mapped.size() < len(self.mapped):
                raise ValueError("it was truncated")
            return np.ndarray(self.shape, _DTYPES[self.dtype], self.mapped, self.offset)


@dataclass(frozen=True)
class JoinedTensor:
    """Tensors of files joined along their first axis."""

    parts: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole, of parts that differ in the first axis alone."""
        rows = sum(part.shape[0] for part in self.parts)
        return rows, *self.parts[0].shape[1:]

    @property
    def dtype(self) -> str:
        """That of the first part."""
        return self.parts[0].dtype

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that its parts are in."""
        return tuple(path for part in self.parts for path in part.paths)

    def view(self) -> Shaped[np.ndarray, "..."]:
        """The whole, a copy."""
        return np.concatenate([part.view() for part in self.parts])


@contextlib.contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """Turns what a damaged file raises into a WeightsError that names it."""
    try:
        yield
    except (
        OSError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        RecursionError,
    ) as error:
        raise WeightsError(
            f"{path} can't be read ({error}). Fetch or save it again."
        ) from error


_ROWS_COMPARED = 4096  # at once
_LONGEST_HEADER = 100_000_000  # bytes, in safetensors too
_DTYPES = {
    f"{kind}{8 * size}": np.dtype(f"<{kind.lower()}{size}")
    for kind in "IU"
    for size in (1, 2, 4, 8)
}
_DTYPES |= {f"F{8 * size}": np.dtype(f"<f{size}") for size in (2, 4, 8)}
_DTYPES |= {
    FP8: np.dtype(jnp.float8_e4m3fn),
    "BF16": np.dtype(jnp.bfloat16),
    "BOOL": np.dtype(bool),
}


def _tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors that a header describes, one after the other from its end to that of
    the file.
    """
    found = {}
    with _errors_of(path):
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        # The file begins with the length of its header, in 8 bytes.
        start = end = 8 + int.from_bytes(mapped[:8], "little")
        # Before it is parsed: a damaged length could ask for any amount of memory.
        if start > min(len(mapped), _LONGEST_HEADER):
            raise ValueError("its header is too long")
        header = json.loads(mapped[8:start])
        header.pop("__metadata__", None)
        for name, one in sorted(
            header.items(), key=lambda item: item[1]["data_offsets"]
        ):
            shape = tuple(one["shape"])
            dtype = one["dtype"]
            first, last = one["data_offsets"]
            size = (
                math.prod(shape) * _DTYPES[dtype].itemsize
                if dtype in _DTYPES
                else last - first
            )
            # The format has neither gaps nor overlaps: each begins where one ends.
            if (start + first, last) != (end, first + size) or size < 0:
                raise ValueError(
                    f"{shown(name)} is not where another tensor ends, or of another"
                    " size"
                )
            found[name] = StoredTensor(path, mapped, end, shape, dtype)
            end = end + size
        if end != len(mapped):
            raise ValueError(f"it has {len(mapped)} bytes, and {end} by its header")
    return found


def write_safetensors(
    root: Path,
    tensors: Mapping[str, "Pending"],
    *,
    documents: Mapping[str, Any],
    texts: Mapping[str, str] = MappingProxyType({}),
    max_file_bytes: int = 5 * 2**30,
) -> None:
    """Writes tensors, in as many files as needed, and JSON documents such as
    `config.json`.

    The folder gets its name when all of it is written, so that it is never partial.

    Args:
        documents: contents by file name, to be written as JSON.
        max_file_bytes: of a file; a larger tensor has a file of its own.

    Cost: the host memory of one file.
    """
    root = Path(os.path.realpath(root))
    check_new_folder(root)
    # The names and sizes of files are those that other libraries write.
    split = split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda tensor: tensor.num_bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_file_bytes,
    )
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        documents = {**documents, INDEX: index}
    written = {
        file: json.dumps(content, indent=2) + "\n"
        for file, content in documents.items()
    }
    root.parent.mkdir(parents=True, exist_ok=True)
    with written_safetensors(root), replaced_whole(root, shared=True) as unfinished:
        unfinished.mkdir()
        for file, names in split.filename_to_tensors.items():
            # One file's tensors at a time are in host memory.
            made = {name: np.ascontiguousarray(tensors[name].make()) for name in names}
            save_file(made, unfinished / file, metadata={"format": "pt"})
        for file, text in {**texts, **written}.items():
            path = unfinished / file
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")


def check_new_folder(root: Path) -> None:
    """Raises FileExistsError for a folder that exists and is not empty."""
    root = Path(os.path.realpath(root))
    # `exists` is false for a link to itself.
    if os.path.lexists(root) and (not root.is_dir() or any(root.iterdir())):
        raise FileExistsError(
            f"{root} exists and is not an empty folder. Export to a new one."
        )


@dataclass(frozen=True)
class Pending:
    """A tensor that is made only when it is written."""

    num_bytes: int
    make: Callable[[], Shaped[np.ndarray, "..."]]


def weight_files(root: Path) -> list[str]:
    """The files that a folder's weights are in, whether they are there or not."""
    if files := sorted({*_weight_map(root).values()}):
        return files
    if not _is_inside(root, SINGLE):
        raise WeightsError(
            f"{root / SINGLE} is a link to a file outside of that folder. Put the"
            " weights into the folder."
        )
    return [SINGLE]


def _weight_map(root: Path) -> dict[str, str]:
    """The file of every tensor by the index; empty without an index."""
    files = (
        read_json(root / INDEX).get("weight_map", {})
        if (root / INDEX).is_file()
        else {}
    )
    if not isinstance(files, dict) or not all(
        isinstance(file, str) for file in files.values()
    ):
        raise WeightsError(
            f"weight_map in {root / INDEX} is not the file of each tensor. Fetch it"
            " again."
        )
    for file in sorted({*files.values()}):
        if not _is_inside(root, file):
            raise WeightsError(
                f"weight_map in {root / INDEX} names {shown(file)}, which is not a file"
                " of that folder. Put the weights into the folder, and correct their"
                " names there."
            )
    return files


def _is_inside(root: Path, file: str) -> bool:
    """Whether a name is of a file in a folder, and not by a link elsewhere, nor a path
    out of it.
    """
    parts = re.split(r"[/\\]", file)
    if (
        Path(file).is_absolute()
        or "\0" in file
        or not {"", ".", ".."}.isdisjoint(parts)
    ):
        return False
    path = Path(os.path.realpath(root / file))
    return any(
        path.is_relative_to(os.path.realpath(folder))
        for folder in (root, *_hub_blobs(root))
    )


def is_hub_snapshot(root: Path) -> bool:
    """Whether a folder is one of the Hub's cache."""
    snapshots = root.resolve().parent
    return snapshots.name == "snapshots" and snapshots.parent.name.startswith(
        "models--"
    )


def _hub_blobs(root: Path) -> list[Path]:
    """Where the files are to which those of a snapshot in the Hub's cache are links.

    The layout is `models--OWNER--NAME/snapshots/REVISION` beside
    `models--OWNER--NAME/blobs`.
    """
    return [root.resolve().parent.parent / "blobs"] if is_hub_snapshot(root) else []
