"""What `--help` prints: every key of a config with its type, its default and what it means.

All of it is read off the config's dataclasses; the meaning stands in the `Attributes:` of their docstrings.
"""

import dataclasses
import inspect
import json
import re
import textwrap
import types
import typing
from collections.abc import Iterator
from typing import Any

import draccus

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


def _section(config_class: Any, prefix: str, default: Any) -> Iterator[str]:
    """The paragraphs of one dataclass. `default` is an instance of it where there is one."""
    hints, meanings = typing.get_type_hints(config_class), _meanings(config_class)
    for field in dataclasses.fields(config_class):
        value = _default(field) if default is None else getattr(default, field.name)
        yield from _key(f"{prefix}{field.name}", hints[field.name], value, meanings.get(field.name, ""))


def _key(dotted: str, hint: Any, default: Any, meaning: str) -> Iterator[str]:
    section: Any = next((part for part in _parts(hint) if _is_section(part)), None)
    if section is None:
        shown = "required" if default is dataclasses.MISSING else f"default {_shown(default)}"
        yield f"--{dotted} {_type_name(hint)} ({shown})"
        yield from _indented(meaning)
        return
    unset = " (default null, which leaves the section out)" if default is None else ""
    yield f"--{dotted}.*{unset}"
    yield from _indented(meaning)
    instance = default if dataclasses.is_dataclass(default) else None
    if not _is_registry(section):
        yield from _section(section, f"{dotted}.", instance)
        return
    choices = section.get_known_choices()
    chosen = next((name for name, choice in choices.items() if type(instance) is choice), None)
    yield f"--{dotted}.type {' | '.join(choices)}" + (f" (default {chosen})" if chosen else " (required)")
    for name, choice in choices.items():
        yield f"With --{dotted}.type {name}:"
        yield from _section(choice, f"{dotted}.", instance if name == chosen else None)


def _default(field: dataclasses.Field) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _parts(hint: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def _is_section(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint) or _is_registry(hint)


def _is_registry(hint: Any) -> bool:
    is_class = isinstance(hint, type) and not dataclasses.is_dataclass(hint)  # its choices are dataclasses
    return is_class and issubclass(hint, draccus.ChoiceRegistry)


def _type_name(hint: Any) -> str:
    names = []
    for part in _parts(hint):
        if typing.get_origin(part) is typing.Literal:
            names += [str(choice) for choice in typing.get_args(part)]
        elif part is type(None):
            names.append("null")
        else:
            names.append(part.__name__ if isinstance(part, type) and not typing.get_args(part) else str(part))
    return "|".join(names).replace("typing.", "").replace(" ", "")


def _shown(value: Any) -> str:
    encoded = draccus.encode(value)
    return encoded if isinstance(encoded, str) else json.dumps(encoded)


def _indented(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="    ", subsequent_indent="    ")


def _meanings(config_class: type) -> dict[str, str]:
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
