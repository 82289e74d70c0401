"""A config as it was written: a tree of entries that know where each was written."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .._messages import shown
from .config_error import ConfigError

# More than any config has, and few enough to be read at once: aliases make a short file describe a huge tree.
_MOST_LEVELS, _MOST_VALUES = 50, 100_000


@dataclass(frozen=True)
class Entry:
    """A value of a config, or a section of it.

    Attributes:
        value: a scalar, a list, or for a section a dict of entries by key.
        where: where it was written, for errors: `in FILE` or `on the command line`.
        replaced: for a section, the value that was not a section and that it replaced, if any.
    """

    value: Any
    where: str
    replaced: "Entry | None" = None

    @property
    def is_section(self) -> bool:
        """Whether this is a mapping of keys."""
        return isinstance(self.value, dict)

    @property
    def plain(self) -> Any:
        """The value without the places."""
        return {key: entry.plain for key, entry in self.value.items()} if self.is_section else self.value


def entry_of(value: Any, where: str, level: int = 1, count: Iterator[int] | None = None) -> Entry:
    """The tree of a plain value, in which parts may be entries already.

    Args:
        value: mappings with text as keys, lists and scalars.
        where: where it was written.
        level: the level of `value` in the whole.
        count: counts the values of the whole.

    Raises:
        ConfigError: too many levels or values.
    """
    count = itertools.count() if count is None else count
    if level > _MOST_LEVELS or next(count) > _MOST_VALUES:
        raise too_large(where)
    if isinstance(value, Entry):
        return value
    if isinstance(value, Mapping):
        return Entry({key: entry_of(own, where, level + 1, count) for key, own in value.items()}, where)
    if isinstance(value, list):
        return Entry([entry_of(item, where, level + 1, count).plain for item in value], where)
    return Entry(value, where)


def too_large(where: str) -> ConfigError:
    """The error for a config with too many levels or values."""
    return ConfigError(
        f"The config {where} has more than {_MOST_LEVELS} levels or more than {_MOST_VALUES:,} values, "
        f"aliases written out. Check that this is the file you meant."
    )


def overlaid(below: Entry, above: Entry) -> Entry:
    """Two trees merged key by key; where both have a value, that of `above` holds.

    A section that is empty, or names another `type` than the one below, replaces all of it.
    """
    if not above.is_section or not above.value:
        return above
    if not below.is_section:
        return Entry(above.value, above.where, replaced=below)
    if "type" in above.value and above.plain["type"] != below.plain.get("type"):
        return above
    merged = dict(below.value)
    for key, entry in above.value.items():
        merged[key] = overlaid(merged[key], entry) if key in merged else entry
    return Entry(merged, above.where, above.replaced or below.replaced)


def with_key(tree: Entry, dotted: str, entry: Entry, above: tuple[str, ...] = ()) -> Entry:
    """The tree with one entry replaced, at `dotted` below the keys `above`; adds sections that are missing.

    Raises:
        ConfigError: a key that leads to it has a value, and is not a section.
    """
    if not tree.is_section and tree.value is not None:
        name = ".".join(above)
        raise ConfigError(
            f"`{name}.{dotted}` {entry.where} is a key of the section `{name}`, but `{name}` {tree.where} is "
            f"{shown(tree.plain)}, which has no keys. Write a section there, or leave `{name}` out."
        )
    key, dot, rest = dotted.partition(".")
    keys: dict[str, Entry] = dict(tree.value or {})
    keys[key] = with_key(keys.get(key, Entry({}, entry.where)), rest, entry, (*above, key)) if dot else entry
    if tree.is_section:
        return Entry(keys, tree.where, tree.replaced)
    return Entry(keys, entry.where, replaced=tree)


def leaves(tree: Entry, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Entry]]:
    """Every value that is not a section, with its path."""
    if tree.is_section:
        for key, entry in tree.value.items():
            yield from leaves(entry, (*path, key))
    else:
        yield path, tree
