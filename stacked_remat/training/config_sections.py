"""Sections of configs: families by `type:`, written keys, and configs as plain values.

Configs are dataclasses of the standard library; pydantic reads them by their
annotations.
"""

import dataclasses
import functools
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Self, TypeAlias, TypeVar

import yaml
from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    Strict,
    TypeAdapter,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from .._messages import did_you_mean, shown
from .config_tree import BOOLS, Quoted, leaves
from .errors import all_without_credentials

Choice = TypeVar("Choice", bound=type)

# an attribute of configs; `dataclasses.replace` does not keep it
_WRITTEN = "_written_keys"
NO_TYPE = "no_type"
FAMILY = "family"
"""The root of a family in what pydantic knows of it."""
_READING = ConfigDict(
    extra="forbid",
    allow_inf_nan=False,
    arbitrary_types_allowed=True,
    # A value may be a URL with a password.
    hide_input_in_errors=True,
    # YAML has a number where text looks like one.
    coerce_numbers_to_str=True,
)


@functools.cache
def adapter(config_class: Any) -> TypeAdapter[Any]:
    """What reads a config class."""
    # pydantic takes settings for a union, and not for a dataclass by itself.
    union: Any = config_class | None
    return TypeAdapter(union, config=_READING)


class RecordsArguments:
    """A section of configs whose `written_keys` are known where Python code made it.

    These are its arguments, so that a value that is written differs from a default
    that it equals. `dataclasses.replace` gives all fields as arguments.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """An instance that knows the names of its arguments."""
        section = super().__new__(cls)
        fields: Any = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
        by_position = zip([field.name for field in fields], args, strict=False)
        written = {"type"} if issubclass(cls, ChoiceRegistry) else set()
        for name, value in [*by_position, *kwargs.items()]:
            if isinstance(value, RecordsArguments):
                written |= {f"{name}.{key}" for key in written_keys(value)}
            else:
                written.add(name)
        object.__setattr__(section, _WRITTEN, frozenset(written))
        return section


class ChoiceRegistry(RecordsArguments):
    """The root of a family of dataclasses of which the key `type` of a section chooses
    one; a root names this as its base.
    """

    _choices: ClassVar[dict[str, Any]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if is_registry(cls):
            cls._choices = {}

    @classmethod
    def register_subclass(cls, name: str) -> Callable[[Choice], Choice]:
        """Makes the decorated class that of sections of this `type`."""

        def register(choice: Choice) -> Choice:
            cls._choices[name] = choice
            return choice

        return register

    @classmethod
    def get_known_choices(cls) -> dict[str, Any]:
        """The classes of the family by their names."""
        return cls._choices

    @classmethod
    def get_choice_name(cls, choice: type) -> str:
        """The name of a class of the family."""
        for name, one in cls._choices.items():
            if one is choice:
                return name
        raise KeyError(f"{choice.__name__} is no registered type of {cls.__name__}.")

    @classmethod
    def default_choice_name(cls) -> str | None:
        """The type of a section without `type`; None where it has to be written."""
        return None

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """How pydantic reads one: a root is open, as others may register more later."""
        if is_registry(source):
            return core_schema.no_info_plain_validator_function(
                functools.partial(_chosen, source), metadata={FAMILY: source}
            )
        return handler(source)


def union_parts(hint: Any) -> tuple[Any, ...]:
    """The members of a union; the annotation itself if it is not a union."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def is_registry(hint: Any) -> bool:
    """Whether this is the root of a family of dataclasses of which `type:` chooses
    one.
    """
    return isinstance(hint, type) and ChoiceRegistry in hint.__bases__


def family_of(config_class: type) -> Any:
    """The root of the family that a class is of; None if it is of none."""
    return next(filter(is_registry, config_class.__mro__), None)


def chosen_class(section: Any, tree: Any) -> Any:
    """The class of a section: of a family the one that its `type` names, or None."""
    if not is_registry(section):
        return section
    usual = section.default_choice_name()
    name = tree.get("type", usual) if isinstance(tree, dict) else None
    return section.get_known_choices().get(name) if isinstance(name, str) else None


def got(value: Any) -> str:
    """How an error shows a value that is not allowed."""
    return "nothing (null)" if value is None else shown(value)


def _chosen(registry: Any, tree: Any) -> Any:
    if isinstance(tree, registry):
        return tree
    if not isinstance(tree, dict):
        raise PydanticCustomError("dataclass_type", "no section")
    choice = chosen_class(registry, tree)
    if choice is None:
        known = registry.get_known_choices()
        said = "lacks the key `type`."
        if "type" in tree:
            said = f"is {got(tree['type'])}.{did_you_mean(str(tree['type']), known)}"
        valid = {"said": said, "valid": ", ".join(known)}
        raise PydanticCustomError(NO_TYPE, "{said} Valid: {valid}.", valid)
    own = {key: value for key, value in tree.items() if key != "type"}
    return adapter(choice).validate_python(own)


def default_of(field: dataclasses.Field[Any]) -> Any:
    """What a field is by default; `dataclasses.MISSING` if it is required."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def written_keys(section: Any) -> frozenset[str]:
    """The dotted keys that were given below a section, its `type` included: by a config
    file, by the command line, or by Python code as arguments.

    Empty for a section that Python code made of another class than
    `RecordsArguments`: there a default and a value that equals it look alike.
    """
    return getattr(section, _WRITTEN, frozenset())


def record_written(config: Any, tree: dict[str, Any]) -> None:
    """Tells a config, and the sections in it, which keys of a tree it was read from."""
    # A default that is written is a wish; one that is not may be replaced by what a
    # model's folder has.
    written = (".".join(path) for path, value in leaves(tree) if value != {})
    object.__setattr__(config, _WRITTEN, frozenset(written))
    for key, own in tree.items():
        value = getattr(config, key, None)
        if isinstance(own, dict) and dataclasses.is_dataclass(value):
            record_written(value, own)


def config_yaml(entries: Mapping[str, Any]) -> str:
    """Plain values of a config as YAML that is read back to the same."""
    return yaml.dump(dict(entries), Dumper=_Dumper, sort_keys=False)


class _Dumper(yaml.SafeDumper):
    """Quotes text that would be read as another value."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        # YAML 1.1, which PyYAML goes by, has fewer numbers: `1e3` is text there.
        style = None if natural(text) == text else "'"
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)


@functools.singledispatch
def plain(value: Any) -> Any:
    """A value of a config as plain dicts, lists and scalars."""
    if dataclasses.is_dataclass(value):
        own = {
            field.name: plain(getattr(value, field.name))
            for field in dataclasses.fields(value)
        }
        family = family_of(type(value))
        if family is None:
            return own
        return {"type": family.get_choice_name(type(value))} | own
    if isinstance(value, dict):
        return {key: plain(own) for key, own in value.items()}
    return [plain(own) for own in value] if isinstance(value, list | tuple) else value


def config_as_dict(config: Any) -> dict[str, Any]:
    """The config as plain dicts, lists and scalars, with every default filled in and
    registries' `type` keys.

    Written as YAML or JSON it is read back to an equal config, except for passwords and
    tokens in URLs, which are left out.
    """
    return all_without_credentials(plain(config))


_INTEGER = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)


def natural(value: Any) -> Any:
    """A value of which no annotation says what its text means: a number of YAML 1.2 or
    a bool, where it reads as one and is not in quotes.
    """
    if isinstance(value, dict):
        return {key: natural(own) for key, own in value.items()}
    if isinstance(value, list):
        return [natural(own) for own in value]
    if not isinstance(value, str):
        return value
    if isinstance(value, Quoted):
        return str(value)
    if _INTEGER.fullmatch(value):
        return int(value)
    if _FLOAT.fullmatch(value):
        return float(re.sub(r"\.(?=[in])", "", value.lower()))
    return BOOLS.get(value.lower(), value)


Natural: TypeAlias = Annotated[Any, BeforeValidator(natural)]
"""Any value; text that reads as a number or a bool is one."""


def _flag(value: Any) -> Any:
    if not isinstance(value, str) or isinstance(value, Quoted):
        return value
    return BOOLS.get(value.lower(), value)


Flag: TypeAlias = Annotated[bool, Strict(), BeforeValidator(_flag)]
"""A bool in a union with text, where text such as `1` is no bool."""
FlagOrText: TypeAlias = Annotated[Flag | str, Field(union_mode="left_to_right")]
Switch: TypeAlias = Annotated[
    Flag | dict[str, Natural] | str, Field(union_mode="left_to_right")
]
"""A bool, the keys of a section, or a name."""
