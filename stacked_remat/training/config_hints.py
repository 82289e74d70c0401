"""The annotations of config dataclasses: which are sections, which values, and what these are called."""

import dataclasses
import inspect
import types
import typing
from collections.abc import Iterator
from typing import Any

import draccus


def is_registry(hint: Any) -> bool:
    """Whether this is the root of a family of dataclasses of which `type:` chooses one."""
    return isinstance(hint, type) and draccus.ChoiceRegistry in hint.__bases__


def union_parts(hint: Any) -> tuple[Any, ...]:
    """The members of a union; anything else is its own only one."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def section_class(hint: Any) -> Any:
    """The class whose fields are the keys of a section, which may be optional; None for a value."""
    # An abstract class that is no registry has a decoder of its own, which knows the keys.
    sections = [
        part
        for part in union_parts(hint)
        if is_registry(part) or (dataclasses.is_dataclass(part) and not inspect.isabstract(part))
    ]
    return sections[0] if len(sections) == 1 else None


def named_section_class(hint: Any) -> Any:
    """The class of the values of a `dict[str, Section]`; None for anything else."""
    arguments = typing.get_args(hint)
    return section_class(arguments[1]) if typing.get_origin(hint) is dict and len(arguments) == 2 else None


def allows_none(hint: Any) -> bool:
    """Whether null may stand there."""
    return any(part in (Any, type(None)) for part in union_parts(hint))


def type_name(hint: Any) -> str:
    """What a value is, in a word; the members of a union, or the choices, with a bar between them."""
    return "|".join(type_names(hint))


def type_names(hint: Any) -> list[str]:
    """The names of the members of a union, or the choices; of anything else its own."""
    names = []
    for part in union_parts(hint):
        if typing.get_origin(part) is typing.Literal:
            names += [str(choice) for choice in typing.get_args(part)]
        elif part is type(None):
            names.append("null")
        elif typing.get_origin(part) is tuple and typing.get_args(part)[1:] == (Ellipsis,):
            names.append(f"list[{type_name(typing.get_args(part)[0])}]")
        else:
            names.append(part.__name__ if isinstance(part, type) and not typing.get_args(part) else str(part))
    return [name.replace("typing.", "").replace(" ", "") for name in names]


def keys_below(config_class: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every key of a config, those of all types of a registry among them."""
    if is_registry(config_class):
        found = [key for one in config_class.get_known_choices().values() for key in keys_below(one, path)]
        yield from dict.fromkeys(found)
        return
    hints = typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        own = (*path, field.name)
        yield own
        hint = hints[field.name]
        if (named := named_section_class(hint)) is not None:
            yield from keys_below(named, (*own, "NAME"))
        elif (section := section_class(hint)) is not None:
            yield from keys_below(section, own)
