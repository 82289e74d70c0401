"""How `N` layers are cut for a checkpointed reverse sweep: pure integers, no JAX.

A reverse sweep visits the layers from the last to the first and needs the input carry
of each. Keeping all `N` of them costs `N` carries; a `Schedule` needs fewer *slots*, at
the cost of running some layers forward again. It is a stack: a slot holds the input of
one layer, later slots hold later layers, and the top is consumed first.

    forward:  keep the inputs of some layers, in slots from 0 on
    reverse:  for each *run*: read a carry that is held, mostly at the top, run some
              layers forward again, write their inputs to slots above it, then visit
              layers backwards, popping a slot each

A slot is freed by its visit, so later runs may use it. `shrinking(6)`, of three slots:

              runs forward   slots then hold   visits
    forward   0 1 2 3 4 5    0 3 5
    run 0                    0 3 5             5
    run 1     3              0 3 4             4 3
    run 2     0 1            0 1 2             2 1 0

A `Program` has the same as columns of integers, one entry a run; the loops of
`_sweep/` look these up and know nothing else of the schedule.

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

Which inputs stay. A run reads slots that the forward sweep filled in two ways: its
replay starts from one, or it visits layers whose inputs are there. All slots below
those that the first run visits are read later, each as the start of its part, so their
inputs stay. Those above are read only by the visits of the first run itself, and only
if it doesn't make them again: it does if it has a replay, and where the internals of
the layers to visit are saved, since they run again for that from the lowest. So what
stays is all that the forward sweep holds, or where the first run makes them again
(`_from_slots`) what is up to the slot of the lowest layer that it visits.

Segments of one layer need no replay, so they are visited in the run before, as if they
were part of its segment. Not where internals are saved: a run holds those of all that
it visits, and of a segment of one layer that is to be one layer.

Two levels. Where the inputs of segments are kept *off the device*, on the host or on
disk, they take no slots. Each segment is then reversed by itself: its input is fetched
to slot 0, and its layers are cut as above for the slots that there are. With a slot for
each layer of a segment that is one run, with fewer it is binomial again. Of `k`
segments of `n` layers and `S` slots, layers run `k (n - 1 + bounded(n, S).replays)`
times more. Herrmann and Pallez (2020, "H-Revolve", https://doi.org/10.1145/3378672)
find the best cut for a bounded number of places on the disk, where a place is written
again once it is free. Here it is the writes that are bounded, one for each segment.

`_policy.py` makes schedules of policies, `_sweep/` executes their programs.
"""

import bisect
import functools
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

# Python's recursion limit of 1000 allows about 60 checkpoints within each other.
_MOST_NESTED = 50
# A layer's number, or parts in forward order.
Tree: TypeAlias = "int | tuple[Tree, ...]"


class _Run(NamedTuple):
    """One replay and the visits that follow it. The forward sweep is one too, of all
    layers.
    """

    # The layers whose inputs are held, in slots that follow each other, once all before
    # the last of them ran. The replay starts from the input of the first.
    held: Sequence[int]
    # The slot of the first.
    slot: int
    # How many layers are then visited, from the last that is held down, one for each
    # slot: below `held` are inputs that earlier runs left.
    visits: int


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
    # How many layers of the sweep run before these.
    offset: int = 0
    # Whether the first input of each segment is kept on the host or on disk. It is in a
    # slot only while its segment is reversed, which then has all slots.
    off_device: bool = False

    @cached_property
    def replays(self) -> int:
        """Forward evaluations of a block that the reverse sweep makes to recover layer
        inputs.
        """
        return sum(self.program().advances)

    @property
    def tree(self) -> tuple["Tree", ...]:
        """The cuts as parts within parts, in forward order, a layer being its number:
        for layers that are compiled one by one, under one `jax.checkpoint` a part. Not
        of two levels.

        While a part is reversed, the input of each part within it is held.
        """
        tree = self._part(self.layers, self.slots, 1)
        # One layer, or one segment, is the only part.
        if isinstance(tree, int) or len(self.segments) == 1:
            return (tree,)
        return tree

    @property
    def has_two_levels(self) -> bool:
        """Whether segments whose first inputs are off the device are cut once more."""
        return self.off_device and self.slots < max(self.segments)

    @property
    def layers(self) -> range:
        return range(self.offset, self.offset + self.length)

    def _part(self, layers: range, slots: int, depth: int) -> Tree:
        if depth > _MOST_NESTED:
            raise ValueError(
                f"{self.slots} carries for {self.length} layers that are compiled one"
                f" by one take more than {_MOST_NESTED} checkpoints within each other,"
                " too many for JAX. Give a larger max_carries, or let the layers be a"
                " Stacked."
            )
        if len(layers) == 1:
            return layers[0]
        cut = self._cut(layers, slots)
        if len(cut) == 1:
            return tuple(layers)
        parts = []
        # While a part is reversed, the starts of those before it are held.
        for before, part in enumerate(cut):
            held = 0 if self.off_device else before
            parts.append(self._part(part, slots - held, depth + 1))
        return tuple(parts)

    def _cut(self, layers: range, slots: int) -> list[range]:
        """The parts of some layers, for so many slots: the last one needs no further
        cut.
        """
        if self.segments and layers == self.layers:
            return _divided(layers, self.segments)
        return _divided(layers, _sizes(len(layers), slots))

    def _expansions(self, saves: bool) -> Iterator[_Run]:
        """The runs, and before the first the forward sweep, as the part at the top of a
        stack is cut.

        Each entry of the stack is a part that is still to be reversed, with the input
        of its first layer in the slot that is the entry's place.
        """
        stack = [self.layers]
        while stack:
            part = stack.pop()
            slot = len(stack)
            *waiting, last = self._cut(part, self.slots - slot)
            # The last part is visited at once, with a slot for each layer; the others
            # wait.
            stack += waiting
            visits = len(last)
            # A part of one layer needs no replay: its visit follows.
            while stack and len(stack[-1]) == 1 and not saves:
                stack.pop()
                visits += 1
            starts = [part[0] for part in waiting]
            yield _Run((*starts, *last), slot, visits)

    def program(self, *, saves: bool = False) -> "Program":
        """What a sweep executes: O(length) numbers, however few slots.

        Args:
            saves: whether internals are kept of the layers that a run visits: those of
                one segment.
        """
        runs_of_segments: tuple[int, ...] = ()
        if self.off_device:
            stays, segments = self._from_segments(saves)
            runs_of_segments = tuple(map(len, segments))
            runs = [*itertools.chain(*segments)]
        else:
            stays, runs = self._from_slots(saves)
        columns = []
        all_held: list[int] = []
        runs_first = []
        made = slots = 0
        for held, slot, visits in runs:
            start = held[0]
            top = held[-1]
            end_slot = slot + len(held)
            bottom = top - visits + 1
            last = bottom if saves else top
            advances = max(0, last - start)
            at_bottom = bottom, end_slot - visits, visits
            # In the order of the columns of `Program`.
            columns.append((start, slot, advances, len(all_held), *at_bottom))
            all_held += held[1:]
            runs_first.append(start if advances else last)
            made += top - start
            slots = max(slots, end_slot)
        return Program(
            self.layers,
            stays,
            slots,
            tuple(all_held),
            (*runs_first, runs_first[-1]),
            saves,
            len(all_held) == made,
            runs_of_segments,
            *zip(*columns, strict=True),
        )

    def _from_segments(self, saves: bool) -> tuple[tuple[int, ...], list[list[_Run]]]:
        """The layers whose inputs stay, and the runs of each segment, the last first,
        with the first inputs off the device.
        """
        segments = _divided(self.layers, self.segments)
        runs = []
        for segment in reversed(segments):
            size = len(segment)
            alone = Schedule(size, min(self.slots, size), offset=segment.start)
            runs.append([*alone._expansions(saves)])
        return tuple(segment[0] for segment in segments), runs

    def _from_slots(self, saves: bool) -> tuple[tuple[int, ...], list[_Run]]:
        """The same with all inputs in slots."""
        forward, *runs = self._expansions(saves)
        stays = tuple(forward.held)
        # What the forward sweep left is visited without a replay.
        top_slot = len(stays) - 1
        first_run = _Run(stays[-1:], top_slot, forward.visits)
        is_made_again = saves
        count = len(self.segments)
        sizes = {*self.segments}
        if count > 1 and len(sizes) == 1 and sizes != {1}:
            # What the forward sweep left of the last segment is made again: then all
            # runs are alike, and trip counts static.
            (size,) = sizes
            first_run = _Run(self.layers[-size:], count - 1, size)
            is_made_again = True
        if is_made_again:
            lowest_slot = first_run.slot + len(first_run.held) - first_run.visits
            stays = stays[: lowest_slot + 1]
        return stays, [first_run, *runs]


class Program(NamedTuple):
    """What a sweep executes over the layers of a schedule, as plain integers.

    The forward sweep runs `layers`, and the inputs of those in `stays` stay: in slots
    0, 1, ... or off the device, on the host or on disk. The reverse sweep executes
    runs; a column has one entry for each, in order:

        layer   start                bottom         bottom + visits - 1
        slot    slot                 bottom_slot    bottom_slot + visits - 1
                |----- advances ---->|<---- visits ------|

    1. The replay reads the input of layer `start` from `slot` and runs `advances`
       layers: to the highest that is visited. Where internals are *saved*, it stops
       before the lowest, from where the layers to visit run once more, to save them.
       The inputs that it makes go to the slots above: all, or those in
       `held_layers`.
    2. `visits` layers are visited, down to `bottom`. This may be less than `start`,
       where inputs that earlier runs left in slots are visited too.
    """

    # The numbers of all layers.
    layers: range
    # Those whose inputs stay from the forward sweep.
    stays: tuple[int, ...]
    # How many slots there are.
    slots: int
    # The layers after `start` whose inputs the replays hold, those of all runs in turn.
    held_layers: tuple[int, ...]
    # The layer that each run executes first, for a replay or a visit. Each run reads
    # the next one's ahead; one entry more is for the last run, which may read any.
    runs_first: tuple[int, ...]
    # Whether internals are kept of the layers that a run visits.
    saves: bool
    # Whether replays hold every input that they make: then the slot of an input is
    # found from the layer's number.
    holds_all: bool
    # Where the first inputs of segments are off the device, how many runs reverse each
    # segment, the last one first: before its first run that input is fetched to slot 0.
    # Else ().
    runs_of_segments: tuple[int, ...]
    # From here on the columns.
    start: tuple[int, ...]
    slot: tuple[int, ...]
    advances: tuple[int, ...]
    # Where the layers of a run begin in `held_layers`.
    held_from: tuple[int, ...]
    bottom: tuple[int, ...]
    bottom_slot: tuple[int, ...]
    visits: tuple[int, ...]

    @property
    def sources(self) -> int:
        """How many slots hold inputs that replays start from, or that the lowest layer
        of a run has, from which the internals of all that it visits are made.

        Later slots are read by visits alone. Leaves that these don't read need no more.
        """
        return max(self.bottom_slot) + 1

    @property
    def input_slots(self) -> tuple[int, ...]:
        """The slot of each layer's input in a forward sweep that writes all of them.

        One that doesn't stay goes where the next one that does will replace it; after
        the last of these, to the slot above them.
        """
        return tuple(bisect.bisect_left(self.stays, layer) for layer in self.layers)

    @property
    def replayed(self) -> list[range]:
        """The layers that each replay runs."""
        return _ranges(self.start, self.advances)

    @property
    def visited(self) -> list[range]:
        """The layers that each run visits."""
        return _ranges(self.bottom, self.visits)


def _ranges(starts: Sequence[int], sizes: Sequence[int]) -> list[range]:
    pairs = zip(starts, sizes, strict=True)
    return [range(start, start + size) for start, size in pairs]


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
    sizes = [size + 1] * longer
    sizes += [size] * (segments - longer)
    return _cut_into(sizes)


def bounded(length: int, *, max_carries: int) -> Schedule:
    """The least recomputation that keeps at most `max_carries` layer inputs alive.

    Binomial checkpointing (Griewank and Walther 2000, Algorithm 799: "revolve"): with
    `c` carries and at most `r` forward evaluations of a layer before its visit,
    `binomial(c - 1 + r, r)` layers can be reversed.
    """
    return Schedule(length, min(max_carries, length))


def off_device(schedule: Schedule, max_carries: int | None = None) -> Schedule:
    """The same segments with their first inputs on the host or on disk, and at most so
    many layer inputs on the device while one is reversed: by default all of a segment.
    """
    slots = max(schedule.segments)
    if max_carries is not None:
        slots = min(slots, max_carries)
    return replace(schedule, slots=slots, off_device=True)


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
    enough = functools.partial(_most_layers, slots)
    repeats = 1 + bisect.bisect_left(range(1, size), size, key=enough)
    most_before = _most_layers(slots, repeats - 1)
    least_after = _most_layers(slots - 1, repeats - 1)
    return min(most_before, size - least_after)


def _most_layers(slots: int, repeats: int) -> int:
    """`L` of this file's docstring."""
    return math.comb(slots - 1 + repeats, repeats)


def _sizes(size: int, slots: int) -> list[int]:
    """The sizes of the parts of so many layers; the last has a slot for each layer."""
    sizes = []
    while size > slots:
        sizes.append(_split(size, slots))
        size -= sizes[-1]
        slots -= 1
    return [*sizes, size]


def _divided(layers: range, sizes: Iterable[int]) -> list[range]:
    """Parts of these sizes."""
    parts = []
    for size in sizes:
        parts.append(layers[:size])
        layers = layers[size:]
    return parts


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
