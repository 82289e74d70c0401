"""One value of a config as its annotation says, or what is wrong with it."""

import difflib
import math
import typing
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

import draccus
import draccus.utils
from draccus.parsers.decoding import get_decoding_fn

from .config_entries import shortened
from .config_hints import type_name, type_names, union_parts
from .credentials import without_credentials

_SCALARS = (bool, int, float, str)


class ValueMismatch(ValueError):
    """A value that its annotation does not allow.

    Attributes:
        path: of the value or the item of it that is wrong.
        problem: what follows the key and its place in an error.
        fix: the end of it, which says what to write; empty where that is not known.
    """

    def __init__(self, path: tuple[str, ...], problem: str, fix: str = ""):
        super().__init__(path, problem, fix)
        self.path = path
        self.problem = problem + fix
        self.fix = fix


def decode_value(hint: Any, value: Any, path: tuple[str, ...]) -> Any:
    """What a field of this annotation gets for a value that YAML gave.

    Numbers may be written as text, since YAML takes `1e-4` for text; nothing else changes its type unseen.

    Raises:
        ValueMismatch: the value is of another type, or none of the choices.
    """
    parts = union_parts(hint)
    if hint is Any or (value is None and type(None) in parts):
        return value
    if value is None:
        raise ValueMismatch(path, f"has no value; it must be {type_name(hint)}.")
    parts = [part for part in parts if part is not type(None)]
    parts.sort(key=lambda part: type(value) is not (typing.get_origin(part) or part))  # its own type first
    mismatches = []
    for part in parts:
        try:
            return _decode_one(part, value, path)
        except ValueMismatch as error:
            mismatches.append(error)
    first = mismatches[0]
    if first.path != path or (len(parts) == 1 and parts[0] not in _SCALARS):
        raise first
    raise _mismatch(hint, value, path, first.fix)


def _decode_one(hint: Any, value: Any, path: tuple[str, ...]) -> Any:
    origin = typing.get_origin(hint) or hint
    if hint in (int, float):
        return _number(hint, value, path)
    if hint is str:
        if isinstance(value, str):
            if "\0" in value:
                raise _mismatch(hint, value, path, " Leave the null character out.")
            return value
        if isinstance(value, int | date) and not isinstance(value, bool):
            return str(value)
        raise _mismatch(hint, value, path, "" if isinstance(value, dict | list) else " Put it in quotes.")
    if hint is bool:
        if isinstance(value, bool) or value in ("true", "false"):
            return value in (True, "true")
        raise _mismatch(hint, value, path)
    if origin is typing.Literal:
        return _choice(hint, value, path)
    if origin in (tuple, list):
        return _items(origin, typing.get_args(hint), value, path)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise _mismatch(hint, value, path)
        (_, item) = typing.get_args(hint) or (str, Any)
        return {key: decode_value(item, own, (*path, key)) for key, own in value.items()}
    try:
        return get_decoding_fn(hint)(value, path)
    except (draccus.utils.DraccusException, ValueError, TypeError) as error:
        raise ValueMismatch(path, f"can't be read: {error}") from error


def _number(hint: Any, value: Any, path: tuple[str, ...]) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _mismatch(hint, value, path)
    try:
        if hint is float or not isinstance(value, float):
            number = hint(value)
            if hint is int and not -(2**63) <= number < 2**63:
                raise _mismatch(hint, value, path, " It must fit in 64 bits: below 2**63.")
            if math.isfinite(number):
                return number
    except ValueMismatch:
        raise
    except (ValueError, OverflowError):
        pass
    raise _mismatch(hint, value, path, _whole(value) if hint is int else "")


def _whole(value: float | str) -> str:
    """What to write for a whole number that is written as `1e3` or `1000.0`."""
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return ""
    return f" Write {int(number)}." if number.is_integer() else ""


def _choice(hint: Any, value: Any, path: tuple[str, ...]) -> Any:
    choices = typing.get_args(hint)
    for choice in choices:
        if value == choice and type(value) is type(choice):
            return choice
    raise _mismatch(hint, value, path, nearest(str(value), [str(choice) for choice in choices]))


def _items(origin: Any, types: tuple[Any, ...], value: Any, path: tuple[str, ...]) -> Any:
    if not isinstance(value, list | tuple):
        raise ValueMismatch(path, f"is a list, got {shortened(value)}.", _as_list(value))
    types = types or (Any, ...)
    each = list(types) if origin is tuple and types[-1] is not Ellipsis else [types[0]] * len(value)
    if len(each) != len(value):
        raise ValueMismatch(path, f"has {len(each)} items, got {len(value)}: {shortened(value)}.")
    pairs = enumerate(zip(each, value, strict=True))
    return origin(decode_value(item, own, (*path, str(index))) for index, (item, own) in pairs)


def _as_list(value: Any) -> str:
    return "" if isinstance(value, Mapping) else f" Write [{value}]."


def _mismatch(hint: Any, value: Any, path: tuple[str, ...], fix: str = "") -> ValueMismatch:
    what = type_name(hint)
    if typing.get_origin(hint) is typing.Literal:
        what = f"one of {', '.join(type_names(hint))}"
    return ValueMismatch(path, f"must be {what}, got {shortened(value)}.", fix)


def check_folder(key: str, folder: str) -> None:
    """Refuses what can't be the path of a local folder.

    Raises:
        ValueError: says why.
    """
    if not folder.strip() or "\0" in folder:
        raise ValueError(f"{key} must be the path of a folder, got {folder!r}.")
    if "://" in folder:
        raise ValueError(
            f"{key} = {without_credentials(folder)!r} is a URL, and must be a folder of this machine or one "
            f"that is mounted there. Write its path."
        )
    try:
        Path(folder).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{key} = {folder!r} names no home folder: {error}") from error


def nearest(name: str, valid: list[str]) -> str:
    """A sentence that asks whether the nearest of `valid` was meant; nothing if none is near."""
    close = difflib.get_close_matches(name, valid, n=1)
    return f" Did you mean `{close[0]}`?" if close else ""
