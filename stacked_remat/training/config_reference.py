"""Every key of a config with its type, default and meaning: a page of documentation,
and `--help`.

The meanings come from the `Attributes:` of the dataclasses' docstrings.
"""

import dataclasses
import inspect
import json
import re
import textwrap
import typing
from collections.abc import Iterator
from typing import Any

from .config_checks import CHOICES, limits
from .config_sections import default_of, is_registry, plain, union_parts

_WIDTH = 79
_HEADING = re.compile(r"#+ `([\w.]+)`")
_ROW = re.compile(r"- `([\w.]+)`")
_BEGINNING = re.compile(r"(?:`[^`]*`|[^`.;:])*")  # up to a stop that is not in code


_USAGE = (
    "`--config_path FILE`: a YAML file of the keys below, which are given as `--key"
    " VALUE` too"
)


def config_reference(config_class: Any) -> str:
    """The reference of a config's keys as Markdown in lines of 79 characters, a heading
    for each section.

    Args:
        config_class: a dataclass of values, dataclasses and registries
            (`ChoiceRegistry`), of which every known type is described.
    """
    usage = f"{_USAGE}."
    blocks = [*description(config_class), _wrapped(usage), *_rows(config_class, "")]
    return "\n\n".join(blocks) + "\n"


def config_summary(config_class: Any) -> str:
    """One screen about a config: its keys with the beginning of what they mean, and
    what is in each of its sections.
    """
    usage = (
        f"{_USAGE}; `--help KEY` says more of a key or section, and `--help all` of all"
        " of them; `--schema` prints a JSON schema for editors."
    )
    hints = typing.get_type_hints(config_class)
    meanings = field_meanings(config_class)
    values = []
    sections = []
    for field in dataclasses.fields(config_class):
        hint = hints[field.name]
        meaning = meanings.get(field.name, "")
        text = f"- `{field.name}`: {_BEGINNING.findall(meaning)[0]}"
        section = section_class(hint) or named_section_class(hint)
        if section is None:
            values.append(_wrapped(text))
        else:
            sections.append(_wrapped(f"{text}: {', '.join(names_in(section))}"))
    blocks = [*description(config_class), _wrapped(usage)]
    return "\n\n".join([*blocks, "\n".join(values), "\n".join(sections)]) + "\n"


def names_in(section: Any) -> list[str]:
    """The keys of a section, of any of its types."""
    if not is_registry(section):
        return [field.name for field in dataclasses.fields(section)]
    names = ["type"]
    for choice in section.get_known_choices().values():
        names += [field.name for field in dataclasses.fields(choice)]
    return [*dict.fromkeys(names)]


def config_section(config_class: Any, key: str) -> str:
    """What the reference says of one key, or of a section with all that is in it; ""
    if there is no such key.
    """
    found: list[str] = []
    is_within = False
    types = None
    for block in config_reference(config_class).rstrip().split("\n\n"):
        heading = _HEADING.match(block)
        row = _ROW.match(block)
        if heading is not None:
            section = heading[1]
            is_within = f"{section}.".startswith(f"{key}.")
            # Headings of types of a section say of which type those below them are.
            if "`type: " in block and key.startswith(f"{section}."):
                types = block
        is_row = row is not None and row[1] == key
        if is_within or is_row:
            if types is not None:
                found.append(types)
                types = None
            found.append(block)
    return "\n\n".join(found) + "\n" if found else ""


def config_keys(config_class: Any) -> list[str]:
    """The dotted keys of a config's values, without those below names of its user's
    own.
    """
    return re.findall(r"^- `([\w.]+)`", config_reference(config_class), re.MULTILINE)


def _rows(config_class: Any, prefix: str, instance: Any = None) -> Iterator[str]:
    """A list item for each value of a dataclass, then each section with its own rows.

    Keys are below `prefix`; an instance has the default values in place of the class.
    """
    hints = typing.get_type_hints(config_class)
    meanings = field_meanings(config_class)
    ranges = [one for one in limits(config_class) if CHOICES not in one.words]
    sections = []
    for field in dataclasses.fields(config_class):
        hint = hints[field.name]
        dotted = f"{prefix}{field.name}"
        meaning = meanings.get(field.name, "")
        value = default_of(field) if instance is None else getattr(instance, field.name)
        if (named := named_section_class(hint)) is not None:
            sections.append(_section(named, f"{dotted}.NAME", meaning, {}))
        elif (section := section_class(hint)) is not None:
            sections.append(_section(section, dotted, meaning, value))
        else:
            encoded = None if value is dataclasses.MISSING else plain(value)
            written = encoded if isinstance(encoded, str) else json.dumps(encoded)
            given = (
                "required" if value is dataclasses.MISSING else f"default `{written}`"
            )
            own = [said for name, said, _ in ranges if name == field.name]
            kind = ", ".join([type_name(hint), *own, given])
            yield _wrapped(f"- `{dotted}` {kind}: {meaning}".rstrip(": "))
    yield from sections


def _section(section: Any, dotted: str, meaning: str, default: Any) -> str:
    """The heading, the meaning and the rows of a section."""
    heading, meaning = (
        f"{'#' * min(2 + dotted.count('.'), 4)} `{dotted}`",
        meaning[:1].upper() + meaning[1:],
    )
    unset = ["Left out by default."] if default is None else []
    instance = default if dataclasses.is_dataclass(default) else None
    if is_registry(section):
        body = [_wrapped(meaning), *unset, *_types(section, dotted, instance)]
    else:
        text = description(section) or [_wrapped(meaning)]
        body = [*text, *unset, *_rows(section, f"{dotted}.", instance)]
    return "\n\n".join([heading, *filter(None, body)])


def _types(registry: Any, dotted: str, instance: Any) -> Iterator[str]:
    """The rows of the types of a section: those of all types first, each row once."""
    choices = registry.get_known_choices()
    default = [name for name, choice in choices.items() if type(instance) is choice]
    chosen = f"; `{default[0]}` if the section is left out" if default else ""
    yield _wrapped(
        f"`{dotted}.type` is one of"
        f" {', '.join(f'`{name}`' for name in choices)}{chosen}."
    )
    # Most keys are the same in all types: each row is written once, under the types
    # that have it.
    owners: dict[str, list[str]] = {}
    for name, choice in choices.items():
        own = instance if type(instance) is choice else None
        for row in [*description(choice), *_rows(choice, f"{dotted}.", own)]:
            owners.setdefault(row, []).append(name)
    groups = dict.fromkeys(map(tuple, owners.values()))
    for names in sorted(groups, key=lambda names: -len(names)):
        if len(names) < len(choices):
            yield f"#### `{dotted}`, `type: {' or '.join(names)}`"
        yield from (row for row, own in owners.items() if tuple(own) == names)


def _wrapped(text: str) -> str:
    """The text in lines of at most 79 characters, its words whole; an item's lines are
    indented.
    """
    indent = "  " if text.startswith("- ") else ""
    options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(text, _WIDTH, subsequent_indent=indent, **options)


def description(config_class: Any) -> list[str]:
    """The paragraphs that a docstring has before its attributes; indented ones are
    examples, and kept.
    """
    text = (
        inspect.cleandoc(config_class.__doc__ or "")
        .partition("\nAttributes:")[0]
        .strip()
    )
    if text.startswith(f"{config_class.__name__}("):  # made by `dataclass`
        return []
    return [
        part if part.startswith(" ") else _wrapped(part)
        for part in text.split("\n\n")
        if part
    ]


def field_meanings(config_class: type) -> dict[str, str]:
    """What the `Attributes:` of a class and of its bases say about each field."""
    found: dict[str, str] = {}
    # Bases first, so that a class may say more of a field that it inherits.
    for base in reversed(config_class.__mro__):
        _, _, attributes = inspect.cleandoc(base.__doc__ or "").partition(
            "\nAttributes:\n"
        )
        # Up to the next heading, which is not indented
        block = re.split(r"\n(?=\S)", attributes)[0]
        for entry in re.split(r"\n(?=    \S)", block):
            name, colon, meaning = entry.strip().partition(":")
            if colon:
                found[name] = " ".join(meaning.split())
    return found


def section_class(hint: Any) -> Any:
    """The class whose fields are the keys of a section, which may be optional; None for
    a value.
    """
    # An abstract class that is not a registry has its own decoder, which knows the
    # keys.
    sections = [
        part
        for part in union_parts(hint)
        if is_registry(part)
        or (dataclasses.is_dataclass(part) and not inspect.isabstract(part))
    ]
    return sections[0] if len(sections) == 1 else None


def named_section_class(hint: Any) -> Any:
    """The class of the values of a `dict[str, Section]`; None for anything else."""
    arguments = typing.get_args(hint)
    return (
        section_class(arguments[1])
        if typing.get_origin(hint) is dict and len(arguments) == 2
        else None
    )


def type_name(hint: Any) -> str:
    """The names of a union's members, or the choices; for anything else its own
    name.
    """
    names = []
    for part in union_parts(hint):
        origin = typing.get_origin(part)
        arguments = typing.get_args(part)
        if origin is typing.Literal:
            names += [str(choice) for choice in arguments]
        elif part is type(None):
            names.append("null")
        elif origin is tuple and arguments[1:] == (Ellipsis,):
            names.append(f"list[{type_name(arguments[0])}]")
        else:
            names.append(
                part.__name__ if isinstance(part, type) and not arguments else str(part)
            )
    return "|".join(names).replace("typing.", "").replace(" ", "")
