"""The text of `--help` and the reference page of a config."""

import dataclasses
import importlib
import re
from dataclasses import dataclass, field
from typing import Any, Literal

import draccus
import pytest

from models.run_config import LmRunConfig
from stacked_remat.training import config_as_dict, config_reference, parse_config


class Shape(draccus.ChoiceRegistry):
    pass


@dataclass(frozen=True)
class Paint:
    """What covers it.

    Attributes:
        colour: how it looks, which
            takes two lines.
        layers: how thick.
    """

    layers: int
    colour: Literal["red", "blue"] = "red"


@Shape.register_subclass("circle")
@dataclass(frozen=True)
class Circle(Shape):
    radius: float = 1.0


@Shape.register_subclass("square")
@dataclass(frozen=True)
class Square(Shape):
    """Four sides.

    Attributes:
        side: of any of the four.
    """

    side: int | None = None


@dataclass(frozen=True)
class Pen(draccus.ChoiceRegistry):
    """What is drawn with.

    Attributes:
        width: of a line.
    """

    width: float = 1.0


@Pen.register_subclass("quill")
@dataclass(frozen=True)
class Quill(Pen):
    pass


@Pen.register_subclass("marker")
@dataclass(frozen=True)
class Marker(Pen):
    inks: tuple[str, ...] = ("red",)


@dataclass(frozen=True)
class Drawing:
    """A drawing of one shape.

    This paragraph is shown and wrapped at 80 columns; the one below it is indented, and so
    it is shown as it is.

        draw --config_path FILE
          then paint

    Attributes:
        shape: by `type`.
        paint: null for none.
        remat: anything.
        pen: by `type`.
        frames: around it.
    """

    shape: Shape = field(default_factory=lambda: Circle(2.5))
    paint: Paint | None = None
    remat: bool | dict[str, Any] | str = True
    pen: Pen = field(default_factory=Quill)
    frames: dict[str, Paint] = field(default_factory=dict)


def help_of(config_class, capsys):
    with pytest.raises(SystemExit) as stop:
        parse_config(config_class, ["--help"])
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_help_gives_each_key_its_type_default_and_meaning(capsys):
    assert help_of(Drawing, capsys).splitlines() == [
        "A drawing of one shape.",
        "",
        "This paragraph is shown and wrapped at 80 columns; the one below it is",
        "indented, and so it is shown as it is.",
        "",
        "    draw --config_path FILE",
        "      then paint",
        "",
        "--config_path FILE",
        "    a YAML file of the keys below, which override it on the command line.",
        "--remat bool|dict[str,Any]|str (default true)",
        "    anything.",
        "",
        "--shape.*",
        "    by `type`.",
        "--shape.type circle | square (default circle, required beside other keys)",
        "With --shape.type circle:",
        "--shape.radius float (default 2.5)",
        "With --shape.type square:",
        "--shape.side int|null (default null)",
        "    of any of the four.",
        "",
        "--paint.* (default null, which leaves the section out)",
        "    null for none.",
        "--paint.layers int (required)",
        "    how thick.",
        "--paint.colour red|blue (default red)",
        "    how it looks, which takes two lines.",
        "",
        "--pen.*",
        "    by `type`.",
        "--pen.type quill | marker (default quill, required beside other keys)",
        "--pen.width float (default 1.0)",
        "    of a line.",
        "With --pen.type marker:",
        '--pen.inks list[str] (default ["red"])',
        "",
        "--frames.NAME.* (any number of sections, each under a name of your own)",
        "    around it.",
        "--frames.NAME.layers int (required)",
        "    how thick.",
        "--frames.NAME.colour red|blue (default red)",
        "    how it looks, which takes two lines.",
    ]


@pytest.mark.parametrize("command", ["run_config.LmRunConfig", "plan_lm.PlanLmConfig"])
def test_the_commands_describe_all_of_their_keys(command, capsys):
    module, name = command.split(".")
    config_class = getattr(importlib.import_module(f"models.{module}"), name)
    lines = help_of(config_class, capsys).splitlines()
    for one in dataclasses.fields(config_class):
        at = next(i for i, line in enumerate(lines) if line.startswith((f"--{one.name} ", f"--{one.name}.")))
        assert lines[at + 1].startswith("    "), f"{name} does not say what {one.name} is"
    assert max(map(len, lines)) < 80
    assert "--trainer.num_steps int (default 100)" in lines and "    optimizer steps." in lines


def test_the_page_has_sections_types_defaults_and_docstrings():
    assert config_reference(Drawing).split("\n\n") == [
        "| key | type | default | |\n|---|---|---|---|\n"
        "| `remat` | `bool` or `dict[str,Any]` or `str` | `true` | anything. |",
        "## `shape`",
        "By `type`.",
        "`type` is one of `circle`, `square`; `circle` if the section is left out.",
        "#### `shape`, `type: circle`",
        "| key | type | default | |\n|---|---|---|---|\n| `shape.radius` | `float` | `2.5` |  |",
        "#### `shape`, `type: square`",
        "Four sides.",
        "| key | type | default | |\n|---|---|---|---|\n"
        "| `shape.side` | `int` or `null` | `null` | of any of the four. |",
        "## `paint`",
        "What covers it.",
        "Left out by default.",
        "| key | type | default | |\n|---|---|---|---|\n"
        "| `paint.layers` | `int` | required | how thick. |\n"
        "| `paint.colour` | `red` or `blue` | `red` | how it looks, which takes two lines. |",
        "## `pen`",
        "By `type`.",
        "`type` is one of `quill`, `marker`; `quill` if the section is left out.",
        "All types have:",
        "| key | type | default | |\n|---|---|---|---|\n| `pen.width` | `float` | `1.0` | of a line. |",
        "#### `pen`, `type: quill`",
        "#### `pen`, `type: marker`",
        '| key | type | default | |\n|---|---|---|---|\n| `pen.inks` | `list[str]` | `["red"]` |  |',
        "### `frames.NAME`",
        "What covers it.",
        "| key | type | default | |\n|---|---|---|---|\n"
        "| `frames.NAME.layers` | `int` | required | how thick. |\n"
        "| `frames.NAME.colour` | `red` or `blue` | `red` | how it looks, which takes two lines. |\n",
    ]


def test_the_page_has_every_key_and_says_what_it_is():
    page = config_reference(LmRunConfig)
    rows = dict(re.findall(r"^\| `([\w.]+)` \| .* \| (.*) \|$", page, re.MULTILINE))
    headings = re.findall(r"^#+ `([\w.]+?)(?:\.NAME)?`$", page, re.MULTILINE)

    def check(value, path):
        if path in rows:
            assert rows[path], f"no docstring says what {path} is"
            return
        assert path in headings, f"the reference lacks {path}"
        for key, own in (value or {}).items():
            if key != "type":
                check(own, f"{path}.{key}")

    for key, value in config_as_dict(LmRunConfig()).items():
        check(value, key)
    assert "| `trainer.mesh.param_mapping` | `dict[str,list[str]|str]` | `{" in page
    for type_of_model in ("qwen3", "qwen3_moe"):
        assert f"`type: {type_of_model}`" in page
    assert all(rows.values()), "no docstring says what a key is"


@dataclass(frozen=True)
class Vehicle(draccus.ChoiceRegistry):
    seats: int = 1


@Vehicle.register_subclass("bicycle")
@dataclass(frozen=True)
class Bicycle(Vehicle):
    gears: int = 1


@Vehicle.register_subclass("car")
@dataclass(frozen=True)
class Car(Vehicle):
    gears: int = 1
    paint: Paint = field(default_factory=lambda: Paint(1))


@Vehicle.register_subclass("lorry")
@dataclass(frozen=True)
class Lorry(Vehicle):
    load: float = 1.5
    paint: Paint = field(default_factory=lambda: Paint(1))


@dataclass(frozen=True)
class Traffic:
    """Passes by."""

    vehicle: Vehicle = field(default_factory=Car)


def test_a_section_of_some_types_is_described_once(capsys):
    shown = help_of(Traffic, capsys)
    last = shown[shown.index("With --vehicle.type bicycle:") :]
    assert last.startswith(
        "With --vehicle.type bicycle:\n--vehicle.gears int (default 1)\n"
        "With --vehicle.type car:\n--vehicle.gears int (default 1)\n"
        "With --vehicle.type lorry:\n--vehicle.load float (default 1.5)\n"
        "With --vehicle.type car or lorry:\n--vehicle.paint.*\n"
    )
    assert last.count("--vehicle.paint.colour") == 1
    assert config_reference(Traffic).count("#### `vehicle`, `type: car or lorry`") == 1
