"""What the text of a compiled program tells: its largest buffers, and the bytes that
devices send each other.

The compiler does not give its own assignment of buffers for devices that are not
attached. Collectives appear when it divides the program.
"""

import functools
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import equinox as eqx
import haliax as hax

from .._trips import trips_in
from ._table import readable_bytes

_COMPUTATION = re.compile(r"^(ENTRY )?%([^\s(]+) ?\(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%\S+ = (.*?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"\b((?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\])(\{[^}]*\})?")
_CALLED = re.compile(
    r"(?:body|condition|to_apply|calls|\w+_computations?)=(%[\w.\-]+|\{.*?\})"
)
_NAME = re.compile(r"%([\w.\-]+)")
_ENTRY = re.compile(r"(\w+)=(\d+)")
_SCOPES = re.compile(r'op_name="([^"]*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_GROUPS = re.compile(
    r"replica_groups=(?:\[\d+,(\d+)\]|\{\{([\d,]*)\}|mesh\[(.*?)\] \{(.*?)\})"
)
_COLLECTIVES = re.compile(
    r"(all-gather|all-reduce|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute)(-start)?$"
)
_LIBRARIES = (
    str(Path(__file__).parents[1]),
    *(str(Path(str(each.__file__)).parent) for each in (eqx, hax)),
)
_ALLOCATES_NOTHING = frozenset(
    "parameter constant iota after-all partition-id replica-id tuple get-tuple-element"
    " while conditional call bitcast optimization-barrier copy-done"
    " dynamic-update-slice async-done".split()
)


class _Instruction(NamedTuple):
    kind: str
    results: list[tuple[int, str, str]]  # bytes, shapes and layouts of arrays
    called: list[str]
    rest: str  # its line after the opening bracket


class Buffer(NamedTuple):
    """An array that a program allocates in device memory; no argument and no constant.

    Attributes:
        size: its bytes.
        shape: dtype and shape, as `f32[4096,1024]`.
        operation: what computes it, as the program names it.
        source: the line of source, as `file:line`; `""` where the compiler does not
            know it.
    """

    size: int
    shape: str
    operation: str
    source: str

    def __str__(self) -> str:
        source = f" ({self.source})" if self.source else ""
        return f"{readable_bytes(self.size)} {self.shape} {self.operation}{source}"


def largest_buffers(program: str) -> tuple[Buffer, ...]:
    """The five largest arrays of a program; those of one shape and line of source count
    as one.
    """
    bodies, _ = _computations(program)
    sources = _sources(program)
    fused = {
        name
        for body in bodies.values()
        for one in body
        if one.kind == "fusion"
        for name in one.called
    }

    def buffer(one: _Instruction, size: int, shape: str) -> Buffer:
        inside = [inner.rest for name in one.called for inner in bodies.get(name, ())]
        texts = [one.rest, *(inside[::-1] if one.kind == "fusion" else ())]
        scope = next(filter(None, map(_SCOPES.search, texts)), None)
        frames = [found[1] for found in map(_FRAME.search, texts) if found]
        source = next((sources[frame] for frame in frames if frame in sources), "")
        return Buffer(size, shape, scope[1] if scope else one.kind, source)

    allocating = [
        one for name, body in bodies.items() if name not in fused for one in body
    ]
    buffers = [
        buffer(one, size, shape)
        for one in allocating
        for size, shape, layout in one.results
        if one.kind not in _ALLOCATES_NOTHING
        and "S(" not in layout  # in another memory
    ]
    found: dict[tuple[str, str], Buffer] = {}
    for each in sorted(buffers, reverse=True):
        found.setdefault((each.shape, each.source), each)
    largest = [*found.values()][:5]
    return tuple(each for each in largest if 100 * each.size >= largest[0].size)


def sent_bytes(program: str, devices: int) -> int:
    """The bytes that each device sends in collectives that go round a ring, in one
    call.

    Those in a loop count times its trips, which where the compiler does not know them
    its name says (`_trips.py`).
    """
    computations, entry = _computations(program)

    @functools.cache
    def sent(name: str) -> float:
        return sum(map(of_instruction, computations.get(name, ())))

    def of_instruction(one: _Instruction) -> float:
        if found := _COLLECTIVES.match(one.kind):
            size = sum(size for size, _, _ in one.results)
            return _sent_in(found[1], bool(found[2]), size, _group(one.rest, devices))
        if one.kind.endswith(("-done", "-update")):  # of what has started
            return 0.0
        called = [*map(sent, one.called)]
        if one.kind == "conditional":
            return max(called)
        return sum(called) * (
            _trips(one, computations) if one.kind == "while" and any(called) else 1
        )

    return round(sent(entry))


def _computations(text: str) -> tuple[dict[str, list[_Instruction]], str]:
    """The instructions of each computation, in the order in which they run, and the
    name of the first.
    """
    found: dict[str, list[_Instruction]] = {}
    entry, body = "", []
    for line in text.splitlines():
        if start := _COMPUTATION.match(line):
            entry = start[2] if start[1] else entry
            body = found.setdefault(start[2], [])
        elif match := _INSTRUCTION.match(line):
            types, kind, rest = match.groups()
            called = [
                name for names in _CALLED.findall(rest) for name in _NAME.findall(names)
            ]
            body.append(_Instruction(kind, [*_arrays(types)], called, rest))
    return found, entry


def _arrays(types: str) -> Iterable[tuple[int, str, str]]:
    for shape, bits, sizes, layout in _ARRAY.findall(types):
        size = int(bits or 8) * math.prod(map(int, filter(None, sizes.split(","))))
        yield -(-size // 8), shape, layout


def _sources(text: str) -> dict[str, str]:
    """The lines of source of a program's stack frames, as `file:line`, by the numbers
    of the frames.

    For a line in this package, Equinox or Haliax, it is that of the nearest caller
    elsewhere.
    """
    tables: dict[str, dict[str, str]] = {}
    rows: dict[str, str] = {}
    for line in text.partition("\n%")[0].splitlines():
        number, _, row = line.partition(" ")
        if number.isdecimal():
            rows[number] = row
        elif line:
            rows = tables.setdefault(line, {})
    found: dict[str, str] = {}
    for frame, row in tables.get("StackFrames", {}).items():
        entry = dict(_ENTRY.findall(row))
        at = dict(_ENTRY.findall(tables["FileLocations"][entry["file_location_id"]]))
        file = tables["FileNames"][at["file_name_id"]].strip('"')
        # Counted from 1, for none
        caller = found.get(str(int(entry.get("parent_frame_id", 1)) - 1))
        found[frame] = (
            caller if caller and file.startswith(_LIBRARIES) else f"{file}:{at['line']}"
        )
    return found


def _trips(loop: _Instruction, computations: dict[str, list[_Instruction]]) -> float:
    if known := _TRIPS.search(loop.rest):
        return int(known[1])
    scopes = _SCOPES.search(loop.rest)
    trips, _ = trips_in(scopes[1].rpartition("/")[0]) if scopes else (None, False)
    if trips is not None:
        return float(trips)
    # Of a loop from 0 to a constant; XLA for TPUs says no count.
    bodies = (computations[name] for name in loop.called)
    condition = next(body for body in bodies if body[-1].results[0][1] == "pred[]")
    constants = (one for one in condition if one.kind == "constant")
    limits = [one.rest for one in constants if one.results[0][1] in ("s32[]", "u32[]")]
    return int(limits[0].split(")")[0]) if len(limits) == 1 else 1


def _sent_in(kind: str, starts: bool, size: float, group: int) -> float:
    """What a device sends, from the bytes of a collective's result; where it starts,
    with its operands.
    """
    if starts and kind != "all-reduce":
        size /= {"all-gather": 1 + 1 / group, "reduce-scatter": 1 + group}.get(kind, 2)
    ring = (group - 1) / group
    return size * {
        "all-reduce": 2 * ring,
        "reduce-scatter": group - 1,
        "collective-permute": 1,
    }.get(kind, ring)


def _group(text: str, devices: int) -> int:
    found = _GROUPS.search(text)
    if found is None:
        return devices
    many, listed, mesh, axes = found.groups()
    if many:
        return int(many)
    if mesh is None:
        return len(listed.split(",")) if listed else devices
    sizes = dict(re.findall(r"'([^']+)'=(\d+)", mesh))
    parts = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", axes)
    return math.prod(int(part or sizes[name]) for name, part in parts)
