"""What `--help` prints: every key of a config with its type, its default and what it means.

All of it is read off the config's dataclasses; the meaning stands in the `Attributes:` of their docstrings.
"""

import dataclasses
import inspect
import json
import re
import textwrap
import typing
from collections.abc import Container, Iterator, Mapping
from typing import Any

import draccus

from .config_hints import is_registry, named_section_class, section_class, type_name

_WIDTH = 100


def describe_keys(config_class: Any) -> str:
    """The keys of a config dataclass as they are written on the command line, one paragraph each.

    Args:
        config_class: a dataclass of values, dataclasses and registries (`draccus.ChoiceRegistry`), of which
            every known choice is described.
    """
    summary = (inspect.getdoc(config_class) or "").partition("\n")[0]
    path = ["--config_path FILE", "    a YAML file of the keys below, which override it on the command line."]
    return "\n".join([summary, "", *path, *_section(config_class, "", None)])


def _section(
    config_class: Any, prefix: str, default: Any, only: Container[str] | None = None
) -> Iterator[str]:
    """The paragraphs of one dataclass, or of `only` some of its fields; `default` is an instance, if any."""
    hints, meanings = typing.get_type_hints(config_class), field_meanings(config_class)
    for field in dataclasses.fields(config_class):
        if only is not None and field.name not in only:
            continue
        value = field_default(field) if default is None else getattr(default, field.name)
        yield from _key(f"{prefix}{field.name}", hints[field.name], value, meanings.get(field.name, ""))


def _key(dotted: str, hint: Any, default: Any, meaning: str) -> Iterator[str]:
    if (named := named_section_class(hint)) is not None:
        yield f"--{dotted}.NAME.* (any number of sections, each under a name of your own)"
        yield from _indented(meaning)
        yield from _section(named, f"{dotted}.NAME.", None)
        return
    section = section_class(hint)
    if section is None:
        shown = "required" if default is dataclasses.MISSING else f"default {as_written(default)}"
        yield f"--{dotted} {type_name(hint)} ({shown})"
        yield from _indented(meaning)
        return
    unset = " (default null, which leaves the section out)" if default is None else ""
    yield f"--{dotted}.*{unset}"
    yield from _indented(meaning)
    instance = default if dataclasses.is_dataclass(default) else None
    if not is_registry(section):
        yield from _section(section, f"{dotted}.", instance)
        return
    choices, chosen, shared = registry_types(section, instance)
    yield f"--{dotted}.type {' | '.join(choices)}" + (f" (default {chosen})" if chosen else " (required)")
    yield from _section(next(iter(choices.values())), f"{dotted}.", None, shared)
    for name, choice in choices.items():
        own = {field.name for field in dataclasses.fields(choice)} - shared
        if own:
            yield f"With --{dotted}.type {name}:"
            yield from _section(choice, f"{dotted}.", instance if name == chosen else None, own)


def registry_types(section: Any, instance: Any) -> tuple[Mapping[str, Any], str | None, set[str]]:
    """The types of a registry by name, that of its default, and the fields that need describing once only.

    Args:
        section: the registry.
        instance: the default of the section, if it has one.
    """
    choices = section.get_known_choices()
    chosen = next((name for name, choice in choices.items() if type(instance) is choice), None)
    return choices, chosen, _shared_fields(choices, instance)


def _shared_fields(choices: Mapping[str, Any], instance: Any) -> set[str]:
    """The fields that all types of a registry have with the same annotation and default.

    Args:
        choices: the dataclass of each type.
        instance: the default of the section, if it has one.
    """
    described = []
    for choice in choices.values():
        hints = typing.get_type_hints(choice)
        fields = {
            field.name: (hints[field.name], field_default(field)) for field in dataclasses.fields(choice)
        }
        if type(instance) is choice:
            fields = {name: (hint, getattr(instance, name)) for name, (hint, _) in fields.items()}
        described.append(fields)
    first, *others = described
    return {
        name for name, what in first.items() if others and all(other.get(name) == what for other in others)
    }


def field_default(field: dataclasses.Field) -> Any:
    """What a field has if nothing is written; `dataclasses.MISSING` if something must be."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def as_written(value: Any) -> str:
    """A default as one would write it in the file."""
    encoded = draccus.encode(value)
    return encoded if isinstance(encoded, str) else json.dumps(encoded)


def _indented(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="    ", subsequent_indent="    ")


def field_meanings(config_class: type) -> dict[str, str]:
    """What the `Attributes:` of a class and of its bases say of each field."""
    found: dict[str, str] = {}
    for base in reversed(config_class.__mro__):
        _, _, attributes = inspect.cleandoc(base.__doc__ or "").partition("\nAttributes:\n")
        block = re.split(r"\n(?=\S)", attributes)[0]
        for entry in re.split(r"\n(?=    \S)", block):
            name, colon, meaning = entry.strip().partition(":")
            if colon:
                found[name] = " ".join(meaning.split())
    return found
