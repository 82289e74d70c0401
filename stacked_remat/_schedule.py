"""How `N` layers are cut for a checkpointed reverse sweep: pure integers, no JAX.

A reverse sweep visits the layers from the last to the first and needs the input carry of each. Keeping all
`N` of them costs `N` carries; a `Schedule` needs fewer *slots*, at the cost of running some layers forward
again. It is a stack: a slot holds the input of one layer, later slots hold later layers, and the top is
consumed first.

    forward:  every layer writes its input to a slot; a slot that is written again loses what it held
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
from dataclasses import dataclass, field
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


Part: TypeAlias = "tuple[int, int, int]"  # layers start to stop, cut by the third
_SINGLE = -1  # in a part: each of its layers is a part of its own
Tree: TypeAlias = "int | tuple[Tree, ...]"


@dataclass(frozen=True)
class Schedule:
    """A cut of `length` layers, executed by the sweep; build one with a function of this module.

    `forward`, `runs`, `replays` and `tree` take time for many layers, and are computed when they are read.

    Attributes:
        length: number of layers.
        slots: number of carries alive at once.
        cut: the parts of a part.
        segments: lengths of the segments in forward order, where the layers are cut once; else empty.
    """

    length: int
    slots: int
    cut: "_Once | _Levels | _Bounded" = field(repr=False)
    segments: tuple[int, ...] = ()

    @property
    def max_carries_alive(self) -> int:
        """Layer inputs held at once, at the most; the one being visited is among them."""
        return self.slots

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
        if self._replays_last_segment:
            last, size = len(sizes) - 1, sizes[-1]
            runs[0] = Run(self.length - size, last, tuple(range(last + 1, last + size)), size)
        return tuple(runs)

    @cached_property
    def replays(self) -> int:
        """Forward evaluations of a block that the reverse sweep makes to recover layer inputs."""
        run_again = sum(parts[-1][1] - 1 - start for parts, start, _, _ in self._expansions())
        again = self.segments[-1] - 1 if self._replays_last_segment else 0
        return run_again - (self.length - 1) + again

    @cached_property
    def tree(self) -> Tree:
        """The cuts as parts within parts, in forward order, a layer being its number.

        While a part is reversed, the input of each part within it is held.

        Raises:
            ValueError: the parts are nested deeper than JAX can nest checkpoints.
        """
        if _depth(self.length, self.cut) > _MOST_NESTED:
            enough = next(
                k
                for k in range(self.slots + 1, self.length + 1)
                if _depth(self.length, _Bounded(k)) <= _MOST_NESTED
            )
            raise ValueError(
                f"{self.slots} carries for {self.length} layers that are compiled one by one take more than "
                f"{_MOST_NESTED} checkpoints within each other, too many for JAX. Give max_carries at least "
                f"{enough}, or let the layers be a Stacked."
            )

        def nested(part: Part) -> Tree:
            inner: list[Tree] = []
            for start, stop, key in self.cut(part):
                inner.extend(range(start, stop) if key == _SINGLE else [nested((start, stop, key))])
            return tuple(inner)

        return nested((0, self.length, 0)) if self.length > 1 else 0

    @property
    def block_evaluations(self) -> int:
        """Cost of forward and backward, in forward evaluations of one block.

        The forward sweep counts 1 a layer, a replay 1, and a visit 3 (the block once more, with
        its internals, and the two products of its transpose). Saving every layer's input costs `4 * length`.
        """
        return 4 * self.length + self.replays

    @property
    def uniform(self) -> bool:
        """Whether all runs have the same shape, so that every loop has a static trip count."""
        return len({(run.replays, run.visits) for run in self.runs}) == 1

    @property
    def _replays_last_segment(self) -> bool:
        """Whether what the forward sweep left of the last segment is made again: then all runs are alike."""
        sizes = self.segments
        return len(sizes) > 1 and sizes[0] > 1 and len(set(sizes)) == 1

    def _expansions(self) -> Iterator[tuple[list[Part], int, int, int]]:
        """For each run the parts that it cuts down to layers, their first layer, its slot, and the visits.

        Always at the top of a stack of parts whose first input is held.
        """
        stack: list[Part] = [(0, self.length, 0 if self.length > 1 else _SINGLE)]
        held = 1
        while stack:
            below, start, slot = len(stack) - 1, stack[-1][0], held - 1
            while stack[-1][2] != _SINGLE:
                inner = self.cut(stack.pop())
                stack.extend(inner)
                held += sum(map(_inputs_held, inner)) - 1
            parts, visits = stack[below:], 0
            while stack and stack[-1][2] == _SINGLE:
                visits += _inputs_held(stack.pop())
            held -= visits
            yield parts, start, slot, visits


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


# Nested checkpoints: Python's recursion limit of 1000 allows about 60.
_MOST_NESTED = 50


def _depth(length: int, cut: "_Once | _Levels | _Bounded") -> int:
    deepest, parts = 0, [((0, length, 0), 1)]
    while parts:
        part, depth = parts.pop()
        deepest = max(deepest, depth)
        parts.extend((inner, depth + 1) for inner in cut(part) if inner[2] != _SINGLE)
    return deepest


def _part(start: int, stop: int, key: int) -> Part:
    return (start, stop, key if stop - start > 1 else _SINGLE)


@dataclass(frozen=True)
class _Once:
    """Segments of the given sizes."""

    sizes: tuple[int, ...]

    def __call__(self, part: Part) -> list[Part]:
        start, stop, key = part
        if key == 1 or max(self.sizes) == 1:
            return [(start, stop, _SINGLE)]
        ends = itertools.accumulate(self.sizes)
        return [_part(end - size, end, 1) for end, size in zip(ends, self.sizes, strict=True)]


@dataclass(frozen=True)
class _Levels:
    """Each part into as many as the size of its level says; of the last level, into layers."""

    sizes: tuple[int, ...]

    def __call__(self, part: Part) -> list[Part]:
        start, stop, level = part
        if level == len(self.sizes) - 1:
            return [(start, stop, _SINGLE)]
        size = self._size(stop - start, level)
        return [_part(first, min(first + size, stop), level + 1) for first in range(start, stop, size)]

    def _size(self, length: int, level: int) -> int:
        return -(-length // self.sizes[level])

    def slots(self, length: int, level: int = 0) -> int:
        """How many inputs are held at once while a part of this length is reversed."""
        if level == len(self.sizes) - 1:
            return length
        size = self._size(length, level)
        whole, rest = divmod(length, size)
        slots = whole - 1 + self.slots(size, level + 1)
        return max(slots, whole + self.slots(rest, level + 1)) if rest else slots


@dataclass(frozen=True)
class _Bounded:
    """A part into two, the second with a carry less, since the input of the first is held meanwhile.

    The key of a part is the number of carries less than `carries` that it may hold.
    """

    carries: int

    def __call__(self, part: Part) -> list[Part]:
        start, stop, fewer = part
        slots = self.carries - fewer
        if stop - start <= slots:
            return [(start, stop, _SINGLE)]
        middle = start + _split(stop - start, slots)
        return [_part(start, middle, fewer), _part(middle, stop, fewer + 1)]


def shrinking(length: int) -> Schedule:
    """The cut with the fewest carries that evaluates no layer more than twice before its visit.

    With `S` slots the segments are `S, S - 1, ...` long: when segment `j` is reversed, the boundaries before
    it fill `j` slots and its own inputs the rest. So `S * (S + 1) / 2 >= length`, about `sqrt(2 * length)`
    carries. This is binomial checkpointing for one replay.

    Args:
        length: number of layers, positive.
    """
    length = whole_number("length", length, "the number of layers")
    slots = (math.isqrt(8 * length + 1) - 1) // 2
    slots += slots * (slots + 1) // 2 < length
    sizes, rest = [], length
    while rest:
        sizes.append(min(slots - len(sizes), rest))
        rest -= sizes[-1]
    return _once(sizes)


def equal(length: int, segments: int) -> Schedule:
    """`segments` segments of one length, the later ones a layer shorter where they do not divide evenly.

    Where they do, all loops get static trip counts; the last segment is then replayed like the others.

    Args:
        length: number of layers, positive.
        segments: how many, positive; more than `length` means `length`.
    """
    length = whole_number("length", length, "the number of layers")
    segments = min(whole_number("segments", segments, "how many segments the layers are cut into"), length)
    size, longer = divmod(length, segments)
    return _once([size + 1] * longer + [size] * (segments - longer))


def levels(length: int, sizes: Sequence[int]) -> Schedule:
    """Segments within segments: cut into `sizes[0]` parts, each of these into `sizes[1]`, and so on.

    The last size is how many layers a part of the innermost level holds; a layer is replayed at most
    `len(sizes) - 1` times, and about `sum(sizes)` carries are alive. `(a, b)` is `equal(length, a)`.

    Args:
        length: number of layers, positive.
        sizes: at least one positive number, with a product of at least `length`.
    """
    length = whole_number("length", length, "the number of layers")
    sizes = tuple(
        whole_number(f"sizes[{i}]", size, "how many parts that level has") for i, size in enumerate(sizes)
    )
    if not sizes or math.prod(sizes) < length:
        held = math.prod(sizes) if sizes else 0
        raise ValueError(
            f"levels {sizes} hold {held} layers, fewer than {length}; make one of them larger, or add one"
        )
    if len(sizes) <= 2:
        return equal(length, sizes[0]) if len(sizes) == 2 else equal(length, 1)

    cut = _Levels(sizes)
    return Schedule(length, cut.slots(length), cut)


def bounded(length: int, *, max_carries: int) -> Schedule:
    """The least recomputation that keeps at most `max_carries` layer inputs alive.

    Binomial checkpointing (Griewank and Walther 2000, Algorithm 799: "revolve"): with `c` carries and at most
    `r` forward evaluations of a layer before its visit, `binomial(c - 1 + r, r)` layers can be reversed.

    Args:
        length: number of layers, positive.
        max_carries: at least 2, or 1 for a single layer; as many as `length` keeps everything.
    """
    length = whole_number("length", length, "the number of layers")
    carries = whole_number("max_carries", max_carries, "how many layer inputs may be held at once")
    if carries == 1 and length > 1:
        raise ValueError(
            f"max_carries=1 is too few for {length} layers: the stack's input and the input of the layer "
            "being visited must both be held; give at least 2"
        )

    return Schedule(length, min(carries, length), _Bounded(carries))


@functools.lru_cache(maxsize=4096)
def _split(size: int, slots: int) -> int:
    """Where to hold the next carry, so that both sides stay within the optimal range of repetitions."""
    repeats = 1
    while math.comb(slots - 1 + repeats, repeats) < size:
        repeats += 1
    most_before = math.comb(slots + repeats - 2, repeats - 1)
    least_after = math.comb(slots + repeats - 3, repeats - 1)
    return min(most_before, size - least_after)


def _once(sizes: Sequence[int]) -> Schedule:
    """Cut once, into segments of the given sizes."""
    slots = max(before + size for before, size in enumerate(sizes))
    return Schedule(sum(sizes), slots, _Once(tuple(sizes)), tuple(sizes))


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
