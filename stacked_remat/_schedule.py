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

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
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


@dataclass(frozen=True)
class Schedule:
    """A cut of `length` layers, executed by the sweep; build one with a function of this module.

    Attributes:
        length: number of layers.
        slots: number of carries alive at once.
        forward: the slot to which the forward sweep writes the input of each layer.
        runs: what the reverse sweep does, in order.
        segments: lengths of the segments in forward order, where the layers are cut once; else empty.
        tree: the cuts as parts within parts, in forward order, a layer being its number. While a part is
            reversed, the input of each part within it is held.
    """

    length: int
    slots: int
    forward: tuple[int, ...] = field(repr=False)
    runs: tuple[Run, ...] = field(repr=False)
    segments: tuple[int, ...] = ()
    tree: "Tree" = field(default=(), repr=False)

    @property
    def max_carries_alive(self) -> int:
        """Layer inputs held at once, at the most; the one being visited is among them."""
        return self.slots

    @cached_property
    def replays(self) -> int:
        """Forward evaluations of a block that the reverse sweep makes to recover layer inputs."""
        return sum(run.replays for run in self.runs)

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


Tree: TypeAlias = "int | tuple[Tree, ...]"


@dataclass(frozen=True)
class _Part:
    """Layers `start` to `stop` whose first input is held; `key` is for the cut."""

    start: int
    stop: int
    key: int = 0

    @property
    def size(self) -> int:
        return self.stop - self.start


_Cut = Callable[[_Part], list[_Part]]


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
    sizes: list[int] = []
    while sum(sizes) < length:
        sizes.append(min(slots - len(sizes), length - sum(sizes)))
    return _once(length, sizes)


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
    return _once(length, [size + (j < longer) for j in range(segments)])


def segmented(length: int, segment_length: int) -> Schedule:
    """Segments of `segment_length` layers, the last one shorter where it has to be.

    Args:
        length: number of layers, positive.
        segment_length: layers in a segment, positive; more than `length` means `length`.
    """
    length = whole_number("length", length, "the number of layers")
    size = min(whole_number("segment_length", segment_length, "how many layers a segment has"), length)
    return _once(length, [min(size, length - start) for start in range(0, length, size)])


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
        return equal(length, sizes[0]) if len(sizes) == 2 else segmented(length, length)

    def cut(part: _Part) -> list[_Part]:
        if part.key == len(sizes) - 1:
            return _units(part)
        size = -(-part.size // sizes[part.key])
        starts = range(part.start, part.stop, size)
        return [_Part(start, min(start + size, part.stop), part.key + 1) for start in starts]

    return _build(length, cut)


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

    def cut(part: _Part) -> list[_Part]:
        slots = part.key
        if part.size <= slots:
            return _units(part)
        middle = part.start + _split(part.size, slots)
        return [_Part(part.start, middle, slots), _Part(middle, part.stop, slots - 1)]

    return _build(length, cut, key=carries)


def _split(size: int, slots: int) -> int:
    """Where to hold the next carry, so that both sides stay within the optimal range of repetitions."""
    repeats = 1
    while math.comb(slots - 1 + repeats, repeats) < size:
        repeats += 1
    most_before = math.comb(slots + repeats - 2, repeats - 1)
    least_after = math.comb(slots + repeats - 3, repeats - 1)
    return min(most_before, size - least_after)


def _once(length: int, sizes: Sequence[int]) -> Schedule:
    """Cut once, into segments of the given sizes."""
    starts = list(itertools.accumulate(sizes[:-1], initial=0))

    def cut(part: _Part) -> list[_Part]:
        if part.key == 1:
            return _units(part)
        return [_Part(start, start + size, 1) for start, size in zip(starts, sizes, strict=True)]

    schedule = _build(length, cut)
    runs, last = schedule.runs, len(sizes) - 1
    if len(set(sizes)) == 1 and len(sizes) > 1 and sizes[0] > 1:
        # What the forward sweep left of the last segment is made again: then all runs are alike.
        runs = (Run(starts[last], last, tuple(range(last + 1, last + sizes[0])), sizes[0]), *runs[1:])
    return replace(schedule, runs=runs, segments=tuple(sizes))


def _units(part: _Part) -> list[_Part]:
    return [_Part(layer, layer + 1) for layer in range(part.start, part.stop)]


def _build(length: int, cut: _Cut, key: int = 0) -> Schedule:
    """Follow `cut` down to single layers, always at the top of a stack of parts whose first input is held."""
    stack = [_Part(0, length, key)]
    slots, runs = 1, []
    while stack:
        start, slot = stack[-1].start, len(stack) - 1
        while stack[-1].size > 1:
            stack.extend(cut(stack.pop()))
        slots = max(slots, len(stack))
        writes = _writes(stack, start, slot)
        visits = 0
        while stack and stack[-1].size == 1:
            stack.pop()
            visits += 1
        runs.append(Run(start, slot, writes, visits))
    first = runs[0]
    forward = (0, *first.writes)
    runs[0] = Run(first.top, first.top_slot, (), first.visits)
    return Schedule(length, slots, forward, tuple(runs), tree=_tree(_Part(0, length, key), cut))


def _tree(part: _Part, cut: _Cut) -> Tree:
    return part.start if part.size == 1 else tuple(_tree(inner, cut) for inner in cut(part))


def _writes(stack: list[_Part], start: int, slot: int) -> tuple[int, ...]:
    """The slot for each layer's input from `start + 1` on: its own if kept, else the next kept one's."""
    writes: list[int] = []
    for held in range(slot + 1, len(stack)):
        writes.extend([held] * (stack[held].start - start - len(writes)))
    return tuple(writes)


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
