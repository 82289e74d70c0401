"""Names on loops and conditionals that say how often they run, for code that
counts a program's work.

A trip count that comes from a table, or from data, can't be read off a traced or a
compiled program. A name stays with the operation through transformations and compilers.
Whoever makes a loop calls `known_trips` around it. `memory/`, which counts the FLOPs of
jaxprs and the transfers of compiled programs, calls `trips_in` with the scopes around
an operation:

    with known_trips(15, 6):        the loop runs 15 trips in all, entered 6 times
        lax.fori_loop(...)          in a scope "stacked_remat_trips_15_6"

    trips_in("jit(f)/stacked_remat_trips_15_6") == (Fraction(15, 6), True)
"""

import contextlib
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, TypeAlias

import jax

Named: TypeAlias = contextlib.AbstractContextManager[Any]


def known_trips(total: int | None, entered: int = 1, *, exact: bool = True) -> Named:
    """Within it, a `while` loop is traced that runs `total` times in all, if known,
    when entered so often.

    Not `exact` where data decide, and it is expected to run so often.
    """
    if total is None:
        return contextlib.nullcontext()
    return _named("trips" if exact else "expected", total, entered)


def known_branches(taken: Sequence[int]) -> Named:
    """Within it, a conditional is traced each of whose branches is taken so often."""
    return _named("branches", *taken)


def known_products(flops: int) -> Named:
    """Within it, kernels are called whose matrix products take so many FLOPs each."""
    return _named("products", flops)


def trips_in(scopes: str) -> tuple[Fraction | None, bool]:
    """The mean trips of a loop, by the named scopes around it, or None; and whether
    they are exact.
    """
    for what in ("trips", "expected"):
        if numbers := _numbers(scopes, what):
            total, entered = numbers
            return Fraction(total, max(1, entered)), what == "trips"
    return None, False


def branches_in(scopes: str) -> list[Fraction]:
    """The share that each branch of a conditional has, by the named scopes around it;
    empty if not known.
    """
    taken = _numbers(scopes, "branches")
    total = max(1, sum(taken))
    return [Fraction(count, total) for count in taken]


def products_in(scopes: str) -> int | None:
    """The FLOPs of a kernel's matrix products, by the named scopes around it; None if
    not known.
    """
    flops = _numbers(scopes, "products", at_end=False)
    return flops[0] if flops else None


def _named(what: str, *numbers: int) -> Named:
    words = "stacked_remat", what, *map(str, numbers)
    return jax.named_scope("_".join(words))


def _numbers(scopes: str, what: str, *, at_end: bool = True) -> list[int]:
    """The numbers in the first scope of this name; empty if there is none.

    With `at_end` the innermost scope alone counts: a name further out is that of
    another loop, around this one.
    """
    last_scope = "[^/]*$" if at_end else ""
    found = re.search(rf"stacked_remat_{what}((?:_\d+)+){last_scope}", scopes)
    if found is None:
        return []
    # `_3_5`: nothing stands before the first of them.
    _, *numbers = found[1].split("_")
    return [*map(int, numbers)]
