"""The JSON schema of a config, by which editors check YAML files and complete keys."""

from typing import Any

from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from .config_reference import description, field_meanings
from .config_sections import FAMILY, adapter, family_of


def config_schema(config_class: Any) -> dict[str, Any]:
    """The JSON schema of the files of a config, with the meaning of each key."""
    return adapter(config_class).json_schema(schema_generator=_Schema)


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
        choices = schema.get("metadata", {})[FAMILY].get_known_choices().values()
        inner = (self.generate_inner(adapter(one).core_schema) for one in choices)
        # Of each, without the null that `adapter` allows
        return {"anyOf": [one["anyOf"][0] for one in inner]}


def _or_included(section: dict[str, Any]) -> dict[str, Any]:
    # An editor takes `!include FILE` for the text that follows the tag.
    return section | {"type": ["object", "string"]}
