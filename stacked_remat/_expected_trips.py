"""How often a loop is expected to run whose trips depend on data, for whoever reads the program."""

import contextlib
import re
from typing import Any

import jax

_SCOPE = "stacked_remat_expected_trips_"
_ENDS_IN_SCOPE = re.compile(rf"{_SCOPE}(\d+)[^/]*$")


def expected_trips(trips: int) -> contextlib.AbstractContextManager[Any]:
    """Within it, a `while` loop is traced as one that is expected to run so often."""
    return jax.named_scope(f"{_SCOPE}{trips}")


def trips_expected(scopes: str) -> int | None:
    """The trips that are expected of a loop, by the named scopes around it; None where these don't say."""
    found = _ENDS_IN_SCOPE.search(scopes)
    return int(found[1]) if found else None
