"""The text of a compiled program, read into instructions in the order in which they run."""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

_COMPUTATION = re.compile(r"^(ENTRY )?%([^\s(]+) ?\(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%(\S+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"\b(?:pred|[a-z]+\d+\w*)\[[\d,]*\](?:\{[^}]*\})?")
_SIZES = re.compile(r"(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:body|condition|to_apply|calls|\w+_computations?)=(?:%([\w.\-]+)|\{(.*?)\})")
_NAME = re.compile(r"%?([\w.\-]+)")
_ENTRY = re.compile(r"(\w+)=(\d+)")


class Instruction(NamedTuple):
    """An instruction; `types` are the arrays of its result, `rest` its line after the opening bracket."""

    name: str
    types: list[str]
    kind: str
    operands: list[str]
    called: list[str]
    rest: str


Computations: TypeAlias = dict[str, list[Instruction]]


def computations_in(text: str) -> tuple[Computations, str]:
    """The computations of a program, and the name of the first that runs."""
    found: Computations = {}
    entry, body = "", []
    for line in text.splitlines():
        if start := _COMPUTATION.match(line):
            entry = start[2] if start[1] else entry
            body = found.setdefault(start[2], [])
        elif match := _INSTRUCTION.match(line):
            name, types, kind, rest = match.groups()
            operands = re.findall(r"%([\w.\-]+)", rest.split("), ")[0])
            called = [name for names in _CALLED.findall(rest) for name in _NAME.findall(" ".join(names))]
            body.append(Instruction(name, _ARRAY.findall(types), kind, operands, called, rest))
    return found, entry


def bytes_of(types: Sequence[str]) -> int:
    bits = 0
    for kind, width, sizes in _SIZES.findall(" ".join(types)):
        bits += (8 if kind == "pred" else int(width)) * math.prod(
            int(size) for size in sizes.split(",") if size
        )
    return -(-bits // 8)


def sources_in(text: str, outside: tuple[str, ...]) -> dict[str, str]:
    """The lines of source of a program's stack frames, as `file:line`, by the numbers of the frames.

    For those of a file in one of the folders `outside`, it is the nearest caller that is not.
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
        caller = found.get(str(int(entry.get("parent_frame_id", 1)) - 1))  # counted from 1, for none
        found[frame] = caller if caller and file.startswith(outside) else f"{file}:{at['line']}"
    return found
