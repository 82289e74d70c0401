"""The near tier of checkpoints: what a process holds of the state, in files of its
host.

A checkpoint on a file system that all hosts share takes long and is written seldom.
Between two of them each process writes its own part of the state every few steps to a
disk or to memory of its host (`/dev/shm`), which outlives the process. A run that is
started again on the same hosts resumes from the last step that all processes have;
where a host was lost, it resumes from the shared checkpoint.

Files count only where the run went on from them. They are in a folder named by an id,
which the run folder has in a file; wherever a run begins or resumes otherwise, it gets
another id.

A file is an archive of NumPy's (`.npz`, a ZIP without compression): a checkpoint's
JSON, and the bytes of each part of an array that a device of the process holds, once.
ZIP has a checksum of each.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, final

import jax
import numpy as np

from .._files import replaced_whole
from .array_layout import sharding_of
from .errors import CheckpointDamagedError, ConfigError
from .processes import of_all

# The first and the last index, exclusive, along each axis of an array
Part: TypeAlias = tuple[tuple[int, int], ...]

_ID = re.compile("[0-9a-f]{8}")
_RUN = "run"  # the member of an archive that has the JSON
_PARTS = "parts"  # the field of that JSON that says which parts there are


class _Place(NamedTuple):
    """Where the local checkpoints of a run are, as the run folder says."""

    id: str
    parent: str


@final
class LocalFiles:
    """The files of one process of a run, the latest two of which are kept.

    Two, because processes end their writing at different times: the last step that all
    have may be the one before the last.

    Attributes:
        folder: of this process's files, `PARENT/RUN/ID/PROCESS`.
    """

    folder: Path

    def __init__(self, id_file: Path, parent: Path):
        """Makes the folder, or finds that of an earlier process.

        All processes of a run call this, the first one before the others.

        Args:
            id_file: has the id and the parent, in the run folder.
            parent: a folder of the host, which other runs may use too.

        Raises:
            ConfigError: what is in `id_file` is no id.
        """
        self._id_file = id_file
        self._parent = parent.absolute()
        self._of_run = _folder_of_run(id_file, self._parent)
        place = _read_place(id_file)
        # Each host may have a parent of its own: that of the first process is written.
        if place is None or (
            jax.process_index() == 0 and place.parent != str(self._parent)
        ):
            place = _Place(_new_id(), str(self._parent))
            self._write_place(place)
        self._open(place.id)
        self._writer = ThreadPoolExecutor(1, "local checkpoints")
        self._writing: Future[None] | None = None

    def renew(self) -> None:
        """Forgets all files, since the run does not go on from them; all processes call
        this.
        """
        current = of_all(_new_id())[0]
        if jax.process_index() == 0:
            self._write_place(_Place(current, str(self._parent)))
        self._open(current)

    def _write_place(self, place: _Place) -> None:
        with replaced_whole(self._id_file) as path:
            path.write_text(json.dumps(place._asdict()), encoding="utf-8")

    def _open(self, current: str) -> None:
        """Makes the folder of an id, and removes those of earlier ids, and what an
        earlier process did not finish.
        """
        self.folder = self._of_run / current / f"process-{jax.process_index()}"
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self._of_run.iterdir():
            if _ID.fullmatch(path.name) and path.name != current:
                shutil.rmtree(path, ignore_errors=True)
        for path in self.folder.glob("*.unfinished"):
            path.unlink()

    def steps(self) -> list[int]:
        """The steps of the files, in order."""
        found = self.folder.glob("*.npz")
        return sorted(int(path.stem) for path in found if path.stem.isdecimal())

    def save(
        self, step: int, arrays: Mapping[str, jax.Array], run: Mapping[str, Any]
    ) -> None:
        """Copies this process's parts of the arrays to the host, and writes them in the
        background.

        Args:
            step: of the file.
            arrays: by name; their buffers may be donated as soon as this returns.
            run: what a checkpoint says of its run, as JSON.

        Raises:
            OSError: the file before this one can't be written.
        """
        self.wait()
        parts: dict[str, list[Part]] = {}
        members: dict[str, np.ndarray] = {}
        for name, array in arrays.items():
            copies: dict[Part, np.ndarray] = {}
            for shard in array.addressable_shards:
                part = _part(shard.index, array.shape)
                if part not in copies:
                    # A copy: on CPUs `np.asarray` would be a view of what is donated.
                    copies[part] = np.array(shard.data)
            parts[name] = list(copies)
            for number, copy in enumerate(copies.values()):
                # NumPy's format does not know bfloat16 and the like.
                members[f"{name}:{number}"] = copy.reshape(-1).view(np.uint8)
        text = json.dumps({**run, _PARTS: parts})
        members[_RUN] = np.frombuffer(text.encode(), np.uint8)
        self._writing = self._writer.submit(self._write, step, members)

    def _write(self, step: int, members: Mapping[str, np.ndarray]) -> None:
        try:
            with replaced_whole(self.path(step)) as path, path.open("wb") as file:
                np.savez(file, **members)  # pyright: ignore[reportArgumentType]
        except OSError as error:
            number = error.errno or 0
            raise OSError(
                number,
                f"Can't write the local checkpoint of step {step}:"
                f" {os.strerror(number)}",
                str(self.folder),
            ) from error
        for old in self.steps()[:-2]:
            self.path(old).unlink()

    def wait(self) -> None:
        """Waits until the last file is written; raises an OSError if it can't be."""
        writing = self._writing
        self._writing = None
        if writing is not None:
            writing.result()

    def keep(self, *, first: int = 0, last: float = math.inf) -> None:
        """Removes the files of steps before the first and after the last."""
        for step in self.steps():
            if not first <= step <= last:
                self.path(step).unlink()

    def close(self) -> None:
        """Ends writing, and removes folders that are empty."""
        self._writer.shutdown()
        for path in (self.folder, self.folder.parent, self._of_run):
            # One with files, maybe of another process, stays.
            with contextlib.suppress(OSError):
                path.rmdir()

    def run(self, step: int) -> dict[str, Any]:
        """What the file of a step says of its run.

        Raises:
            CheckpointDamagedError: the file is damaged.
        """
        with _opened(self.path(step)) as archive:
            return json.loads(archive[_RUN].tobytes())

    def read(
        self, step: int, run: Mapping[str, Any], like: Mapping[str, Any]
    ) -> dict[str, jax.Array]:
        """The arrays of a file.

        Args:
            step: of the file.
            run: what it says of its run, which has all parts of `like`.
            like: an array or a `jax.ShapeDtypeStruct` by name; each is read with its
                sharding, or onto the default device.

        Raises:
            CheckpointDamagedError: the file is damaged.
        """
        found: dict[str, jax.Array] = {}
        with _opened(self.path(step)) as archive:
            for name, wanted in like.items():
                parts = {}
                for number, one in enumerate(run[_PARTS][name]):
                    part = _as_part(one)
                    sizes = [stop - start for start, stop in part]
                    content = archive[f"{name}:{number}"]
                    parts[part] = content.view(wanted.dtype).reshape(sizes)
                found[name] = _made(wanted, parts)
        return found

    def path(self, step: int) -> Path:
        """The file of a step."""
        return self.folder / f"{step}.npz"


def has_parts(run: Mapping[str, Any], like: Mapping[str, Any]) -> bool:
    """Whether a file, by what it says of its run, has the parts of arrays that this
    process's devices hold.
    """
    for name, wanted in like.items():
        saved = {_as_part(one) for one in run[_PARTS].get(name, ())}
        if not saved.issuperset(_held(wanted)):
            return False
    return True


def check_not_left(id_file: Path, parent: Path | None, last: int) -> None:
    """Refuses to leave local checkpoints behind that are later than all others.

    Args:
        id_file: of the run.
        parent: where its local checkpoints are to be; None for none.
        last: the step of its last other checkpoint, -1 for none.

    Raises:
        ConfigError: they are in another folder; the message names it.
    """
    place = _read_place(id_file)
    if place is None or (parent is not None and place.parent == str(parent.absolute())):
        return
    of_run = _folder_of_run(id_file, Path(place.parent))
    found = (of_run / place.id).glob("process-*/*.npz")
    steps = [int(path.stem) for path in found if path.stem.isdecimal()]
    if max(steps, default=-1) > last:
        other = "that of the last checkpoint" if last >= 0 else "the first step"
        raise ConfigError(
            f"trainer.checkpoint.local_dir was {place.parent} and has the state after"
            f" step {max(steps)} of this run. Give it again to go on from there, or"
            f" delete {of_run} to go on from {other}."
        )


def forget(id_file: Path) -> None:
    """Removes the local checkpoints of a run on this host, and what says where they
    are.
    """
    place = _read_place(id_file)
    if place is not None:
        shutil.rmtree(_folder_of_run(id_file, Path(place.parent)), ignore_errors=True)
        id_file.unlink()


def _folder_of_run(id_file: Path, parent: Path) -> Path:
    root = id_file.parent.absolute()
    # Run folders of one name may share a parent.
    digest = hashlib.sha256(str(root).encode()).hexdigest()[:8]
    return parent / f"{root.name}-{digest}"


def _read_place(id_file: Path) -> _Place | None:
    """Where local checkpoints are; None for a run without any."""
    if not id_file.exists():
        return None
    with contextlib.suppress(ValueError, TypeError):
        place = _Place(**json.loads(id_file.read_text(encoding="utf-8")))
        # They are names of folders that are removed.
        if _ID.fullmatch(place.id) and Path(place.parent).is_absolute():
            return place
    raise ConfigError(
        f"{id_file} is damaged: it should have the id of local checkpoints and their"
        " folder. Delete it: the run then goes on without them, from its last"
        f" checkpoint in {id_file.parent} or from the first step."
    )


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """An archive, whose errors are a CheckpointDamagedError that names it."""
    try:
        with np.load(path) as archive:
            yield archive
    except Exception as error:  # zipfile and NumPy raise anything
        raise CheckpointDamagedError(
            f"The local checkpoint {path} is damaged ({error}). Delete it: the run then"
            " resumes from the one before."
        ) from error


def _new_id() -> str:
    return uuid.uuid4().hex[:8]


def _made(like: Any, parts: Mapping[Part, np.ndarray]) -> jax.Array:
    """An array like another one, of the parts that this process's devices hold."""
    shape = tuple(like.shape)
    return jax.make_array_from_callback(
        shape, sharding_of(like), lambda index: parts[_part(index or (), shape)]
    )


def _held(array: Any) -> set[Part]:
    """The parts of an array that the devices of this process hold."""
    shape = tuple(array.shape)
    held = sharding_of(array).addressable_devices_indices_map(shape)
    return {_part(index or (), shape) for index in held.values()}


def _part(index: Iterable[slice], shape: Iterable[int]) -> Part:
    return tuple(one.indices(size)[:2] for one, size in zip(index, shape, strict=True))


def _as_part(one: Iterable[Iterable[int]]) -> Part:
    """A part that was read from JSON."""
    return tuple((start, stop) for start, stop in one)
