"""From a YAML file and dotted command-line overrides to a checked config dataclass, and back.

Draccus decodes the values. The keys are checked here first, so that a misspelt one is answered with where it
stands and what it probably should be.
"""

import copy
import dataclasses
import difflib
import inspect
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import draccus
import draccus.cfgparsing
import draccus.utils
import yaml

from .config_help import describe_keys

Config = TypeVar("Config")

_CONFIG_PATH = "config_path"
_DECODING_ERRORS = (draccus.utils.DraccusException, TypeError, ValueError)


class ConfigError(ValueError):
    """A config that can't be used; the message names the key, where it came from, and the fix."""


def parse_config(config_class: type[Config], arguments: Sequence[str]) -> Config:
    """Reads `--config_path FILE` and `--dotted.key VALUE` overrides into a config.

    Args:
        config_class: a dataclass of values, dataclasses and registries (`draccus.ChoiceRegistry`).
        arguments: the command line without the program's name. Values are YAML. `--help` prints all keys and
            exits.

    Raises:
        ConfigError: an unknown key, a value of the wrong type or out of range, or a file that can't be read.
    """
    if "--help" in arguments or "-h" in arguments:
        print(describe_keys(config_class))
        raise SystemExit(0)
    overrides = _read_overrides(arguments)
    path = overrides.pop(_CONFIG_PATH, None)
    entries = {} if path is None else _read_file(path)
    of_file = copy.deepcopy(entries)
    for key, value in overrides.items():
        _set_dotted(entries, key, value)
    source = f"in {path}" if path is not None else "on the command line"
    _check_keys(config_class, entries, (), source, frozenset(overrides))
    try:
        return draccus.decode(config_class, entries)
    except _DECODING_ERRORS as error:
        source = "on the command line" if overrides and _decodes(config_class, of_file) else source
        raise ConfigError(f"Bad config {source}: {_innermost(error)}") from error


def _decodes(config_class: Any, entries: dict[str, Any]) -> bool:
    try:
        draccus.decode(config_class, entries)
    except _DECODING_ERRORS:
        return False
    return True


def config_as_dict(config: Any) -> dict[str, Any]:
    """The config as plain dicts, lists and scalars, with every default filled in and registries' `type` keys.

    Written as YAML or JSON it is read back to an equal config.
    """
    return draccus.encode(config)


def _read_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    overrides: dict[str, Any] = {}
    remaining = list(arguments)
    while remaining:
        flag = remaining.pop(0)
        if not flag.startswith("--") or len(flag) == 2:
            raise ConfigError(f"Expected `--key value` on the command line, got {flag!r}.")
        key, equals, value = flag[2:].partition("=")
        if not equals:
            if not remaining:
                raise ConfigError(f"`--{key}` on the command line lacks its value: write `--{key} VALUE`.")
            value = remaining.pop(0)
        overrides[key] = value if key == _CONFIG_PATH else _read_value(key, value)
    return overrides


def _read_value(key: str, value: str) -> Any:
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"The value of `--{key}` on the command line is no YAML: {error}") from error


def _read_file(path: str) -> dict[str, Any]:
    try:
        with Path(path).open(encoding="utf-8") as file:
            entries = draccus.cfgparsing.load_config(file, file=path)
    except OSError as error:
        raise ConfigError(f"Can't read the config file {path}: {error}") from error
    except draccus.utils.ParsingError as error:
        raise ConfigError(f"Can't read the config file {path}: {error.__cause__}") from error
    if not isinstance(entries, dict):
        raise ConfigError(f"{path} must hold a mapping of keys to values, got {type(entries).__name__}.")
    return entries


def _set_dotted(entries: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    for parent in parents:
        if not isinstance(entries.get(parent), dict):
            entries[parent] = {}
        entries = entries[parent]
    entries[last] = value


def _check_keys(
    config_class: Any, entries: Any, path: tuple[str, ...], source: str, overrides: frozenset[str]
) -> None:
    """Raises for the first key that no field answers to, and for values that can't be a section."""
    name = ".".join(path)
    if not isinstance(entries, Mapping):
        raise ConfigError(f"`{name}` {source} is a section of keys, got {entries!r}.")
    keys = dict(entries)
    if _is_registry(config_class):
        config_class = _chosen(config_class, keys, name, source)
    hints = typing.get_type_hints(config_class)
    valid = [field.name for field in dataclasses.fields(config_class)]
    for key, value in keys.items():
        dotted = ".".join((*path, str(key)))
        where = (
            "on the command line"
            if any(o == dotted or o.startswith(dotted + ".") for o in overrides)
            else source
        )
        if key not in valid:
            raise ConfigError(f"Unknown key `{dotted}` {where}.{_nearest(str(key), valid)}")
        section, named = _section_class(hints[key]), _class_of_named_sections(hints[key])
        if value is None and _allows_none(hints[key]):
            continue
        if section is not None:
            _check_keys(section, value, (*path, key), where, overrides)
        elif named is not None:
            if not isinstance(value, Mapping):
                raise ConfigError(f"`{dotted}` {where} holds sections, each under its name, got {value!r}.")
            for name, entry in value.items():
                _check_keys(named, entry, (*path, key, str(name)), where, overrides)
        elif isinstance(value, str) and typing.get_origin(hints[key]) in (tuple, list):
            raise ConfigError(f"`{dotted}` {where} is a list, got {value!r}. Write [{value}].")
        elif value is None:
            raise ConfigError(f"`{dotted}` {where} has no value; it needs one of type {hints[key]}.")


def _chosen(registry: Any, keys: dict[str, Any], name: str, source: str) -> Any:
    choices = registry.get_known_choices()
    if "type" not in keys and registry.default_choice_name() is not None:
        return choices[registry.default_choice_name()]
    if "type" not in keys:
        raise ConfigError(f"`{name}` {source} lacks the key `type`. Known types: {', '.join(choices)}.")
    choice = keys.pop("type")
    if choice not in choices:
        raise ConfigError(f"`{name}.type` {source} is {choice!r}.{_nearest(str(choice), list(choices))}")
    return choices[choice]


def _nearest(key: str, valid: list[str]) -> str:
    close = difflib.get_close_matches(key, valid, n=1)
    return (f" Did you mean `{close[0]}`?" if close else "") + f" Valid: {', '.join(valid)}."


def _is_registry(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, draccus.ChoiceRegistry)


def _section_class(hint: Any) -> Any:
    """The class whose fields are the keys of a section, which may be optional; None for a value."""
    options = typing.get_args(hint) if _is_union(hint) else (hint,)
    # An abstract class has a decoder of its own, which knows the keys.
    sections = [
        option
        for option in options
        if _is_registry(option) or (dataclasses.is_dataclass(option) and not inspect.isabstract(option))
    ]
    return sections[0] if len(sections) == 1 else None


def _class_of_named_sections(hint: Any) -> Any:
    """The class of the values of a `dict[str, Section]`."""
    arguments = typing.get_args(hint)
    return _section_class(arguments[1]) if typing.get_origin(hint) is dict and len(arguments) == 2 else None


def _allows_none(hint: Any) -> bool:
    return hint is Any or (_is_union(hint) and type(None) in typing.get_args(hint))


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _innermost(error: BaseException) -> str:
    """The message of a validation at the bottom of a chain of decoding errors, else the decoder's own."""
    cause: BaseException | None = error
    while cause is not None:
        if type(cause) in (ValueError, TypeError) and isinstance(error, draccus.utils.ParsingError):
            if "Couldn't instantiate" in str(error):
                return str(cause)
        cause = cause.__cause__
    return str(error)
