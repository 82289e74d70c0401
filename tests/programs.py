"""Execute a sweep's program of integers in plain Python, check it, and draw it."""

import dataclasses

from stacked_remat._schedule import Program


@dataclasses.dataclass
class Execution:
    """A program as it is executed, where the input of a layer is the layer's number.

    Every visit, replay and save asserts that it finds its layer's input.
    """

    program: Program
    # As the argument of `Schedule.program`.
    saves: bool = False
    # The input in each slot that is filled.
    slots: dict[int, int] = dataclasses.field(default_factory=dict)
    # Each access to a slot in order: what, the slot, the layer.
    log: list[tuple[str, int, int]] = dataclasses.field(default_factory=list)
    # The layers in the order in which they are visited.
    visited: list[int] = dataclasses.field(default_factory=list)
    # A drawing: a line for the forward sweep and for each run.
    lines: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self):
        self._forward()
        self.fetched_before = self._fetched_before()
        for r in range(len(self.program.start)):
            self._run(r)
        assert self.visited == list(self.program.layers)[::-1]

    def _fetched_before(self) -> dict[int, int]:
        """The first run of each segment whose input is off the device, and that
        input.
        """
        runs = self.program.runs_of_segments
        assert sum(runs) == (len(self.program.start) if runs else 0)
        segments = reversed(self.program.stays)
        return {
            sum(runs[:number]): layer
            for number, layer in zip(range(len(runs)), segments, strict=False)
        }

    def _write(self, slot: int, layer: int) -> None:
        assert slot < self.program.slots
        self.slots[slot] = layer
        self.log.append(("write", slot, layer))

    def _read(self, slot: int, layer: int) -> None:
        assert self.slots[slot] == layer, "a slot holds the input that is read"
        self.log.append(("read", slot, layer))

    def _forward(self) -> None:
        program = self.program
        if program.runs_of_segments:
            self._draw("forward", program.layers, ())
            return
        # Where all inputs are written, those that stay are in the same slots.
        every = dict(zip(program.input_slots, program.layers, strict=True))
        assert max(every) < program.slots
        for slot, layer in enumerate(program.stays):
            assert every[slot] == layer
            self._write(slot, layer)
        self._draw("forward", program.layers, ())

    def _run(self, r: int) -> None:
        program = self.program
        start, slot = program.start[r], program.slot[r]
        bottom, bottom_slot = program.bottom[r], program.bottom_slot[r]
        replayed = range(start, start + program.advances[r])
        visited = range(bottom, bottom + program.visits[r])
        assert (program.replayed[r], program.visited[r]) == (replayed, visited)
        ends = [bottom] if self.saves else [visited[-1]]
        assert program.runs_first[r] == [*replayed, *ends][0]
        if r in self.fetched_before:
            assert slot == 0
            self._write(0, self.fetched_before[r])
        if replayed:
            self._read(slot, start)
        written = 0
        for k, layer in enumerate(replayed):
            place = slot + 1 + (k if program.holds_all else written)
            # Leaves that visits don't read have no more slots.
            assert not self.saves or place < program.sources
            self._write(place, layer + 1)
            if not program.holds_all:
                next_held = program.held_layers[program.held_from[r] + written]
                written += next_held == layer + 1
        if self.saves:
            assert bottom_slot < program.sources
            self._read(bottom_slot, bottom)
            for k, layer in enumerate(visited):
                self._write(bottom_slot + k, layer)
        self._draw(f"run {r}", replayed, visited[::-1])
        for layer in reversed(visited):
            place = bottom_slot + layer - bottom
            self._read(place, layer)
            del self.slots[place]
            self.visited.append(layer)

    def _draw(self, name: str, runs: range, visits: range | tuple[()]) -> None:
        held = [self.slots[slot] for slot in sorted(self.slots)]
        parts = [" ".join(map(str, row)) for row in (runs, held, visits)]
        self.lines.append("{:10}{:15}{:18}{}".format(name, *parts).rstrip())

    @property
    def used(self) -> set[int]:
        """The slots that are written."""
        return {slot for kind, slot, _ in self.log if kind == "write"}

    @property
    def unread(self) -> list[int]:
        """The layers whose inputs stay from the forward sweep, and are not the first
        thing that is read of their slots.
        """
        later = self.log[len(self.program.stays) :]
        first_access = {slot: kind for kind, slot, _ in reversed(later)}
        kept = enumerate(self.program.stays)
        return [layer for slot, layer in kept if first_access.get(slot) != "read"]

    @property
    def most_alive(self) -> int:
        """The most inputs that were written and will still be read, at once."""
        alive: set[tuple[int, int]] = set()
        most = 0
        for kind, slot, layer in reversed(self.log):
            (alive.add if kind == "read" else alive.discard)((slot, layer))
            most = max(most, len(alive))
        return most
