"""Config files that include others: `!include FILE` wherever a value may stand, and at a merge key.

    <<: !include base.yaml                 # all of it, with the keys below instead of its own
    optimizer: !include optimizers/lion.yaml
    trainer:
      <<: [!include short.yaml, !include quiet.yaml]   # where both have a key, the first one's holds
      num_steps: 500

A name is relative to the file that includes it. Keys beside a merge override single keys of what is included,
however deep; a section that names another `type`, or `{}`, replaces the included one.
"""

import json
import os
import posixpath
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import yaml

from .config_entries import Entry, entry_of, overlaid
from .config_error import ConfigError

_INCLUDE, _MERGE = "!include", "tag:yaml.org,2002:merge"


def read_config_file(location: str) -> Entry:
    """The entries of a config file with those of the files that it includes.

    Args:
        location: a path, or a URL of any file system that fsspec knows. YAML; `.json` and `.toml` are read as
            what they are, and include nothing.

    Raises:
        ConfigError: a file that can't be read, that includes itself, or that holds no mapping; names all
            files on the way to it.
    """
    tree = _read(_File(location))
    if not tree.is_section:
        raise ConfigError(
            f"{location} must hold a mapping of keys to values, got {type(tree.value).__name__}."
        )
    return tree


def read_config_value(text: str, where: str) -> Entry:
    """The entries of YAML from elsewhere; names of files to include are relative to the working directory.

    Args:
        text: the YAML.
        where: where it stands, for errors.

    Raises:
        yaml.YAMLError: the text is none.
        ConfigError: as `read_config_file`.
    """
    return _resolved(_parse(text, where), _File("", where=where))


@dataclass(frozen=True)
class _File:
    """A file being read.

    Attributes:
        location: path or URL.
        includers: the files on the way to it and the line there, from the nearest.
        seen: what tells these files, and this, from others.
        where: how errors call it.
    """

    location: str
    includers: tuple[str, ...] = ()
    seen: tuple[str, ...] = ()
    where: str = field(default="", kw_only=True)

    @property
    def name(self) -> str:
        return self.location + "".join(f", included by {includer}" for includer in self.includers)

    @property
    def place(self) -> str:
        return self.where or f"in {self.name}"

    def included(self, include: "_Include") -> "_File":
        location = _beside(self.location, include.name)
        here = f"{self.location} line {include.line}" if self.location else "the command line"
        found = _File(location, (here, *self.includers), (*self.seen, _identity(self.location)))
        if _identity(location) in found.seen:
            raise ConfigError(f"A config file can't include itself: {found.name}.")
        return found


@dataclass(frozen=True)
class _Include:
    """What stands for a file that is not read yet."""

    name: str
    line: int


def _read(file: _File) -> Entry:
    location = file.location
    try:
        if "://" in location:
            with fsspec.open(location, "r", encoding="utf-8") as stream:
                text = stream.read()  # pyright: ignore[reportAttributeAccessIssue]
        else:
            text = Path(location).read_text(encoding="utf-8")
        for ending, loads in {".json": json.loads, ".toml": tomllib.loads}.items():
            if location.endswith(ending):
                return entry_of(loads(text), file.place)
        return _resolved(_parse(text, location), file)
    except ConfigError:
        raise
    except (OSError, ImportError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"Can't read the config file {file.name}: {error}") from error


def _resolved(value: Any, file: _File) -> Entry:
    """The tree of what stands in `file`, with the files that it includes."""
    if isinstance(value, _Include):
        return _read(file.included(value))
    if isinstance(value, list):
        return Entry([_resolved(item, file).plain for item in value], file.place)
    if not isinstance(value, dict):
        return Entry(value, file.place)
    keys = {str(key): _resolved(item, file) for key, item in value.items() if key is not _Include}
    bases = value.get(_Include, ())
    own = Entry(keys, file.place) if keys or not bases else None
    for base in bases:
        below = _resolved(base, file)
        if not below.is_section:
            name = base.name if isinstance(base, _Include) else repr(base)
            raise ConfigError(f"What `<<:` {file.place} merges has to be a mapping; {name} is none.")
        own = below if own is None else overlaid(below, own)
    assert own is not None
    return own


class _Loader(yaml.SafeLoader):
    """Plain values, with every `!include` still to be read; refuses a key that is given twice."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and lines.setdefault(key.value, line) != line:
                raise yaml.constructor.ConstructorError(
                    None,
                    None,
                    f"the key {key.value!r} is there twice: line {lines[key.value]}",
                    key.start_mark,
                )
        return node

    def construct_yaml_map(self, node: yaml.MappingNode) -> Any:
        merges = [value for key, value in node.value if key.tag == _MERGE and _includes(value)]
        kept = [(key, value) for key, value in node.value if not (key.tag == _MERGE and _includes(value))]
        node = yaml.MappingNode(node.tag, kept, node.start_mark, node.end_mark)
        mapping: dict[Any, Any] = self.construct_mapping(node, deep=True)
        for value in merges:
            several = isinstance(value, yaml.SequenceNode)
            items = [self.construct_object(item, deep=True) for item in (value.value if several else [value])]
            mapping[_Include] = items
        return mapping

    def construct_include(self, node: yaml.ScalarNode) -> _Include:
        return _Include(str(self.construct_scalar(node)), node.start_mark.line + 1)


_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.construct_yaml_map)
_Loader.add_constructor(_INCLUDE, _Loader.construct_include)


def _includes(value: yaml.Node) -> bool:
    items: Sequence[yaml.Node] = value.value if isinstance(value, yaml.SequenceNode) else [value]
    return any(item.tag == _INCLUDE for item in items)


def _parse(text: str, name: str) -> Any:
    loader = _Loader(text)
    loader.name = name
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _beside(including: str, name: str) -> str:
    """The location of a file that another names."""
    name = os.path.expanduser(name)
    if "://" in name or os.path.isabs(name):
        return name
    scheme, separator, rest = including.rpartition("://")
    joined = posixpath.join(posixpath.dirname(rest), name)
    return f"{scheme}{separator}{posixpath.normpath(joined)}" if separator else joined


def _identity(location: str) -> str:
    return location if "://" in location or not location else os.path.realpath(location)
