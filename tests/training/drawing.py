"""A config with each kind of value, section and docstring."""

from dataclasses import dataclass, field
from typing import Literal

from stacked_remat.training import ChoiceRegistry
from stacked_remat.training.config_sections import Switch


class Shape(ChoiceRegistry):
    pass


@dataclass(frozen=True)
class Paint:
    """What covers it.

    Attributes:
        colour: how it looks, which
            takes two lines.
        layers: how thick.
    """

    colour: Literal["red", "blue"] = "red"
    layers: int = 1

    def __post_init__(self):
        if self.layers < 1:
            raise ValueError(f"paint.layers must be at least 1, got {self.layers}.")


@Shape.register_subclass("circle")
@dataclass(frozen=True)
class Circle(Shape):
    radius: float = 1.0
    paint: Paint = field(default_factory=Paint)


@Shape.register_subclass("square")
@dataclass(frozen=True)
class Square(Shape):
    """Four sides.

    Attributes:
        side: of any of the four.
    """

    side: int | None = None


@dataclass(frozen=True)
class Pen(ChoiceRegistry):
    """What is drawn with.

    Attributes:
        width: of a line.
    """

    width: float = 1.0


@Pen.register_subclass("quill")
@dataclass(frozen=True)
class Quill(Pen):
    cap: Paint = field(default_factory=Paint)


@Pen.register_subclass("marker")
@dataclass(frozen=True)
class Marker(Pen):
    cap: Paint = field(default_factory=Paint)
    inks: tuple[str, ...] = ("red",)


@Pen.register_subclass("brush")
@dataclass(frozen=True)
class Brush(Pen):
    inks: tuple[str, ...] = ("red",)


@dataclass(frozen=True)
class Frame:
    """What is around it.

    Attributes:
        makers: who made it.
        weight: in kilograms.
    """

    makers: tuple[str, ...]
    weight: float = 1.0

    def __post_init__(self):
        if self.weight < 0:
            raise ValueError("A weight is not negative.")


@dataclass(frozen=True)
class Drawing:
    """A drawing of one shape.

    This paragraph is shown and wrapped at 80 columns; the one below it is indented, and
    so it is shown as it is.

        draw --config_path FILE
          then paint

    Attributes:
        shape: by `type`.
        title: below it.
        remat: anything.
        paint: null for none.
        pen: by `type`.
        frames: around it.
        scale: of it.
        largest: that is allowed.
    """

    shape: Shape = field(default_factory=Circle)
    title: str | None = None
    remat: Switch = True
    paint: Paint | None = None
    pen: Pen = field(default_factory=Quill)
    frames: dict[str, Frame] = field(default_factory=dict)
    scale: int = 1
    largest: int = 10

    def __post_init__(self):
        if self.scale > self.largest:
            raise ValueError(
                f"scale = {self.scale} is more than largest = {self.largest}."
            )
