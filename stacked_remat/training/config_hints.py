"""What the annotations of a config's fields mean: sections or values, and their names in help and errors."""

import dataclasses
import inspect
import types
import typing
from typing import Any

import draccus


def is_registry(hint: Any) -> bool:
    """Whether this is the root of a family of dataclasses of which `type:` chooses one."""
    return isinstance(hint, type) and draccus.ChoiceRegistry in hint.__bases__


def union_parts(hint: Any) -> tuple[Any, ...]:
    """The members of a union; the annotation itself if it is not a union."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def section_class(hint: Any) -> Any:
    """The class whose fields are the keys of a section, which may be optional; None for a value."""
    # An abstract class that is not a registry has its own decoder, which knows the keys.
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


def type_names(hint: Any) -> list[str]:
    """The names of a union's members, or the choices; for anything else its own name."""
    names = []
    for part in union_parts(hint):
        if typing.get_origin(part) is typing.Literal:
            names += [str(choice) for choice in typing.get_args(part)]
        elif part is type(None):
            names.append("null")
        elif typing.get_origin(part) is tuple and typing.get_args(part)[1:] == (Ellipsis,):
            names.append(f"list[{'|'.join(type_names(typing.get_args(part)[0]))}]")
        else:
            names.append(part.__name__ if isinstance(part, type) and not typing.get_args(part) else str(part))
    return [name.replace("typing.", "").replace(" ", "") for name in names]
