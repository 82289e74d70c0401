"""Tests of stacked_remat/training/trackers.py."""

import json
import shutil
import struct
import subprocess
import sys

import jax.numpy as jnp
import pytest
from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

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
    assert json.loads(on_disk) == {
        "step": 0,
        "loss": 1.5,
        "per_layer": [1.0, 2.0],
        "speed": None,
    }
    assert json.loads(path.read_text().splitlines()[1]) == {
        "step": 3,
        "loss": 0.5,
        "tokens": 7,
    }


@pytest.mark.parametrize(
    ("resumed_after", "kept"), [(None, 5), (7, 5), (5, 4), (-1, 0)]
)
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
    with pytest.raises(
        ConfigError, match=r"metrics.jsonl is damaged: line 2 is not a line of metrics"
    ):
        JsonLinesTracker(path, resumed_after=1)
    assert path.read_bytes() == before


class FakePackage:
    """Stands for wandb and its run."""

    def __init__(self):
        self.options, self.logged, self.ended = [], [], 0

    def init(self, *arguments, **options):
        self.options.append((*arguments, options))
        return self

    def log(self, metrics, step):
        self.logged += [(name, value, step) for name, value in metrics.items()]

    def finish(self):
        self.ended += 1


@pytest.fixture
def wandb(monkeypatch):
    fake = FakePackage()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def events(folder):
    """The events of TensorBoard's files: of each the length, a checksum, the event and
    another checksum.
    """
    found = []
    for file in sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime_ns):
        content = file.read_bytes()
        while content:
            (size,) = struct.unpack("Q", content[:8])
            found.append(Event.FromString(content[12 : 12 + size]))
            content = content[16 + size :]
    return found


def scalars(folder):
    return [
        (one.tag, one.simple_value, event.step)
        for event in events(folder)
        for one in event.summary.value
    ]


@pytest.mark.parametrize(
    ("config", "package", "install"),
    [
        (
            TrackersConfig(tensorboard=True),
            "tensorboardX",
            r"'stacked_remat\[tensorboard\]'",
        ),
        (TrackersConfig(wandb=WandbConfig(project="p")), "wandb", "wandb"),
    ],
)
def test_a_missing_package_is_named_and_one_that_is_not_configured_not_imported(
    tmp_path, monkeypatch, config, package, install
):
    monkeypatch.setitem(sys.modules, package, None)  # importing it fails
    assert build_trackers(TrackersConfig(), tmp_path, {}) == []
    check_trackers(TrackersConfig())
    for check in (
        lambda: check_trackers(config),
        lambda: build_trackers(config, tmp_path, {}),
    ):
        with pytest.raises(
            ConfigError, match=f"needs the package {package}: pip install {install}"
        ):
            check()


def test_trackers_are_started_as_configured_and_get_a_scalar_for_each_number(
    tmp_path, wandb
):
    folder = tmp_path / "run7"
    folder.mkdir()
    check_trackers(ALL)
    expected = [("loss", 1.5, 4), ("per_layer/0", 1.0, 4), ("per_layer/1", 2.0, 4)]
    for resumed_after in (None, 12):
        shutil.rmtree(folder / "tensorboard", ignore_errors=True)
        trackers = build_trackers(ALL, folder, {"n": 1}, resumed_after=resumed_after)
        for tracker in trackers:
            tracker.log(4, METRICS)
            tracker.flush()
        assert scalars(folder / "tensorboard") == expected
        for tracker in trackers:
            tracker.close()
        starts = [
            event.step
            for event in events(folder / "tensorboard")
            if event.session_log.status == 1
        ]
        assert starts == ([] if resumed_after is None else [13])
    assert wandb.logged == expected * 2 and wandb.ended == 2
    (first,), second = wandb.options
    assert (first,) == second and len(first.pop("id")) == 32
    assert first == {
        "project": "words", "entity": "team", "name": "run7", "mode": "offline",
        "dir": str(folder), "config": {"n": 1}, "resume": "allow",
    }  # fmt: skip


KILLED = """
import os, pathlib, signal, sys
from stacked_remat.training import JsonLinesTracker, TrackersConfig, build_trackers
folder = pathlib.Path(sys.argv[1])
trackers = [JsonLinesTracker(folder / "metrics.jsonl")]
trackers += build_trackers(TrackersConfig(tensorboard=True), folder, {})
for step in range(300):
    for tracker in trackers:
        tracker.log(step, {"loss": step / 2})
for tracker in trackers:
    tracker.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_loses_nothing_that_was_flushed(tmp_path):
    assert (
        subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)]).returncode == -9
    )
    assert scalars(tmp_path / "tensorboard") == [
        ("loss", step / 2, step) for step in range(300)
    ]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [*range(300)]


def test_an_error_of_the_package_names_the_setting_and_the_fix(tmp_path, wandb):
    def refuse(**_):
        raise RuntimeError("No API key configured.")

    wandb.init = refuse
    with pytest.raises(
        ConfigError,
        match=r"trackers.wandb: .* No API key configured. .*\(mode: offline\)",
    ):
        build_trackers(ALL, tmp_path, {})
