"""The largest buffers of a compiled program at its peak of memory, from its text, which is in order.

The compiler does not give its own assignment of buffers for devices that are not attached. What is written
in place (loops, updates of slices) is followed; what the compiler shares beyond that is not.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, TypeAlias

import equinox as eqx
import haliax as hax

from ._hlo import Instruction, bytes_of, computations_in, sources_in
from ._table import readable_bytes

_SCOPE = re.compile(r'op_name="([^"]*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_PARAMETER = re.compile(r"parameter\((\d+)\)")
_INDEX = re.compile(r"index=(\d+)")
_LIBRARIES = (str(Path(__file__).parents[1]), *(str(Path(str(each.__file__)).parent) for each in (eqx, hax)))
_Owner: TypeAlias = tuple[str, int]  # an instruction that allocates, and which of its outputs
_IN_PLACE = ("while", "bitcast", "optimization-barrier", "copy-done", "dynamic-update-slice", "async-done")
_NOT_ALLOCATED = ("parameter", "constant", "iota", "after-all", "partition-id", "replica-id")


class Buffer(NamedTuple):
    """An array in device memory when a program needs most of it; no argument and no constant.

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
    """The largest arrays that are neither arguments nor constants, when the program needs most memory.

    Args:
        program: the text of a compiled program.
        most: how many.
    """
    found = sorted(_Program(program).peak(), reverse=True)
    return tuple(each for each in found[:most] if 100 * each.size >= found[0].size)


class _Program:
    def __init__(self, text: str) -> None:
        self._bodies, self._entry = computations_in(text)
        self._sources = sources_in(text, _LIBRARIES)
        self._peaks: dict[tuple[str, bool], list[Buffer]] = {}

    def peak(self, name: str | None = None, in_loop: bool = False) -> list[Buffer]:
        """The buffers alive when most bytes are, of a computation or of the whole program."""
        key = name or self._entry, in_loop
        if key not in self._peaks:
            self._peaks[key] = []  # for a computation that calls itself
            self._peaks[key] = self._find_peak(self._bodies.get(key[0], []), in_loop)
        return self._peaks[key]

    def _find_peak(self, body: list[Instruction], in_loop: bool) -> list[Buffer]:
        """Those of a loop are without its state, which is allocated outside."""
        owners: dict[str, list[_Owner]] = {}
        made: dict[_Owner, Buffer] = {}
        last: dict[_Owner, int] = {}
        for i, one in enumerate(body):
            owners[one.name] = self._owners(one, owners)
            for name in (one.name, *one.operands):
                last.update(dict.fromkeys(owners.get(name, ()), i))
            for k, type_ in enumerate(one.types[:1] if one.kind == "copy-start" else one.types):
                is_new = one.kind not in _NOT_ALLOCATED and owners[one.name][k : k + 1] == [(one.name, k)]
                if is_new and "S(" not in type_:  # a number says that it is in another memory
                    made[one.name, k] = self._buffer(one, type_)
        for owner in owners[body[-1].name] if body else ():
            last[owner] = len(body)
            if in_loop:
                made.pop(owner, None)
        most, alive = [], {}
        for i, one in enumerate(body):
            own = [(one.name, k) for k in range(len(one.types))]
            alive |= {owner: made[owner] for owner in own if owner in made}
            called = () if one.kind == "fusion" else one.called
            inner = max((self.peak(name, one.kind == "while") for name in called), key=_total, default=[])
            most = max(most, [*alive.values(), *inner], key=_total)
            alive = {owner: kept for owner, kept in alive.items() if last[owner] > i}
        return most

    def _buffer(self, one: Instruction, type_: str) -> Buffer:
        fused = [inner.rest for name in one.called for inner in self._bodies.get(name, ())]
        texts = [one.rest, *(fused[::-1] if one.kind == "fusion" else ())]
        scope = next(filter(None, map(_SCOPE.search, texts)), None)
        frames = [found[1] for found in map(_FRAME.search, texts) if found]
        source = next((self._sources[frame] for frame in frames if frame in self._sources), "")
        return Buffer(bytes_of([type_]), type_.split("{")[0], scope[1] if scope else one.kind, source)

    def _owners(self, one: Instruction, owners: dict[str, list[_Owner]]) -> list[_Owner]:
        """For each array of a result, the instruction and output that allocated it."""
        given = [owners.get(name, []) for name in one.operands]
        own = [(one.name, i) for i in range(len(one.types))]
        if one.kind == "tuple":
            return [owner for part in given for owner in part]
        if one.kind == "get-tuple-element" and given:
            index = _INDEX.search(one.rest)
            return given[0][int(index[1]) :][:1] if index and len(one.types) == 1 else given[0]
        if one.kind in _IN_PLACE and given and len(given[0]) >= len(own):
            return given[0][: len(own)]
        if one.kind == "fusion" and len(own) == 1:
            body = next(filter(None, map(self._bodies.get, one.called)), [])
            if body and body[-1].kind == "dynamic-update-slice":
                updated = next((each.rest for each in body if each.name == body[-1].operands[0]), "")
                found = _PARAMETER.search(updated)
                if found and len(given[int(found[1])]) == 1:
                    return given[int(found[1])]
        return own


def _total(buffers: Iterable[Buffer]) -> int:
    return sum(buffer.size for buffer in buffers)
