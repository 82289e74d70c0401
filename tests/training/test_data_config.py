"""Values of the `data` section, and the errors for bad ones."""

import json

import pytest

from stacked_remat.training import ConfigError, DataConfig, SourceConfig, config_as_dict, parse_config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chat_date": "30.6.2025"}, r"data.chat_date must be a date such as 2025-06-30, got '30.6.2025'"),
        ({"held_out_fraction": 1.0}, r"data.held_out_fraction must lie between 0 and 1, got 1.0"),
        ({"cache_dir": "s3://u:SECRET@h/x"}, r"^data.cache_dir = 's3://\*\*\*@h/x' is a URL; it must be"),
    ],
)
def test_values_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"paths": ("",)}, r"A data source needs paths: .* got \[''\]"),
        ({"paths": ("x",), "weight": float("nan")}, r"positive and finite, got nan. To leave"),
    ],
)
def test_bad_sources_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        SourceConfig(**changes)


def parse(tmp_path, text, *overrides):
    path = tmp_path / "data.yaml"
    path.write_text(text)
    return parse_config(DataConfig, ["--config_path", str(path), *overrides])


def test_sources_are_named_sections(tmp_path):
    text = """
    sources:
      web: {paths: [web/, more/*.txt], weight: 3}
      chats: {paths: [s3://bucket/chats.jsonl], format: jsonl, train_on: answers, held_out: [exam.jsonl]}
    tokenizer: tokenizers/words
    packing: whole
    """
    config = parse(tmp_path, text, "--sources.web.weight", "2")
    assert config.sources["web"] == SourceConfig(("web/", "more/*.txt"), weight=2.0)
    assert config.sources["chats"].train_on == "answers" and config.packing == "whole"
    assert parse(tmp_path, json.dumps(config_as_dict(config))) == config
    alone = parse_config(DataConfig, ["--sources.mine.paths", "[texts/]"])
    assert alone == DataConfig({"mine": SourceConfig(("texts/",))})
    with pytest.raises(ConfigError, match=r"\(of `sources.web`\): The weight of a data source is positive"):
        parse(tmp_path, "sources: {web: {paths: [x], weight: -1}}")
