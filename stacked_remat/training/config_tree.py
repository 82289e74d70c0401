"""Config files as trees of entries that know where each was written, and files that include others.

`!include FILE` stands in the place of any value, and at a merge key:

    <<: !include base.yaml  # all of it, except for the keys below
    trainer:
      <<: [!include short.yaml, !include quiet.yaml]  # the first one that has a key gives its value

A name is relative to the file that includes it. Keys beside a merge override single keys of included files,
at any depth; a section that names another `type`, or `{}`, replaces the included one.
"""

import json
import os
import posixpath
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import fsspec
import yaml

from .._files import unique_keys
from .._messages import shown
from .errors import ConfigError

ON_THE_COMMAND_LINE = "on the command line"


@dataclass(frozen=True)
class Entry:
    """A value of a config, or a section of it.

    Attributes:
        value: a scalar, a list, or for a section a dict of entries by key.
        where: where it was written, for errors: `in FILE` or `on the command line`.
    """

    value: Any
    where: str

    @staticmethod
    def of(value: Any, where: str) -> "Entry":
        """The tree of a plain value, in which parts may be entries already."""
        if isinstance(value, Entry):
            return value
        if isinstance(value, Mapping):
            return Entry({key: Entry.of(own, where) for key, own in value.items()}, where)
        if isinstance(value, list):
            return Entry([Entry.of(item, where).plain for item in value], where)
        return Entry(value, where)

    @property
    def is_section(self) -> bool:
        """Whether this is a mapping of keys."""
        return isinstance(self.value, dict)

    @property
    def plain(self) -> Any:
        """The value without the places."""
        return {key: entry.plain for key, entry in self.value.items()} if self.is_section else self.value

    def leaves(self, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], "Entry"]]:
        """Every value that is not a section, with its path."""
        if self.is_section:
            for key, entry in self.value.items():
                yield from entry.leaves((*path, key))
        else:
            yield path, self

    def overlaid(self, above: "Entry") -> "Entry":
        """This tree and another merged key by key; where both have a value, that of `above` holds.

        A section that is empty, or names another `type` than the one below, replaces all of it.
        """
        if not (self.is_section and above.is_section and above.value):
            return above
        if "type" in above.value and above.plain["type"] != self.plain.get("type"):
            return above
        merged = dict(self.value)
        for key, entry in above.value.items():
            merged[key] = merged[key].overlaid(entry) if key in merged else entry
        return Entry(merged, above.where)

    def with_key(self, dotted: str, entry: "Entry", above: tuple[str, ...] = ()) -> "Entry":
        """The tree with the entry at `dotted`, below the keys `above`, replaced; adds missing sections.

        Raises:
            ConfigError: a key that leads to it has a value, and is not a section.
        """
        if not self.is_section and self.value is not None:
            name = ".".join(above)
            raise ConfigError(
                f"`{name}.{dotted}` {entry.where} is a key of the section `{name}`, but `{name}` "
                f"{self.where} is {shown(self.plain)}, which has no keys. Write a section there, or leave "
                f"`{name}` out."
            )
        key, dot, rest = dotted.partition(".")
        keys: dict[str, Entry] = dict(self.value or {})
        below = keys.get(key, Entry({}, entry.where))
        keys[key] = below.with_key(rest, entry, (*above, key)) if dot else entry
        return Entry(keys, self.where if self.is_section else entry.where)


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
    except ConfigError:
        raise
    except Exception as error:  # PyYAML raises a KeyError for `!!bool abc`
        raise ConfigError(f"The value of `--{key}` {ON_THE_COMMAND_LINE} is not YAML: {error}") from error


@dataclass(frozen=True)
class _File:
    """A file being read: its path or URL, empty for the command line, and the files that lead to it."""

    location: str
    chain: str = ""  # `, included by FILE line N` for each of them, the nearest first
    includers: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        return f"in {self.location}{self.chain}" if self.location else ON_THE_COMMAND_LINE

    def included(self, name: str, line: int) -> Entry:
        """The entries of a file that this one includes in a line."""
        by = f"{self.location} line {line}" if self.location else "the command line"
        location, includers = _beside(self.location, name), (*self.includers, self.location)
        found = _File(location, f", included by {by}{self.chain}", includers)
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
        return stream.read().decode("utf-8-sig")  # pyright: ignore[reportAttributeAccessIssue]


def _parsed(text: str, file: _File) -> Entry:
    match posixpath.splitext(file.location)[1]:
        case ".json":
            plain = json.loads(text, object_pairs_hook=unique_keys)
        case ".toml":
            plain = tomllib.loads(text)
        case _:
            plain = _Loader(text, file).get_single_data()
    return Entry.of(plain, file.where)


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
            entry = Entry.of(below, self._file.where)
            if not entry.is_section:
                raise ConfigError(f"`<<` merges {shown(entry.plain)} {entry.where}; it must be a mapping.")
            tree = entry.overlaid(Entry.of(tree, self._file.where)) if tree else entry
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
