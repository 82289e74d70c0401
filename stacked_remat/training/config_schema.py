"""The JSON schema of a config, by which editors check YAML files and complete keys."""

from typing import Any

from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from .config_reference import description, field_meanings, names_in
from .config_sections import FAMILY, adapter, family_of
from .config_tree import BOOLS


def config_schema(config_class: Any) -> dict[str, Any]:
    """The JSON schema of the files of a config, with the meaning of each key."""
    schema = adapter(config_class).json_schema(schema_generator=_Schema)
    # Without the null that `adapter` allows; in a union all mistakes look the same.
    config, _null = schema.pop("anyOf")
    return config | schema


class _Schema(GenerateJsonSchema):
    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> dict[str, Any]:
        """A section: its keys, what they mean, and the merge of other files."""
        section = super().dataclass_schema(schema)
        keys = section["properties"]
        meaning = field_meanings(schema["cls"])
        section["description"] = "\n\n".join(description(schema["cls"]))
        for name, key in keys.items():
            key["description"] = meaning.get(name, "")
        keys["<<"] = {"description": "files whose keys are taken: !include FILE"}
        family = family_of(schema["cls"])
        if family is not None:
            keys["type"] = {"const": family.get_choice_name(schema["cls"])}
        # A file that includes others may leave out what these have.
        section.pop("required", None)
        return _or_included(section)

    def dict_schema(self, schema: core_schema.DictSchema) -> dict[str, Any]:
        """Sections under names of the user's own, or other values."""
        return _or_included(super().dict_schema(schema))

    def function_plain_schema(
        self, schema: core_schema.PlainValidatorFunctionSchema
    ) -> dict[str, Any]:
        """A section of a family: one of any of its types."""
        family = schema.get("metadata", {})[FAMILY]
        choices = {
            name: self.generate_inner(adapter(one).core_schema)["anyOf"][0]
            for name, one in family.get_known_choices().items()
        }
        chosen = [
            {
                "if": {"properties": {"type": {"const": name}}, "required": ["type"]},
                "then": one,
            }
            for name, one in choices.items()
        ]
        # A file that is included may have the type.
        keys = {"propertyNames": {"enum": [*names_in(family), "<<"]}}
        untyped = {
            "if": {"not": {"required": ["type"]}},
            "then": keys | {"anyOf": list(choices.values())},
        }
        return _or_included(
            {"properties": {"type": {"enum": list(choices)}}}
            | {"allOf": [*chosen, untyped]}
        )

    def str_schema(self, schema: core_schema.StringSchema) -> dict[str, Any]:
        """Text, which numbers and booleans without quotes are too."""
        return super().str_schema(schema) | {"type": ["string", "number", "boolean"]}

    def bool_schema(self, schema: core_schema.BoolSchema) -> dict[str, Any]:
        """A boolean, which may be a word too."""
        return {"enum": [True, False, *BOOLS]}


def _or_included(section: dict[str, Any]) -> dict[str, Any]:
    # An editor takes `!include FILE` for the text that follows the tag.
    return section | {"type": ["object", "string"]}
