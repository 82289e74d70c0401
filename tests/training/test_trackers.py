"""Tests of stacked_remat/training/trackers.py."""

import contextlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from stacked_remat.training import (
    ConfigError,
    JsonLinesTracker,
    TrackersConfig,
    TrackioConfig,
    WandbConfig,
    build_trackers,
    check_trackers,
)

METRICS = {"loss": jnp.float32(1.5), "per_layer": jnp.array([1.0, 2.0])}
ALL = TrackersConfig(
    tensorboard=True,
    wandb=WandbConfig(project="words", entity="team", mode="offline"),
    trackio=TrackioConfig(project="words", name="first", space_id="team/space"),
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


def test_lines_are_appended(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in range(2):
        tracker = JsonLinesTracker(path)
        tracker.log(step, {})
        tracker.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1]


@pytest.mark.parametrize(("resumed_after", "kept"), [(None, 5), (7, 5), (5, 4), (-1, 0)])
def test_lines_after_the_resumed_step_are_dropped(tmp_path, resumed_after, kept):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step}) + "\n" for step in (0, 1, 5, 5, 6)]
    half = "" if resumed_after is None else '{"step": 3, "lo'
    path.write_text("".join(lines) + half)
    JsonLinesTracker(path, resumed_after=resumed_after).close()
    assert path.read_text() == "".join(lines[:kept])
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("line", [b"\xff", b"{", b"[1]", b'{"stop": 1}', b'{"step": null}', b"\0\0"])
def test_a_damaged_line_is_named_and_the_file_unchanged(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(before := b'{"step": 0}\n' + line + b'\n{"step": 2}\n')
    with pytest.raises(ConfigError, match=r"metrics.jsonl is damaged: line 2 is not a line of metrics"):
        JsonLinesTracker(path, resumed_after=1)
    assert path.read_bytes() == before


def test_the_error_of_a_full_disk_names_the_file():
    if not Path("/dev/full").exists():
        pytest.skip("only Linux has a file that is always full")
    tracker = JsonLinesTracker(Path("/dev/full"))
    with pytest.raises(OSError, match=r"No space left on device: '/dev/full'"):
        tracker.log(1, METRICS)
    with contextlib.suppress(OSError):
        tracker.close()


class FakeRun:
    """Stands for wandb, trackio, and what their init returns."""

    def __init__(self):
        self.options, self.logged, self.finished = [], [], 0

    def init(self, **options):
        self.options.append(options)
        return self

    def log(self, metrics, step):
        self.logged.append((step, metrics))

    def finish(self):
        self.finished += 1


class FakeWriter:
    def __init__(self, folder, purge_step):
        self.folder, self.purge_step, self.scalars, self.closed = folder, purge_step, [], False
        written.append(self)

    def add_scalar(self, name, value, step):
        self.scalars.append((name, value, step))

    def close(self):
        self.closed = True


written = []


@pytest.fixture
def packages(monkeypatch):
    written.clear()
    fakes = {
        "wandb": FakeRun(),
        "trackio": FakeRun(),
        "tensorboardX": SimpleNamespace(SummaryWriter=FakeWriter),
    }
    for name, fake in fakes.items():
        monkeypatch.setitem(sys.modules, name, fake)
    return fakes


def test_only_configured_packages_are_imported(tmp_path, monkeypatch):
    for name in ("wandb", "trackio", "tensorboardX"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it fails
    assert build_trackers(TrackersConfig(), tmp_path, {}) == []
    check_trackers(TrackersConfig())


@pytest.mark.parametrize(
    ("config", "package", "install"),
    [
        (TrackersConfig(tensorboard=True), "tensorboardX", r"'stacked_remat\[tensorboard\]'"),
        (TrackersConfig(wandb=WandbConfig(project="p")), "wandb", "wandb"),
        (TrackersConfig(trackio=TrackioConfig(project="p")), "trackio", "trackio"),
    ],
)
def test_a_missing_package_is_named(tmp_path, monkeypatch, config, package, install):
    monkeypatch.setitem(sys.modules, package, None)
    for check in (lambda: check_trackers(config), lambda: build_trackers(config, tmp_path, {})):
        with pytest.raises(ConfigError, match=f"needs the package {package}: pip install {install}"):
            check()


def test_every_tracker_gets_a_scalar_for_each_number(tmp_path, packages):
    check_trackers(ALL)
    trackers = build_trackers(ALL, tmp_path, {"n": 1})
    assert len(trackers) == 3
    for tracker in trackers:
        tracker.log(4, METRICS)
        tracker.close()
    scalars = {"loss": 1.5, "per_layer/0": 1.0, "per_layer/1": 2.0}
    assert written[0].scalars == [(name, value, 4) for name, value in scalars.items()]
    assert written[0].folder == str(tmp_path / "tensorboard") and written[0].closed
    for name in ("wandb", "trackio"):
        assert packages[name].logged == [(4, scalars)] and packages[name].finished == 1


def test_hosted_runs_are_started_as_configured_and_resumed(tmp_path, packages):
    folder = tmp_path / "run7"
    folder.mkdir()
    for resumed_after in (None, 12):
        build_trackers(ALL, folder, {"n": 1}, resumed_after=resumed_after)
    first, second = packages["wandb"].options
    assert first == second and len(first.pop("id")) == 32
    assert first == {
        "project": "words", "entity": "team", "name": "run7", "mode": "offline",
        "dir": str(folder), "config": {"n": 1}, "resume": "allow",
    }  # fmt: skip
    for options, resume in zip(packages["trackio"].options, ("never", "allow"), strict=True):
        assert options == {
            "project": "words", "name": "first", "space_id": "team/space", "config": {"n": 1},
            "resume": resume,
        }  # fmt: skip
    assert [writer.purge_step for writer in written] == [None, 13]


def test_tensorboard_event_files_are_written(tmp_path):
    pytest.importorskip("tensorboardX")
    for resumed_after in (None, 4):
        (tracker,) = build_trackers(
            TrackersConfig(tensorboard=True), tmp_path, {}, resumed_after=resumed_after
        )
        tracker.log(5, METRICS)
        tracker.close()
    events = [path.read_bytes() for path in (tmp_path / "tensorboard").iterdir()]
    assert any(b"per_layer/1" in event and b"loss" in event for event in events)


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_an_error_of_a_package_names_the_setting_and_the_fix(tmp_path, packages, package):
    def refuse(**_):
        raise RuntimeError("No API key configured.")

    packages[package].init = refuse
    way_out = {"wandb": "mode: offline", "trackio": "space_id: null"}[package]
    with pytest.raises(ConfigError, match=rf"trackers.{package}: .* No API key configured. .*\({way_out}\)"):
        build_trackers(ALL, tmp_path, {})


def log_a_run_that_is_interrupted(config, folder):
    """Steps 0 to 2, of which the last is after the checkpoint, then 2 and 3 by another process."""
    folder.mkdir()
    for resumed_after, steps in ((None, (0, 1, 2)), (1, (2, 3))):
        (tracker,) = build_trackers(config, folder, {"model": {"n": 1}}, resumed_after=resumed_after)
        for step in steps:
            tracker.log(step, {**METRICS, "speed": float("nan")})
        tracker.close()


def test_a_real_run_of_wandb_resumes(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    folder = tmp_path / "mine"
    log_a_run_that_is_interrupted(TrackersConfig(wandb=WandbConfig(project="p", mode="offline")), folder)
    identifier = (folder / "wandb_run_id.txt").read_text()
    files = [path.name for path in (folder / "wandb").glob("offline-run-*/*.wandb")]
    assert files == [f"run-{identifier}.wandb"] * len(files) and files


def test_a_real_run_of_trackio_resumes_and_a_new_one_of_its_name_does_not(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    trackio = pytest.importorskip("trackio")
    config = TrackersConfig(trackio=TrackioConfig(project="p"))
    for parent in ("first", "second"):
        (tmp_path / parent).mkdir()
        log_a_run_that_is_interrupted(config, tmp_path / parent / "mine")
    assert [run.name for run in trackio.Api().runs("p")] == ["mine", "mine"]
    assert "Resumed existing run: mine" in capfd.readouterr().out
