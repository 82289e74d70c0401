"""The bytes that devices send each other in one call, from the compiled program.

Collectives appear when the compiler divides the program, so they are read from its text: those in a loop
times its trips. Trips that the compiler does not know are those that the loop's name says (`_trips.py`).
"""

import functools
import math
import re

from .._trips import trips_in
from ._hlo import Computations, Instruction, bytes_of, computations_in

_COLLECTIVES = re.compile(
    r"(all-gather|all-reduce|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute)(-start)?$"
)
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_SCOPES = re.compile(r'op_name="([^"]*)/')
_GROUPS = re.compile(r"replica_groups=(?:\[\d+,(\d+)\]|\{\{([\d,]*)\}|mesh\[(.*?)\] \{(.*?)\})")


def sent_bytes(program: str, devices: int) -> int:
    """The bytes that each device sends in collectives that go round a ring, in one call."""
    computations, entry = computations_in(program)

    @functools.cache
    def sent(name: str) -> float:
        return sum(map(of_instruction, computations.get(name, ())))

    def of_instruction(one: Instruction) -> float:
        if found := _COLLECTIVES.match(one.kind):
            return _sent_in(found[1], bool(found[2]), bytes_of(one.types), _group(one.rest, devices))
        if one.kind.endswith(("-done", "-update")):  # of what has started
            return 0.0
        called = [*map(sent, one.called)]
        if one.kind == "conditional":
            return max(called)
        return sum(called) * (_trips(one, computations) if one.kind == "while" and any(called) else 1)

    return round(sent(entry))


def _trips(loop: Instruction, computations: Computations) -> float:
    if known := _TRIPS.search(loop.rest):
        return int(known[1])
    scopes = _SCOPES.search(loop.rest)
    trips, _ = trips_in(scopes[1]) if scopes else (None, False)
    if trips is not None:
        return float(trips)
    # Of a loop from 0 to a constant; XLA for TPUs says no count.
    condition = next(
        body for name in loop.called if (body := computations[name])[-1].types[0].startswith("pred")
    )
    limits = [
        one.rest for one in condition if one.kind == "constant" and one.types[0][:5] in ("s32[]", "u32[]")
    ]
    return int(limits[0].split(")")[0]) if len(limits) == 1 else 1


def _sent_in(kind: str, starts: bool, size: int, group: int) -> float:
    """What a device sends, from the bytes of a collective's result; where it starts, with its operands."""
    if kind == "all-gather":
        return size * (group - 1) / (group + 1 if starts else group)
    if kind == "all-reduce":
        return 2 * size * (group - 1) / group
    if kind == "reduce-scatter":
        return size * (group - 1) / (group + 1 if starts else 1)
    result = size / 2 if starts else size
    return result if kind == "collective-permute" else result * (group - 1) / group


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
