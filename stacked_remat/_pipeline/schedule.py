"""When each stage of a pipeline runs which microbatch: a table of integers.

A *stage* is a device (or a group) with a contiguous part of the layers. Of each
microbatch it runs the forward pass F and the backward pass B, and where these are taken
apart, B computes the cotangent of the carry and W later those of the weights.

The table has *ticks*. In each tick a stage runs at most one F or B, and then exchanges
with one neighbour: at tick t the stages s and s + 1 where s has the parity of t. With P
stages, stage s runs

    F of microbatch m at tick 2m + s
    B of microbatch m at tick 2m + 2P - 1 - s

so F follows at the next stage, and B at the one before, at the very next tick, and what
arrives is used at once. A stage alternates between F and B, and has P - s microbatches
in flight: the schedule 1F1B (PipeDream-Flush, Narayanan et al. 2021). Ticks need not be
equally long. A stage waits for the neighbour of each exchange alone, and that is the
one whose result it uses next, so a microbatch takes F + B, and the whole F + B for each
of M + P - 1 (`Schedule.span`). With exchanges in both directions at each tick it would
take twice the longer of F and B.

`zero_bubble` (Qi et al. 2023, arXiv 2401.10241) has the same ticks. B is shorter and
its result is sent before W, and W is run where a stage would wait. Stage s keeps s of
them back, which gives it work at the end, when the others of its B come late. That
leaves P - 1 idle units of F = B = W = 1 for each stage, where 1F1B has 3(P - 1); the
last stage can't begin before P - 1 ticks, so no schedule has fewer. With other costs,
as where B runs the stage's forward pass again, it is (P - 1)(F + B - W) for W <= F.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np

ScheduleName: TypeAlias = Literal["1f1b", "zero_bubble"]
IDLE, FORWARD, BACKWARD = range(3)
_LETTERS = ".FB"


class Work(NamedTuple):
    """One operation of one stage, from `start` to `end`."""

    stage: int
    # "F", "B" or "W"
    operation: str
    microbatch: int
    start: float
    end: float


@dataclass(frozen=True, eq=False)
class Schedule:
    """The table; arrays are `[tick, stage]`.

    Attributes:
        stages: P.
        microbatches: M.
        is_split: whether B and W are taken apart.
        operations: what a stage runs in a tick: 0 for nothing, 1 for F, 2 for B.
        numbers: the microbatch of that, or 0.
        weights_done: of how many microbatches, in order, W is done before that.
    """

    stages: int
    microbatches: int
    is_split: bool
    operations: np.ndarray
    numbers: np.ndarray
    weights_done: np.ndarray

    @property
    def ticks(self) -> int:
        return len(self.operations)

    def timeline(self, costs: tuple[float, float, float] = (1, 1, 1)) -> list[Work]:
        """When everything runs, if F, B and W take this long, and a stage goes on as
        soon as it has exchanged. Where they are not taken apart, B takes both.

        Returns:
            Named tuples `(stage, operation, microbatch, start, end)`; an operation is
            "F", "B" or "W".
        """
        forward, backward, weights = costs
        if not self.is_split:
            backward = backward + weights
        lengths = {FORWARD: forward, BACKWARD: backward}
        now = [0.0] * self.stages
        done = [0] * self.stages
        works = []

        def run(stage: int, operation: str, microbatch: int, length: float) -> None:
            end = now[stage] + length
            works.append(Work(stage, operation, microbatch, now[stage], end))
            now[stage] = end

        for tick in range(self.ticks):
            for stage in range(self.stages):
                # W of earlier microbatches comes before what the tick runs
                while done[stage] < self.weights_done[tick, stage]:
                    run(stage, "W", done[stage], weights)
                    done[stage] += 1
                operation = int(self.operations[tick, stage])
                if operation != IDLE:
                    number = int(self.numbers[tick, stage])
                    run(stage, _LETTERS[operation], number, lengths[operation])
            # An exchange ends when the later of the two is there
            for stage, neighbour in exchanges(tick, self.stages):
                now[stage] = now[neighbour] = max(now[stage], now[neighbour])
        return works

    def span(self, costs: tuple[float, float, float] = (1, 1, 1)) -> float:
        """How long all of it takes, as `timeline` says."""
        return max(work.end for work in self.timeline(costs))

    def idle(self, costs: tuple[float, float, float] = (1, 1, 1)) -> float:
        """Which part of the stages' time nothing runs. F of the last stage counts as
        run; there B computes it, so `pipeline` doesn't run it.
        """
        busy = sum(work.end - work.start for work in self.timeline(costs))
        return 1 - busy / (self.span(costs) * self.stages)

    def in_flight(self) -> list[int]:
        """Of how many microbatches each stage keeps its input at once, at most."""
        return self._most_at_once(FORWARD)

    def weights_waiting(self) -> list[int]:
        """For how many microbatches each stage keeps what W reads at once, at most."""
        if not self.is_split:
            return [0] * self.stages
        return self._most_at_once(BACKWARD)

    def _most_at_once(self, begins: int) -> list[int]:
        begun = np.cumsum(self.operations == begins, axis=0)
        if begins == FORWARD:
            # The input of a microbatch is kept until its B is over
            ended = np.cumsum(self.operations == BACKWARD, axis=0)
            ended = np.concatenate([np.zeros_like(ended[:1]), ended[:-1]])
        else:
            ended = self.weights_done
        return (begun - ended).max(axis=0).tolist()

    def draw(self) -> str:
        """A line for each stage, one column for each unit of time: `F3` is the forward
        pass of microbatch 3. Without W taken apart, B is drawn as two units.
        """
        width = len(str(self.microbatches - 1)) + 2
        span = round(self.span())
        rows = [[".".ljust(width)] * span for _ in range(self.stages)]
        for work in self.timeline():
            text = f"{work.operation}{work.microbatch}".ljust(width)
            for column in range(round(work.start), round(work.end)):
                rows[work.stage][column] = text
        return "\n".join("".join(row).rstrip() for row in rows)


def exchanges(tick: int, stages: int) -> Iterator[tuple[int, int]]:
    """The neighbours that exchange after a tick: the first sends what its F made, the
    second what its B made.
    """
    for stage in range(tick % 2, stages - 1, 2):
        yield stage, stage + 1


def make_schedule(name: ScheduleName, stages: int, microbatches: int) -> Schedule:
    """The table of a schedule.

    Raises:
        ValueError: there is no such schedule.
    """
    if name not in get_args(ScheduleName):
        names = " or ".join(map(repr, get_args(ScheduleName)))
        raise ValueError(f"schedule is {names}; got {name!r}.")
    ticks = 2 * (microbatches + stages - 1)
    # One more, for W that are left
    operations = np.full((ticks + 1, stages), IDLE, np.int32)
    numbers = np.zeros_like(operations)
    for stage in range(stages):
        for number in range(microbatches):
            forward = 2 * number + stage
            backward = 2 * number + 2 * stages - 1 - stage
            operations[forward, stage] = FORWARD
            operations[backward, stage] = BACKWARD
            numbers[[forward, backward], stage] = number
    done = np.zeros_like(operations)
    if name == "zero_bubble":
        done = _weights_done(operations, microbatches)
    return Schedule(
        stages, microbatches, name == "zero_bubble", operations, numbers, done
    )


def _weights_done(operations: np.ndarray, microbatches: int) -> np.ndarray:
    """Of how many microbatches W is done before each tick.

    Follows the stages through time, with F = B = W = 1. A stage that would wait for a
    neighbour runs W meanwhile, if one is left. Stage s has at most s of them left when
    it goes on to the next tick.
    """
    rows, stages = operations.shape
    result = np.zeros_like(operations)
    now = np.zeros(stages, int)
    done = np.zeros(stages, np.int32)
    ready = np.zeros(stages, np.int32)

    for tick in range(rows - 1):
        result[tick] = done
        now += operations[tick] != IDLE
        for pair in exchanges(tick, stages):
            later = max(now[stage] for stage in pair)
            # The earlier one has time for as many W until then
            for stage in pair:
                fitting = min(later - now[stage], ready[stage] - done[stage])
                result[tick, stage] += fitting
                done[stage] += fitting
                now[stage] = later
        # From the next tick on: what this one sends must not wait for W
        ready += operations[tick] == BACKWARD
        for stage in range(stages):
            must = max(ready[stage] - done[stage] - stage, 0)
            done[stage] += must
            now[stage] += must
    # The last row runs what is left
    result[-1] = microbatches
    return result
