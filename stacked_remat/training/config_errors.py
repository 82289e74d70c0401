"""What pydantic refuses in a config, in words that name the key, where it was written,
and the fix.
"""

import contextlib
import dataclasses
import itertools
import re
import typing
from collections.abc import Sequence
from typing import Any

import yaml
from pydantic_core import ErrorDetails

from .._messages import did_you_mean
from .config_reference import config_keys, config_section, section_class
from .config_sections import NO_TYPE, chosen_class, got, is_registry
from .config_tree import Alone, leaves
from .errors import ConfigError

CONFIG_PATH = "config_path"
COMMAND_LINE = "on the command line"

_MOST = 8  # mistakes that are shown
_UNKNOWN = "unexpected_keyword_argument"  # pydantic's type of an unknown key
# What a value has to be, by the beginning of pydantic's type of an error
_EXPECTED = {
    "int_": "a whole number in decimal digits",
    "float_": "a number",
    "finite_number": "a finite number",
    "string_": "text",
    "bool_": "true or false",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping of keys to values",
    "greater_than_equal": "at least {ge:g}",
    "greater_than": "above {gt:g}",
    "less_than_equal": "at most {le:g}",
    "less_than": "below {lt:g}",
}


def without_value(key: str) -> ConfigError:
    """The error for a key that stands alone and may not."""
    return ConfigError(
        f"`--{key}` on the command line has no value: write `--{key} VALUE`."
    )


class Mistakes:
    """The texts of errors of a config of some class, which was read from a tree.

    `place` says where values were written, but for those `given` on the command line,
    by dotted key.
    """

    def __init__(self, config_class: Any, tree: Any, place: str, given: Sequence[str]):
        self._config_class = config_class
        self._tree = tree
        self._place = place
        self._given = given
        self._listed: set[str] = set()

    def text(self, errors: Sequence[ErrorDetails]) -> str:
        """What is wrong, a line for each key."""
        by_key: dict[tuple[Any, ...], list[ErrorDetails]] = {}
        # A key that is missing may be one that is spelled wrong, which is said first.
        for error in sorted(errors, key=lambda error: error["type"] != _UNKNOWN):
            by_key.setdefault(self._path(error["loc"]), []).append(error)
        first = itertools.islice(by_key.items(), _MOST)
        lines = [self._line(path, own) for path, own in first]
        if len(by_key) > _MOST:
            lines.append(f"And {len(by_key) - _MOST} more mistakes.")
        return "\n".join(lines)

    def _path(self, loc: Sequence[int | str]) -> tuple[Any, ...]:
        """The keys of a location, which names members of unions too."""
        node: Any = self._tree
        path = []
        for part in loc:
            with contextlib.suppress(KeyError, TypeError):
                node = node[part]
                path.append(part)
        return tuple(path)

    def _line(self, path: tuple[Any, ...], errors: Sequence[ErrorDetails]) -> str:
        """What is wrong with one key; of a union each member has an error."""
        first = errors[0]
        at = ".".join(map(str, path))
        kind = first["type"]
        value = first["input"]
        if kind == _UNKNOWN:
            key = at or "''"
            return f"Unknown key `{key}` {self._where(at)}.{self._meant(*path)}"
        if kind == "missing":
            return f"{self._named(at)} lacks the key `{first['loc'][-1]}`."
        if kind == NO_TYPE:
            if "type" in value:
                return f"{self._named(f'{at}.type')} {first['msg']}"
            # A config may know where the section is from, if not from these keys
            remark = getattr(self._config_class, "remark_without_type", None)
            if remark is not None and (fix := remark(at, self._tree)):
                return f"{self._named(at)} lacks the key `type`. {fix}"
            return f"{self._named(at)} {first['msg']}"
        if kind == "value_error":
            message = first["msg"].removeprefix("Value error, ")
            return self._alone(at, message) or self._refused(at, message)
        if isinstance(value, Alone):
            return str(without_value(at))
        if kind == "dataclass_type":
            names = ", ".join(_keys(self._section(path)[1])[:4])
            return (
                f"{self._named(at)} is a section of keys, got {got(value)}. Write its"
                f" keys there ({names}, ...), or leave `{at}` out."
            )
        expected = " or ".join(dict.fromkeys(map(_expected, errors)))
        fix = _fix(first)
        if value is None and "true or false" in expected:
            fix = f" To turn it off write `{path[-1]}: false`."
        if kind == "literal_error" and not fix:
            fix = self._meanings(path)
        return f"{self._named(at)} must be {expected}, got {got(value)}.{fix}"

    def _meanings(self, path: Sequence[Any]) -> str:
        """Where to read what the values of a key mean; said once for a list."""
        key = ".".join(part for part in path if isinstance(part, str))
        if key in self._listed or not config_section(self._config_class, key):
            return ""
        self._listed.add(key)
        return f" `--help {key}` says what they mean."

    def _named(self, at: str) -> str:
        """A key and where it was written."""
        return f"`{at}` {self._where(at)}" if at else "The config"

    def _where(self, at: str) -> str:
        given = any(
            f"{key}.".startswith(f"{at}.") or at.startswith(f"{key}.")
            for key in self._given
        )
        return COMMAND_LINE if given else self._place

    def _alone(self, at: str, message: str) -> str:
        """The error for text that stands alone on the command line, if a check refuses
        that; "" otherwise.
        """
        for path, value in leaves(self._tree):
            key = ".".join(map(str, path))
            is_within = not at or f"{key}.".startswith(f"{at}.")
            # In quotes it was taken for text.
            is_named = path[-1] in message and repr(str(value)) in message
            if isinstance(value, Alone) and is_within and is_named:
                return str(without_value(key))
        return ""

    def _refused(self, at: str, message: str) -> str:
        """The error of a check of a dataclass, which knows no file."""
        keys = [".".join(path) for path, _ in leaves(self._tree)]
        own = [key for key in keys if not at or f"{key}.".startswith(f"{at}.")]
        places = " and ".join(dict.fromkeys(map(self._where, own or [at])))
        name = at.rpartition(".")[2]
        of = "" if re.search(rf"\b{name}\b", message) else f" (of `{at}`)"
        return f"Bad config {places}{of}: {message}"

    def _meant(self, *path: Any) -> str:
        """What an unknown key may have been meant to be."""
        *section, key = path
        root, found = self._section(section)
        choices = root.get_known_choices() if is_registry(root) else {}
        owners = [
            f"`type: {name}`" for name, one in choices.items() if key in _keys(one)
        ]
        keys = dict.fromkeys(config_keys(self._config_class))
        same = [other for other in keys if other.rpartition(".")[2] == key]
        valid = _keys(found)
        if "." in key and ".".join(path) in keys:
            above, _, last = key.rpartition(".")
            inner = above.replace(".", ": {")
            closing = "}" * key.count(".")
            meant = f" Write it in its section: `{inner}: {{{last}: VALUE{closing}`."
        elif owners:
            meant = f" It is one of {', '.join(owners)}."
        elif same:
            meant = f" Did you mean `{'` or `'.join(same[:3])}`?"
        else:
            meant = did_you_mean(key, [*valid, CONFIG_PATH])
        listed = f" Valid: {', '.join(valid) or 'none'}."
        if listed in self._listed:
            return meant
        self._listed.add(listed)
        return meant + listed

    def _section(self, path: Sequence[Any]) -> tuple[Any, Any]:
        """The class that is annotated for the section at a key, and the one of its
        family that is written there; None for none.
        """
        hint = self._config_class
        node = self._tree
        for key in path:
            found = chosen_class(section_class(hint), node)
            named = typing.get_args(hint)[-1:]
            hint = named[0] if found is None else typing.get_type_hints(found)[key]
            node = node[key]
        section = section_class(hint)
        return section, chosen_class(section, node)


def _keys(section: Any) -> list[str]:
    if section is None:
        return ["type"]
    return [field.name for field in dataclasses.fields(section)]


def _expected(error: ErrorDetails) -> str:
    for kind, expected in _EXPECTED.items():
        if error["type"].startswith(kind):
            return expected.format(**error.get("ctx", {}))
    return error["msg"].removeprefix("Input should be ")


def _fix(error: ErrorDetails) -> str:
    value = error["input"]
    if _expected(error) == "a list" and isinstance(value, str):
        # Quoted where YAML would read it as something else, as `*` at its beginning
        written = yaml.safe_dump([str(value)], default_flow_style=True, width=2**16)
        return f" Write {written.strip()}."
    valid = re.findall("'(.*?)'", error.get("ctx", {}).get("expected", ""))
    return did_you_mean(str(value), valid)
