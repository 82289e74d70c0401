"""What a compilation says of a program's memory, kept in a folder so that it need not be repeated."""

import contextlib
import hashlib
import importlib.metadata
import inspect
import json
import os
import time
from pathlib import Path
from typing import Any

import jax

from .._compat import compiled_with_text
from .._files import read_json_fields, replaced_whole
from . import _compiled_text, _report
from ._compiled_text import Buffer, largest_buffers, sent_bytes
from ._targets import Target

_COMPILERS = ("jax", "libtpu")
_KINDS = {"arguments": "argument", "outputs": "output", "temporaries": "temp", "aliased": "alias"}


class DoesNotFit(RuntimeError):
    """The compiler refused the program because device memory is too small (XLA:TPU does)."""


def sizes_of(lowered: Any, target: Target, devices: int, folder: str | Path | None) -> dict[str, Any]:
    """What the compilation of a `jax.stages.Lowered` tells of a report, or an earlier one, kept in `folder`.

    A folder that can't be written to, and a file that can't be read, are as none.
    """
    if folder is None:
        return _compiled(lowered, target, devices)
    path = Path(folder) / f"{_key(lowered, target, devices)}.json"
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        found = read_json_fields(path)
        largest = tuple(Buffer(*each) for each in found["largest"])
        return found | {"host": _report.HostBytes(**found["host"]), "largest": largest}
    found = _compiled(lowered, target, devices)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced_whole(path, shared=True) as unfinished:
            unfinished.write_text(json.dumps(found, default=vars), encoding="utf-8")
    return found


def _compiled(lowered: Any, target: Target, devices: int) -> dict[str, Any]:
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
    found = {"host": _report.HostBytes(**host), "sent": sent, "largest": largest_buffers(text)}
    return device | found | {"compile_seconds": seconds}


def _key(lowered: Any, target: Target, devices: int) -> str:
    """A name for everything that decides what the compiler does."""
    device = target.devices()[0]
    compiler = getattr(getattr(device, "client", None), "platform_version", "")
    flags = [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    versions = sorted(f"{each.name} {each.version}" for each in importlib.metadata.distributions())
    parts = [repr(target), str(devices), compiler, device.device_kind, *flags]
    parts += [each for each in versions if each.startswith(_COMPILERS)]
    parts += [inspect.getsource(module) for module in (_compiled_text, _report)]
    return hashlib.sha256("\0".join([*parts, lowered.as_text()]).encode()).hexdigest()
