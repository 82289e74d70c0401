"""A page of the documentation with every key of a config: its type, its default and what it means.

All of it is read off the config's dataclasses and their docstrings, as `--help` is.
"""

import dataclasses
import inspect
import typing
from collections.abc import Container, Iterable, Iterator
from typing import Any

from .config_help import as_written, field_default, field_meanings, registry_types
from .config_hints import is_registry, named_section_class, section_class, type_names

_HEADER = "| key | type | default | |\n|---|---|---|---|"


def config_reference(config_class: Any) -> str:
    """The reference of a config's keys as Markdown, a heading for each section of the file.

    Args:
        config_class: a dataclass of values, dataclasses and registries (`draccus.ChoiceRegistry`), of which
            every known type is described.
    """
    return "\n\n".join(filter(None, _keys(config_class, "", None))) + "\n"


def _section(dotted: str, hint: Any, default: Any, meaning: str) -> Iterator[str]:
    """The paragraphs of a section below the top: its heading, what it is, and its keys."""
    yield f"{'#' * min(2 + dotted.count('.'), 4)} `{dotted}`"
    yield _sentence(meaning) + (" Left out by default." if default is None else "")
    instance = default if dataclasses.is_dataclass(default) else None
    section = named_section_class(hint) or section_class(hint)
    if not is_registry(section):
        yield _description(section)
        yield from _keys(section, f"{dotted}.", instance)
        return
    choices, chosen, shared = registry_types(section, instance)
    yield f"`type` is one of {_listed(choices)}" + (f"; `{chosen}` if it is not named." if chosen else ".")
    if shared:
        yield "All types have:"
        yield from _keys(next(iter(choices.values())), f"{dotted}.", None, shared)
    for name, choice in choices.items():
        yield f"#### `{dotted}`, `type: {name}`"
        yield _description(choice)
        own = {field.name for field in dataclasses.fields(choice)} - shared
        yield from _keys(choice, f"{dotted}.", instance if name == chosen else None, own)


def _keys(config_class: Any, prefix: str, default: Any, only: Container[str] | None = None) -> Iterator[str]:
    """A table of the values of one dataclass, then its sections."""
    hints, meanings = typing.get_type_hints(config_class), field_meanings(config_class)
    rows, sections = [], []
    for field in dataclasses.fields(config_class):
        if only is not None and field.name not in only:
            continue
        hint, meaning = hints[field.name], meanings.get(field.name, "")
        value = field_default(field) if default is None else getattr(default, field.name)
        dotted = f"{prefix}{field.name}"
        if section_class(hint) is None and named_section_class(hint) is None:
            shown = "required" if value is dataclasses.MISSING else f"`{as_written(value)}`"
            rows.append(f"| `{dotted}` | {_listed(type_names(hint), ' or ')} | {shown} | {meaning} |")
        elif named_section_class(hint) is not None:
            sections.append((f"{dotted}.NAME", hint, dataclasses.MISSING, meaning))
        else:
            sections.append((dotted, hint, value, meaning))
    if rows:
        yield "\n".join([_HEADER, *rows])
    for section in sections:
        yield from _section(*section)


def _description(config_class: Any) -> str:
    """What a docstring says before its attributes."""
    text = inspect.cleandoc(config_class.__doc__ or "").partition("\nAttributes:")[0].strip()
    made_by_dataclass = text.startswith(f"{config_class.__name__}(")
    return "" if made_by_dataclass else text


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _listed(names: Iterable[str], separator: str = ", ") -> str:
    return separator.join(f"`{name}`" for name in names)
