"""Config files and command lines to configs, and the errors for mistakes in them."""

from dataclasses import dataclass, field

import pytest
import yaml

from stacked_remat.training import ConfigError, config_as_dict, parse_config
from stacked_remat.training.config_checks import Count
from stacked_remat.training.config_sections import config_yaml, written_keys

from .drawing import Circle, Drawing, Frame, Paint, Shape, Square


def parse(tmp_path, text, *overrides):
    path = tmp_path / "drawing.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return parse_config(Drawing, ["--config_path", str(path), *overrides])


def test_the_file_gives_values_and_the_command_line_overrides_them(tmp_path):
    text = "shape: {type: circle, radius: 2, paint: {layers: 3}}\ntitle: a"
    assert parse(tmp_path, text) == Drawing(Circle(2.0, Paint(layers=3)), "a")
    changed = parse(
        tmp_path,
        text,
        "--shape.paint.colour",
        "blue",
        "--title=b=c",
        "--remat",
        "{nested: 2}",
    )
    assert changed == Drawing(Circle(2.0, Paint("blue", 3)), "b=c", {"nested": 2})
    for text, value in (
        ("nested", "nested"),
        ("On", True),
        ("1", "1"),
        ("{a: [3, 0.5, x], b: {c: 1e-3}}", {"a": [3, 0.5, "x"], "b": {"c": 0.001}}),
        ("{a: 2, b: False}", {"a": 2, "b": False}),
    ):
        assert parse(tmp_path, f"remat: {text}").remat == value


def test_text_is_what_was_written_and_numbers_are_decimal(tmp_path):
    """YAML 1.1 makes other numbers of these, and dates."""
    texts = (
        "0010 -010 1:30 1:30:00 1:30.5 0x1F 0b11 0o17 1_000 1_0.5 +5 -0 12 -3 1e3"
        " 2024-01-01 2024-1-1 1.10 .5 .nan yes true Off =".split()
    )
    for text in (*texts, "2024-01-01 10:00:00", "2024-01-01T10:00:00Z"):
        assert parse(tmp_path, f"title: {text}").title == text
        assert parse_config(Drawing, ["--title", text]).title == text
        assert parse(tmp_path, yaml.safe_dump({"title": text})).title == text

    def circle(*arguments):
        return parse_config(Drawing, ["--shape.type", "circle", *arguments])

    numbers = {"0010": 10, "1_000": 1000, "+5": 5, "12": 12}
    for text, number in numbers.items():
        assert circle("--shape.paint.layers", text).shape == Circle(
            paint=Paint(layers=number)
        )
    for text, number in {
        "-.5e-3": -5e-4,
        "1.": 1.0,
        "2.5": 2.5,
        "1e-3": 1e-3,
        "+1.5E+2": 150.0,
    }.items():
        assert circle("--shape.radius", text).shape == Circle(number)
    for key, text in (
        ("paint.layers", "1:30"),
        ("paint.layers", "0x1F"),
        ("radius", "1:30.5"),
    ):
        with pytest.raises(
            ConfigError, match=f"must be a (whole )?number.*, got '{text}'"
        ):
            circle(f"--shape.{key}", text)


def test_a_boolean_key_alone_is_true(tmp_path):
    assert parse(tmp_path, "remat: false", "--remat", "--title", "a").remat is True
    assert parse_config(Drawing, ["--remat"]).remat is True
    assert parse_config(Drawing, ["--title=--remat"]).title == "--remat"
    layers = parse_config(Drawing, ["--paint", "{}", "--paint.layers", "3"]).paint
    assert layers == Paint(layers=3)
    with pytest.raises(ConfigError, match="`--config_path` on the command line has no"):
        parse_config(Drawing, ["--config_path", "--remat"])


def test_configs_round_trip(tmp_path):
    drawing = Drawing(Square(4), None, {"nested": 3})
    assert parse(tmp_path, yaml.safe_dump(config_as_dict(drawing))) == drawing
    assert config_as_dict(Drawing())["shape"] == {
        "type": "circle",
        "radius": 1.0,
        "paint": {"colour": "red", "layers": 1},
    }


def test_text_in_quotes_stays_text_where_any_value_may_be(tmp_path):
    read = parse(tmp_path, "remat: {a: '5', b: [\"yes\", !!str 5], c: 0010, d: .inf}")
    assert read.remat == {"a": "5", "b": ["yes", "5"], "c": 10, "d": float("inf")}
    assert parse_config(Drawing, ["--remat", "{a: 'true'}"]).remat == {"a": "true"}
    assert parse(tmp_path, "scale: '5'").scale == 5
    texts = "5 0010 0089 1.5 1e3 +.5 true tRuE On nan inf .inf .nan null 1_000".split()
    drawing = Drawing(remat={"a": [*texts, "", "~", 5, 1e-7, 1e16, True, None]})
    written = config_as_dict(drawing)
    assert parse(tmp_path, config_yaml(written)) == drawing
    read = parse(tmp_path, yaml.safe_dump({"remat": {"a": "5", "b": "nan", "c": "no"}}))
    assert read.remat == {"a": "5", "b": "nan", "c": "no"}
    assert parse(tmp_path, "remat: 'true'").remat == "true"


def test_a_section_may_be_left_out_and_others_have_names():
    assert (
        parse_config(Drawing, [])
        == parse_config(Drawing, ["--paint", "null"])
        == Drawing()
    )
    assert parse_config(Drawing, ["--paint.layers", "2"]).paint == Paint("red", 2)
    assert config_as_dict(Drawing(paint=Paint()))["paint"] == {
        "colour": "red",
        "layers": 1,
    }
    frames = ["--frames.a.makers", "[1, x]", "--frames.a.weight", "1e-4"]
    assert parse_config(Drawing, frames).frames == {"a": Frame(("1", "x"), 1e-4)}


def layers(text):
    return f"shape: {{type: circle, paint: {{layers: {text}}}}}"


IN_FILE = [
    (
        "titel: x",
        (
            r"Unknown key `titel` in .*drawing.yaml. Did you mean `title`\? Valid:"
            r" shape, title"
        ),
    ),
    (
        "shape: {type: circle, paint: {layer: 2}}",
        r"Unknown key `shape.paint.layer` in .*mean `layers`",
    ),
    (
        "shape: {type: circle, side: 2}",
        r"Unknown key `shape.side`.*Valid: radius, paint",
    ),
    ("shape: {type: circle, r: 2}", r"Unknown key `shape.r` .* Did you mean `radius`"),
    ("shape: {type: circel}", r"`shape.type` in .* is 'circel'. Did you mean `circle`"),
    (
        "shape: {type: circle, radius: }",
        r"`shape.radius` in .* must be a number, got nothing .null.",
    ),
    (
        "paint: {colour: blu}",
        r"`paint.colour` in .* 'red' or 'blue', got 'blu'. Did you mean `blue`",
    ),
    (
        layers("1e3"),
        r"`shape.paint.layers` .* be a whole number in decimal digits, got '1e3'\.$",
    ),
    (
        "shape: {type: circle, side: 2}",
        r"`shape.side` in .* It is one of `type: square`",
    ),
    ("paint.layers: 5", r"Unknown key `paint.layers` .* `paint: {layers: VALUE}`"),
    ("shape.paint.layers: 5", r"section: `shape: {paint: {layers: VALUE}}`. Valid"),
    ("'': 5", r"Unknown key `''` in .*drawing.yaml. Valid: shape"),
    ("shape: {type: }", r"`shape.type` in .* is nothing \(null\). Valid: circle"),
    ("remat: ", r"or text, got nothing \(null\). To turn it off write `remat: false`"),
    (
        "paint: {colour: green}",
        r"must be 'red' or 'blue', got 'green'. `--help paint.colour` says what they m",
    ),
    ("colour: red", r"Unknown key `colour` in .* Did you mean `shape.paint.colour`"),
    (
        "{title: a, title: b}",
        r"(?s)the key 'title' is given twice: line 1.*line 1, column 12",
    ),
    ("", r"drawing.yaml is empty; it must hold a mapping"),
    (
        "shape: {type: circle, radius: 0x" + "f" * 9999 + "}",
        r"must be a number, got .0xf+\.\.\.f+",
    ),
    (
        b"title: \xff",
        r"drawing.yaml: 'utf-8' codec can't decode byte 0xff in position 7",
    ),
    (
        "title: &a [*a]",
        r"(?s)drawing.yaml: found unconstructable recursive node.*line 1, column 8",
    ),
]
ON_THE_COMMAND_LINE = [
    (
        ["--shape.type", "square", "--shape.sid", "3"],
        r"`shape.sid` on the command line.*`side`",
    ),
    (
        ["--config", "a.yaml"],
        r"Unknown key `config` on the command line. Did you mean `config_path`",
    ),
    (["--title", ""], r"`--title` on the command line has no value: write"),
    (["--title="], r"`--title` on the command line has no value"),
    (["--remat", " "], r"`--remat` on the command line has no value"),
    (["--title"], r"`--title` on the command line has no value"),
    (["--scale", "--title", "x"], r"`--scale` on the .* no value: write `--scale VAL"),
    (["--paint"], r"`--paint` on the command line has no value"),
    (["--shape.type"], r"`shape.type` on the command line is nothing. Valid: circle"),
    (
        ["--shape.radius", "2"],
        r"`shape` on the .* line lacks the key `type`. Valid: ci",
    ),
    (["--frames", "{a.b: {maker: [x]}}"], r"Unknown key `frames.a.b.maker` on"),
    (
        ["--frames", "{a.b: 3}"],
        r"`frames.a.b` .* is a section of keys, .*\(makers, w",
    ),
    (["--shape", "--shape.radius", "2"], r"but `shape` is nothing, which has no keys"),
    (["--titl"], r"Unknown key `titl` on the command line. Did you mean `title`"),
    (
        ["--title", "a", "--scale=2", "--title=b"],
        r"`title` is given twice on the command line: `--title a` and then `--title b`",
    ),
    (
        ["--paint.layers", "2", "--paint", "{colour: red}"],
        r"`paint.layers` is given twice .*: `--paint.layers 2` and then `--paint {col",
    ),
    (["--remat", "--remat"], r"given twice .*: `--remat` and then `--remat`. Leave"),
    (
        ["--config_path", "a.yaml"],
        r"`config_path` is given twice .*drawing.yaml` and then `--config_path a.yaml`",
    ),
    (["title", "x"], r"Expected `--key value` on the command line, got 'title'"),
    (["--.title", "x"], r"Expected `--key value` on the command line, got '--.title'"),
    (
        ["--paint.layers", "1e300"],
        r"must be a whole number in decimal digits, got '1e300'\.$",
    ),
    (
        ["--frames.a.makers", "[1e3, {}]"],
        r"makers.1` on the command line must be text, got {}\.$",
    ),
    (["--title", "!!bool abc"], r"`--title` on the command line is not YAML: 'abc'"),
    (["--paint.layer", "2"], r"Unknown key `paint.layer` .* Did you mean `layers`"),
    (["--paint", "3"], "`paint` on the command line is a section of keys, got 3"),
    (
        ["--frames.a.weight", "2"],
        r"`frames.a` on the command line lacks the key `makers`",
    ),
    (
        ["--frames.a.maker", "[x]"],
        r"Unknown key `frames.a.maker` .* Did you mean `makers`",
    ),
    (
        ["--frames.a.makers", "x"],
        r"`frames.a.makers` on .* must be a list, got 'x'. Write \[x\]",
    ),
    (
        ["--frames.a.makers", "[x, null]"],
        r"`frames.a.makers.1` on .* must be text, got nothing",
    ),
    (
        ["--frames", "[a]"],
        r"`frames` on the .* line must be a mapping of keys to values, got \['a'\]",
    ),
    (
        ["--frames.a", "{makers: [x], weight: -1}"],
        r"\(of `frames.a`\): A weight is not negative",
    ),
]
BAD_VALUE = "paint.layers must be at least 1, got 0"


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        *((text, [], message) for text, message in IN_FILE),
        *(
            ("title: a", arguments, message)
            for arguments, message in ON_THE_COMMAND_LINE
        ),
        (
            layers(3),
            ["--shape.paint.layers", "0"],
            f"Bad config on the command line: {BAD_VALUE}",
        ),
        (layers(0), ["--title", "a"], f"Bad config in .*drawing.yaml: {BAD_VALUE}"),
        (
            "largest: 5",
            ["--scale", "7"],
            "Bad config in .*drawing.yaml and on the command line: scale = 7",
        ),
    ],
)
def test_mistakes_are_named_with_the_place_that_has_them(
    tmp_path, text, arguments, message
):
    with pytest.raises(ConfigError, match=message):
        parse(tmp_path, text, *arguments)


def test_all_mistakes_are_told_at_once(tmp_path):
    text = "scale: x\npaint: {layers: 1.5, colour: re}\ntitel: a\nshape: {type: a}"
    with pytest.raises(ConfigError) as error:
        parse(tmp_path, text, "--frames.a.makers", "'*x'")
    lines = str(error.value).replace(f" in {tmp_path}/drawing.yaml", "").splitlines()
    assert lines == [
        "Unknown key `titel`. Did you mean `title`? Valid: shape, title, remat, paint,"
        " pen, frames, scale, largest.",
        "`shape.type` is 'a'. Valid: circle, square.",
        "`paint.colour` must be 'red' or 'blue', got 're'. Did you mean `red`?",
        "`paint.layers` must be a whole number in decimal digits, got '1.5'.",
        "`frames.a.makers` on the command line must be a list, got '*x'. Write ['*x'].",
        "`scale` must be a whole number in decimal digits, got 'x'.",
    ]


def test_many_mistakes_are_cut_and_valid_keys_told_once(tmp_path):
    text = "".join(f"key{number}: 5\n" for number in range(30))
    with pytest.raises(ConfigError) as error:
        parse(tmp_path, text)
    lines = str(error.value).splitlines()
    assert len(lines) == 9 and lines[-1] == "And 22 more mistakes."
    assert str(error.value).count("Valid:") == 1 and "Valid: shape" in lines[0]


def test_a_family_is_open(monkeypatch):
    """Others may register a type after configs were read."""
    assert parse_config(Drawing, ["--shape.type", "square"]).shape == Square()
    monkeypatch.setattr(Shape, "_choices", dict(Shape.get_known_choices()))

    @Shape.register_subclass("dot")
    @dataclass(frozen=True)
    class Dot(Shape):
        size: Count = 1

    drawing = parse_config(Drawing, ["--shape.type", "dot", "--shape.size", "3"])
    assert drawing.shape == Dot(3) and config_as_dict(drawing)["shape"]["type"] == "dot"
    with pytest.raises(ConfigError, match="`shape.size` on .* must be at least 1, got"):
        parse_config(Drawing, ["--shape.type", "dot", "--shape.size", "0"])


@dataclass(frozen=True)
class Sketch:
    paint: Paint = field(default_factory=lambda: Paint(layers=5))
    shape: Shape = field(default_factory=lambda: Circle(2.0, Paint(layers=7)))


def test_keys_that_are_not_written_keep_the_defaults_of_the_whole_config():
    def parsed(*arguments):
        return parse_config(Sketch, arguments)

    assert parsed("--paint.colour", "blue").paint == Paint("blue", 5)
    assert parsed("--shape.type", "circle").shape == Sketch().shape
    thick = parsed("--shape.type", "circle", "--shape.paint.colour", "blue").shape
    assert thick == Circle(2.0, Paint("blue", 7))
    assert parsed("--shape.type", "square").shape == Square()
    assert written_keys(parsed("--paint.colour", "blue").paint) == {"colour"}
