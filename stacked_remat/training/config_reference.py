"""Every key of a config with its type, default and meaning: for `--help`, and as a page of documentation.

The meanings come from the `Attributes:` of the dataclasses' docstrings.
"""

import dataclasses
import inspect
import itertools
import json
import re
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import draccus

_HEADER = "| key | type | default | |\n|---|---|---|---|"
_WIDTH = 79


@dataclasses.dataclass(frozen=True)
class ConfigRow:
    """A key of a config (of a value, a section, or sections under free names), or a type of a section.

    Attributes:
        names: the names of a value's type; the types that a section chooses among; the name of a type, or
            those of types with the same sections.
        default: as one would write it, None if it is required; for a section, its type, or `null` if it is
            left out.
        type_required: whether a section that is written has to name its `type`.
        meaning: what the docstring of the class says about the field.
        description: what the docstring of a section's class says before its fields.
    """

    kind: Literal["value", "section", "named", "type"]
    dotted: str
    names: tuple[str, ...] = ()
    default: str | None = None
    type_required: bool = False
    meaning: str = ""
    description: str = ""


def config_rows(config_class: Any, prefix: str = "", instance: Any = None) -> Iterator[ConfigRow]:
    """The rows of a dataclass: its values first, then each section with its own rows.

    Args:
        config_class: a dataclass of values, dataclasses and registries (`draccus.ChoiceRegistry`), of which
            every known type is described.
        prefix: put before the dotted keys.
        instance: has the default values in place of the class.
    """
    hints, meanings = typing.get_type_hints(config_class), _meanings(config_class)
    sections = []
    for field in dataclasses.fields(config_class):
        hint, dotted, meaning = hints[field.name], f"{prefix}{field.name}", meanings.get(field.name, "")
        value = _default(field) if instance is None else getattr(instance, field.name)
        if (named := named_section_class(hint)) is not None:
            row = ConfigRow("named", f"{dotted}.NAME", meaning=meaning, description=_description(named))
            sections.append((row, named, None))
        elif (section := section_class(hint)) is not None:
            default = "null" if value is None else None
            row = ConfigRow("section", dotted, (), default, False, meaning, _description(section))
            sections.append((row, section, value if dataclasses.is_dataclass(value) else None))
        else:
            default = None if value is dataclasses.MISSING else _written(value)
            yield ConfigRow("value", dotted, tuple(type_names(hint)), default, meaning=meaning)
    for row, section, value in sections:
        yield from _section(row, section, value)


def _section(row: ConfigRow, section: Any, instance: Any) -> Iterator[ConfigRow]:
    prefix = f"{row.dotted}."
    if not is_registry(section):
        yield row
        yield from config_rows(section, prefix, instance)
        return
    choices = section.get_known_choices()
    chosen = next((name for name, choice in choices.items() if type(instance) is choice), row.default)
    required = section.default_choice_name() is None
    yield dataclasses.replace(
        row, names=tuple(choices), default=chosen, type_required=required, description=""
    )
    rows = {
        name: list(config_rows(choice, prefix, instance if name == chosen else None))
        for name, choice in choices.items()
    }
    first, *others = rows.values()
    shared = [row for row in first if others and all(row in other for other in others)]
    yield from shared
    several = _of_several(rows, prefix)
    for name, choice in choices.items():
        yield ConfigRow("type", row.dotted, (name,), description=_description(choice))
        yield from (own for own in rows[name] if own not in shared and own not in several)
    for names in dict.fromkeys(several.values()):
        yield ConfigRow("type", row.dotted, names)
        yield from (own for own, owners in several.items() if owners == names)


def _of_several(rows: Mapping[str, list[ConfigRow]], prefix: str) -> dict[ConfigRow, tuple[str, ...]]:
    """The rows of sections below `prefix` that some types have and not all, with the names of these."""
    found = {}
    for row in dict.fromkeys(itertools.chain(*rows.values())):
        names = tuple(name for name, own in rows.items() if row in own)
        is_in_section = row.kind != "value" or "." in row.dotted.removeprefix(prefix)
        if is_in_section and 1 < len(names) < len(rows):
            found[row] = names
    return found


def config_help(config_class: Any) -> str:
    """What `--help` prints: the keys as they are written on the command line, a paragraph each."""
    path = "a YAML file of the keys below, which override it on the command line."
    lines = [*_paragraphs(_description(config_class)), "--config_path FILE", *_wrapped(path, "    ", "    ")]
    for row, following in _with_next(config_class):
        default = "required" if row.default is None else f"default {row.default}"
        heading = ""
        if row.kind == "value":
            heading = f"--{row.dotted} {'|'.join(row.names)} ({default})"
        elif row.kind == "named":
            heading = f"--{row.dotted}.* (any number of sections, each under a name of your own)"
        elif row.kind == "section":
            unset = " (default null, which leaves the section out)" if row.default == "null" else ""
            heading = f"--{row.dotted}.*{unset}"
        elif following is not None and following.dotted.startswith(f"{row.dotted}."):
            heading = f"With --{row.dotted}.type {' or '.join(row.names)}:"
        if row.kind == "named" or (row.kind == "section" and "." not in row.dotted):
            lines.append("")
        lines += _wrapped(heading, "", " " * 8) + _wrapped(row.meaning, "    ", "    ")
        if row.kind == "section" and row.names:
            required = ", required beside other keys" if row.type_required and row.default else ""
            lines += _wrapped(
                f"--{row.dotted}.type {' | '.join(row.names)} ({default}{required})", "", " " * 8
            )
    return "\n".join(lines)


def _paragraphs(text: str) -> list[str]:
    """The lines of paragraphs, each followed by an empty one; indented ones are examples, and kept."""
    lines: list[str] = []
    for paragraph in text.split("\n\n"):
        kept = paragraph.startswith(" ")
        lines += [*(paragraph.splitlines() if kept else _wrapped(" ".join(paragraph.split()))), ""]
    return lines


def _wrapped(text: str, first: str = "", others: str = "") -> list[str]:
    """The text in lines of at most 79 characters that begin with these, its words whole."""
    options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(text, _WIDTH, initial_indent=first, subsequent_indent=others, **options)


def config_reference(config_class: Any) -> str:
    """The reference of a config's keys as Markdown, with a heading for each section of the file.

    Args:
        config_class: a dataclass of values, dataclasses and registries (`draccus.ChoiceRegistry`), of which
            every known type is described.
    """
    paragraphs: list[str] = []
    before = ""
    for row, following in _with_next(config_class):
        if row.kind == "value":
            default = "required" if row.default is None else f"`{row.default}`"
            line = f"| `{row.dotted}` | {_listed(row.names, ' or ')} | {default} | {row.meaning} |"
            paragraphs.append(f"{paragraphs.pop() if before == 'value' else _HEADER}\n{line}")
        elif row.kind == "type":
            paragraphs += [f"#### `{row.dotted}`, `type: {' or '.join(row.names)}`", row.description]
        else:
            unset = "Left out by default." if row.default == "null" else ""
            heading = f"{'#' * min(2 + row.dotted.count('.'), 4)} `{row.dotted}`"
            paragraphs += [heading, row.description or row.meaning[:1].upper() + row.meaning[1:], unset]
        if row.kind == "section" and row.names:
            left_out = "the section is left out" if row.type_required else "it is not named"
            chosen = "" if row.default in (None, "null") else f"; `{row.default}` if {left_out}"
            paragraphs.append(f"`type` is one of {_listed(row.names)}{chosen}.")
            if following is not None and following.kind != "type":
                paragraphs.append("All types have:")
        before = row.kind
    return "\n\n".join(filter(None, paragraphs)) + "\n"


def _with_next(config_class: Any) -> Iterator[tuple[ConfigRow, ConfigRow | None]]:
    rows = list(config_rows(config_class))
    return zip(rows, [*rows[1:], None], strict=True)


def _default(field: dataclasses.Field) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _written(value: Any) -> str:
    """A value as one would write it in the file."""
    encoded = draccus.encode(value)
    return encoded if isinstance(encoded, str) else json.dumps(encoded)


def _description(config_class: Any) -> str:
    """What a docstring says before its attributes."""
    text = inspect.cleandoc(config_class.__doc__ or "").partition("\nAttributes:")[0].strip()
    made_by_dataclass = text.startswith(f"{config_class.__name__}(")
    return "" if made_by_dataclass else text


def _meanings(config_class: type) -> dict[str, str]:
    """What the `Attributes:` of a class and of its bases say about each field."""
    found: dict[str, str] = {}
    for base in reversed(config_class.__mro__):
        _, _, attributes = inspect.cleandoc(base.__doc__ or "").partition("\nAttributes:\n")
        block = re.split(r"\n(?=\S)", attributes)[0]
        for entry in re.split(r"\n(?=    \S)", block):
            name, colon, meaning = entry.strip().partition(":")
            if colon:
                found[name] = " ".join(meaning.split())
    return found


def _listed(names: Iterable[str], separator: str = ", ") -> str:
    return separator.join(f"`{name}`" for name in names)


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
