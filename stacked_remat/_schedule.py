"""How `N` layers are cut for a checkpointed reverse sweep: pure integers, no JAX.

A reverse sweep visits the layers from the last to the first and needs the input carry
of each. Keeping all `N` of them costs `N` carries; a `Schedule` needs fewer *slots*, at
the cost of running some layers forward again. It is a stack: a slot holds the input of
one layer, later slots hold later layers, and the top is consumed first.

    forward:  the input of each layer goes to a slot, where a later one may replace it;
              only those that stay need be written
    reverse:  for each *run*: read the carry held at the top of the stack, run some
              layers forward again, write their inputs to slots above it, then visit
              layers backwards, popping a slot each

A slot is freed by its visit, so later runs may use it: with segments that are one
shorter each, boundaries and the segment being reversed share one buffer (`shrinking`).
"""

import bisect
import functools
import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Run:
    """One replay and the visits that follow it.

    Attributes:
        start: the layer whose input is held in `slot` when the run begins.
        slot: the slot it is held in.
        holds: the layers after it whose inputs are held once all up to the last of them
            ran forward again, in the slots that follow. An input in between is written
            where the next one that is held goes.
        visits: how many layers are then visited, from `top` down; their slots are
            consecutive.
    """

    start: int
    slot: int
    holds: tuple[int, ...]
    visits: int

    @property
    def replays(self) -> int:
        return self.top - self.start

    @property
    def top(self) -> int:
        """The first layer that the run visits, the highest whose input is held."""
        return self.holds[-1] if self.holds else self.start

    @property
    def top_slot(self) -> int:
        """The slot of the input of layer `top`."""
        return self.slot + len(self.holds)

    @property
    def writes(self) -> tuple[int, ...]:
        """The slot for the input of each layer from `start + 1` to `top`."""
        parts = enumerate(itertools.pairwise((self.start, *self.holds)), self.slot + 1)
        return tuple(slot for slot, (before, own) in parts for _ in range(own - before))


# Python's recursion limit of 1000 allows about 60 checkpoints within each other
_MOST_NESTED = 50
Tree: TypeAlias = "int | tuple[Tree, ...]"


@dataclass(frozen=True)
class Schedule:
    """A cut of `length` layers, executed by the sweep; build one with a function of
    this module.

    Attributes:
        length: number of layers.
        slots: layer inputs held at once, at the most; the one being visited is among
            them.
        segments: lengths of the segments in forward order; empty for a binomial cut.
    """

    length: int
    slots: int
    segments: tuple[int, ...] = ()

    @cached_property
    def forward(self) -> tuple[int, ...]:
        """The slot of each layer's input in the forward sweep; a later input in the
        same slot replaces it.
        """
        return (0, *next(self._expansions()).writes)

    @cached_property
    def sources(self) -> int:
        """How many slots hold inputs that replays start from; visits alone read those
        of later slots.
        """
        return max(run.top_slot - run.visits for run in self.runs) + 2

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """What the reverse sweep does, in order; O(length) numbers, however few
        slots.
        """
        runs, sizes = [*self._expansions()], self.segments
        runs[0] = Run(runs[0].top, runs[0].top_slot, (), runs[0].visits)
        if len(sizes) > 1 and sizes[0] > 1 and len(set(sizes)) == 1:
            # What the forward sweep left of the last segment is made again: then all
            # runs are alike.
            start = self.length - sizes[-1]
            runs[0] = Run(
                start, len(sizes) - 1, tuple(range(start + 1, self.length)), sizes[-1]
            )
        return tuple(runs)

    @cached_property
    def replays(self) -> int:
        """Forward evaluations of a block that the reverse sweep makes to recover layer
        inputs.
        """
        return sum(run.replays for run in self.runs)

    @property
    def tree(self) -> tuple["Tree", ...]:
        """The cuts as parts within parts, in forward order, a layer being its number.

        While a part is reversed, the input of each part within it is held.
        """
        tree = self._part(0, self.length, self.slots, 1)
        return tree if isinstance(tree, tuple) and len(self.segments) != 1 else (tree,)

    def _part(self, start: int, stop: int, slots: int, depth: int) -> Tree:
        if depth > _MOST_NESTED:
            raise ValueError(
                f"{self.slots} carries for {self.length} layers that are compiled one"
                f" by one take more than {_MOST_NESTED} checkpoints within each other,"
                " too many for JAX. Give a larger max_carries, or let the layers be a"
                " Stacked."
            )
        if stop - start == 1:
            return start
        cuts = self._cuts(start, stop, slots)
        if len(cuts) == 1:
            return tuple(range(start, stop))
        parts = enumerate(itertools.pairwise((*cuts, stop)))
        return tuple(self._part(*part, slots - held, depth + 1) for held, part in parts)

    def _cuts(self, start: int, stop: int, slots: int) -> list[int]:
        """Where the parts of some layers start, for so many slots: the last part needs
        no further cut.
        """
        if self.length == stop - start and 0 < len(self.segments) < self.length:
            return [*itertools.accumulate(self.segments[:-1], initial=start)]
        cuts = [start]
        while (size := stop - cuts[-1]) > slots:
            cuts.append(cuts[-1] + _split(size, slots))
            slots -= 1
        return cuts

    def _expansions(self) -> Iterator[Run]:
        """The runs, and before the first the forward sweep, as the part at the top of a
        stack is cut.
        """
        stack = [(0, self.length)]
        while stack:
            start, stop = stack.pop()
            slot = len(stack)
            cuts = self._cuts(start, stop, self.slots - slot)
            stack += itertools.pairwise(cuts)
            visits = stop - cuts[-1]
            while stack and stack[-1][1] - stack[-1][0] == 1:
                stack.pop()
                visits += 1
            yield Run(start, slot, (*cuts[1:], *range(cuts[-1] + 1, stop)), visits)


def shrinking(length: int) -> Schedule:
    """The cut with the fewest carries that evaluates no layer more than twice before
    its visit.

    With `S` slots the segments are `S, S - 1, ...` long: when segment `j` is reversed,
    the boundaries before it fill `j` slots and its own inputs the rest. So `S * (S + 1)
    / 2 >= length`, about `sqrt(2 * length)` carries. This is binomial checkpointing for
    one replay.
    """
    slots = (math.isqrt(8 * length - 7) + 1) // 2
    sizes, rest = [], length
    while rest:
        sizes.append(min(slots - len(sizes), rest))
        rest -= sizes[-1]
    return _cut_into(sizes)


def equal(length: int, segments: int) -> Schedule:
    """So many segments of one length, at most one a layer; later ones are a layer
    shorter where they must.
    """
    segments = min(segments, length)
    size, longer = divmod(length, segments)
    return _cut_into([size + 1] * longer + [size] * (segments - longer))


def bounded(length: int, *, max_carries: int) -> Schedule:
    """The least recomputation that keeps at most `max_carries` layer inputs alive.

    Binomial checkpointing (Griewank and Walther 2000, Algorithm 799: "revolve"): with
    `c` carries and at most `r` forward evaluations of a layer before its visit,
    `binomial(c - 1 + r, r)` layers can be reversed.
    """
    return Schedule(length, min(max_carries, length))


@functools.lru_cache(maxsize=4096)
def _split(size: int, slots: int) -> int:
    """Where to hold the next carry, so that both sides stay within the optimal range of
    repetitions.
    """
    repeats = 1 + bisect.bisect_left(
        range(1, size), size, key=lambda r: math.comb(slots - 1 + r, r)
    )
    most_before = math.comb(slots + repeats - 2, repeats - 1)
    least_after = math.comb(slots + repeats - 3, repeats - 1)
    return min(most_before, size - least_after)


def _cut_into(sizes: Sequence[int]) -> Schedule:
    slots = max(before + size for before, size in enumerate(sizes))
    return Schedule(sum(sizes), slots, tuple(sizes))


def whole_number(
    name: str, value: Any, meaning: str, fix: str = "", *, least: int = 1
) -> int:
    """An argument as an int, or an error with its meaning and the fix."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name} is {meaning} (an int); got {value!r}.")
    if number < least:
        raise ValueError(
            f"{name} is {meaning} and at least {least}; got {number}. {fix}".rstrip()
        )
    return number
