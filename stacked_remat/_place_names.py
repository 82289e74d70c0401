"""The form of places: names of operations in a layer, such as `"dot_general 2/7"`.

`_places.py` says which operation one stands for.
"""

import re

_PLACE = re.compile(r"(\S+) (\d+)/(\d+)")


def is_place(name: str) -> bool:
    """Whether a name is a place; others are those of `checkpoint_name`."""
    return _PLACE.fullmatch(name) is not None
