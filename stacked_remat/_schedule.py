"""How `N` layers are cut for a checkpointed reverse sweep: pure integers, no JAX.

A reverse sweep visits the layers from the last to the first and needs the input carry
of each. Keeping all `N` of them costs `N` carries; a `Schedule` needs fewer *slots*, at
the cost of running some layers forward again. It is a stack: a slot holds the input of
one layer, later slots hold later layers, and the top is consumed first.

    forward:  the input of each layer goes to a slot, where a later one may replace it;
              only those that stay need be written
    reverse:  for each *run*: read a carry that is held, mostly at the top, run some
              layers forward again, write their inputs to slots above it, then visit
              layers backwards, popping a slot each

A slot is freed by its visit, so later runs may use it. `shrinking(6)`, of three slots:

              runs forward   slots then hold   visits
    forward   0 1 2 3 4 5    0 3 5
    run 0                    0 3 5             5
    run 1     3              0 3 4             4 3
    run 2     0 1            0 1 2             2 1 0

How many layers `S` slots can reverse. Let each layer run forward at most `r` times
before its visit, the forward sweep included, and let `L(S, r)` be the most layers for
which that is possible.

    r = 1   Every input must stay from the forward sweep: L(S, 1) = S.
    S = 1   There is no slot but that of layer 0: L(1, r) = 1.
    else    Hold the input of one layer `m` beside that of layer 0. The layers from `m`
            on are reversed first, with a slot less: at most L(S - 1, r) of them. The
            `m` layers before have run once for that, and are reversed with all slots
            and a run less each: m <= L(S, r - 1).

So `L(S, r) = L(S, r - 1) + L(S - 1, r)`, Pascal's rule: `L(S, r) = binomial(S - 1 + r,
r)`. This is binomial checkpointing (Griewank and Walther 2000, "Algorithm 799:
revolve", https://doi.org/10.1145/347837.347846; their checkpoints are the slots but
the one of the layer that is visited). For one replay, `r = 2`, it is `L(S, 2) =
S (S + 1) / 2`, in segments of `S`, `S - 1`, ..., 1 layers: `shrinking`.

How often layers run. `L(S, k) - L(S, k - 1)` layers run `k` times, and what is beyond
`L(S, r - 1)` runs `r` times, for the least `r` with `L(S, r) >= N`: in all

    r N - sum of L(S, k) over k < r  =  r N - binomial(S + r - 1, r - 1)

of which the forward sweep's are `N - 1` (not the last layer's: its visit needs no
output). The rest are `bounded(N, max_carries=S).replays`. Other cuts cost as much, as
long as both parts stay between the numbers that `r` allows (`_split`).

`_policy.py` makes schedules of policies, `_sweep/` executes them.
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
    """One replay and the visits that follow it. Layers are numbered from the schedule's
    first.
    """

    # The layer whose input is held in `slot` when the run begins.
    start: int
    # The slot it is held in.
    slot: int
    # The layers after it whose inputs are held once all before the last of them ran
    # forward again, in the slots that follow. An input in between is written where the
    # next one that is held goes.
    holds: tuple[int, ...]
    # How many layers are then visited, from `top` down; their slots are consecutive.
    visits: int

    @property
    def replays(self) -> int:
        """How many layers run forward again: from `start` to before `top`."""
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
        slots: list[int] = []
        before = self.start
        for slot, held in enumerate(self.holds, self.slot + 1):
            slots += [slot] * (held - before)
            before = held
        return tuple(slots)


# Python's recursion limit of 1000 allows about 60 checkpoints within each other.
_MOST_NESTED = 50
# A layer's number, or parts in forward order.
Tree: TypeAlias = "int | tuple[Tree, ...]"


@dataclass(frozen=True)
class Schedule:
    """A cut of `length` layers, executed by the sweep; build one with a function of
    this module.
    """

    # Number of layers.
    length: int
    # Layer inputs held at once, at the most; the one being visited is among them.
    slots: int
    # Lengths of the segments in forward order; empty for one of `bounded`.
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
        of later slots. Leaves that no visit reads need no more.

        The lowest slot that a run visits may be where a replay starts too: of the layer
        that it visits last.
        """
        bottom_slots = [run.top_slot - run.visits + 1 for run in self.runs]
        return max(bottom_slots) + 1

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """What the reverse sweep does, in order; O(length) numbers, however few
        slots.
        """
        forward, *later = self._expansions()
        # What the forward sweep left is visited without a replay.
        first = Run(forward.top, forward.top_slot, (), forward.visits)
        sizes = self.segments
        if len(sizes) > 1 and sizes[0] > 1 and len(set(sizes)) == 1:
            # What the forward sweep left of the last segment is made again: then all
            # runs are alike, and trip counts static.
            start = self.length - sizes[-1]
            held = tuple(range(start + 1, self.length))
            first = Run(start, len(sizes) - 1, held, sizes[-1])
        return (first, *later)

    @cached_property
    def replays(self) -> int:
        """Forward evaluations of a block that the reverse sweep makes to recover layer
        inputs.
        """
        return sum(run.replays for run in self.runs)

    @property
    def tree(self) -> tuple["Tree", ...]:
        """The cuts as parts within parts, in forward order, a layer being its number:
        for layers that are compiled one by one, under one `jax.checkpoint` a part.

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
        parts = []
        # While a part is reversed, the starts of those before it are held.
        for held, (first, end) in enumerate(itertools.pairwise((*cuts, stop))):
            parts.append(self._part(first, end, slots - held, depth + 1))
        return tuple(parts)

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

        Each entry of the stack is a part `(start, stop)` that is still to be reversed,
        with the input of layer `start` in the slot that is the entry's place.
        """
        stack = [(0, self.length)]
        while stack:
            start, stop = stack.pop()
            slot = len(stack)
            cuts = self._cuts(start, stop, self.slots - slot)
            # The last part is visited at once, with a slot for each layer; the others
            # wait.
            stack += itertools.pairwise(cuts)
            visits = stop - cuts[-1]
            # A part of one layer needs no replay: its visit follows.
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
    # The greatest S with S (S - 1) / 2 < length: one less would not be enough.
    slots = (math.isqrt(8 * length - 7) + 1) // 2
    sizes: list[int] = []
    while (rest := length - sum(sizes)) > 0:
        sizes.append(min(slots - len(sizes), rest))
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
    """How many of `size` layers to run before the next carry is held, with so many
    slots.

    With `L` of this file's docstring, `L(slots, r - 1) < size <= L(slots, r)` for r
    repeats. The part before the cut has at most `L(slots, r - 1)` layers, to run at
    most r - 1 times more. The part after it has at least `L(slots - 1, r - 1)`: fewer
    would need only r - 1 repeats, and leave more layers to the part before. All cuts
    within both bounds cost the same; this is the last of them.
    """
    repeats = 1 + bisect.bisect_left(
        range(1, size), size, key=lambda r: math.comb(slots - 1 + r, r)
    )
    most_before = math.comb(slots + repeats - 2, repeats - 1)
    least_after = math.comb(slots + repeats - 3, repeats - 1)
    return min(most_before, size - least_after)


def _cut_into(sizes: Sequence[int]) -> Schedule:
    """Segments of these lengths. While one is reversed, the inputs of those before it
    are held, and its own.
    """
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
