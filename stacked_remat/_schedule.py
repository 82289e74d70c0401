"""How `N` layers are cut for a checkpointed reverse sweep: pure integers, no JAX.

A reverse sweep visits the layers from the last to the first and needs the input carry of each. Keeping all
`N` of them costs `N` carries; a `Schedule` needs fewer *slots*, at the cost of running some layers forward
again. It is a stack: a slot holds the input of one layer, later slots hold later layers, and the top is
consumed first.

    forward:  every layer writes its input to a slot; writing a slot overwrites it
    reverse:  for each *run*: read the carry held at the top of the stack, run some layers forward
              again, write their inputs to slots above it, then visit layers backwards, popping a slot each

A slot is freed by its visit, so later runs may use it: with segments that are
one shorter each, boundaries and the segment being reversed share one buffer (`shrinking`).
"""

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
        writes: the input of layer `start + 1 + k` is written to slot `writes[k]`; so `len(writes)` layers are
            run forward again.
        visits: how many layers are then visited, from `top` down; their slots are consecutive.
    """

    start: int
    slot: int
    writes: tuple[int, ...]
    visits: int

    @property
    def replays(self) -> int:
        """How many layers the run evaluates forward."""
        return len(self.writes)

    @property
    def top(self) -> int:
        """The first layer that the run visits, the highest whose input is held."""
        return self.start + self.replays

    @property
    def top_slot(self) -> int:
        """The slot of the input of layer `top`."""
        return self.writes[-1] if self.writes else self.slot


Part: TypeAlias = "tuple[int, int, int]"  # layers start to stop, and what tells how they are cut
_SINGLE = -1  # in a part: each of its layers is a part of its own
_MOST_NESTED = 50  # Python's recursion limit of 1000 allows about 60 checkpoints within each other
Tree: TypeAlias = "int | tuple[Tree, ...]"


@dataclass(frozen=True)
class Schedule:
    """A cut of `length` layers, executed by the sweep; build one with a function of this module.

    `forward`, `runs`, `replays` and `tree` take time for many layers, and are computed when they are read.

    Attributes:
        length: number of layers.
        slots: layer inputs held at once, at the most; the one being visited is among them.
        segments: lengths of the segments in forward order; empty for a binomial cut.
        levels: into how many parts a segment is cut, and each of these, and so on.
    """

    length: int
    slots: int
    segments: tuple[int, ...] = ()
    levels: tuple[int, ...] = ()

    @cached_property
    def forward(self) -> tuple[int, ...]:
        """The slot to which the forward sweep writes the input of each layer."""
        parts, start, slot, _ = next(self._expansions())
        return (0, *_writes(parts, start, slot))

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """What the reverse sweep does, in order. As many numbers as layers are run again."""
        found = self._expansions()
        runs = [Run(start, slot, _writes(parts, start, slot), visits) for parts, start, slot, visits in found]
        first, sizes = runs[0], self.segments
        runs[0] = Run(first.top, first.top_slot, (), first.visits)
        if not self.levels and len(sizes) > 1 and sizes[0] > 1 and len(set(sizes)) == 1:
            # What the forward sweep left of the last segment is made again: then all runs are alike.
            last, size = len(sizes) - 1, sizes[-1]
            runs[0] = Run(self.length - size, last, tuple(range(last + 1, last + size)), size)
        return tuple(runs)

    @cached_property
    def replays(self) -> int:
        """Forward evaluations of a block that the reverse sweep makes to recover layer inputs."""
        return sum(run.replays for run in self.runs)

    @cached_property
    def tree(self) -> Tree:
        """The cuts as parts within parts, in forward order, a layer being its number.

        While a part is reversed, the input of each part within it is held.

        Raises:
            ValueError: the parts are nested deeper than JAX can nest checkpoints.
        """

        def nested(part: Part, depth: int) -> Tree:
            if depth > _MOST_NESTED:
                raise ValueError(
                    f"{self.slots} carries for {self.length} layers that are compiled one by one take more "
                    f"than {_MOST_NESTED} checkpoints within each other, too many for JAX. Give a larger "
                    "max_carries, or let the layers be a Stacked."
                )
            inner: list[Tree] = []
            for each in self._cut(part):
                inner.extend(range(*each[:2]) if each[2] == _SINGLE else [nested(each, depth + 1)])
            return tuple(inner)

        return nested((0, self.length, 0), 1) if self.length > 1 else 0

    @property
    def block_evaluations(self) -> int:
        """Cost of forward and backward, in forward evaluations of one block.

        The forward sweep counts 1 a layer, a replay 1, and a visit 3 (the block once more, with
        its internals, and the two products of its transpose). Saving every layer's input costs `4 * length`.
        """
        return 4 * self.length + self.replays

    def _cut(self, part: Part) -> list[Part]:
        """The parts of a part, whose third number is its level, or how many carries parts before it hold."""
        start, stop, key = part
        if not self.segments:
            slots = self.slots - key
            if stop - start <= slots:
                return [(start, stop, _SINGLE)]
            middle = start + _split(stop - start, slots)
            return [_part(start, middle, key), _part(middle, stop, key + 1)]
        if key > len(self.levels) or len(self.segments) == self.length:
            return [(start, stop, _SINGLE)]
        sizes = self.segments if key == 0 else _parts_of(stop - start, self.levels[key - 1])
        ends = itertools.accumulate(sizes, initial=start)
        return [_part(first, end, key + 1) for first, end in itertools.pairwise(ends)]

    def _expansions(self) -> Iterator[tuple[list[Part], int, int, int]]:
        """For each run the parts that it cuts down to layers, their first layer, its slot, and the visits.

        Always at the top of a stack of parts whose first input is held.
        """
        stack: list[Part] = [_part(0, self.length, 0)]
        held = 1
        while stack:
            below, start, slot = len(stack) - 1, stack[-1][0], held - 1
            while stack[-1][2] != _SINGLE:
                inner = self._cut(stack.pop())
                stack.extend(inner)
                held += sum(map(_inputs_held, inner)) - 1
            parts, visits = stack[below:], 0
            while stack and stack[-1][2] == _SINGLE:
                visits += _inputs_held(stack.pop())
            held -= visits
            yield parts, start, slot, visits


def _part(start: int, stop: int, key: int) -> Part:
    return (start, stop, key if stop - start > 1 else _SINGLE)


def _inputs_held(part: Part) -> int:
    start, stop, key = part
    return stop - start if key == _SINGLE else 1


def _writes(parts: list[Part], start: int, slot: int) -> tuple[int, ...]:
    """The slot for each layer's input from `start + 1` on: its own if kept, else the next kept one's."""
    writes: list[int] = []
    for part in parts:
        writes.extend([slot] * (part[0] - start - len(writes)))
        writes.extend(range(slot + 1, slot + _inputs_held(part)))
        slot += _inputs_held(part)
    return tuple(writes)


def shrinking(length: int) -> Schedule:
    """The cut with the fewest carries that evaluates no layer more than twice before its visit.

    With `S` slots the segments are `S, S - 1, ...` long: when segment `j` is reversed, the boundaries before
    it fill `j` slots and its own inputs the rest. So `S * (S + 1) / 2 >= length`, about `sqrt(2 * length)`
    carries. This is binomial checkpointing for one replay.
    """
    slots = (math.isqrt(8 * length + 1) - 1) // 2
    slots += slots * (slots + 1) // 2 < length
    sizes, rest = [], length
    while rest:
        sizes.append(min(slots - len(sizes), rest))
        rest -= sizes[-1]
    return _cut_into(sizes)


def equal(length: int, segments: int) -> Schedule:
    """`segments` segments of one length, at most one a layer, the later ones a layer shorter where they must.

    Where they divide evenly, all loops get static trip counts; the last segment is then replayed too.
    """
    segments = min(segments, length)
    size, longer = divmod(length, segments)
    return _cut_into([size + 1] * longer + [size] * (segments - longer))


def levels(length: int, sizes: Sequence[int]) -> Schedule:
    """Segments within segments: cut into `sizes[0]` parts, each of these into `sizes[1]`, and so on.

    The last size is how many layers a part of the innermost level holds; a layer is replayed at most
    `len(sizes) - 1` times, and about `sum(sizes)` carries are alive. `(a, b)` is `equal(length, a)`.

    Raises:
        ValueError: the product of the sizes is less than `length`.
    """
    if (held := math.prod(sizes)) < length:
        raise ValueError(
            f"levels {sizes} hold {held} layers, fewer than {length}; make one of them larger, or add one"
        )
    if len(sizes) <= 2:
        return equal(length, sizes[0] if len(sizes) == 2 else 1)
    return _cut_into(_parts_of(length, sizes[0]), tuple(sizes[1:-1]))


def bounded(length: int, *, max_carries: int) -> Schedule:
    """The least recomputation that keeps at most `max_carries` layer inputs alive.

    Binomial checkpointing (Griewank and Walther 2000, Algorithm 799: "revolve"): with `c` carries and at most
    `r` forward evaluations of a layer before its visit, `binomial(c - 1 + r, r)` layers can be reversed.

    Raises:
        ValueError: `max_carries` is 1 for more layers than one.
    """
    if max_carries == 1 and length > 1:
        raise ValueError(
            f"max_carries=1 is too few for {length} layers: the stack's input and the input of the layer "
            "being visited must both be held; give at least 2"
        )
    return Schedule(length, min(max_carries, length))


@functools.lru_cache(maxsize=4096)
def _split(size: int, slots: int) -> int:
    """Where to hold the next carry, so that both sides stay within the optimal range of repetitions."""
    repeats = 1
    while math.comb(slots - 1 + repeats, repeats) < size:
        repeats += 1
    most_before = math.comb(slots + repeats - 2, repeats - 1)
    least_after = math.comb(slots + repeats - 3, repeats - 1)
    return min(most_before, size - least_after)


def _parts_of(length: int, count: int) -> tuple[int, ...]:
    """The lengths of at most `count` parts, all of one length but the last."""
    size = -(-length // count)
    whole, rest = divmod(length, size)
    return (size,) * whole + (rest,) * (rest > 0)


def _cut_into(sizes: Sequence[int], levels: tuple[int, ...] = ()) -> Schedule:
    """Segments of the given sizes, each cut further where there are levels."""

    def slots(sizes: Sequence[int], levels: tuple[int, ...]) -> int:
        held = (slots(_parts_of(size, levels[0]), levels[1:]) if levels else size for size in sizes)
        return max(before + inside for before, inside in enumerate(held))

    return Schedule(sum(sizes), slots(sizes, levels), tuple(sizes), levels)


def whole_number(name: str, value: Any, meaning: str, fix: str = "", *, least: int = 1) -> int:
    """An argument as an int.

    Raises:
        TypeError, ValueError: it is not an int, or less than `least`; gives the meaning and the fix.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name} is {meaning} (an int); got {value!r}.")
    if number < least:
        raise ValueError(f"{name} is {meaning} and at least {least}; got {number}. {fix}".rstrip())
    return number
