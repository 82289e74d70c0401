"""Config files that include others: `!include FILE` in the place of any value, and at a merge key.

    <<: !include base.yaml  # all of it, except for the keys below
    trainer:
      <<: [!include short.yaml, !include quiet.yaml]  # the first one that has a key gives its value

A name is relative to the file that includes it. Keys beside a merge override single keys of included files,
at any depth; a section that names another `type`, or `{}`, replaces the included one.
"""

import itertools
import json
import os
import posixpath
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import fsspec
import yaml

from .._files import unique_keys
from .._messages import shown
from .config_entries import Entry, entry_of, overlaid, too_large
from .config_error import ConfigError

ON_THE_COMMAND_LINE = "on the command line"

_LARGEST, _MOST_INCLUDES = 2**20, 100  # more bytes and files than any config has


def read_config_file(location: str) -> Entry:
    """The entries of a config file and of the files that it includes.

    Args:
        location: a path, or a URL of any file system that fsspec knows. YAML; a `.json` or `.toml` file is
            read in its own format, and includes nothing.

    Raises:
        ConfigError: a file that can't be read, includes itself, or is not a mapping; names the file and all
            files that lead to it.
    """
    tree = _read(_File(_beside("", location)))
    if not tree.is_section:
        got = "is empty" if tree.value is None else f"holds {shown(tree.plain)}"
        raise ConfigError(f"The config file {location} {got}; it must hold a mapping of keys to values.")
    return tree


def read_config_value(key: str, text: str) -> Entry:
    """The entries of YAML from the command line; included files are relative to the working directory.

    Raises:
        ConfigError: the text is not YAML; or as `read_config_file`.
    """
    try:
        return _parsed(text, _File(""))
    except yaml.YAMLError as error:
        raise ConfigError(f"The value of `--{key}` {ON_THE_COMMAND_LINE} is not YAML: {error}") from error


@dataclass(frozen=True)
class _File:
    """A file being read: its path or URL, empty for the command line, and the files that lead to it."""

    location: str
    chain: str = ""  # `, included by FILE line N` for each of them, the nearest first
    includers: tuple[str, ...] = ()
    count: Iterator[int] = field(default_factory=itertools.count)  # of all included files

    @property
    def where(self) -> str:
        return f"in {self.location}{self.chain}" if self.location else ON_THE_COMMAND_LINE

    def included(self, name: str, line: int) -> Entry:
        """The entries of a file that this one includes in a line."""
        by = f"{self.location} line {line}" if self.location else "the command line"
        location, includers = _beside(self.location, name), (*self.includers, self.location)
        found = _File(location, f", included by {by}{self.chain}", includers, self.count)
        if next(self.count) == _MOST_INCLUDES:
            raise ConfigError(
                f"A config includes at most {_MOST_INCLUDES} files; one more is {location}{found.chain}."
            )
        if location in includers:
            raise ConfigError(f"A config file can't include itself: {location}{found.chain}.")
        return _read(found)


def _read(file: _File) -> Entry:
    try:
        return _parsed(_text(file.location), file)
    except ConfigError:
        raise
    except Exception as error:  # file systems raise what their clients do
        problem = str(error) or type(error).__name__
        if isinstance(error, OSError):
            problem = f"{error.strerror or problem}. Check the path and its permissions."
        raise ConfigError(f"Can't read the config file {file.location}{file.chain}: {problem}") from error


def _text(location: str) -> str:
    with fsspec.open(location, "rb") if "://" in location else open(location, "rb") as stream:
        found = stream.read(_LARGEST + 1)  # pyright: ignore[reportAttributeAccessIssue]
    if len(found) > _LARGEST:
        raise ValueError(f"it has more than {_LARGEST >> 20} MiB, which no config has.")
    try:
        return found.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"it is not UTF-8 text (byte {error.start}). Save it as UTF-8, or restore it."
        ) from error


def _parsed(text: str, file: _File) -> Entry:
    try:
        match posixpath.splitext(file.location)[1]:
            case ".json":
                plain = json.loads(text, object_pairs_hook=unique_keys)
            case ".toml":
                plain = tomllib.loads(text)
            case _:
                plain = _Loader(text, file).get_single_data()
        return entry_of(plain, file.where)
    except RecursionError as error:
        raise too_large(file.where) from error


class _Loader(yaml.SafeLoader):
    """Gives plain values, and entries in place of included files. Refuses a key that is given twice.

    A number is one in decimal, and anything else is text as it was written: YAML 1.1 reads `0010` as 8,
    `1:30` as 90 and `2024-01-01 10:00` as a date.
    """

    yaml_implicit_resolvers = {
        first: [
            (tag, regexp) for tag, regexp in resolvers if not tag.endswith((":int", ":float", ":timestamp"))
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str, file: _File):
        super().__init__(text)
        self.name, self._file = file.location or file.where, file

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (yaml.YAMLError, RecursionError, ConfigError):
            raise
        except Exception as error:  # PyYAML: a KeyError for `!!bool abc`, an AttributeError for a timestamp
            why = f": {error}" if isinstance(error, ValueError) else ""
            raise _error(f"{shown(node.value)} is not a {node.tag.rpartition(':')[2]}{why}", node) from error

    def construct_map(self, node: yaml.MappingNode) -> Any:
        """A dict, or an entry where it merges included files."""
        lines: dict[str, int] = {}
        tree: Any = {}
        merged: list[Any] = []
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _error("a key must be text", key)
            if key.value in lines:
                raise _error(f"the key {key.value!r} is given twice: line {lines[key.value]}", key)
            lines[key.value] = key.start_mark.line + 1
            found = self.construct_object(value, deep=True)
            if key.tag == "tag:yaml.org,2002:merge":
                merged = found if isinstance(found, list) else [found]
            else:
                tree[key.value] = found
        for below in merged:
            if isinstance(below, dict) and isinstance(tree, dict):
                tree = {**below, **tree}  # YAML's own merge replaces whole values
                continue
            entry = entry_of(below, self._file.where)
            if not entry.is_section:
                raise ConfigError(f"`<<` merges {shown(entry.plain)} {entry.where}; it must be a mapping.")
            tree = overlaid(entry, entry_of(tree, self._file.where)) if tree else entry
        return tree

    def construct_include(self, node: yaml.ScalarNode) -> Entry:
        """The entries of another file."""
        return self._file.included(str(self.construct_scalar(node)), node.start_mark.line + 1)


_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.construct_map)
_Loader.add_constructor("!include", _Loader.construct_include)
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"(0|-?[1-9][0-9]*)$"), list("-0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"),
    list("-+.0123456789"),
)


def _error(problem: str, node: yaml.Node) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _beside(including: str, name: str) -> str:
    """The location of a file that another names."""
    name = os.path.expanduser(name)
    if "://" in name or os.path.isabs(name):
        return name
    scheme, separator, path = including.rpartition("://")
    return scheme + separator + posixpath.normpath(posixpath.join(posixpath.dirname(path), name))
