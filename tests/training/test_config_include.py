"""Config files that include others, and the errors for mistakes in them."""

from dataclasses import dataclass, field

import draccus
import fsspec
import pytest

from stacked_remat.training import ConfigError, parse_config


class Motor(draccus.ChoiceRegistry):
    pass


@Motor.register_subclass("petrol")
@dataclass(frozen=True)
class Petrol(Motor):
    litres: float = 1.0
    power: int = 50


@Motor.register_subclass("electric")
@dataclass(frozen=True)
class Electric(Motor):
    power: int = 80


@dataclass(frozen=True)
class Wheels:
    count: int = 4
    makers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Car:
    motor: Motor = field(default_factory=Petrol)
    wheels: Wheels = field(default_factory=Wheels)
    name: str = "car"


def parse(folder, files, *overrides, main="main.yaml"):
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return parse_config(Car, ["--config_path", str(folder / main), *overrides])


PARTS = {
    "main.yaml": "motor: !include parts/motor.yaml\nwheels: {makers: !include parts/makers.yaml}",
    "parts/motor.yaml": "type: electric\npower: !include power.yaml",
    "parts/power.yaml": "90",
    "parts/makers.yaml": '["a", "b"]',
}
BASE = {"base.yaml": "name: base\nmotor: {type: petrol, litres: 2}\nwheels: {count: 6, makers: [a]}"}
OVER_BASE = BASE | {"main.yaml": "name: mine\n<<: !include base.yaml\nwheels: {count: 3}"}
SEVERAL = {
    "main.yaml": "wheels:\n  <<: [!include a.yaml, !include b.yaml, {makers: [c]}]",
    "a.yaml": "<<: !include deep.yaml\ncount: 1",
    "deep.yaml": "{count: 9, makers: [deep]}",
    "b.yaml": "{count: 2, makers: [b]}",
}
ANCHORS = {
    "main.yaml": "wheels: &w {<<: !include count.yaml}\nmotor: &m\n  <<: {power: 4}\n  type: electric",
    "count.yaml": "count: 3",
}


def over_base(text):
    return BASE | {"main.yaml": f"<<: !include base.yaml\n{text}"}


@pytest.mark.parametrize(
    ("files", "overrides", "expected"),
    [
        (PARTS, [], Car(Electric(90), Wheels(makers=("a", "b")))),
        (OVER_BASE, [], Car(Petrol(2.0), Wheels(3, ("a",)), "mine")),
        (OVER_BASE, ["--motor.power", "70"], Car(Petrol(2.0, 70), Wheels(3, ("a",)), "mine")),
        (over_base("motor: {type: electric}"), [], Car(Electric(), Wheels(6, ("a",)), "base")),
        (over_base("motor: {type: petrol, power: 8}"), [], Car(Petrol(2.0, 8), Wheels(6, ("a",)), "base")),
        (over_base("wheels: {}"), [], Car(Petrol(2.0), Wheels(), "base")),
        (SEVERAL, [], Car(wheels=Wheels(1, ("deep",)))),
        (SEVERAL | {"a.yaml": "count: 1"}, [], Car(wheels=Wheels(1, ("b",)))),
        (ANCHORS, [], Car(Electric(4), Wheels(3))),
    ],
)
def test_included_files_are_merged_key_by_key(tmp_path, files, overrides, expected):
    """Another type or an empty section replaces the included one; the first of several files wins."""
    assert parse(tmp_path, files, *overrides) == expected


def test_the_command_line_includes_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = {"main.yaml": "name: a", "three.yaml": "count: 3"}
    assert parse(tmp_path, files, "--wheels", "!include three.yaml").wheels.count == 3


def test_urls_are_read_and_their_includes_are_relative_to_them():
    memory = fsspec.filesystem("memory")
    memory.pipe("/configs/main.yaml", b"<<: !include ../shared/base.yaml\nname: url")
    memory.pipe("/shared/base.yaml", b"wheels: {count: 8}")
    assert parse_config(Car, ["--config_path", "memory://configs/main.yaml"]) == Car(
        wheels=Wheels(8), name="url"
    )
    with pytest.raises(ConfigError, match="Can't read the config file memory://none.yaml"):
        parse_config(Car, ["--config_path", "memory://none.yaml"])
    with pytest.raises(ConfigError, match="Can't read the config file nosuch://a.yaml"):
        parse_config(Car, ["--config_path", "nosuch://a.yaml"])


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"main.yaml": "\n<<: !include a.yaml", "a.yaml": "wheels: !include gone.yaml"},
            r"gone.yaml, included by .*a.yaml line 1, included by .*main.yaml line 2: No such file .* Check",
        ),
        (
            {"main.yaml": "<<: !include a.yaml", "a.yaml": "<<: !include ./../x/main.yaml"},
            r"can't include itself: .*main.yaml, included by .*a.yaml line 1, included by .*main.yaml line 1",
        ),
        (
            {"main.yaml": "wheels: !include a.yaml", "a.yaml": "cuont: 3"},
            r"Unknown key `wheels.cuont` in .*main.yaml. Did you mean `count`",
        ),
        (
            {"main.yaml": "<<: !include a.yaml", "a.yaml": "[1]"},
            r"`<<` in .*main.yaml merges 1; it must be a mapping",
        ),
        (
            {"main.yaml": "wheels: !include a.yaml", "a.yaml": "a: ["},
            r"Can't read the config file .*a.yaml, inc",
        ),
    ],
)
def test_mistakes_name_the_file_and_those_that_include_it(tmp_path, files, message):
    (tmp_path / "x").mkdir()
    with pytest.raises(ConfigError, match=message):
        parse(tmp_path / "x", files)
