"""What a compilation says of a program's memory, kept in a folder so that it need not be repeated."""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import inspect
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from .._compat import compiled_with_text
from .._files import read_json_fields, replaced_whole
from . import _collectives, _hlo, _largest
from ._collectives import sent_bytes
from ._largest import Buffer, largest_buffers
from ._targets import Target

_COMPILERS = ("jax", "libtpu")
_KINDS = {"arguments": "argument", "outputs": "output", "temporaries": "temp", "aliased": "alias"}


class DoesNotFit(RuntimeError):
    """The compiler refused the program because device memory is too small (XLA:TPU does)."""


@dataclasses.dataclass(frozen=True)
class CompiledSizes:
    """Bytes by the names of `_KINDS`, in device and in host memory, and what else a report has."""

    device: dict[str, int]
    host: dict[str, int]
    seconds: float
    sent: int
    largest: Sequence[Buffer] = ()


def sizes_of(lowered: Any, target: Target, devices: int, folder: str | Path | None) -> CompiledSizes:
    """Compile a `jax.stages.Lowered`, or read from `folder` what an earlier compilation of it found.

    A folder that can't be written to, and a file that can't be read, are as none.

    Raises:
        DoesNotFit: the compiler refused the program because device memory is too small.
    """
    if folder is None:
        return _compiled(lowered, target, devices)
    folder = Path(folder)
    path = folder / f"{_key(lowered, target, devices)}.json"
    with contextlib.suppress(OSError, ValueError, TypeError):
        found = CompiledSizes(**read_json_fields(path))
        if found.device.keys() == found.host.keys() == _KINDS.keys():
            return dataclasses.replace(found, largest=tuple(Buffer(*each) for each in found.largest))
    found = _compiled(lowered, target, devices)
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with replaced_whole(path, shared=True) as unfinished:
            unfinished.write_text(json.dumps(dataclasses.asdict(found)), encoding="utf-8")
    return found


def _compiled(lowered: Any, target: Target, devices: int) -> CompiledSizes:
    start = time.perf_counter()
    compiled, text = compiled_with_text(lowered, target.devices()[0].platform)
    if isinstance(compiled, jax.errors.JaxRuntimeError):
        listed = "".join(f"\n  {each}" for each in largest_buffers(text))
        largest = f"\nThe largest buffers beside the arguments:{listed}" if listed else ""
        raise DoesNotFit(f"compiling for {target.name!r}: {compiled}{largest}") from compiled
    seconds, stats = time.perf_counter() - start, compiled.memory_analysis()
    device, host = (
        {name: getattr(stats, f"{where}{kind}_size_in_bytes") for name, kind in _KINDS.items()}
        for where in ("", "host_")
    )
    sent = sent_bytes(text, devices) if devices > 1 else 0
    return CompiledSizes(device, host, seconds, sent, largest_buffers(text))


def _key(lowered: Any, target: Target, devices: int) -> str:
    """A name for everything that decides what the compiler does."""
    device = target.devices()[0]
    compiler = getattr(getattr(device, "client", None), "platform_version", "")
    flags = [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    versions = sorted(f"{each.name} {each.version}" for each in importlib.metadata.distributions())
    parts = [repr(target), str(devices), compiler, device.device_kind, *flags]
    parts += [each for each in versions if each.startswith(_COMPILERS)]
    parts += [inspect.getsource(module) for module in (_collectives, _hlo, _largest)]
    return hashlib.sha256("\0".join([*parts, lowered.as_text()]).encode()).hexdigest()
