"""From a YAML file and dotted command-line overrides to a checked config dataclass, and back."""

import contextlib
import dataclasses
import difflib
import math
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import draccus
import draccus.utils
from draccus.parsers.decoding import get_decoding_fn

from .._messages import did_you_mean, shown
from .config_reference import (
    config_keys,
    config_reference,
    is_registry,
    named_section_class,
    section_class,
    type_name,
    union_parts,
)
from .config_tree import ON_THE_COMMAND_LINE, Key, leaves, plain, read_config_file, set_key
from .errors import ConfigError, all_without_credentials

Config = TypeVar("Config")

_CONFIG_PATH = "config_path"


def parse_config(config_class: type[Config], arguments: Sequence[str]) -> Config:
    """Reads `--config_path FILE` and `--dotted.key VALUE` overrides into a config.

    Numbers may be written as text, since YAML takes `1e-4` for text; no other value changes its type.

    Args:
        config_class: a dataclass of values, dataclasses and registries (`draccus.ChoiceRegistry`).
        arguments: the command line without the program's name. The file and the values are YAML, in which
            `!include FILE` inserts the content of another file. `--help` prints all keys and exits.

    Raises:
        ConfigError: an unknown or missing key, a value of another type or out of range, or a file that can't
            be read; names the key, where it was written, and the nearest valid one.
    """
    if "--help" in arguments or "-h" in arguments:
        print(config_reference(config_class), end="")
        raise SystemExit(0)
    given: dict[str, str] = {}
    remaining = list(arguments)
    while remaining:
        flag = remaining.pop(0)
        if not flag.startswith("--") or len(flag) == 2:
            raise ConfigError(f"Expected `--key value` on the command line, got {flag!r}.")
        key, equals, value = flag[2:].partition("=")
        if not equals and not remaining:
            raise ConfigError(f"`--{key}` on the command line has no value: write `--{key} VALUE`.")
        close = difflib.get_close_matches(key, [_CONFIG_PATH], cutoff=0.8)
        if key != _CONFIG_PATH and (key == "config" or close):
            raise ConfigError(f"Unknown key `{key}` on the command line. Did you mean `--{_CONFIG_PATH}`?")
        given[key] = value if equals else remaining.pop(0)
    path = given.pop(_CONFIG_PATH, None)
    tree: dict[Key, Any] = {} if path is None else read_config_file(path)
    for key, text in given.items():
        set_key(tree, key, text)
    return decode_config(config_class, tree)


def decode_config(config_class: type[Config], tree: dict[Key, Any]) -> Config:
    """The instance of `config_class` that sections of plain values describe; errors as `parse_config`."""
    return _Decoder(config_class).section(config_class, tree, ())


def config_as_dict(config: Any) -> dict[str, Any]:
    """The config as plain dicts, lists and scalars, with every default filled in and registries' `type` keys.

    Written as YAML or JSON it is read back to an equal config, except for passwords and tokens in URLs, which
    are left out.
    """
    return all_without_credentials(draccus.encode(config))


class _Misfit(Exception):
    """A value that its annotation does not allow; its text says what to write, where that is known."""


def _named(path: tuple[Key, ...]) -> str:
    """A key and its place, for errors."""
    return f"`{'.'.join(path)}` {path[-1].where}" if path else "The config"


class _Decoder:
    """From a tree to dataclasses; knows the class of the whole config, for hints in errors."""

    def __init__(self, config_class: Any):
        self._config_class = config_class

    def section(self, config_class: Any, tree: Any, path: tuple[Key, ...]) -> Any:
        """The instance of `config_class`, or of the type chosen from it, that a section describes."""
        _check_section(tree, path, "is a section of keys", config_class)
        registry, tree = config_class if is_registry(config_class) else None, dict(tree)
        if registry is not None:
            config_class = _chosen(registry, tree, path)
        hints, fields = typing.get_type_hints(config_class), dataclasses.fields(config_class)
        valid = [field.name for field in fields]
        for key in tree:
            if key not in valid:
                raise ConfigError(f"Unknown key {_named((*path, key))}.{self._meant(key, registry, valid)}")
        values = {key: self.value(hints[key], own, (*path, key)) for key, own in tree.items()}
        for field in fields:
            required = field.default is field.default_factory is dataclasses.MISSING
            if required and field.name not in values:
                raise ConfigError(f"{_named(path)} lacks the key `{field.name}`.")
        try:
            return config_class(**values)
        except (ValueError, OverflowError) as error:
            named = not path or re.search(rf"\b{re.escape(path[-1])}\b", str(error))
            of = "" if named else f" (of `{'.'.join(path)}`)"
            raise ConfigError(f"Bad config {_blamed(tree, path, str(error))}{of}: {error}") from error

    def value(self, hint: Any, value: Any, path: tuple[Key, ...]) -> Any:
        """What a field of this annotation gets."""
        parts = union_parts(hint)
        if hint is Any or (type(None) in parts and value is None):
            return plain(value)
        if (section := section_class(hint)) is not None:
            return self.section(section, value, path)
        if (named := named_section_class(hint)) is not None:
            _check_section(value, path, "holds sections, each under its name", named)
        fix = ""
        # The value's own type first: `true` for `str | bool` is a bool.
        for part in sorted(parts, key=lambda part: type(value) is not (typing.get_origin(part) or part)):
            try:
                if part is not type(None) and value is not None:
                    return self._fitted(part, value, path)
            except _Misfit as misfit:
                fix = fix or str(misfit)
        raise ConfigError(f"{_named(path)} must be {type_name(hint)}, got {_got(value)}.{fix}")

    def _fitted(self, hint: Any, value: Any, path: tuple[Key, ...]) -> Any:
        """The value for an annotation that is not a union, or a `_Misfit`."""
        origin, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
        if origin in (bool, int, float, str):
            return _scalar(hint, value)
        if origin is typing.Literal:
            if value not in arguments:
                raise _Misfit(did_you_mean(str(value), [str(choice) for choice in arguments]))
            return value
        if origin in (tuple, list) and not isinstance(value, list):
            raise _Misfit("" if isinstance(value, Mapping) else f" Write [{value}].")
        if origin is list or arguments[1:] == (Ellipsis,):
            own = arguments[0] if arguments else Any
            items = ((Key.of(str(at), path[-1].where), item) for at, item in enumerate(value))
            return origin(self.value(own, item, (*path, at)) for at, item in items)
        if origin is dict:
            if not isinstance(value, dict):
                raise _Misfit
            own = arguments[1] if arguments else Any
            return {str(key): self.value(own, item, (*path, key)) for key, item in value.items()}
        try:
            return get_decoding_fn(hint)(value, path)
        except (draccus.utils.DraccusException, ValueError, TypeError) as error:
            raise ConfigError(f"{_named(path)} can't be read: {error}") from error

    def _meant(self, key: str, registry: Any, valid: list[str]) -> str:
        """What an unknown key may have been meant to be."""
        choices = {} if registry is None else registry.get_known_choices()
        owners = [f"`type: {name}`" for name, one in choices.items() if key in one.__dataclass_fields__]
        keys = dict.fromkeys(config_keys(self._config_class))
        same = [other for other in keys if other.rpartition(".")[2] == key]
        if owners:
            meant = f" It is one of {', '.join(owners)}."
        elif same:
            meant = f" Did you mean `{'` or `'.join(same[:3])}`?"
        else:
            meant = did_you_mean(key, valid)
        return f"{meant} Valid: {', '.join(valid) or 'none'}."


def _scalar(kind: Any, value: Any) -> Any:
    is_bool = isinstance(value, bool)
    if kind is bool and (is_bool or value in ("true", "false")):
        return value in (True, "true")
    if kind is str and isinstance(value, str | int) and not is_bool:
        return str(value)
    if kind is str and not isinstance(value, dict | list):
        raise _Misfit(f""" Put it in quotes; on a command line, in two kinds: "'{value}'".""")
    if kind in (int, float) and isinstance(value, str | int | float) and not is_bool:
        with contextlib.suppress(ValueError, OverflowError):
            if kind is int and not isinstance(value, float):
                return int(value)
        with contextlib.suppress(ValueError, OverflowError):
            number = float(value)
            if kind is float and math.isfinite(number):
                return number
            if kind is int and number.is_integer():
                raise _Misfit(f" Write {int(number)}.")
    raise _Misfit


def _check_section(value: Any, path: tuple[Key, ...], what: str, config_class: Any) -> None:
    if isinstance(value, dict):
        return
    if is_registry(config_class):
        keys = [f"type: {'|'.join(config_class.get_known_choices())}", "..."]
    else:
        names = [field.name for field in dataclasses.fields(config_class)]
        keys = names[:4] + ["..."] * (len(names) > 4)
    raise ConfigError(
        f"{_named(path)} {what}, got {_got(value)}. Write its keys there ({', '.join(keys)}), or leave "
        f"`{'.'.join(path)}` out."
    )


def _got(value: Any) -> str:
    return "nothing (null)" if value is None else shown(value)


def _chosen(registry: Any, keys: dict[Key, Any], path: tuple[Key, ...]) -> Any:
    """The class that a section's `type` names; takes that key out of `keys`."""
    choices = registry.get_known_choices()
    given = next((key for key in keys if key == "type"), None)
    if given is None:
        default = registry.default_choice_name()
        if default is None:
            raise ConfigError(f"{_named(path)} lacks the key `type`. Known types: {', '.join(choices)}.")
        return choices[default]
    chosen = keys.pop(given)
    if not isinstance(chosen, str) or chosen not in choices:
        hint = did_you_mean(str(chosen), choices)
        raise ConfigError(f"{_named((*path, given))} is {chosen!r}.{hint} Valid: {', '.join(choices)}.")
    return choices[chosen]


def _blamed(tree: Any, path: tuple[Key, ...], message: str) -> str:
    """Where the values that a validation error mentions were written; all places if it mentions none."""
    last: list[Key] = [own[-1] for own, _ in leaves(tree)]
    mentioned = [key for key in last if re.search(rf"\b{re.escape(key)}\b", message)]
    found = mentioned or last or list(path[-1:]) or [Key.of("", ON_THE_COMMAND_LINE)]
    return " and ".join(dict.fromkeys(key.where for key in found))
