"""The JSON schema of configs, by which editors check and complete their files."""

import json
from pathlib import Path
from typing import Any

import pytest

from models.run_config import LmRunConfig
from stacked_remat.training import config_schema, parse_config
from stacked_remat.training.config_sections import natural
from stacked_remat.training.config_tree import read_config_file

from .drawing import Drawing

CONFIGS = Path(__file__).resolve().parents[2] / "models" / "configs"


def sections(config_class):
    return config_schema(config_class)["$defs"]


def test_each_key_has_its_type_default_limits_and_meaning():
    found = sections(Drawing)
    keys = found["Paint"]["properties"]
    colour: dict[str, Any] = dict(enum=["red", "blue"], default="red", type="string")
    meaning = "how it looks, which takes two lines."
    assert keys["colour"] == colour | {"description": meaning, "title": "Colour"}
    assert found["Paint"]["description"] == "What covers it."
    assert not found["Paint"]["additionalProperties"] and "<<" in keys
    steps = sections(LmRunConfig)["TrainerConfig"]["properties"]["num_steps"]
    assert (steps["minimum"], steps["default"]) == (1, 100)
    # An editor sees the name of an included file in place of what it has.
    assert found["Paint"]["type"] == ["object", "string"]


def test_a_section_of_a_family_is_one_of_its_types():
    found = sections(Drawing)
    assert found["Circle"]["properties"]["type"] == {"const": "circle"}
    shape = found["Drawing"]["properties"]["shape"]
    refs = [{"$ref": "#/$defs/Circle"}, {"$ref": "#/$defs/Square"}]
    assert shape["properties"]["type"] == {"enum": ["circle", "square"]}
    assert [one["then"] for one in shape["allOf"][:-1]] == refs
    assert shape["allOf"][-1]["then"]["anyOf"] == refs
    assert not any("required" in one for one in found.values())


def test_the_command_prints_it(capsys):
    with pytest.raises(SystemExit) as stop:
        parse_config(Drawing, ["--schema"])
    assert stop.value.code == 0
    assert json.loads(capsys.readouterr().out) == config_schema(Drawing)


def test_the_configs_of_the_models_are_valid_and_mistakes_are_not():
    validation = pytest.importorskip("jsonschema")
    validator = validation.Draft202012Validator(config_schema(LmRunConfig))
    for path in sorted(CONFIGS.glob("*.yaml")):
        tree = natural(read_config_file(str(path)))
        assert [*validator.iter_errors(tree)] == [], path
    for text in ({"run_dir": 5}, {"run_dir": True}, {"streaming": "on"}):
        assert validator.is_valid({"trainer": text}), text
    assert validator.is_valid({"budget": 5, "initialize_from_hf": 1.5})
    assert not validator.is_valid(None)
    assert validator.is_valid({"optimizer": {"nesterov": True}})  # of `type: sgd`
    for mistake, said in (
        ({"trainer": {"num_step": 1}}, "('num_step' was unexpected)"),
        ({"optimizer": {"type": "sgd", "beta1": 1}}, "('beta1' was unexpected)"),
        ({"optimizer": {"learning_rat": 5}}, "'learning_rat' is not one of ['type'"),
        ({"optimizer": {"type": "adam"}}, "'adam' is not one of ['adamw'"),
    ):
        errors = [error.message for error in validator.iter_errors(mistake)]
        assert any(said in error for error in errors), errors
    included = {"<<": "base.yaml", "trainer": "trainer.yaml"}
    assert validator.is_valid(included)
    for mistake in (
        {"trainer": {"num_step": 1}},
        {"trainer": {"num_steps": 0}},
        {"trainer": {"num_steps": "many"}},
        {"model": {"type": "qwen3", "experts": {}}},
        {"optimizer": {"type": "adam"}},
        {"trainer": {"checkpoint": 3}},
    ):
        assert not validator.is_valid(mistake), mistake
