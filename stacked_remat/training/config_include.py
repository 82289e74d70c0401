"""Config files that include others: `!include FILE` wherever a value may stand, and at a merge key.

    <<: !include base.yaml                 # all of it, with the keys below instead of its own
    optimizer: !include optimizers/lion.yaml
    trainer:
      <<: [!include short.yaml, !include quiet.yaml]   # where both have a key, the first one's holds
      num_steps: 500

A name is relative to the file that includes it. Keys beside a merge override single keys of what is included,
however deep; a section that names another `type`, or `{}`, replaces the included one.
"""

import itertools
import json
import os
import posixpath
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import yaml

from .config_entries import DEEPEST, Entry, entry_of, overlaid, shortened
from .config_error import ConfigError

# More than any config has, and little enough to be read at once: by its aliases a short file may be huge.
_LARGEST, _MOST_VALUES, _MOST_INCLUDES = 2**20, 100_000, 100

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
        got = "is empty" if tree.value is None else f"holds {shortened(tree.plain)}"
        raise ConfigError(f"The config file {location} {got}; it must hold a mapping of keys to values.")
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
        count: counts all files that are included, however deep.
    """

    location: str
    includers: tuple[str, ...] = ()
    seen: tuple[str, ...] = ()
    where: str = field(default="", kw_only=True)
    count: Iterator[int] = field(default_factory=itertools.count, kw_only=True)

    @property
    def name(self) -> str:
        return self.location + "".join(f", included by {includer}" for includer in self.includers)

    @property
    def place(self) -> str:
        return self.where or f"in {self.name}"

    def included(self, include: "_Include") -> "_File":
        location = _beside(self.location, include.name)
        here = f"{self.location} line {include.line}" if self.location else "the command line"
        seen = (*self.seen, _identity(self.location))
        found = _File(location, (here, *self.includers), seen, count=self.count)
        if next(self.count) == _MOST_INCLUDES:
            raise ConfigError(f"A config includes at most {_MOST_INCLUDES} files; one more is {found.name}.")
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
        text = _text(location)
        for ending, loads in {".json": json.loads, ".toml": tomllib.loads}.items():
            if location.endswith(ending):
                return entry_of(loads(text), file.place)
        return _resolved(_parse(text, location), file)
    except ConfigError:
        raise
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"Can't read the config file {file.name}: it is not UTF-8 text (byte {error.start}). Save it as "
            f"UTF-8, or restore it."
        ) from error
    except RecursionError as error:
        raise ConfigError(
            f"Can't read the config file {file.name}: it is nested too deeply. A config has a few levels."
        ) from error
    except (OSError, ImportError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"Can't read the config file {file.name}: {error}") from error


def _text(location: str) -> str:
    """What is in a file, unless that is more than a config can be: a device or a data file, say."""
    if "://" in location:
        try:
            with fsspec.open(location, "rb") as stream:
                found = stream.read(_LARGEST + 1)  # pyright: ignore[reportAttributeAccessIssue]
        except (OSError, ImportError, ValueError):
            raise
        except Exception as error:  # file systems raise what their clients do
            raise OSError(f"{type(error).__name__}: {error}") from error
    else:
        with Path(location).open("rb") as stream:
            found = stream.read(_LARGEST + 1)
    if len(found) > _LARGEST:
        raise ValueError(f"it has more than {_LARGEST >> 20} MiB, which is no config.")
    return found.decode("utf-8-sig")


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
    """Plain values, with every `!include` still to be read.

    Refuses a key that is given twice, and more values, aliases written out, or levels than a config has.
    """

    def __init__(self, text: str):
        super().__init__(text)
        self._level = 0
        # Values and levels of each whole node, aliases written out.
        self._sizes: dict[int, tuple[int, int]] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        mark, is_alias = self.peek_event().start_mark, self.check_event(yaml.AliasEvent)
        self._level += 1
        if self._level > DEEPEST:
            raise _too_much(f"more than {DEEPEST} levels", mark)
        node = super().compose_node(parent, index)
        self._level -= 1
        if node is None:
            return None
        if not is_alias:
            parts = [] if isinstance(node, yaml.ScalarNode) else node.value
            if isinstance(node, yaml.MappingNode):
                parts = [part for pair in node.value for part in pair]
            within = [self._sizes[id(part)] for part in parts]
            values, levels = zip(*within, strict=True) if within else ((0,), (0,))
            self._sizes[id(node)] = (1 + sum(values), 1 + max(levels))
        if id(node) not in self._sizes:
            raise _too_much("an alias inside of what it stands for", mark)
        values, levels = self._sizes[id(node)]
        if values > _MOST_VALUES or self._level + levels > DEEPEST:
            raise _too_much(
                f"more than {_MOST_VALUES:,} values or {DEEPEST} levels, aliases written out", mark
            )
        return node

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

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (yaml.YAMLError, RecursionError):
            raise
        except (
            Exception
        ) as error:  # `!!bool abc` is a KeyError in PyYAML, `!!timestamp abc` an AttributeError
            kind = node.tag.rpartition(":")[2]
            why = f": {error}" if isinstance(error, ValueError) else ""
            raise yaml.constructor.ConstructorError(
                None, None, f"{shortened(node.value)} is no {kind}{why}", node.start_mark
            ) from error

    def construct_include(self, node: yaml.ScalarNode) -> _Include:
        return _Include(str(self.construct_scalar(node)), node.start_mark.line + 1)


_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.construct_yaml_map)
_Loader.add_constructor(_INCLUDE, _Loader.construct_include)


def _too_much(what: str, mark: Any) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, f"{what}, which no config has", mark)


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
