"""From what was written for a config to its dataclasses, or to an error that says where and what is wrong."""

import dataclasses
import re
import typing
from typing import Any, TypeVar

from .config_entries import Entry, leaves, shortened
from .config_error import ConfigError
from .config_hints import allows_none, is_registry, keys_below, named_section_class, section_class
from .config_value import ValueMismatch, decode_value, nearest

Config = TypeVar("Config")


def decode_config(config_class: type[Config], tree: Entry) -> Config:
    """The config of this class that a tree of entries describes.

    Raises:
        ConfigError: an unknown key, one that is lacking, or a value that is of another type or out of range;
            names the key, where it was written, and the nearest that would do.
    """
    return _Decoder(config_class).section(config_class, tree, ())


class _Decoder:
    """Decodes one config; knows all of its keys, for hints in errors."""

    def __init__(self, config_class: Any):
        self._config_class = config_class

    def section(self, config_class: Any, entry: Entry, path: tuple[str, ...]) -> Any:
        """The instance of `config_class`, or of the type chosen from it, that a section describes."""
        name = ".".join(path)
        _check_section(entry, name, "is a section of keys", _keys_of(config_class))
        registry, keys = None, dict(entry.value)
        if is_registry(config_class):
            registry, config_class = config_class, _chosen(config_class, keys, entry, name)
        hints, fields = typing.get_type_hints(config_class), dataclasses.fields(config_class)
        valid = [field.name for field in fields]
        for key, own in keys.items():
            if key not in valid:
                hint = self._meant(key, path, registry, valid)
                raise ConfigError(f"Unknown key `{'.'.join((*path, key))}` {own.where}.{hint}")
        values = {key: self._entry(hints[key], own, (*path, key)) for key, own in keys.items()}
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

    def _entry(self, hint: Any, entry: Entry, path: tuple[str, ...]) -> Any:
        name = ".".join(path)
        if allows_none(hint):
            if entry.plain is None:
                return None
            if entry.replaced is not None and entry.replaced.value is None:
                entry = Entry(entry.value, entry.where)  # an optional section that was left out below
        if (section := section_class(hint)) is not None:
            return self.section(section, entry, path)
        if (named := named_section_class(hint)) is not None:
            _check_section(entry, name, "holds sections, each under its name", _keys_of(named))
            return {key: self.section(named, own, (*path, key)) for key, own in entry.value.items()}
        try:
            return decode_value(hint, entry.plain, path)
        except ValueMismatch as error:
            raise ConfigError(f"`{'.'.join(error.path)}` {entry.where} {error.problem}") from error

    def _meant(self, key: str, path: tuple[str, ...], registry: Any, valid: list[str]) -> str:
        """What an unknown key may have been meant to be."""
        listed = f" Valid: {', '.join(valid) or 'none'}."
        others = {} if registry is None else registry.get_known_choices()
        owners = [
            name
            for name, choice in others.items()
            if key in {field.name for field in dataclasses.fields(choice)}
        ]
        if owners:
            return f" It is one of `type: {'`, `type: '.join(owners)}`.{listed}"
        there = [".".join(other) for other in keys_below(self._config_class) if other[-1] == key]
        if there:
            return f" Did you mean `{'` or `'.join(there[:3])}`?{listed}"
        return nearest(key, valid) + listed


def _check_section(entry: Entry, name: str, what: str, keys: list[str]) -> None:
    """Refuses anything else where a section belongs, be it under keys that were laid over it."""
    found = entry if entry.replaced is None else entry.replaced
    if not found.is_section:
        got = "nothing (null)" if found.plain is None else shortened(found.plain)
        raise ConfigError(
            f"`{name}` {found.where} {what}, got {got}. Write its keys there ({', '.join(keys)}), or leave "
            f"`{name}` out."
        )


def _keys_of(config_class: Any) -> list[str]:
    """The keys of a section, for errors; where `type` chooses among several sections, that alone."""
    if is_registry(config_class):
        return [f"type: {'|'.join(config_class.get_known_choices())}", "..."]
    names = [field.name for field in dataclasses.fields(config_class)]
    return names[:4] + ["..."] * (len(names) > 4)


def _chosen(registry: Any, keys: dict[str, Entry], entry: Entry, name: str) -> Any:
    """The class that a section's `type` names; takes that key out of `keys`."""
    choices = registry.get_known_choices()
    chosen = keys.pop("type", None)
    if chosen is None:
        default = registry.default_choice_name()
        if default is None:
            raise ConfigError(
                f"`{name}` {entry.where} lacks the key `type`. Known types: {', '.join(choices)}."
            )
        return choices[default]
    if not isinstance(chosen.value, str) or chosen.value not in choices:
        hint = nearest(str(chosen.plain), list(choices))
        raise ConfigError(
            f"`{name}.type` {chosen.where} is {chosen.plain!r}.{hint} Valid: {', '.join(choices)}."
        )
    return choices[chosen.value]


def _blamed(section: Entry, message: str) -> str:
    """Where the entries stand that a message of a section's validation speaks of; all of them if of none."""
    found = list(leaves(section))
    for length in (2, 1):  # `paint.layers`, then `layers` alone
        names = [(re.escape(".".join(path[-length:])), entry.where) for path, entry in found]
        spoken_of = [where for name, where in names if re.search(rf"\b{name}\b", message)]
        if spoken_of:
            return " and ".join(dict.fromkeys(spoken_of))
    return " and ".join(dict.fromkeys(entry.where for _, entry in found)) or section.where
