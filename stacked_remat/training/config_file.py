"""From a YAML file and dotted command-line overrides to a checked config dataclass, and
back.
"""

import contextlib
import dataclasses
import math
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeVar

import draccus
import draccus.utils
import yaml
from draccus.parsers.decoding import get_decoding_fn

from .._messages import did_you_mean, shown
from .config_reference import (
    config_keys,
    config_reference,
    config_section,
    config_summary,
    is_registry,
    named_section_class,
    section_class,
    type_name,
    union_parts,
)
from .config_tree import ALONE, leaves, read_config_file, set_key
from .errors import ConfigError, all_without_credentials

Config = TypeVar("Config")

# an attribute of configs; `dataclasses.replace` does not keep it
_WRITTEN = "_written_keys"
_CONFIG_PATH, _COMMAND_LINE = "config_path", "on the command line"
_BOOLS = yaml.SafeLoader.bool_values  # of `yes`, `true`, `on` and their opposites


def parse_config(config_class: type[Config], arguments: Sequence[str]) -> Config:
    """Reads `--config_path FILE` and `--dotted.key VALUE` overrides into a config.

    The annotation of a key says what a value is: `1.10` and `yes` are text for one of
    text. A boolean key of the command line may stand alone, for true.

    Args:
        config_class: a dataclass of values, dataclasses and registries
            (`draccus.ChoiceRegistry`).
        arguments: the command line without the program's name. The file and the values
            are YAML, in which `!include FILE` inserts the content of another file.
            `--help` prints what keys there are and exits, `--help KEY` all of a key
            or section, `--help all` all of all.

    Raises:
        ConfigError: an unknown or missing key, one that is given twice, a value of
            another type or out of range, or a file that can't be read; names the key,
            where it was written, and the nearest valid one.
    """
    # Wherever it is, also beside a mistake that a user asks help for.
    for flag in {"--help", "-h"}.intersection(arguments):
        after = arguments[arguments.index(flag) + 1 :]
        print(_help(config_class, after[0] if after else ""), end="")
        raise SystemExit(0)
    given: dict[str, str | None] = {}
    remaining = list(arguments)
    while remaining:
        flag = remaining.pop(0)
        key, equals, value = flag.removeprefix("--").partition("=")
        if not flag.startswith("--") or not all(key.split(".")):
            raise ConfigError(
                f"Expected `--key value` on the command line, got {flag!r}."
            )
        if not equals:
            is_alone = not remaining or remaining[0].startswith("--")
            value = None if is_alone else remaining.pop(0)
        _check_once(key, value, given)
        given[key] = value
    if given.get(_CONFIG_PATH, "") is None:
        raise _without_value(_CONFIG_PATH)
    file = given.pop(_CONFIG_PATH, None)
    tree = {} if file is None else read_config_file(file)
    for key, text in given.items():
        set_key(tree, key, text)
    return decode_config(
        config_class, tree, f"in {file}" if file else _COMMAND_LINE, list(given)
    )


def _help(config_class: Any, key: str) -> str:
    """What `--help KEY` prints, or `--help` where no key follows."""
    if not key or key.startswith("-"):
        return config_summary(config_class)
    if key == "all":
        return config_reference(config_class)
    text = config_section(config_class, key)
    if not text:
        keys = config_keys(config_class)
        sections = {one.rpartition(".")[0] for one in keys}
        hint = did_you_mean(key, [*sorted(sections), *keys])
        raise ConfigError(
            f"There is no key `{key}`.{hint} `--help` shows what keys there are."
        )
    return text


def _check_once(key: str, value: str | None, earlier: Mapping[str, str | None]) -> None:
    """Refuses a key of the command line that is given before, or is a section of one
    that is.
    """
    for other, others_value in earlier.items():
        # A section after one of its keys would replace what the key set; a key after
        # its section adds to it, as is usual.
        if other == key or other.startswith(f"{key}."):
            both = [f"`--{other} {others_value or ''}", f"`--{key} {value or ''}"]
            places = " and then ".join(f"{place.rstrip()}`" for place in both)
            raise ConfigError(
                f"`{other}` is given twice on the command line: {places}. Leave out one"
                " of them."
            )


def _without_value(key: str) -> ConfigError:
    return ConfigError(
        f"`--{key}` on the command line has no value: write `--{key} VALUE`."
    )


def decode_config(
    config_class: type[Config],
    tree: dict[str, Any],
    place: str,
    given: Sequence[str] = (),
) -> Config:
    """The instance of `config_class` that sections of plain values describe; errors as
    `parse_config`.

    `place` is where the values were written, except for those `given` on the command
    line, by dotted key.
    """
    return _Decoder(config_class, place, given).section(config_class, tree, "")


def written_keys(section: Any) -> frozenset[str]:
    """The dotted keys that were given below a section, its `type` included: by a config
    file, by the command line, or by Python code as arguments.

    Empty for a section that Python code made of another class than
    `RecordsArguments`: there a default and a value that equals it look alike.
    """
    return getattr(section, _WRITTEN, frozenset())


class RecordsArguments:
    """A section of configs whose `written_keys` are known where Python code made it.

    These are its arguments, so that a value that is written differs from a default
    that it equals. `dataclasses.replace` gives all fields as arguments.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """An instance that knows the names of its arguments."""
        section = super().__new__(cls)
        fields: Any = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
        by_position = zip([field.name for field in fields], args, strict=False)
        written = {"type"} if issubclass(cls, draccus.ChoiceRegistry) else set()
        for name, value in [*by_position, *kwargs.items()]:
            if isinstance(value, RecordsArguments):
                written |= {f"{name}.{key}" for key in written_keys(value)}
            else:
                written.add(name)
        object.__setattr__(section, _WRITTEN, frozenset(written))
        return section


def config_as_dict(config: Any) -> dict[str, Any]:
    """The config as plain dicts, lists and scalars, with every default filled in and
    registries' `type` keys.

    Written as YAML or JSON it is read back to an equal config, except for passwords and
    tokens in URLs, which are left out.
    """
    return all_without_credentials(draccus.encode(config))


class _Misfit(Exception):
    """A value that its annotation does not allow; its text says what to write, where
    that is known.
    """


def _default_of(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _set_in(usual: Any, config_class: Any) -> dict[str, Any]:
    """The fields of a default section that are not those of its class, such as an
    architecture's own.
    """
    required = [
        field for field in dataclasses.fields(config_class) if _is_required(field)
    ]
    if type(usual) is not config_class or required:
        return {}
    plain = config_class()
    pairs = (
        (field.name, getattr(usual, field.name))
        for field in dataclasses.fields(config_class)
    )
    return {name: value for name, value in pairs if value != getattr(plain, name)}


def _is_required(field: dataclasses.Field) -> bool:
    return field.default is field.default_factory is dataclasses.MISSING


class _Decoder:
    """From a tree to dataclasses.

    Knows the class of the whole config and where values were written, for errors. `at`
    is the dotted key of a value, empty for the whole config.
    """

    def __init__(self, config_class: Any, place: str, given: Sequence[str]):
        self._config_class, self._place, self._given = config_class, place, given

    def section(self, config_class: Any, tree: Any, at: str, usual: Any = None) -> Any:
        """The instance of `config_class`, or of the type chosen from it, that a section
        describes.

        `usual` is what there is without the section: keys that are not written keep
        what it has.
        """
        self._check_section(tree, at, "is a section of keys", config_class)
        # A default that is written is a wish; one that is not may be replaced by what a
        # model's folder has.
        written = frozenset(
            ".".join(path) for path, value in leaves(tree) if value != {}
        )
        registry, tree = config_class if is_registry(config_class) else None, dict(tree)
        below = f"{at}." if at else ""
        if registry is not None:
            config_class = self._chosen(registry, tree, at)
        hints, fields = (
            typing.get_type_hints(config_class),
            dataclasses.fields(config_class),
        )
        valid = [field.name for field in fields]
        if unknown := [key for key in tree if key not in valid]:
            meant = self._meant(unknown[0], registry, valid)
            raise ConfigError(f"Unknown key {self._named(below + unknown[0])}.{meant}")
        usual_of = {field.name: _default_of(field) for field in fields}
        values = {
            key: self.value(hints[key], own, below + key, usual_of[key])
            for key, own in tree.items()
        }
        values = _set_in(usual, config_class) | values
        for field in fields:
            if _is_required(field) and field.name not in values:
                raise ConfigError(f"{self._named(at)} lacks the key `{field.name}`.")
        try:
            config = config_class(**values)
        except (ValueError, OverflowError) as error:
            # A check of a dataclass knows no file: the keys that its message names say
            # where.
            named = not at or _mentions(str(error), at)
            keys = [below + ".".join(path) for path, _ in leaves(tree)]
            blamed = [key for key in keys if _mentions(str(error), key)] or keys or [at]
            places = " and ".join(dict.fromkeys(map(self._where, blamed)))
            raise ConfigError(
                f"Bad config {places}{'' if named else f' (of `{at}`)'}: {error}"
            ) from error
        object.__setattr__(config, _WRITTEN, written)
        return config

    def value(self, hint: Any, value: Any, at: str, usual: Any = None) -> Any:
        """What a field of this annotation gets."""
        parts = union_parts(hint)
        if value is ALONE:
            if bool in parts:
                return True
            raise _without_value(at)
        if hint is Any:
            return (
                self._fitted(type(value), value, at)
                if isinstance(value, dict | list)
                else _natural(value)
            )
        if type(None) in parts and value is None:
            return None
        if (section := section_class(hint)) is not None:
            return self.section(section, value, at, usual)
        if (named := named_section_class(hint)) is not None:
            self._check_section(value, at, "holds sections, each under its name", named)
        fix = ""
        # `true` for `str | bool` is a bool, and else the value's own type is first.
        own = bool if str(value).lower() in _BOOLS else type(value)
        for part in sorted(
            parts, key=lambda part: own is not (typing.get_origin(part) or part)
        ):
            try:
                if part is not type(None) and value is not None:
                    return self._fitted(part, value, at)
            except _Misfit as misfit:
                fix = fix or str(misfit)
        raise ConfigError(
            f"{self._named(at)} must be {type_name(hint)}, got {_got(value)}.{fix}"
        )

    def _fitted(self, hint: Any, value: Any, at: str) -> Any:
        """The value for an annotation that is not a union, or a `_Misfit`."""
        origin, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
        if origin in (bool, int, float, str):
            return _scalar(hint, value)
        if origin is typing.Literal:
            if value not in arguments:
                raise _Misfit(
                    did_you_mean(str(value), [str(choice) for choice in arguments])
                )
            return value
        # A text would be taken for a list of its letters.
        if origin in (tuple, list) and not isinstance(value, list):
            raise _Misfit("" if isinstance(value, Mapping) else f" Write [{value}].")
        if origin is list or arguments[1:] == (Ellipsis,):
            own = arguments[0] if arguments else Any
            return origin(
                self.value(own, item, f"{at}.{number}")
                for number, item in enumerate(value)
            )
        if origin is dict:
            if not isinstance(value, dict):
                raise _Misfit
            own = arguments[1] if arguments else Any
            return {
                key: self.value(own, item, f"{at}.{key}") for key, item in value.items()
            }
        try:
            return get_decoding_fn(hint)(self.value(Any, value, at), at.split("."))
        except (draccus.utils.DraccusException, ValueError, TypeError) as error:
            raise ConfigError(f"{self._named(at)} can't be read: {error}") from error

    def _named(self, at: str) -> str:
        """A key and where it was written, for errors."""
        return f"`{at}` {self._where(at)}" if at else "The config"

    def _where(self, at: str) -> str:
        given = any(
            f"{key}.".startswith(f"{at}.") or at.startswith(f"{key}.")
            for key in self._given
        )
        return _COMMAND_LINE if given else self._place

    def _check_section(self, value: Any, at: str, what: str, config_class: Any) -> None:
        if not isinstance(value, dict):
            names = (
                ["type"]
                if is_registry(config_class)
                else list(config_class.__dataclass_fields__)
            )
            raise ConfigError(
                f"{self._named(at)} {what}, got {_got(value)}. Write its keys there "
                f"({', '.join(names[:4])}, ...), or leave `{at}` out."
            )

    def _chosen(self, registry: Any, keys: dict[str, Any], at: str) -> Any:
        """The class that a section's `type` names; takes that key out of `keys`."""
        choices = registry.get_known_choices()
        valid = ", ".join(choices)
        chosen = keys.pop("type") if "type" in keys else registry.default_choice_name()
        if chosen is None:
            raise ConfigError(
                f"{self._named(at)} lacks the key `type`. Known types: {valid}."
            )
        if not isinstance(chosen, str) or chosen not in choices:
            hint = did_you_mean(str(chosen), choices)
            raise ConfigError(
                f"{self._named(f'{at}.type')} is {chosen!r}.{hint} Valid: {valid}."
            )
        return choices[chosen]

    def _meant(self, key: str, registry: Any, valid: list[str]) -> str:
        """What an unknown key may have been meant to be."""
        choices = {} if registry is None else registry.get_known_choices()
        owners = [
            f"`type: {name}`"
            for name, one in choices.items()
            if key in one.__dataclass_fields__
        ]
        keys = dict.fromkeys(config_keys(self._config_class))
        same = [other for other in keys if other.rpartition(".")[2] == key]
        if owners:
            meant = f" It is one of {', '.join(owners)}."
        elif same:
            meant = f" Did you mean `{'` or `'.join(same[:3])}`?"
        else:
            meant = did_you_mean(key, [*valid, _CONFIG_PATH])
        return f"{meant} Valid: {', '.join(valid) or 'none'}."


def _natural(value: Any) -> Any:
    """A value of which no annotation says what its text means: a number or a bool,
    where it reads as one.
    """
    with contextlib.suppress(ValueError):
        return float(value) if isinstance(value, str) else value
    return _BOOLS.get(value.lower(), value)


def _scalar(kind: Any, value: Any) -> Any:
    is_bool = isinstance(value, bool)
    if kind is bool and str(value).lower() in _BOOLS:
        return _BOOLS[str(value).lower()]
    if kind is str and isinstance(value, str | int) and not is_bool:
        return str(value)
    if kind in (int, float) and isinstance(value, str | int | float) and not is_bool:
        with contextlib.suppress(ValueError, OverflowError):
            if kind is int and not isinstance(value, float):
                return int(value)
        with contextlib.suppress(ValueError, OverflowError):
            number = float(value)
            if kind is float and math.isfinite(number):
                return number
            if kind is int and number.is_integer() and abs(number) < 2**53:
                raise _Misfit(f" Write {int(number)}.")
    raise _Misfit


def _got(value: Any) -> str:
    return "nothing (null)" if value is None else shown(value)


def _mentions(message: str, at: str) -> bool:
    """Whether an error of a config mentions the last part of a dotted key."""
    return re.search(rf"\b{re.escape(at.rpartition('.')[2])}\b", message) is not None
