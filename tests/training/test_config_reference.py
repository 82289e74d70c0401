import re

from models.run_config import LmRunConfig
from stacked_remat.training.config_hints import keys_below
from stacked_remat.training.config_reference import config_reference

from .test_config_help import Drawing


def test_sections_types_defaults_and_the_words_of_the_docstrings():
    assert config_reference(Drawing).split("\n\n") == [
        "| key | type | default | |\n|---|---|---|---|\n"
        "| `remat` | `bool` or `dict[str,Any]` or `str` | `true` | anything. |",
        "## `shape`",
        "By `type`.",
        "`type` is one of `circle`, `square`; `circle` if it is not named.",
        "#### `shape`, `type: circle`",
        "| key | type | default | |\n|---|---|---|---|\n| `shape.radius` | `float` | `2.5` |  |",
        "#### `shape`, `type: square`",
        "Four sides.",
        "| key | type | default | |\n|---|---|---|---|\n"
        "| `shape.side` | `int` or `null` | `null` | of any of the four. |",
        "## `paint`",
        "Null for none. Left out by default.",
        "What covers it.",
        "| key | type | default | |\n|---|---|---|---|\n"
        "| `paint.layers` | `int` | required | how thick. |\n"
        "| `paint.colour` | `red` or `blue` | `red` | how it looks, which takes two lines. |",
        "## `pen`",
        "By `type`.",
        "`type` is one of `quill`, `marker`; `quill` if it is not named.",
        "All types have:",
        "| key | type | default | |\n|---|---|---|---|\n| `pen.width` | `float` | `1.0` | of a line. |",
        "#### `pen`, `type: quill`",
        "#### `pen`, `type: marker`",
        '| key | type | default | |\n|---|---|---|---|\n| `pen.inks` | `list[str]` | `["red"]` |  |',
        "### `frames.NAME`",
        "Around it.",
        "What covers it.",
        "| key | type | default | |\n|---|---|---|---|\n"
        "| `frames.NAME.layers` | `int` | required | how thick. |\n"
        "| `frames.NAME.colour` | `red` or `blue` | `red` | how it looks, which takes two lines. |\n",
    ]


def test_the_page_has_every_key_and_says_what_it_is():
    page = config_reference(LmRunConfig)
    for path in keys_below(LmRunConfig):
        key = re.escape(".".join(path))
        row = re.search(rf"^\| `{key}` \| .* \| (.*) \|$", page, re.MULTILINE)
        heading = re.search(rf"^#+ `{key}(\.NAME)?`$", page, re.MULTILINE)
        assert row or heading, f"the reference lacks {key}"
        assert heading or row[1], f"no docstring says what {key} is"  # pyright: ignore
    assert "| `trainer.mesh.param_mapping` | `dict[str,list[str]|str]` | `{" in page
    for type_of_model in ("qwen3", "qwen3_moe"):
        assert f"`type: {type_of_model}`" in page
