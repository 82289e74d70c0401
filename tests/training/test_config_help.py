import dataclasses
import importlib
from dataclasses import dataclass, field
from typing import Any, Literal

import draccus
import pytest

from stacked_remat.training import parse_config


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

    It is not shown.

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
        "--config_path FILE",
        "    a YAML file of the keys below, which override it on the command line.",
        "--shape.*",
        "    by `type`.",
        "--shape.type circle | square (default circle)",
        "With --shape.type circle:",
        "--shape.radius float (default 2.5)",
        "With --shape.type square:",
        "--shape.side int|null (default null)",
        "    of any of the four.",
        "--paint.* (default null, which leaves the section out)",
        "    null for none.",
        "--paint.layers int (required)",
        "    how thick.",
        "--paint.colour red|blue (default red)",
        "    how it looks, which takes two lines.",
        "--remat bool|dict[str,Any]|str (default true)",
        "    anything.",
        "--pen.*",
        "    by `type`.",
        "--pen.type quill | marker (default quill)",
        "--pen.width float (default 1.0)",
        "    of a line.",
        "With --pen.type marker:",
        '--pen.inks list[str] (default ["red"])',
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
    assert "--trainer.num_steps int (default 100)" in lines and "    optimizer steps." in lines
