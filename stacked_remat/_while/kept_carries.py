"""Which carries of a loop without a bound are kept: integers, computed while it runs.

`slots` carries are kept at a time, that of step 0 among them. A reversal visits the
steps from the last to the first and needs the input carry of each. From a kept carry it
runs steps forward again; it may keep carries on the way in the slots whose carries are
no longer needed.

**The cost of a reversal.** Let `s` slots be free for `n` steps, the first step's input
in one of them, and let each step run forward at most `r` times before its visit. Then
`most(s, r) = binomial(s + r, r)` steps can be reversed (Griewank and Walther 2000,
"Algorithm 799: revolve", https://doi.org/10.1145/347837.347846): the steps before the
next kept carry run once to get there and have a run less left, and those after it have
a slot less, so `most(s, r) = most(s, r - 1) + most(s - 1, r)`. This is `L(s + 1, r)` of
`_schedule.py`, whose slots count the carry of the step that is visited too; here it is
in none. `most(s, k) - most(s, k - 1)` steps run `k` times, so in all

    runs(n, s) = r n - binomial(s + r, r - 1)       for the least r with most(s, r) >= n

and because each of these lines lies below the others where it does not hold,

    runs(n, s) = maximum over r of (r n - binomial(s + r, r - 1)).

**In the forward pass** the number of steps is unknown. Kept carries cut the steps so
far into segments, and the last segment is reversed first: with `slots - i` slots for
the one that starts at the i-th kept carry. If the loop ended now, the reversal would
run the sum of `runs` over the segments. So at each step there is a choice: keep its
input and drop one of the others, or don't keep it; the cheapest is taken. That is
greedy, and no proof is known that it is good for all later steps. Counted up to 1,000
steps, it runs at most 18% more steps than a reversal that knew their number where 2
carries are kept, 13% with 3 and 6% with 8, and 1 to 2.5% more on average
(`tests/test_while_loop.py`). The online methods of Stumm and Walther 2010
(https://doi.org/10.1137/080742439) and of Wang, Moin and Iaccarino 2009
(https://doi.org/10.1137/080727890) choose from fewer places.

**In the reverse pass** the number of steps is known, and `split` is optimal.
"""

import functools
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

# Steps are counted in int32.
MOST_STEPS = 2**31 - 1
# Up to how many runs of a step are looked up. More are needed with 2 slots from 2,145
# steps on and with 3 from 47,905 on; the choices are then not the best ones.
_MOST_RUNS = 64


class Kept(NamedTuple):
    """Where the kept carries are, in the order of their steps.

    The first is that of step 0. At the beginning all slots hold it, so that every entry
    is valid.
    """

    # The step whose input carry it is, not decreasing
    steps: Int[Array, " slots"]
    # The slot that holds it
    slot: Int[Array, " slots"]

    @classmethod
    def at_start(cls, slots: int) -> "Kept":
        return cls(jnp.zeros(slots, jnp.int32), jnp.arange(slots, dtype=jnp.int32))

    def replaced(self, dropped: Array, step: Array) -> "Kept":
        """Without the entry of this number, and with the input of a later step, which
        gets its slot.
        """
        slots = len(self.steps)
        number = jnp.arange(slots, dtype=jnp.int32)
        # Entries after the dropped one move down; the new one is the last.
        source = jnp.where(number < dropped, number, number + 1) % slots
        is_new = number == slots - 1
        return Kept(
            jnp.where(is_new, step, self.steps[source]),
            jnp.where(is_new, self.slot[dropped], self.slot[source]),
        )


def to_drop(kept: Kept, step: Array) -> tuple[Array, Bool[Array, ""]]:
    """The entry to drop for the input of a step, and whether to keep that input at
    all: what makes a reversal cheapest if this step is the last.
    """
    slots = len(kept.steps)
    if slots == 1:
        return jnp.int32(0), jnp.bool(False)
    # How many slots each segment has for its reversal
    free = np.arange(slots, 0, -1)
    lengths = jnp.append(kept.steps[1:], step) - kept.steps
    unchanged = _runs(lengths, free)
    # Entries after the dropped one have a slot more.
    with_one_more = _runs(lengths[1:], free[:-1])
    # Without an entry, its steps belong to the segment before it.
    joined = _runs(lengths[:-1] + lengths[1:], free[:-1])
    before = jnp.cumsum(unchanged) - unchanged
    after = jnp.sum(with_one_more) - jnp.cumsum(with_one_more)
    # For each entry but the first. The new segment has one step, which needs no run.
    costs = before[:-1] + joined + after
    without_new = before[-1] + _runs(lengths[-1:] + 1, free[-1:])[0]
    best = jnp.argmin(costs).astype(jnp.int32)
    return best + 1, costs[best] < without_new


def split(length: Array, slots: Array, most_slots: int) -> Array:
    """How many of `length` steps to run before the next carry is kept, of at least 2,
    with `slots` of them free, at least 2.

    With the least `r` that is enough, at most `most(slots, r - 1)` steps may come
    before the cut, and at least `most(slots - 1, r - 1)` after it.
    """
    table = jnp.asarray(_most(most_slots))
    enough = table[slots]
    repeats = jnp.sum(enough < length, dtype=jnp.int32)
    is_known = repeats < len(enough)
    least = jnp.minimum(repeats, len(enough) - 1) - 1
    before = jnp.minimum(enough[least], length - table[slots - 1, least])
    # As many steps after the cut as the looked-up numbers of runs are enough for
    return jnp.where(is_known, before, length - table[slots - 1, -1])


def _runs(lengths: Int[Array, " n"], slots: np.ndarray) -> Float[Array, " n"]:
    """`runs` for each length with each number of slots; 0 for no steps."""
    slopes, offsets = _lines(int(slots.max()))
    lines = slopes[None] * lengths[:, None].astype(jnp.float32) - offsets[slots]
    return jnp.max(lines, axis=1)


@functools.cache
def _most(slots: int) -> np.ndarray:
    """`most(s, r)` for `s` from 0 to `slots` and `r` from 0 on, as int32."""
    repeats = 1
    while repeats < _MOST_RUNS and math.comb(slots + repeats, repeats) < MOST_STEPS:
        repeats += 1
    rows = []
    for s in range(slots + 1):
        row = [min(math.comb(s + r, r), MOST_STEPS) for r in range(repeats + 1)]
        rows.append(row)
    return np.array(rows, np.int32)


@functools.cache
def _lines(slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Slopes, and for each number of slots the offsets, of the lines whose maximum is
    `runs`. The first line is 0.
    """
    repeats = _most(slots).shape[1]
    offsets = []
    for s in range(slots + 1):
        row = [math.comb(s + r, r - 1) for r in range(1, repeats)]
        offsets.append([0, *row])
    # As floats: the products are too large for int32, and only comparisons depend on
    # them.
    return np.arange(repeats, dtype=np.float32), np.array(offsets, np.float32)
