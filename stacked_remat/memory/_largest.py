"""The largest buffers of a compiled program at its peak of memory, from its text, which is in order.

The compiler does not give its own assignment of buffers for devices that are not attached. What is written
in place (loops, updates of slices) is followed; what the compiler shares beyond that is not.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import equinox as eqx
import haliax as hax

from ._hlo import Computations, Instruction, Sources, bytes_of, computations_in
from ._table import readable_bytes

_SCOPE = re.compile(r'op_name="([^"]*)"')
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
        return f"{readable_bytes(self.size)} {self.shape} {self.operation}" + (
            f" ({self.source})" if self.source else ""
        )


def largest_buffers(program: str, most: int = 5) -> tuple[Buffer, ...]:
    """The largest arrays that are neither arguments nor constants, when the program needs most memory.

    Args:
        program: the text of a compiled program.
        most: how many.
    """
    bodies, entry = computations_in(program)
    sources, peaks = Sources(program, _LIBRARIES), {}

    def buffer(one: Instruction, type_: str) -> Buffer:
        fused = [inner.rest for name in one.called for inner in bodies.get(name, ())]
        texts = [one.rest, *(fused[::-1] if one.kind == "fusion" else ())]
        scope = next(filter(None, map(_SCOPE.search, texts)), None)
        source = next(filter(None, map(sources.of, texts)), "")
        return Buffer(bytes_of([type_]), type_.split("{")[0], scope[1] if scope else one.kind, source)

    def peak(name: str, in_loop: bool) -> list[Buffer]:
        if (name, in_loop) not in peaks:
            peaks[name, in_loop] = []  # for a computation that calls itself
            peaks[name, in_loop] = _peak(bodies[name], buffer, peak, bodies, in_loop)
        return peaks[name, in_loop]

    found = sorted(peak(entry, False), reverse=True) if entry in bodies else []
    return tuple(each for each in found[:most] if 100 * each.size >= found[0].size)


def _peak(
    body: Sequence[Instruction],
    buffer: Callable[[Instruction, str], Buffer],
    peak: Callable[[str, bool], list[Buffer]],
    bodies: Computations,
    in_loop: bool,
) -> list[Buffer]:
    """The buffers alive when most bytes are; in a loop without those that become the loop's state."""
    owners: dict[str, list[_Owner]] = {}
    made: dict[_Owner, Buffer] = {}
    last: dict[_Owner, int] = {}
    for i, one in enumerate(body):
        owners[one.name] = _owners(one, owners, bodies)
        for name in (one.name, *one.operands):
            last.update(dict.fromkeys(owners.get(name, ()), i))
        for k, type_ in enumerate(one.types[:1] if one.kind == "copy-start" else one.types):
            is_new = one.kind not in _NOT_ALLOCATED and owners[one.name][k : k + 1] == [(one.name, k)]
            if is_new and "S(" not in type_:  # a number says that it is in another memory
                made[one.name, k] = buffer(one, type_)
    for owner in owners[body[-1].name] if body else ():
        last[owner] = len(body)
        if in_loop:
            made.pop(owner, None)
    most, alive = [], {}
    for i, one in enumerate(body):
        own = [(one.name, k) for k in range(len(one.types))]
        alive |= {owner: made[owner] for owner in own if owner in made}
        called = () if one.kind == "fusion" else [name for name in one.called if name in bodies]
        inner = max((peak(name, one.kind == "while") for name in called), key=_total, default=[])
        if _total([*alive.values(), *inner]) > _total(most):
            most = [*alive.values(), *inner]
        alive = {owner: kept for owner, kept in alive.items() if last[owner] > i}
    return most


def _owners(instruction: Instruction, owners: dict[str, list[_Owner]], bodies: Computations) -> list[_Owner]:
    """For each array of a result, the instruction and output that allocated it."""
    given = [owners.get(name, []) for name in instruction.operands]
    own = [(instruction.name, i) for i in range(len(instruction.types))]
    if instruction.kind == "tuple":
        return [owner for part in given for owner in part]
    if instruction.kind == "get-tuple-element" and given:
        index = _INDEX.search(instruction.rest)
        return given[0][int(index[1]) :][:1] if index and len(instruction.types) == 1 else given[0]
    if instruction.kind in _IN_PLACE and given and len(given[0]) >= len(own):
        return given[0][: len(own)]
    if instruction.kind == "fusion" and len(own) == 1:
        root = next((bodies[name][-1] for name in instruction.called if bodies.get(name)), None)
        if root is not None and root.kind == "dynamic-update-slice":
            target = root.operands[0]
            number = next((e.rest for e in bodies[instruction.called[0]] if e.name == target), "")
            found = re.search(r"parameter\((\d+)\)", number)
            if found and len(given[int(found[1])]) == 1:
                return given[int(found[1])]
    return own


def _total(buffers: Sequence[Buffer]) -> int:
    return sum(buffer.size for buffer in buffers)
