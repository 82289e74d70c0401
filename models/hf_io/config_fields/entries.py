"""Entries of a table of fields, which read them and write them."""

import abc
import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from models.hf_io.config_fields.given import ConfigFields, Found
from models.parts.config import DecoderConfig, SparseDecoderConfig


class Entry(abc.ABC):
    """A field, or several that belong together, under the name of the first."""

    @abc.abstractmethod
    def read(self, given: ConfigFields, name: str, found: Found) -> Found:
        """What the field says; `found` has what the entries before it said."""

    @abc.abstractmethod
    def write(self, config: Any, name: str) -> dict[str, Any]:
        """The fields of a config; none where a file needs none."""


Fields: TypeAlias = dict[str, Entry]
"""The entries of a `config.json` by the names of fields: `rope_theta`, or of a field in
a section `linear_attn_config.head_dim`.
"""


@dataclass(frozen=True)
class Field(Entry):
    """A field that is an attribute of the config.

    Attributes:
        path: of the attribute: `attention.window`.
        default: where the field is absent or null, as in transformers; `...` if it may
            not be.
        aliases: other names that are read.
        written: the path of what is written, where it is another.
        nullable: whether null is a value, and not the default.
        kind: the type, where it is not that of the default; `object` for several.
        also: the path of another attribute, which in files is always the same; empty
            for none.
    """

    path: str
    default: Any = ...
    aliases: tuple[str, ...] = ()
    written: str = ""
    nullable: bool = False
    kind: type | None = None
    also: str = ""

    def read(self, given: ConfigFields, name: str, found: Found) -> Found:
        """The field under any of its names."""
        if self.nullable:
            return {self.path: given(name, self.default, null=None)}
        kind = self.kind
        if kind is None:
            usual = 0 if self.default is ... else self.default  # sizes have none
            kind = object if usual is None else type(usual)
        # All are read, so that none is left over; the first in this order counts.
        values = [given(one, kind=kind) for one in (name, *self.aliases)]
        values = [value for value in values if value is not None]
        if not values and self.default is ...:
            raise ValueError(f"{name} is missing.")
        value = values[0] if values else self.default
        return dict.fromkeys(filter(None, (self.path, self.also)), value)

    def write(self, config: Any, name: str) -> dict[str, Any]:
        """The attribute."""
        parts = (self.written or self.path).split(".")
        return {name: functools.reduce(getattr, parts, config)}


class Only(Entry):
    """A field of which one value is supported, under the names that it may have."""

    def __init__(self, *supported: Any, written: bool = False):
        self.supported = supported
        self.written = written

    def read(self, given: ConfigFields, name: str, found: Found) -> Found:
        """Refuses other values."""
        given.only(name, *self.supported)
        return {}

    def write(self, config: Any, name: str) -> dict[str, Any]:
        """The value, where it is not the default of transformers."""
        return {name: self.supported[0]} if self.written else {}


@dataclass(frozen=True)
class Ignored(Entry):
    """A field of any value, which changes nothing here.

    Attributes:
        always: attributes that have these values whatever the file says.
    """

    always: Mapping[str, Any] = field(default_factory=dict)

    def read(self, given: ConfigFields, name: str, found: Found) -> Found:
        """What is so always."""
        given.ignore(name)
        return dict(self.always)

    def write(self, config: Any, name: str) -> dict[str, Any]:
        """Nothing."""
        return {}


class NoPadding(Entry):
    """`pad_token_id`, where transformers' default is beyond the embedding of a smaller
    vocabulary.
    """

    def read(self, given: ConfigFields, name: str, found: Found) -> Found:
        """Nothing: weights and documents mark padding here."""
        given.ignore(name)
        return {}

    def write(self, config: Any, name: str) -> dict[str, Any]:
        """None, so that it has no default."""
        return {name: None}


@dataclass(frozen=True)
class KeyValueHeads(Entry):
    """The number of key and value heads; null is that of query heads.

    Attributes:
        default: where the field is absent; None for that of query heads too.
    """

    default: int | None = None

    def read(self, given: ConfigFields, name: str, found: Found) -> Found:
        """The number."""
        # Older files have null, or nothing, where each query head has keys of its own.
        every = found["num_heads"]
        return {"num_kv_heads": given(name, self.default or every, null=every)}

    def write(self, config: DecoderConfig, name: str) -> dict[str, Any]:
        """The number."""
        return {name: config.num_kv_heads}


class LoadBalance(Entry):
    """The weight of the load-balance loss; 0 where `output_router_logits` is false,
    which turns the loss off.
    """

    def read(self, given: ConfigFields, name: str, found: Found) -> Found:
        """The weight."""
        # Transformers computes this loss only where it returns the router's logits.
        weight = given(name, 0.001)
        is_on = given("output_router_logits", True)
        return {"experts.load_balance_weight": weight if is_on else 0.0}

    def write(self, config: SparseDecoderConfig, name: str) -> dict[str, Any]:
        """The weight."""
        return {name: config.experts.load_balance_weight_used}


def without(fields: Fields, *names: str) -> Fields:
    """The fields but for some."""
    return {name: entry for name, entry in fields.items() if name not in names}


def with_defaults(fields: Fields, **defaults: Any) -> Fields:
    """The fields, of which these have other defaults."""
    changed = {}
    for name, default in defaults.items():
        entry: Any = fields[name]  # of a class with a default
        changed[name] = dataclasses.replace(entry, default=default)
    return fields | changed


def ignored(*names: str) -> Fields:
    """Fields of any value, which change nothing here."""
    return {name: Ignored() for name in names}


def read_decoder(given: ConfigFields, fields: Fields) -> Found:
    """Reads the fields of a table, in its order."""
    found = Found()
    # In order: an entry may need what one before it found, such as a number of layers.
    for name, entry in fields.items():
        found |= entry.read(given, name, found)
    return found


def write_decoder(config: DecoderConfig, fields: Fields) -> dict[str, Any]:
    """The inverse of `read_decoder`."""
    written = {}
    for name, entry in fields.items():
        written |= entry.write(config, name)
    return in_sections(written)


def in_sections(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, those of `section.field` in a dict that is the value of `section`."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        section, _, name = path.rpartition(".")
        place = tree.setdefault(section, {}) if section else tree
        place[name] = value
    return tree
