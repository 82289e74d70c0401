"""The reference of a config: a page of the documentation, and what `--help` prints."""

import dataclasses
import re

import pytest

from models.plan_lm import PlanLmConfig
from models.run_config import LmRunConfig
from stacked_remat.training import ConfigError, config_reference, parse_config
from stacked_remat.training.config_reference import config_summary

from .drawing import Drawing


def test_the_reference_has_sections_types_defaults_and_docstrings(capsys):
    with pytest.raises(SystemExit) as stop:
        parse_config(Drawing, ["--help", "all"])
    shown = capsys.readouterr().out
    assert stop.value.code == 0 and shown == config_reference(Drawing)
    paragraphs = shown.split("\n\n")
    assert paragraphs[:3] == [
        "A drawing of one shape.",
        (
            "This paragraph is shown and wrapped at 80 columns; the one below it is\n"
            "indented, and so it is shown as it is."
        ),
        "    draw --config_path FILE\n      then paint",
    ]
    assert paragraphs[4:] == [
        "- `title` str|null, default `null`: below it.",
        "- `remat` bool|dict[str,Any]|str, default `true`: anything.",
        "- `scale` int, default `1`: of it.",
        "- `largest` int, default `10`: that is allowed.",
        "## `shape`",
        "By `type`.",
        (
            "`shape.type` is one of `circle`, `square`; `circle` if the section is left"
            " out."
        ),
        "#### `shape`, `type: circle`",
        "- `shape.radius` float, default `1.0`",
        "### `shape.paint`",
        "What covers it.",
        (
            "- `shape.paint.colour` red|blue, default `red`: how it looks, which takes"
            " two\n  lines."
        ),
        "- `shape.paint.layers` int, default `1`: how thick.",
        "#### `shape`, `type: square`",
        "Four sides.",
        "- `shape.side` int|null, default `null`: of any of the four.",
        "## `paint`",
        "What covers it.",
        "Left out by default.",
        (
            "- `paint.colour` red|blue, default `red`: how it looks, which takes two"
            " lines."
        ),
        "- `paint.layers` int, default `1`: how thick.",
        "## `pen`",
        "By `type`.",
        (
            "`pen.type` is one of `quill`, `marker`, `brush`; `quill` if the section is"
            " left\nout."
        ),
        "- `pen.width` float, default `1.0`: of a line.",
        "#### `pen`, `type: quill or marker`",
        "### `pen.cap`",
        "What covers it.",
        (
            "- `pen.cap.colour` red|blue, default `red`: how it looks, which takes"
            " two\n  lines."
        ),
        "- `pen.cap.layers` int, default `1`: how thick.",
        "#### `pen`, `type: marker or brush`",
        '- `pen.inks` list[str], default `["red"]`',
        "### `frames.NAME`",
        "What is around it.",
        "- `frames.NAME.makers` list[str], required: who made it.",
        "- `frames.NAME.weight` float, default `1.0`: in kilograms.\n",
    ]


def helped(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        parse_config(Drawing, arguments)
    assert stop.value.code == 0
    return capsys.readouterr().out.rstrip("\n").split("\n\n")


def test_help_is_one_screen_of_what_there_is(capsys):
    shown = helped(capsys, "--help")
    assert shown == helped(capsys, "-h", "--title")
    assert "`--help KEY` says more" in shown[3].replace("\n", " ")
    assert shown[4:] == [
        "- `title`: below it\n- `remat`: anything\n- `scale`: of it\n"
        "- `largest`: that is allowed",
        "- `shape`: by `type`: type, radius, paint, side\n"
        "- `paint`: null for none: colour, layers\n"
        "- `pen`: by `type`: type, width, cap, inks\n"
        "- `frames`: around it: makers, weight",
    ]
    lines = config_summary(LmRunConfig).splitlines()
    assert len(lines) < 80 and max(map(len, lines)) < 80


def test_help_of_a_key_is_all_that_the_reference_has_of_it(capsys):
    assert helped(capsys, "--scale", "3", "--help", "scale") == [
        "- `scale` int, default `1`: of it."
    ]
    section = helped(capsys, "--help", "shape")
    everything = helped(capsys, "--help", "all")
    begin = everything.index("## `shape`")
    assert section == everything[begin : begin + len(section)]
    assert everything[begin + len(section)] == "## `paint`"
    # With the types that have it.
    assert helped(capsys, "--help", "pen.inks") == [
        "#### `pen`, `type: marker or brush`",
        '- `pen.inks` list[str], default `["red"]`',
    ]
    assert helped(capsys, "--help", "shape.paint")[0] == "#### `shape`, `type: circle`"
    with pytest.raises(ConfigError, match="no key `paint.color`.*`paint.colour`"):
        parse_config(Drawing, ["--help", "paint.color"])


@pytest.mark.parametrize("config_class", [LmRunConfig, PlanLmConfig])
def test_the_commands_describe_all_of_their_keys(config_class):
    page = config_reference(config_class)
    items = re.findall(r"^- `([\w.]+)` ((?:.*\n)(?:  .*\n)*)", page, re.MULTILINE)
    sections = dict(
        re.findall(r"^#+ `([\w.]+?)(?:\.NAME)?`\n\n(.+)$", page, re.MULTILINE)
    )
    assert all(re.search(r"(`|required):\s+\S", text) for _, text in items), (
        "no docstring says what a key is"
    )
    for one in dataclasses.fields(config_class):
        assert one.name in dict(items) or sections.get(one.name), (
            f"no docstring says what {one.name} is"
        )
    assert max(len(line) for line in page.splitlines() if not line.startswith("#")) < 80
    assert (
        dict(items)["trainer.num_steps"]
        == "int, at least 1, default `100`: optimizer steps.\n"
    )
    assert (
        "`type: qwen3`" in page
        and "`trainer.mesh.param_mapping` dict[str,list[str]|str], default" in page
    )
