"""From a YAML file and dotted command-line overrides to a checked config dataclass, and back."""

import difflib
from collections.abc import Sequence
from typing import Any, TypeVar

import draccus

from .config_decode import decode_config
from .config_reference import config_reference
from .config_tree import Key, read_config_file, set_key
from .errors import ConfigError, all_without_credentials

Config = TypeVar("Config")

_CONFIG_PATH = "config_path"


def parse_config(config_class: type[Config], arguments: Sequence[str]) -> Config:
    """Reads `--config_path FILE` and `--dotted.key VALUE` overrides into a config.

    Args:
        config_class: a dataclass of values, dataclasses and registries (`draccus.ChoiceRegistry`).
        arguments: the command line without the program's name. The file and the values are YAML, in which
            `!include FILE` inserts the content of another file. `--help` prints all keys and exits.

    Raises:
        ConfigError: an unknown key, a value of the wrong type or out of range, or a file that can't be read.
    """
    if "--help" in arguments or "-h" in arguments:
        print(config_reference(config_class), end="")
        raise SystemExit(0)
    path, overrides = _read_arguments(arguments)
    tree: dict[Key, Any] = {} if path is None else read_config_file(path)
    for key, text in overrides.items():
        set_key(tree, key, text)
    return decode_config(config_class, tree)


def config_as_dict(config: Any) -> dict[str, Any]:
    """The config as plain dicts, lists and scalars, with every default filled in and registries' `type` keys.

    Written as YAML or JSON it is read back to an equal config, except for passwords and tokens in URLs, which
    are left out.
    """
    return all_without_credentials(draccus.encode(config))


def _read_arguments(arguments: Sequence[str]) -> tuple[str | None, dict[str, str]]:
    """The config file, if one is named, and the overrides."""
    given: dict[str, str] = {}
    remaining = list(arguments)
    while remaining:
        flag = remaining.pop(0)
        if not flag.startswith("--") or len(flag) == 2:
            raise ConfigError(f"Expected `--key value` on the command line, got {flag!r}.")
        key, equals, value = flag[2:].partition("=")
        if not equals:
            if not remaining:
                raise ConfigError(f"`--{key}` on the command line has no value: write `--{key} VALUE`.")
            value = remaining.pop(0)
        close = difflib.get_close_matches(key, [_CONFIG_PATH], cutoff=0.8)
        if key != _CONFIG_PATH and (key == "config" or close):
            raise ConfigError(f"Unknown key `{key}` on the command line. Did you mean `--{_CONFIG_PATH}`?")
        given[key] = value
    return given.pop(_CONFIG_PATH, None), given
