"""What the text of a compiled program tells: its largest buffers, and the bytes that
devices send each other.

`_call.py` hands over the optimized HLO of each program that it compiles. Two figures of
a report are found in nothing else: for devices that are not attached, the compiler does
not give its assignment of buffers; and collectives appear only when it divides the
program over devices.

The text has tables of source lines (`_sources`), then computations (`_computations`):
named lists of instructions, one a line, of which some call other computations.
"""

import functools
import itertools
import math
import re
from pathlib import Path
from typing import NamedTuple

import equinox as eqx
import haliax as hax

from .._trips import trips_in
from ._table import readable_bytes

# `%name (parameters) -> type {`; the program's first has ENTRY in front.
_COMPUTATION = re.compile(r"^(ENTRY )?%([^\s(]+) ?\(.*\{$")
# `%name = types kind(operands), attributes`.
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%\S+ = (.*?) ([a-z][\w\-]*)\((.*)$")
# `bf16[8,128]{1,0:T(8,128)S(5)}`: shape, bits of an entry, sizes, layout.
_ARRAY = re.compile(r"\b((?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\])(\{[^}]*\})?")
# Attributes that name one computation, or several in braces.
_CALLED = re.compile(
    r"(?:body|condition|to_apply|calls|\w+_computations?)=(%[\w.\-]+|\{.*?\})"
)
_NAME = re.compile(r"%([\w.\-]+)")
# Rows of the tables of source lines: files, places in a file, and stack frames, whose
# last number is that of the caller, plus one.
_FILE = re.compile(r'^(\d+) "(.*)"$', re.MULTILINE)
_PLACE = re.compile(r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)", re.MULTILINE)
_FRAME = re.compile(
    r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?", re.MULTILINE
)
# The path of named scopes that JAX gives an operation, and its stack frame.
_SCOPES = re.compile(r'op_name="([^"]+)"')
_FRAME_OF = re.compile(r"stack_frame_id=(\d+)")
_CONDITION = re.compile(r"condition=%([\w.\-]+)")
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
# `[groups,size]<=…`, or `{{0,1},{2,3}}`, or a mesh and those of its axes that form a
# group.
_GROUPS = re.compile(
    r"replica_groups=(?:\[\d+,(\d+)\]|\{\{([\d,]*)\}|mesh\[(.*?)\] \{(.*?)\})"
)
_COLLECTIVES = re.compile(
    r"(all-gather|all-reduce|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute)(-start)?$"
)
# Folders whose lines are not shown as the source of a buffer: their caller's are.
_LIBRARIES = (
    str(Path(__file__).parents[1]),
    str(Path(str(eqx.__file__)).parent),
    str(Path(str(hax.__file__)).parent),
)
# Kinds of instructions whose results are no new buffers: they are those of others, or
# arguments and constants.
_ALLOCATES_NOTHING = frozenset(
    "parameter constant iota after-all partition-id replica-id tuple get-tuple-element"
    " while conditional call bitcast optimization-barrier copy-done"
    " dynamic-update-slice async-done".split()
)


class _Array(NamedTuple):
    size: int  # in bytes
    shape: str  # with the dtype, as `f32[8,128]`
    layout: str  # with the memory, as `{1,0:S(5)}`; "" where the text has none


class _Instruction(NamedTuple):
    kind: str
    results: list[_Array]  # several if it returns a tuple
    called: list[str]  # names of the computations that it calls
    rest: str  # the line after the opening bracket: operands and attributes


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
    computations, _ = _computations(program)
    sources = _sources(program)
    # A fusion allocates its result, and none of what it computes within.
    fused: set[str] = set()
    for instruction in itertools.chain.from_iterable(computations.values()):
        if instruction.kind == "fusion":
            fused.update(instruction.called)
    buffers = []
    for name in computations.keys() - fused:
        for instruction in computations[name]:
            if instruction.kind in _ALLOCATES_NOTHING:
                continue
            origin = _origin(instruction, computations, sources)
            for size, shape, layout in instruction.results:
                # `S(5)` is the host's memory, `S(1)` of a TPU the one on the chip; the
                # device's has no number.
                if "S(" not in layout:
                    buffers.append(Buffer(size, shape, *origin))
    # Instructions of one line and shape, such as copies, are listed once.
    distinct: dict[tuple[str, str], Buffer] = {}
    for buffer in sorted(buffers, reverse=True):
        distinct.setdefault((buffer.shape, buffer.source), buffer)
    largest = [*distinct.values()][:5]
    # One below a hundredth of the largest explains nothing.
    least = largest[0].size / 100 if largest else 0
    return tuple(buffer for buffer in largest if buffer.size >= least)


def _origin(
    instruction: _Instruction,
    computations: dict[str, list[_Instruction]],
    sources: dict[str, str],
) -> tuple[str, str]:
    """The name of an instruction in the program, and its line of source.

    A fusion has them from what it computes, last first, if none of its own.
    """
    texts = [instruction.rest]
    if instruction.kind == "fusion":
        for name in reversed(instruction.called):
            within = computations.get(name, [])
            texts += [inner.rest for inner in reversed(within)]
    text = "\n".join(texts)
    scopes = _SCOPES.search(text)
    known = filter(None, map(sources.get, _FRAME_OF.findall(text)))
    return scopes[1] if scopes else instruction.kind, next(known, "")


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

    def of_instruction(instruction: _Instruction) -> float:
        kind, results, called, rest = instruction
        if collective := _COLLECTIVES.match(kind):
            size = sum(array.size for array in results)
            starts = bool(collective[2])
            return _sent_in(collective[1], starts, size, _group(rest, devices))
        if kind.endswith(("-done", "-update")):
            return 0.0  # counted where it started
        of_called = [*map(sent, called)]
        # Which branch is taken is not known; the most that one sends is counted.
        if kind == "conditional":
            return max(of_called)
        total = sum(of_called)
        if kind == "while" and total:
            return total * _trips(instruction, computations)
        return total

    return round(sent(entry))


def _computations(text: str) -> tuple[dict[str, list[_Instruction]], str]:
    """The instructions of each computation, in the order in which they run, and the
    name of the first computation.
    """
    computations: dict[str, list[_Instruction]] = {}
    entry = ""
    body = []
    for line in text.splitlines():
        if start := _COMPUTATION.match(line):
            is_entry, name = start.groups()
            entry = name if is_entry else entry
            body = computations.setdefault(name, [])
        elif match := _INSTRUCTION.match(line):
            types, kind, rest = match.groups()
            called = _NAME.findall(" ".join(_CALLED.findall(rest)))
            body.append(_Instruction(kind, _arrays(types), called, rest))
    return computations, entry


def _arrays(types: str) -> list[_Array]:
    arrays = []
    for shape, bits, sizes, layout in _ARRAY.findall(types):
        # A scalar has no sizes; pred has no number of bits, and takes a byte; four bits
        # take half of one.
        entries = math.prod(map(int, filter(None, sizes.split(","))))
        size = math.ceil(entries * int(bits or 8) / 8)
        arrays.append(_Array(size, shape, layout))
    return arrays


def _sources(text: str) -> dict[str, str]:
    """The lines of source of a program's stack frames, as `file:line`, by the numbers
    of the frames.

    For a line in this package, Equinox or Haliax, it is that of the nearest caller
    elsewhere.
    """
    header = text.partition("\n%")[0]
    # Names of functions have rows like those of files, and come after them.
    files: dict[str, str] = dict(_FILE.findall(header.partition("\nFunctionNames")[0]))
    places: dict[str, str] = {}
    for number, file, line in _PLACE.findall(header):
        places[number] = f"{files[file]}:{line}"
    sources: dict[str, str] = {}
    # Frames come after their callers.
    for number, place, caller in _FRAME.findall(header):
        source = places[place]
        if source.startswith(_LIBRARIES):
            caller_number = str(int(caller or 1) - 1)
            source = sources.get(caller_number, source)
        sources[number] = source
    return sources


def _trips(loop: _Instruction, computations: dict[str, list[_Instruction]]) -> float:
    """How often a loop runs, as the compiler says, or a named scope, or its condition;
    1 if nothing says it.
    """
    if known := _TRIPS.search(loop.rest):
        return int(known[1])
    if scopes := _SCOPES.search(loop.rest):
        trips, _ = trips_in(scopes[1].rpartition("/")[0])
        if trips is not None:
            return float(trips)
    # XLA for TPUs says no count. The condition of a loop that counts up from 0 compares
    # with the one integer constant in it.
    condition = _CONDITION.search(loop.rest)
    limits = []
    for instruction in computations[condition[1]] if condition else ():
        is_integer = instruction.results[0].shape in ("s32[]", "u32[]")
        if instruction.kind == "constant" and is_integer:
            limits.append(int(instruction.rest.split(")")[0]))
    return limits[0] if len(limits) == 1 else 1


def _sent_in(kind: str, starts: bool, size: float, group: int) -> float:
    """Bytes that each device of a group of g sends round a ring.

    For a result of S bytes: an all-gather and an all-to-all send S (g - 1) / g, an
    all-reduce does that twice, and a reduce-scatter, whose operand is g times as large
    as its result, sends S (g - 1).

    Args:
        kind: of the collective.
        starts: whether it is asynchronous; then `size` is that of the result and of the
            operand, except for an all-reduce.
        size: in bytes.
        group: g.
    """
    ring = (group - 1) / group
    # Of a kind: what `-start` returns, and what is sent, as multiples of the result.
    returned, share = {
        "all-gather": (1 + 1 / group, ring),
        "all-reduce": (1, 2 * ring),
        "reduce-scatter": (1 + group, group - 1),
        "collective-permute": (2, 1),
    }.get(kind, (2, ring))
    if starts:
        size /= returned
    return size * share


def _group(text: str, devices: int) -> int:
    """How many devices take part in a collective with each other, by its attributes."""
    groups = _GROUPS.search(text)
    if groups is None:
        return devices
    size, listed, mesh, axes = groups.groups()
    if size:
        return int(size)
    if mesh is None:
        return len(listed.split(",")) if listed else devices
    # `'x':(2)4` is a part of size 4 of the axis x.
    axis_sizes = dict(re.findall(r"'([^']+)'=(\d+)", mesh))
    parts = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", axes)
    total = 1
    for name, part in parts:
        total *= int(part or axis_sizes[name])
    return total
