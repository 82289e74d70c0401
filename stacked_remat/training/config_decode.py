"""From the entries of a config to its dataclasses, or to an error with the key, the place and the fix."""

import contextlib
import dataclasses
import math
import re
import typing
from collections.abc import Mapping
from datetime import date, datetime
from typing import Any, TypeVar

import draccus.utils
from draccus.parsers.decoding import get_decoding_fn

from .._messages import did_you_mean, shown
from .config_reference import (
    config_rows,
    is_registry,
    named_section_class,
    section_class,
    type_names,
    union_parts,
)
from .config_tree import Entry
from .errors import ConfigError

Config = TypeVar("Config")


def decode_config(config_class: type[Config], tree: Entry) -> Config:
    """The config of this class that a tree of entries describes.

    Numbers may be written as text, since YAML takes `1e-4` for text; no other value changes its type.

    Raises:
        ConfigError: an unknown or missing key, or a value of another type or out of range; names the key,
            where it was written, and the nearest valid one.
    """
    return _Decoder(config_class).section(config_class, tree, ())


class _Misfit(Exception):
    """A value that its annotation does not allow; its text says what to write, where that is known."""


class _Decoder:
    """Decodes one config; knows all of its keys, for hints in errors."""

    def __init__(self, config_class: Any):
        self._config_class = config_class

    def section(self, config_class: Any, entry: Entry, path: tuple[str, ...]) -> Any:
        """The instance of `config_class`, or of the type chosen from it, that a section describes."""
        name = ".".join(path)
        _check_section(entry, name, "is a section of keys", config_class)
        registry, keys = None, dict(entry.value)
        if is_registry(config_class):
            registry, config_class = config_class, _chosen(config_class, keys, entry, name)
        hints, fields = typing.get_type_hints(config_class), dataclasses.fields(config_class)
        valid = [field.name for field in fields]
        for key, own in keys.items():
            if key not in valid:
                hint = self._meant(key, registry, valid)
                raise ConfigError(f"Unknown key `{'.'.join((*path, key))}` {own.where}.{hint}")
        values = {key: self.value(hints[key], own, (*path, key)) for key, own in keys.items()}
        for field in fields:
            required = field.default is field.default_factory is dataclasses.MISSING
            if required and field.name not in values:
                raise ConfigError(f"`{name}` {entry.where} lacks the key `{field.name}`.")
        try:
            return config_class(**values)
        except (ValueError, OverflowError) as error:
            named = not path or re.search(rf"\b{re.escape(path[-1])}\b", str(error))
            of = "" if named else f" (of `{name}`)"
            raise ConfigError(f"Bad config {_blamed(entry, str(error))}{of}: {error}") from error

    def value(self, hint: Any, entry: Entry, path: tuple[str, ...]) -> Any:
        """What a field of this annotation gets for an entry."""
        value, parts, name = entry.plain, union_parts(hint), ".".join(path)
        optional = type(None) in parts
        if hint is Any or (optional and value is None):
            return value
        if (section := section_class(hint)) is not None:
            return self.section(section, entry, path)
        if (named := named_section_class(hint)) is not None:
            _check_section(entry, name, "holds sections, each under its name", named)
        fix = ""
        # The value's own type first: `true` for `str | bool` is a bool.
        for part in sorted(parts, key=lambda part: type(value) is not (typing.get_origin(part) or part)):
            try:
                if part is not type(None) and value is not None:
                    return self._fitted(part, entry, path)
            except _Misfit as misfit:
                fix = fix or str(misfit)
        expected = "|".join(type_names(hint))
        raise ConfigError(f"`{name}` {entry.where} must be {expected}, got {_got(value)}.{fix}")

    def _fitted(self, hint: Any, entry: Entry, path: tuple[str, ...]) -> Any:
        """The value for an annotation that is not a union, or a `_Misfit`."""
        value, origin, arguments = entry.plain, typing.get_origin(hint) or hint, typing.get_args(hint)
        if origin in (bool, int, float, str):
            return _scalar(hint, value)
        if origin is typing.Literal:
            for choice in arguments:
                if value == choice and type(value) is type(choice):
                    return choice
            raise _Misfit(did_you_mean(str(value), [str(choice) for choice in arguments]))
        if origin in (tuple, list) and not isinstance(value, list):
            raise _Misfit("" if isinstance(value, Mapping) else f" Write [{value}].")
        if origin is list or arguments[1:] == (Ellipsis,):
            own = arguments[0] if arguments else Any
            items = ((str(at), Entry.of(item, entry.where)) for at, item in enumerate(value))
            return origin(self.value(own, item, (*path, at)) for at, item in items)
        if origin is dict:
            if not entry.is_section:
                raise _Misfit
            own = arguments[1] if arguments else Any
            return {key: self.value(own, item, (*path, key)) for key, item in entry.value.items()}
        try:
            return get_decoding_fn(hint)(value, path)
        except (draccus.utils.DraccusException, ValueError, TypeError) as error:
            raise ConfigError(f"`{'.'.join(path)}` {entry.where} can't be read: {error}") from error

    def _meant(self, key: str, registry: Any, valid: list[str]) -> str:
        """What an unknown key may have been meant to be."""
        listed = f" Valid: {', '.join(valid) or 'none'}."
        choices = {} if registry is None else registry.get_known_choices()
        owners = [
            f"`type: {name}`"
            for name, choice in choices.items()
            if key in [field.name for field in dataclasses.fields(choice)]
        ]
        if owners:
            return f" It is one of {', '.join(owners)}.{listed}"
        rows = config_rows(self._config_class)
        same = dict.fromkeys(row.dotted for row in rows if row.dotted.rpartition(".")[2] == key)
        if same:
            return f" Did you mean `{'` or `'.join(list(same)[:3])}`?{listed}"
        return did_you_mean(key, valid) + listed


def _scalar(kind: Any, value: Any) -> Any:
    is_bool = isinstance(value, bool)
    if kind is bool:
        if is_bool or value in ("true", "false"):
            return value in (True, "true")
    elif kind is str:
        if isinstance(value, str) and "\0" in value:
            raise _Misfit(" Leave the null character out.")
        if isinstance(value, str | int | date) and not isinstance(value, bool | datetime):
            return str(value)
        if isinstance(value, dict | list):
            raise _Misfit
        raise _Misfit(f""" Put it in quotes; on a command line, in two kinds: "'{value}'".""")
    elif isinstance(value, str | int | float) and not is_bool:
        return _number(kind, value)
    raise _Misfit


def _number(kind: Any, value: str | float) -> Any:
    with contextlib.suppress(ValueError, OverflowError):
        if kind is int and not isinstance(value, float):
            if -(2**63) <= (number := int(value)) < 2**63:
                return number
            raise _Misfit(" It must fit in 64 bits: below 2**63.")
    with contextlib.suppress(ValueError, OverflowError):
        number = float(value)
        if kind is float and math.isfinite(number):
            return number
        if kind is int and number.is_integer():
            raise _Misfit(f" Write {int(number)}.")
    raise _Misfit


def _check_section(entry: Entry, name: str, what: str, config_class: Any) -> None:
    if entry.is_section:
        return
    if is_registry(config_class):
        keys = [f"type: {'|'.join(config_class.get_known_choices())}", "..."]
    else:
        names = [field.name for field in dataclasses.fields(config_class)]
        keys = names[:4] + ["..."] * (len(names) > 4)
    raise ConfigError(
        f"`{name}` {entry.where} {what}, got {_got(entry.plain)}. Write its keys there ({', '.join(keys)}), "
        f"or leave `{name}` out."
    )


def _got(value: Any) -> str:
    return "nothing (null)" if value is None else shown(value)


def _chosen(registry: Any, keys: dict[str, Entry], entry: Entry, name: str) -> Any:
    """The class that a section's `type` names; takes that key out of `keys`."""
    choices = registry.get_known_choices()
    if "type" not in keys:
        default = registry.default_choice_name()
        if default is None:
            raise ConfigError(
                f"`{name}` {entry.where} lacks the key `type`. Known types: {', '.join(choices)}."
            )
        return choices[default]
    chosen = keys.pop("type")
    if not isinstance(chosen.value, str) or chosen.value not in choices:
        hint = did_you_mean(str(chosen.plain), choices)
        raise ConfigError(
            f"`{name}.type` {chosen.where} is {chosen.plain!r}.{hint} Valid: {', '.join(choices)}."
        )
    return choices[chosen.value]


def _blamed(section: Entry, message: str) -> str:
    """Where the entries that a validation error mentions were written; all places if it mentions none."""
    found = list(section.leaves())
    for length in (2, 1):  # `paint.layers`, then `layers` alone
        names = [(re.escape(".".join(path[-length:])), entry.where) for path, entry in found]
        mentioned = [where for name, where in names if re.search(rf"\b{name}\b", message)]
        if mentioned:
            return " and ".join(dict.fromkeys(mentioned))
    return " and ".join(dict.fromkeys(entry.where for _, entry in found)) or section.where
