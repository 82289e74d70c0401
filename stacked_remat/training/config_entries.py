"""What was written for a config, before it is checked: a tree that knows where each entry of it stands."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .config_error import ConfigError

DEEPEST = 50
"""How many levels a config may have: more than any has, and few enough for functions that call themselves."""


@dataclass(frozen=True)
class Entry:
    """A value of a config, or a section of it.

    Attributes:
        value: a scalar, a list, or for a section a dict of entries by key.
        where: the place where it was written, as errors say it: `in FILE`, `on the command line`.
        replaced: what stood below a section that was laid over it, if that was no section.
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


def entry_of(value: Any, where: str, level: int = 1) -> Entry:
    """The tree of a plain value that was written in one place; keys become text.

    Raises:
        ConfigError: it has more than `DEEPEST` levels; this is one of them.
    """
    if level > DEEPEST:
        raise ConfigError(f"What stands {where} has more than {DEEPEST} levels, which no config has.")
    if isinstance(value, Mapping):
        return Entry({str(key): entry_of(own, where, level + 1) for key, own in value.items()}, where)
    if isinstance(value, list):
        return Entry([entry_of(item, where, level + 1).plain for item in value], where)
    return Entry(value, where)


def overlaid(below: Entry, above: Entry) -> Entry:
    """Two trees as one: what `above` says holds, and of `below` what it does not speak of.

    A section that names another `type` than the one below replaces all of that, for its keys are others; so
    does an empty one.
    """
    if above.is_section and above.value and not below.is_section:
        return Entry(above.value, above.where, replaced=below)
    if not (below.is_section and above.is_section and above.value):
        return above
    if _type_of(above) not in (None, _type_of(below)):
        return above
    merged = dict(below.value)
    for key, entry in above.value.items():
        merged[key] = overlaid(merged[key], entry) if key in merged else entry
    return Entry(merged, above.where, above.replaced or below.replaced)


def with_key(tree: Entry, dotted: str, entry: Entry, above: tuple[str, ...] = ()) -> Entry:
    """The tree with one entry replaced, by its dotted key; sections on the way are made if need be.

    Args:
        tree: the entries so far.
        dotted: the key, below `above`.
        entry: what it is to hold.
        above: the keys that lead to the tree.

    Raises:
        ConfigError: on the way stands a value, which has no keys.
    """
    if not tree.is_section and tree.value is not None:
        name = ".".join(above)
        raise ConfigError(
            f"`{name}.{dotted}` {entry.where} is a key of the section `{name}`, but `{name}` {tree.where} is "
            f"{shortened(tree.plain)}, which has no keys. Write a section there, or leave `{name}` out."
        )
    key, dot, rest = dotted.partition(".")
    keys: dict[str, Entry] = dict(tree.value or {})
    keys[key] = with_key(keys.get(key, Entry({}, entry.where)), rest, entry, (*above, key)) if dot else entry
    if tree.is_section:
        return Entry(keys, tree.where, tree.replaced)
    return Entry(keys, entry.where, replaced=tree)


def shortened(value: Any) -> str:
    """A value as an error shows it: its `repr`, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python writes out
        return "a number of thousands of digits"
    return text if len(text) <= 120 else f"{text[:100]}... ({len(text):,} characters)"


def leaves(tree: Entry, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Entry]]:
    """Every value that is no section, with its path."""
    if tree.is_section:
        for key, entry in tree.value.items():
            yield from leaves(entry, (*path, key))
    else:
        yield path, tree


def _type_of(section: Entry) -> Any:
    return section.value["type"].plain if "type" in section.value else None
