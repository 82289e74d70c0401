"""Config files as plain values, and files that include others.

`!include FILE` stands in the place of any value, and at a merge key:

    <<: !include base.yaml  # all of it, except for the keys below
    trainer:
      # The first one that has a key gives its value.
      <<: [!include short.yaml, !include quiet.yaml]

A name is relative to the file that includes it. A file at a URL includes only files of
the same host or bucket, and none of this machine. Keys beside a merge override single
keys of included files, at any depth; a section that names another `type`, or `{}`,
replaces the included one.
"""

import itertools
import os
import posixpath
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import fsspec
import yaml

from .._messages import shown
from .errors import ConfigError

# Files that include two files each, at many levels, would be read for ever.
_MOST_INCLUDES = 1_000


def leaves(
    value: Any, path: tuple[Any, ...] = ()
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The path and the value of everything in sections that is not a section with
    keys.
    """
    if isinstance(value, Mapping) and value:
        for key, own in value.items():
            yield from leaves(own, (*path, key))
    elif path:
        yield path, value


def read_config_file(location: str) -> dict[str, Any]:
    """The keys of a YAML file, a path or any URL that fsspec knows, and of the files
    that it includes.

    A ConfigError names the file that can't be read or includes itself, and those that
    lead to it.
    """
    tree = _File(_beside("", location)).value()
    if not isinstance(tree, dict):
        got = "is empty" if tree is None else f"holds {shown(tree)}"
        raise ConfigError(
            f"The config file {location} {got}; it must hold a mapping of keys to"
            " values."
        )
    return tree


BOOLS = yaml.SafeLoader.bool_values  # of `yes`, `true`, `on` and their opposites


class Alone(str):
    """The value of a key that stands alone on the command line: true, for a boolean
    one.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return "nothing"


class Quoted(str):
    """Text that is in quotes, or has the tag `!!str`: text where any value may be."""

    __slots__ = ()


def set_key(tree: dict[str, Any], dotted: str, text: str | None) -> None:
    """Sets a key from the command line, with the sections that it is in; `text` is
    YAML, or None for a key that stands alone.
    """
    *above, last = dotted.split(".")
    for at, name in enumerate(above, 1):
        if not isinstance(below := tree.get(name), dict | None):
            section = ".".join(above[:at])
            raise ConfigError(
                f"`{dotted}` on the command line is a key of the section `{section}`,"
                f" but `{section}` is {shown(below)}, which has no keys. Write a"
                f" section there, or leave `{section}` out."
            )
        # Others may refer to the one of the file, by an alias
        tree[name] = tree = dict(below or {})
    try:
        tree[last] = Alone(True) if text is None else from_yaml(text)
    except ConfigError:
        raise
    except Exception as error:  # PyYAML raises a KeyError for `!!bool abc`
        quoted = f"\"'{text}'\""
        raise ConfigError(
            f"The value of `--{dotted}` on the command line is not YAML: {error}. Text"
            f" that means something in YAML is quoted for it too: --{dotted} {quoted}"
        ) from error


def from_yaml(text: str) -> Any:
    """What YAML holds."""
    return _Loader(text, _File("")).get_single_data()


def _overlaid(below: Any, above: Any) -> Any:
    """Two values merged key by key; where both have one, that of `above` holds.

    A section that is empty, or names another `type` than the one below, replaces all of
    it.
    """
    if not (isinstance(below, dict) and isinstance(above, dict) and above):
        return above
    # The keys of one type mean nothing to another.
    if "type" in above and above["type"] != below.get("type", above["type"]):
        return above
    merged = dict(below)
    for key, value in above.items():
        merged[key] = _overlaid(merged[key], value) if key in merged else value
    return merged


@dataclass(frozen=True)
class _File:
    """A file being read: its path or URL, empty for the command line, and the files
    that lead to it.
    """

    location: str
    chain: str = ""  # `, included by FILE line N` for each of them, the nearest first
    includers: tuple[str, ...] = ()
    # Of all files that the first one leads to
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def where(self) -> str:
        return self.location + self.chain or "the command line"

    def included(self, name: str, line: int) -> Any:
        """The value of a file that this one includes in a line."""
        by = f"{self.location} line {line}" if self.location else self.where
        try:
            location = _beside(self.location, name)
        except ValueError as error:
            raise ConfigError(
                f"{by}{self.chain}, includes {name!r}: {error}"
            ) from error
        includers = (*self.includers, self.location)
        chain = f", included by {by}{self.chain}"
        # A cycle is found by its names; what only grows is stopped by the number below.
        if location in includers:
            raise ConfigError(f"A config file can't include itself: {location}{chain}.")
        if next(self.numbers) > _MOST_INCLUDES:
            raise ConfigError(
                f"More than {_MOST_INCLUDES:,} files are included, the last one"
                f" {location}{chain}; a file counts each time. Include each file once."
            )
        return _File(location, chain, includers, self.numbers).value()

    def value(self) -> Any:
        """What the file holds."""
        location = self.location
        try:
            with (
                fsspec.open(location, "rb")
                if "://" in location
                else open(location, "rb")
            ) as stream:
                text = stream.read().decode("utf-8-sig")  # pyright: ignore[reportAttributeAccessIssue]
            return _Loader(text, self).get_single_data()
        except ConfigError:
            raise
        except Exception as error:  # file systems raise what their clients do
            problem = str(error) or type(error).__name__
            if isinstance(error, OSError):
                problem = (
                    f"{error.strerror or problem}. Check the path and its permissions."
                )
            raise ConfigError(
                f"Can't read the config file {location}{self.chain}: {problem}"
            ) from error


_TEXT = "tag:yaml.org,2002:str"
_PLAIN = "!plain"


class _Loader(yaml.SafeLoader):
    """Gives plain values. Refuses a key that is given twice.

    What is neither null nor a whole number in decimal is text as it was written: YAML
    1.1 reads `0010` as 8, `1:30` as 90, `no` as false and `2024-01-01 10:00` as a date.
    The annotation of a key says what is a bool.
    """

    # Only these kinds are told by how a value looks; what a bool or a float is, the
    # annotation says.
    yaml_implicit_resolvers = {
        first: [
            (tag, regexp)
            for tag, regexp in resolvers
            if tag.endswith((":null", ":merge"))
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str, file: _File):
        super().__init__(text)
        self.name = file.where
        self._file = file

    def resolve(self, kind: Any, value: Any, implicit: Any) -> str:
        """The tag of a node that has none; one of its own for text without quotes."""
        tag = super().resolve(kind, value, implicit)
        is_plain = kind is yaml.ScalarNode and implicit[0]
        return _PLAIN if is_plain and tag == _TEXT else tag

    def construct_plain(self, node: yaml.ScalarNode) -> str:
        """Text without quotes."""
        return node.value

    def construct_quoted(self, node: yaml.ScalarNode) -> Quoted:
        """Text that is not to be read as anything else."""
        return Quoted(self.construct_scalar(node))

    def construct_map(self, node: yaml.MappingNode) -> dict[str, Any]:
        """A section, with what it merges."""
        lines: dict[str, int] = {}
        tree: dict[str, Any] = {}
        merged: list[Any] = []
        for key, value in node.value:
            problem = "" if isinstance(key, yaml.ScalarNode) else "a key must be text"
            if not problem and key.value in lines:
                problem = (
                    f"the key {key.value!r} is given twice: line {lines[key.value]}"
                )
            if problem:
                raise yaml.constructor.ConstructorError(
                    None, None, problem, key.start_mark
                )
            lines[key.value] = key.start_mark.line + 1
            # Deep: a merge needs the whole value now, and not when the document is
            # done.
            found = self.construct_object(value, deep=True)
            if key.tag == "tag:yaml.org,2002:merge":
                merged = found if isinstance(found, list) else [found]
            else:
                tree[key.value] = found
        for below in merged:
            if not isinstance(below, dict):
                raise ConfigError(
                    f"`<<` in {self._file.where} merges {shown(below)}; it must be a"
                    " mapping."
                )
            # From the first merge on what is there wins, so the first file that has a
            # key gives its value.
            tree = _overlaid(below, tree) if tree else below
        return tree

    def construct_include(self, node: yaml.ScalarNode) -> Any:
        """The value of another file."""
        return self._file.included(
            str(self.construct_scalar(node)), node.start_mark.line + 1
        )


_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.construct_map)
_Loader.add_constructor(_TEXT, _Loader.construct_quoted)
_Loader.add_constructor(_PLAIN, _Loader.construct_plain)
_Loader.add_constructor("!include", _Loader.construct_include)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"(0|-?[1-9][0-9]*)$"), list("-0123456789")
)


_LOCAL_SCHEMES = ("file", "local")  # of fsspec, for files of this machine
_WITHOUT_HOST = ("memory",)  # whose URLs begin with a folder


def _beside(including: str, name: str) -> str:
    """The location of a file that another names; a ValueError if that is at a URL and
    may not include it.
    """
    scheme, separator, path = including.rpartition("://")
    if separator and scheme not in _LOCAL_SCHEMES:
        return _beside_url(scheme, path, name)
    name = os.path.expanduser(name)
    # A local config may include anything; only one at a URL, which someone else may
    # have written, may not.
    if "://" in name or os.path.isabs(name):
        return name
    return (
        scheme
        + separator
        + posixpath.normpath(posixpath.join(posixpath.dirname(path), name))
    )


def _beside_url(scheme: str, path: str, name: str) -> str:
    """The URL of a file of the same host or bucket that one at a URL names."""
    host, slash, path = (
        ("", "", path) if scheme in _WITHOUT_HOST else path.partition("/")
    )
    own = f"{scheme}://{host}{slash}"
    is_relative = "://" not in name and not name.startswith(("/", "~"))
    # fsspec reads `::` as a chain of file systems, each of which may be local.
    if "::" in name or not (is_relative or name.startswith(own)):
        raise ValueError(
            "a config at a URL can't include files of this machine or of another host."
            " Write a path relative to it, or copy the config to this machine."
        )
    below = (
        posixpath.join(posixpath.dirname(path), name)
        if is_relative
        else name.removeprefix(own)
    )
    return own + posixpath.normpath(f"/{below}").lstrip("/")
