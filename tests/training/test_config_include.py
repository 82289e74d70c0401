"""Config files that include others, and the errors for mistakes in them."""

import fsspec
import pytest

from stacked_remat.training import ConfigError, parse_config
from stacked_remat.training.config_tree import _beside

from .drawing import Circle, Drawing, Marker, Paint, Square


def parse(folder, files, *overrides, main="main.yaml"):
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return parse_config(Drawing, ["--config_path", str(folder / main), *overrides])


PARTS = {
    "main.yaml": (
        "shape: !include parts/shape.yaml\npen: {type: marker, inks: !include"
        " parts/inks.yaml}"
    ),
    "parts/shape.yaml": "type: square\nside: !include side.yaml",
    "parts/side.yaml": "90",
    "parts/inks.yaml": '["a", "b"]',
}
BASE = {
    "base.yaml": (
        "title: base\nshape: {type: circle, radius: 2}\npaint: {layers: 6, colour:"
        " blue}"
    )
}
OVER_BASE = BASE | {
    "main.yaml": "title: mine\n<<: !include base.yaml\npaint: {layers: 3}"
}
SEVERAL = {
    "main.yaml": "paint:\n  <<: [!include a.yaml, !include b.yaml, {colour: red}]",
    "a.yaml": "<<: !include deep.yaml\nlayers: 1",
    "deep.yaml": "{layers: 9, colour: blue}",
    "b.yaml": "{layers: 2, colour: red}",
}
ANCHORS = {
    "main.yaml": (
        "paint: &p {<<: !include layers.yaml}\nshape: &s\n  <<: {side: 4}\n  type:"
        " square"
    ),
    "layers.yaml": "layers: 3",
}
CIRCLE, BLUE = Circle(2.0, Paint(layers=7)), Paint("blue", 6)


def over_base(text):
    return BASE | {"main.yaml": f"<<: !include base.yaml\n{text}"}


@pytest.mark.parametrize(
    ("files", "overrides", "expected"),
    [
        (PARTS, [], Drawing(Square(90), pen=Marker(inks=("a", "b")))),
        (OVER_BASE, [], Drawing(Circle(2.0), "mine", paint=Paint("blue", 3))),
        (
            OVER_BASE,
            ["--shape.paint.layers", "7"],
            Drawing(CIRCLE, "mine", paint=Paint("blue", 3)),
        ),
        (over_base("shape: {type: square}"), [], Drawing(Square(), "base", paint=BLUE)),
        (
            over_base("shape: {type: circle, paint: {layers: 7}}"),
            [],
            Drawing(CIRCLE, "base", paint=BLUE),
        ),
        (over_base("paint: {}"), [], Drawing(Circle(2.0), "base", paint=Paint())),
        (SEVERAL, [], Drawing(paint=Paint("blue", 1))),
        (SEVERAL | {"a.yaml": "layers: 1"}, [], Drawing(paint=Paint("red", 1))),
        (ANCHORS, [], Drawing(Square(4), paint=Paint(layers=3))),
    ],
)
def test_included_files_are_merged_key_by_key(tmp_path, files, overrides, expected):
    """Another type or an empty section replaces the included one; the first of several
    files wins.
    """
    assert parse(tmp_path, files, *overrides) == expected


def test_the_command_line_includes_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = {"main.yaml": "title: a", "three.yaml": "layers: 3"}
    assert parse(tmp_path, files, "--paint", "!include three.yaml").paint == Paint(
        layers=3
    )


def test_urls_are_read_and_their_includes_are_relative_to_them():
    memory = fsspec.filesystem("memory")
    memory.pipe("/configs/main.yaml", b"<<: !include ../shared/base.yaml\ntitle: url")
    memory.pipe("/shared/base.yaml", b"paint: {layers: 8}")
    assert parse_config(
        Drawing, ["--config_path", "memory://configs/main.yaml"]
    ) == Drawing(title="url", paint=Paint(layers=8))
    with pytest.raises(
        ConfigError, match="Can't read the config file memory://none.yaml"
    ):
        parse_config(Drawing, ["--config_path", "memory://none.yaml"])
    with pytest.raises(ConfigError, match="Can't read the config file nosuch://a.yaml"):
        parse_config(Drawing, ["--config_path", "nosuch://a.yaml"])


def test_files_that_include_two_files_at_each_level_end_in_an_error(tmp_path):
    def files(levels):
        twice = "title: a\npaint:\n  <<: [!include {0}.yaml, !include {0}.yaml]"
        inner = "<<: [!include {0}.yaml, !include {0}.yaml]"
        texts = {f"{at}.yaml": inner.format(at + 1) for at in range(1, levels)}
        return texts | {"main.yaml": twice.format(1), f"{levels}.yaml": "layers: 8"}

    assert parse(tmp_path, files(8)).paint.layers == 8
    with pytest.raises(
        ConfigError,
        match=r"More than 1,000 files are included, the last one .*/\d+.yaml, included",
    ):
        parse(tmp_path, files(24))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {
                "main.yaml": "\n<<: !include a.yaml",
                "a.yaml": "paint: !include gone.yaml",
            },
            (
                r"gone.yaml, included by .*a.yaml line 1, included by .*main.yaml line"
                r" 2: No such file .* Check"
            ),
        ),
        (
            {
                "main.yaml": "<<: !include a.yaml",
                "a.yaml": "<<: !include ./../x/main.yaml",
            },
            (
                r"can't include itself: .*main.yaml, included by .*a.yaml line 1,"
                r" included by .*main.yaml line 1"
            ),
        ),
        (
            {"main.yaml": "paint: !include a.yaml", "a.yaml": "layer: 3"},
            r"Unknown key `paint.layer` in .*main.yaml. Did you mean `layers`",
        ),
        (
            {"main.yaml": "<<: !include a.yaml", "a.yaml": "[1]"},
            r"`<<` in .*main.yaml merges 1; it must be a mapping",
        ),
        (
            {"main.yaml": "paint: !include a.yaml", "a.yaml": "a: ["},
            r"Can't read the config file .*a.yaml, inc",
        ),
    ],
)
def test_mistakes_name_the_file_and_those_that_include_it(tmp_path, files, message):
    (tmp_path / "x").mkdir()
    with pytest.raises(ConfigError, match=message):
        parse(tmp_path / "x", files)


@pytest.mark.parametrize(
    "name",
    [
        "{here}/secret.yaml",
        "file://{here}/secret.yaml",
        "local://{here}/secret.yaml",
        "~/secret.yaml",
        "simplecache::file://{here}/secret.yaml",
        "memory://::file://{here}/secret.yaml",
        "../secret.yaml::x",
    ],
)
def test_a_config_at_a_url_includes_nothing_of_this_machine(
    tmp_path, monkeypatch, name
):
    """Neither by a file of the machine that includes it, nor by one that it includes
    itself.
    """
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret.yaml").write_text("{layers: 8}")
    memory = fsspec.filesystem("memory")
    memory.pipe(
        "/far/main.yaml", f"paint: !include '{name.format(here=tmp_path)}'".encode()
    )
    memory.pipe("/far/first.yaml", b"<<: !include main.yaml")
    for first in ("memory://far/main.yaml", "memory://far/first.yaml"):
        with pytest.raises(
            ConfigError,
            match=r"far/main.yaml line 1.* can't include files of this machine",
        ):
            parse_config(Drawing, ["--config_path", first])
    with pytest.raises(
        ConfigError,
        match=r"far/main.yaml line 1, included by .*near.yaml line 1.*this machine",
    ):
        parse(
            tmp_path,
            {"near.yaml": "<<: !include memory://far/main.yaml"},
            main="near.yaml",
        )
    # Beside it, and so not there
    memory.pipe("/far/main.yaml", b"paint: !include secret.yaml")
    with pytest.raises(
        ConfigError, match=r"Can't read the config file memory://far/secret.yaml"
    ):
        parse_config(Drawing, ["--config_path", "memory://far/main.yaml"])


@pytest.mark.parametrize(
    ("including", "name", "expected"),
    [
        ("https://host/a/b.yaml", "c.yaml", "https://host/a/c.yaml"),
        ("https://host/a/b.yaml", "../c.yaml", "https://host/c.yaml"),
        ("https://host/a/b.yaml", "../../../other/c.yaml", "https://host/other/c.yaml"),
        ("s3://bucket/b.yaml", "../other/c.yaml", "s3://bucket/other/c.yaml"),
        ("s3://bucket/b.yaml", "s3://bucket/x/../c.yaml", "s3://bucket/c.yaml"),
        ("hf://owner/b.yaml", "./c.yaml", "hf://owner/c.yaml"),
        ("file:///a/b.yaml", "../c.yaml", "file:///c.yaml"),
        ("gs://bucket/b.yaml", "gs://bucket2/c.yaml", None),
        ("https://host/b.yaml", "http://host/c.yaml", None),
        ("https://host/b.yaml", "https://host.other/c.yaml", None),
        ("https://host/b.yaml", "//etc/c.yaml", None),
    ],
)
def test_a_config_at_a_url_includes_files_of_its_own_host(including, name, expected):
    if expected is None:
        with pytest.raises(ValueError, match="of another host"):
            _beside(including, name)
    else:
        assert _beside(including, name) == expected
