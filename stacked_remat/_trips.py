"""Names on loops and conditionals that say how often they run, for whoever counts a program's work.

A trip count that comes from a table, or from data, can't be read off a traced or a compiled program. A name
stays with the operation through transformations and compilers.
"""

import contextlib
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax

_SCOPE = "stacked_remat_"
_OF_LOOP = re.compile(rf"{_SCOPE}(trips|expected)_(\d+)_of_(\d+)[^/]*$")
_OF_BRANCHES = re.compile(rf"{_SCOPE}branches((?:_\d+)+)[^/]*$")
_OF_KERNEL = re.compile(rf"{_SCOPE}blocks_(\d+)")
Named = contextlib.AbstractContextManager[Any]


def known_trips(total: int | None, entered: int = 1) -> Named:
    """Within it, a `while` loop is traced that runs `total` times in all when it is entered so often.

    Where that is None, it is not known.
    """
    if total is None:
        return contextlib.nullcontext()
    return jax.named_scope(f"{_SCOPE}trips_{total}_of_{entered}")


def expected_trips(trips: int) -> Named:
    """Within it, a `while` loop is traced that is expected to run so often, which data decide."""
    return jax.named_scope(f"{_SCOPE}expected_{trips}_of_1")


def known_branches(taken: Sequence[int]) -> Named:
    """Within it, a conditional is traced each of whose branches is taken so often."""
    return jax.named_scope("_".join([f"{_SCOPE}branches", *map(str, taken)]))


def known_blocks(count: int) -> Named:
    """Within it, a splash kernel is called whose table has so many blocks in which anything is visible."""
    return jax.named_scope(f"{_SCOPE}blocks_{count}")


def trips_in(scopes: str) -> tuple[Fraction | None, bool]:
    """The mean trips of a loop, by the named scopes around it, or None; and whether they are exact."""
    found = _OF_LOOP.search(scopes)
    if found is None:
        return None, False
    return Fraction(int(found[2]), max(1, int(found[3]))), found[1] == "trips"


def branches_in(scopes: str) -> list[Fraction]:
    """The share that each branch of a conditional has, by the named scopes around it; empty if not known."""
    found = _OF_BRANCHES.search(scopes)
    taken = [int(each) for each in found[1].split("_")[1:]] if found else []
    return [Fraction(each, max(1, sum(taken))) for each in taken]


def blocks_in(scopes: str) -> int | None:
    """How many blocks of a splash kernel's table are visible, by the named scopes around it."""
    found = _OF_KERNEL.search(scopes)
    return int(found[1]) if found else None
