"""Tests of stacked_remat/training/trackers.py."""

import json
import sys

import jax.numpy as jnp
import pytest

from stacked_remat.training import (
    ConfigError,
    JsonLinesTracker,
    TrackersConfig,
    WandbConfig,
    build_trackers,
    check_trackers,
)

METRICS = {"loss": jnp.float32(1.5), "per_layer": jnp.array([1.0, 2.0])}
ALL = TrackersConfig(
    tensorboard=True,
    wandb=WandbConfig(project="words", entity="team", mode="offline"),
)


def test_lines_hold_numbers_arrays_and_null_for_what_is_not_finite(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tracker = JsonLinesTracker(path)
    tracker.log(0, {**METRICS, "speed": float("nan")})
    on_disk = path.read_text()  # before the tracker is closed
    tracker.log(3, {"loss": 0.5, "tokens": 7})
    tracker.close()
    assert json.loads(on_disk) == {"step": 0, "loss": 1.5, "per_layer": [1.0, 2.0], "speed": None}
    assert json.loads(path.read_text().splitlines()[1]) == {"step": 3, "loss": 0.5, "tokens": 7}


@pytest.mark.parametrize(("resumed_after", "kept"), [(None, 5), (7, 5), (5, 4), (-1, 0)])
def test_lines_after_the_resumed_step_are_dropped(tmp_path, resumed_after, kept):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step}) + "\n" for step in (0, 1, 5, 5, 6)]
    half = "" if resumed_after is None else '{"step": 3, "lo'
    path.write_text("".join(lines) + half)
    JsonLinesTracker(path, resumed_after=resumed_after).close()
    assert path.read_text() == "".join(lines[:kept])
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("line", [b"\xff", b"[1]", b'{"step": null}'])
def test_a_damaged_line_is_named_and_the_file_unchanged(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(before := b'{"step": 0}\n' + line + b'\n{"step": 2}\n')
    with pytest.raises(ConfigError, match=r"metrics.jsonl is damaged: line 2 is not a line of metrics"):
        JsonLinesTracker(path, resumed_after=1)
    assert path.read_bytes() == before


class FakePackage:
    """Stands for wandb and its run, and for tensorboardX and its writer."""

    def __init__(self):
        self.options, self.logged, self.ended = [], [], 0
        self.SummaryWriter = self.init

    def init(self, *arguments, **options):
        self.options.append((*arguments, options))
        return self

    def log(self, metrics, step):
        self.logged += [(name, value, step) for name, value in metrics.items()]

    def add_scalar(self, name, value, step):
        self.logged.append((name, value, step))

    def finish(self):
        self.ended += 1

    close = finish


@pytest.fixture
def packages(monkeypatch):
    fakes = {"wandb": FakePackage(), "tensorboardX": FakePackage()}
    for name, fake in fakes.items():
        monkeypatch.setitem(sys.modules, name, fake)
    return fakes


@pytest.mark.parametrize(
    ("config", "package", "install"),
    [
        (TrackersConfig(tensorboard=True), "tensorboardX", r"'stacked_remat\[tensorboard\]'"),
        (TrackersConfig(wandb=WandbConfig(project="p")), "wandb", "wandb"),
    ],
)
def test_a_missing_package_is_named_and_one_that_is_not_configured_not_imported(
    tmp_path, monkeypatch, config, package, install
):
    monkeypatch.setitem(sys.modules, package, None)  # importing it fails
    assert build_trackers(TrackersConfig(), tmp_path, {}) == []
    check_trackers(TrackersConfig())
    for check in (lambda: check_trackers(config), lambda: build_trackers(config, tmp_path, {})):
        with pytest.raises(ConfigError, match=f"needs the package {package}: pip install {install}"):
            check()


def test_trackers_are_started_as_configured_and_get_a_scalar_for_each_number(tmp_path, packages):
    folder = tmp_path / "run7"
    folder.mkdir()
    check_trackers(ALL)
    for resumed_after in (None, 12):
        trackers = build_trackers(ALL, folder, {"n": 1}, resumed_after=resumed_after)
        for tracker in trackers:
            tracker.log(4, METRICS)
            tracker.close()
    for fake in packages.values():
        assert fake.logged == [("loss", 1.5, 4), ("per_layer/0", 1.0, 4), ("per_layer/1", 2.0, 4)] * 2
        assert fake.ended == 2
    (first,), second = packages["wandb"].options
    assert (first,) == second and len(first.pop("id")) == 32
    assert first == {
        "project": "words", "entity": "team", "name": "run7", "mode": "offline",
        "dir": str(folder), "config": {"n": 1}, "resume": "allow",
    }  # fmt: skip
    board = str(folder / "tensorboard")
    assert packages["tensorboardX"].options == [(board, {"purge_step": after}) for after in (None, 13)]


def test_an_error_of_the_package_names_the_setting_and_the_fix(tmp_path, packages):
    def refuse(**_):
        raise RuntimeError("No API key configured.")

    packages["wandb"].init = refuse
    with pytest.raises(ConfigError, match=r"trackers.wandb: .* No API key configured. .*\(mode: offline\)"):
        build_trackers(ALL, tmp_path, {})
