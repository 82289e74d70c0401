"""From a YAML file and dotted command-line overrides to a checked config dataclass, and
back.
"""

import dataclasses
import json
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from .._messages import did_you_mean
from .config_errors import COMMAND_LINE, CONFIG_PATH, Mistakes, without_value
from .config_reference import (
    config_keys,
    config_reference,
    config_section,
    config_summary,
    named_section_class,
    section_class,
)
from .config_schema import config_schema
from .config_sections import adapter, chosen_class, default_of, record_written
from .config_tree import read_config_file, set_key
from .errors import ConfigError

Config = TypeVar("Config")


def parse_config(config_class: type[Config], arguments: Sequence[str]) -> Config:
    """Reads `--config_path FILE` and `--dotted.key VALUE` overrides into a config.

    The annotation of a key says what a value is: `1.10` and `yes` are text for one of
    text. A boolean key of the command line may stand alone, for true.

    Args:
        config_class: a dataclass of values, dataclasses and registries
            (`ChoiceRegistry`).
        arguments: the command line without the program's name. The file and the values
            are YAML, in which `!include FILE` inserts the content of another file.
            `--help` prints what keys there are and exits, `--help KEY` all of a key
            or section, `--help all` all of all; `--schema` the JSON schema of files,
            for editors.

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
    if "--schema" in arguments:
        print(json.dumps(config_schema(config_class), indent=2))
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
        # An unset variable of a shell; text that is empty is `"''"`.
        if value is not None and not value.strip():
            raise without_value(key)
        _check_once(key, value, given)
        given[key] = value
    if given.get(CONFIG_PATH, "") is None:
        raise without_value(CONFIG_PATH)
    file = given.pop(CONFIG_PATH, None)
    tree = {} if file is None else read_config_file(file)
    for key, text in given.items():
        set_key(tree, key, text)
    place = f"in {file}" if file else COMMAND_LINE
    config = decode_config(config_class, tree, place, list(given))
    for key, text in given.items():
        if text is None and _value_at(config, key) is not True:
            raise without_value(key)
    return config


def _value_at(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = config[name] if isinstance(config, dict) else getattr(config, name)
    return config


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
    try:
        config = adapter(config_class).validate_python(_filled(config_class, tree))
    except ValidationError as error:
        mistakes = Mistakes(config_class, tree, place, given)
        raise ConfigError(mistakes.text(error.errors())) from error
    record_written(config, tree)
    return config


def _filled(hint: Any, tree: Any, usual: Any = None) -> Any:
    """What is annotated so, with what it has by default where that is not written.

    `usual` is what there is without the section, such as an architecture's.
    """
    if not isinstance(tree, dict):
        return tree
    if (named := named_section_class(hint)) is not None:
        return {name: _filled(named, own) for name, own in tree.items()}
    config_class = chosen_class(section_class(hint), tree)
    if config_class is None:
        return tree
    filled = dict(tree)
    hints = typing.get_type_hints(config_class)
    is_usual = type(usual) is config_class
    for field in dataclasses.fields(config_class):
        name = field.name
        value = getattr(usual, name) if is_usual else default_of(field)
        if name in tree:
            filled[name] = _filled(hints[name], tree[name], value)
        elif is_usual:
            filled[name] = value
    return filled
