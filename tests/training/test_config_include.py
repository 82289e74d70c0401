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


def test_sections_lists_and_values_may_come_from_other_files(tmp_path):
    files = {
        "main.yaml": "motor: !include parts/motor.yaml\nwheels: {makers: !include parts/makers.yaml}",
        "parts/motor.yaml": "type: electric\npower: !include power.yaml",
        "parts/power.yaml": "90",
        "parts/makers.yaml": '["a", "b"]',
    }
    assert parse(tmp_path, files) == Car(Electric(90), Wheels(makers=("a", "b")))


def test_keys_beside_a_merge_override_single_keys_at_any_depth(tmp_path):
    files = {
        "main.yaml": "name: mine\n<<: !include base.yaml\nwheels: {count: 3}",
        "base.yaml": "name: base\nmotor: {type: petrol, litres: 2}\nwheels: {count: 6, makers: [a]}",
    }
    assert parse(tmp_path, files) == Car(Petrol(2.0), Wheels(3, ("a",)), "mine")
    overridden = parse(tmp_path, files, "--motor.power", "70", "--wheels.count", "5")
    assert overridden == Car(Petrol(2.0, 70), Wheels(5, ("a",)), "mine")


def test_a_section_of_another_type_or_an_empty_one_replaces_the_included_one(tmp_path):
    base = {"base.yaml": "motor: {type: petrol, litres: 2, power: 7}"}
    other = {"main.yaml": "<<: !include base.yaml\nmotor: {type: electric}"}
    assert parse(tmp_path, base | other).motor == Electric()
    same = {"main.yaml": "<<: !include base.yaml\nmotor: {type: petrol, power: 8}"}
    assert parse(tmp_path, base | same).motor == Petrol(2.0, 8)
    empty = {"base.yaml": "wheels: {count: 3}", "main.yaml": "<<: !include base.yaml\nwheels: {}"}
    assert parse(tmp_path, empty).wheels == Wheels()


def test_the_first_of_several_merged_files_wins_and_merges_nest(tmp_path):
    files = {
        "main.yaml": "wheels:\n  <<: [!include a.yaml, !include b.yaml, {makers: [c]}]",
        "a.yaml": "<<: !include deep.yaml\ncount: 1",
        "deep.yaml": "{count: 9, makers: [deep]}",
        "b.yaml": "{count: 2, makers: [b]}",
    }
    assert parse(tmp_path, files).wheels == Wheels(1, ("deep",))
    files["a.yaml"] = "count: 1"
    assert parse(tmp_path, files).wheels == Wheels(1, ("b",))


def test_anchors_and_merges_of_yaml_work(tmp_path):
    files = {
        "main.yaml": "wheels: &w {<<: !include count.yaml}\nmotor: &m\n  <<: {power: 4}\n  type: electric",
        "count.yaml": "count: 3",
    }
    assert parse(tmp_path, files) == Car(Electric(4), Wheels(3))


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
