"""The largest buffers of a compiled program, from its text.

The compiler does not give its own assignment of buffers for devices that are not attached.
"""

import itertools
import re
from pathlib import Path
from typing import NamedTuple

import equinox as eqx
import haliax as hax

from ._hlo import Instruction, bytes_of, computations_in, sources_in
from ._table import readable_bytes

_SCOPE = re.compile(r'op_name="([^"]*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_LIBRARIES = (str(Path(__file__).parents[1]), *(str(Path(str(each.__file__)).parent) for each in (eqx, hax)))
_ALLOCATES_NOTHING = frozenset(
    "parameter constant iota after-all partition-id replica-id tuple get-tuple-element while conditional "
    "call bitcast optimization-barrier copy-done dynamic-update-slice async-done".split()
)


class Buffer(NamedTuple):
    """An array that a program allocates in device memory; no argument and no constant.

    Attributes:
        size: its bytes.
        shape: dtype and shape, as `f32[4096,1024]`.
        operation: what computes it, as the program names it.
        source: the line of source, as `file:line`; `""` where the compiler does not know it.
    """

    size: int
    shape: str
    operation: str
    source: str

    def __str__(self) -> str:
        source = f" ({self.source})" if self.source else ""
        return f"{readable_bytes(self.size)} {self.shape} {self.operation}{source}"


def largest_buffers(program: str, most: int = 5) -> tuple[Buffer, ...]:
    """The largest arrays that a program allocates; those of one shape and line of source count as one."""
    bodies, _ = computations_in(program)
    sources = sources_in(program, _LIBRARIES)
    fused = {name for body in bodies.values() for one in body if one.kind == "fusion" for name in one.called}

    def buffer(one: Instruction, type_: str) -> Buffer:
        inside = [inner.rest for name in one.called for inner in bodies.get(name, ())]
        texts = [one.rest, *(inside[::-1] if one.kind == "fusion" else ())]
        scope = next(filter(None, map(_SCOPE.search, texts)), None)
        frames = [found[1] for found in map(_FRAME.search, texts) if found]
        source = next((sources[frame] for frame in frames if frame in sources), "")
        return Buffer(bytes_of([type_]), type_.split("{")[0], scope[1] if scope else one.kind, source)

    allocating = [
        (one, type_)
        for name, body in bodies.items()
        for one in body
        for type_ in one.types
        if name not in fused and one.kind not in _ALLOCATES_NOTHING and "S(" not in type_  # another memory
    ]
    found: dict[tuple[str, str], Buffer] = {}
    for each in sorted(itertools.starmap(buffer, allocating), reverse=True):
        found.setdefault((each.shape, each.source), each)
    largest = [*found.values()][:most]
    return tuple(each for each in largest if 100 * each.size >= largest[0].size)
