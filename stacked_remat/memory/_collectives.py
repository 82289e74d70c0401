"""The bytes that devices send each other in one call, from the compiled program.

Collectives appear when the compiler divides the program, so they are read from its text: those in a loop
times its trips. Trips that the compiler does not know are those that the loop's name says (`_trips.py`).
"""

import functools
import math
import re
from collections.abc import Iterator

from .._trips import trips_in

_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute"
_COLLECTIVE = re.compile(rf" = (.*?) ({_KINDS})(-start)?\(")
COMPUTATION = re.compile(r"^(ENTRY )?%([^\s(]+) ?\(.*\{$")
_CALLED = re.compile(r"(?:calls|body)=%([\w.\-]+)")
_APPLIED = re.compile(r" call\(.*to_apply=%([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{(.*?)\}|true_computation=(\S+), false_computation=(\S+)")
_LIMIT = re.compile(r"= [su]32\[\]\S* constant\((\d+)\)")
_CONDITION = re.compile(r"condition=%([\w.\-]+)")
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
_GROUPS = re.compile(r"replica_groups=(?:\[\d+,(\d+)\]|\{\{([\d,]*)\}|mesh\[(.*?)\] \{(.*?)\})")
_SCOPES = re.compile(r'op_name="([^"]*)/')
FRAME = re.compile(r"stack_frame_id=(\d+)")
_ENTRY = re.compile(r"(\w+)=(\d+)")
_ROW = re.compile(r"^(\d+) (.*)$")


def sent_bytes(program: str, devices: int) -> int:
    """The bytes that each device sends in collectives that go round a ring, in one call.

    Loops whose trips the compiler does not know count as often as their names say, and others once.

    Args:
        program: the text of the compiled program.
        devices: how many it runs on.
    """
    return round(_Program(program, devices).sent())


class _Program:
    """The computations of a program: what each sends, and what it calls."""

    def __init__(self, text: str, devices: int):
        self._devices = devices
        self._bodies: dict[str, list[str]] = {}
        self._entry, lines = "", []
        for line in text.splitlines():
            if found := COMPUTATION.match(line):
                self._entry = found[2] if found[1] else self._entry
                lines = self._bodies.setdefault(found[2], [])
            elif "=%" in line or " conditional(" in line or _LIMIT.search(line) or _COLLECTIVE.search(line):
                lines.append(line)
        self._sent = functools.cache(self._of_computation)

    def sent(self) -> float:
        return self._sent(self._entry)

    def _of_computation(self, name: str) -> float:
        return sum(map(self._of_line, self._bodies.get(name, ())))

    def _of_line(self, line: str) -> float:
        if found := _COLLECTIVE.search(line):
            return _sent_in(found[2], bool(found[3]), bytes_of(found[1]), _group(line, self._devices))
        if "-done(" in line or "-update(" in line:
            return 0.0
        if found := _BRANCHES.search(line):
            branches = ",".join(filter(None, found.groups())).split(",")
            return max(self._sent(branch.strip(" %")) for branch in branches if branch)
        sent = sum(map(self._sent, [*_CALLED.findall(line), *_APPLIED.findall(line)]))
        return sent * self._trips(line) if sent and " while(" in line else sent

    def _trips(self, line: str) -> float:
        if known := _TRIPS.search(line):
            return int(known[1])
        scopes = _SCOPES.search(line)
        trips, _ = trips_in(scopes[1]) if scopes else (None, False)
        if trips is not None:
            return float(trips)
        condition = _CONDITION.findall(line)
        limits = [int(n) for name in condition for text in self._bodies[name] for n in _LIMIT.findall(text)]
        return limits[0] if len(limits) == 1 else 1  # loops that the compiler made run from 0 to a constant


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


def bytes_of(shapes: str) -> int:
    bits = 0
    for kind, width, sizes in _ARRAY.findall(shapes):
        each = 8 if kind == "pred" else int(width)
        bits += each * math.prod(int(size) for size in sizes.split(",") if size)
    return -(-bits // 8)


def _group(line: str, devices: int) -> int:
    """How many devices a collective is among."""
    found = _GROUPS.search(line)
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


def places_in(text: str, outside: str = "") -> dict[str, str]:
    """From the numbers of stack frames to places in the source, as `file:line`.

    Args:
        text: of a program.
        outside: a folder. For a frame in it, the place is that of its nearest caller that is not.
    """
    tables: dict[str, dict[str, str]] = {}
    for name, number, row in _rows(text):
        tables.setdefault(name, {})[number] = row
    places = {}
    for frame, row in tables.get("StackFrames", {}).items():
        entry = dict(_ENTRY.findall(row))
        at = dict(_ENTRY.findall(tables["FileLocations"][entry["file_location_id"]]))
        file = tables["FileNames"][at["file_name_id"]].strip('"')
        caller = str(int(entry.get("parent_frame_id", 1)) - 1)  # counted from 1, for none
        inside = outside and file.startswith(outside)
        places[frame] = places[caller] if inside and caller in places else f"{file}:{at['line']}"
    return places


def _rows(text: str) -> Iterator[tuple[str, str, str]]:
    """The rows of the tables at the head of a program: the table, the row's number and the row."""
    table = ""
    for line in text.splitlines():
        if COMPUTATION.match(line):
            return
        if row := _ROW.match(line):
            yield table, row[1], row[2]
        elif line:
            table = line
