"""What values of configs may be: limits in annotations, and checks of single values.

pydantic reads the limits of what files and the command line give; `check_fields` holds
them for configs that Python code makes.
"""

import dataclasses
import datetime
import functools
import math
import numbers
import operator
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, NamedTuple, TypeAlias

from annotated_types import Ge, Gt, Lt

from .config_sections import union_parts
from .errors import without_credentials

Count: TypeAlias = Annotated[int, Ge(1)]
Positive: TypeAlias = Annotated[float, Gt(0)]
NotNegative: TypeAlias = Annotated[float, Ge(0)]
Share: TypeAlias = Annotated[float, Ge(0), Lt(1)]

CHOICES = "one of"
# How a limit is said, and what compares its number with a value
_LIMITS: dict[str, tuple[str, Any]] = {
    "ge": ("at least", operator.le),
    "gt": ("above", operator.lt),
    "le": ("at most", operator.ge),
    "lt": ("below", operator.gt),
}


def check_fields(section: str, config: Any) -> None:
    """Refuses values that the types, the limits and the `Literal`s in the annotations
    of a dataclass do not allow, and numbers with limits that are not finite.

    What is in lists and dicts is not checked. `section` is what stands before the names
    of its keys, such as `trainer.`.
    """
    for name, kinds in _kinds(type(config)):
        value = getattr(config, name)
        if not _is_one(value, kinds):
            said = " or ".join(_NAMES.get(kind, kind.__name__) for kind in kinds)
            raise TypeError(f"{section}{name} must be {said}, got {value!r}.")
    for name, said, holds in limits(type(config)):
        value = getattr(config, name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{section}{name} must be finite, got {value}.")
        if value is not None and not holds(value):
            raise ValueError(f"{section}{name} must be {said}, got {value!r}.")


# What Python code may give for an annotation, with numbers of NumPy
_GIVEN = {int: numbers.Integral, float: numbers.Real, tuple: Sequence, list: Sequence}
_NAMES = {
    numbers.Integral: "an int",
    numbers.Real: "a float",
    Sequence: "a list",
    type(None): "None",
}


@functools.cache
def _kinds(config_class: type) -> list[tuple[str, tuple[type, ...]]]:
    """The names of fields, each with the classes that its values may be of."""
    hints = typing.get_type_hints(config_class)
    return [
        (field.name, tuple(map(_kind, union_parts(hints[field.name]))))
        for field in dataclasses.fields(config_class)
    ]


def _kind(hint: Any) -> type:
    origin = typing.get_origin(hint) or hint
    if origin is typing.Literal:
        return type(typing.get_args(hint)[0])
    return _GIVEN.get(origin, origin) if isinstance(origin, type) else object


def _is_one(value: Any, kinds: tuple[type, ...]) -> bool:
    # Python takes a bool for a number, and text for a sequence.
    for own in (bool, str):
        if isinstance(value, own):
            return own in kinds or object in kinds
    return isinstance(value, kinds)


class Limit(NamedTuple):
    """A limit of a field's values."""

    name: str
    words: str  # what a value must be
    holds: Callable[[Any], bool]


@functools.cache
def limits(config_class: type) -> list[Limit]:
    """The limits of fields; that of a `Literal` is to be one of its `CHOICES`."""
    found = []
    hints = typing.get_type_hints(config_class, include_extras=True)
    for name, hint in hints.items():
        parts = union_parts(hint)
        for part in parts:
            if typing.get_origin(part) is typing.Literal:
                choices = typing.get_args(part)
                holds = functools.partial(_is_choice, choices)
                words = f"{CHOICES} {', '.join(choices)}"
                if bool in parts:
                    words = f"bool or {words}"
                found.append(Limit(name, words, holds))
            for mark in getattr(part, "__metadata__", ()):
                found += _limits_of(name, mark)
    return found


def _is_choice(choices: Sequence[str], value: Any) -> bool:
    # Of another kind is what another part of the annotation takes, such as a bool
    return not isinstance(value, str) or value in choices


def _limits_of(name: str, mark: Any) -> Iterator[Limit]:
    """Those of an annotation, such as `Ge(1)`."""
    for kind, (words, compare) in _LIMITS.items():
        number = getattr(mark, kind, None)
        if number is not None:
            yield Limit(name, f"{words} {number}", functools.partial(compare, number))


def check_date(key: str, date: str | None) -> None:
    """Refuses text that is no date of the calendar; None is not checked."""
    try:
        datetime.date.fromisoformat(date or "2000-01-01")
    except ValueError as error:
        raise ValueError(
            f"{key} must be a date such as 2025-06-30, got {date!r}: {error}."
        ) from error


def check_folder(key: str, folder: str) -> None:
    """Refuses text that can't be the path of a local folder."""
    if not folder.strip() or "\0" in folder:
        raise ValueError(f"{key} must be the path of a folder, got {folder!r}.")
    if "://" in folder:
        raise ValueError(
            f"{key} = {without_credentials(folder)!r} is a URL; it must be a folder of"
            " this machine, or one that is mounted there. Write its path."
        )
