"""Tests of stacked_remat/training/run_folder.py."""

import json

import pytest
import yaml

from stacked_remat._files import replaced_whole
from stacked_remat.training import ConfigError, RunFolder, lock_run_folder

CONFIG = {
    "model": {"type": "x", "width": 2},
    "trainer": {"log_every": 1, "checkpoint": {"keep_last": 2}},
}


def changed(**model):
    return {**CONFIG, "model": {**CONFIG["model"], **model}}


def test_a_new_folder_has_the_resolved_config(tmp_path):
    folder = RunFolder.open(tmp_path / "a" / "b", CONFIG)
    assert yaml.safe_load(folder.config.read_text()) == CONFIG
    assert {folder.metrics.parent, folder.checkpoints.parent} == {tmp_path / "a" / "b"}


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_leftovers_of_a_killed_write_are_removed(tmp_path, kind):
    kept, left = tmp_path / "kept", tmp_path / "run" / ".config.yaml.unfinished"
    (left if kind == "folder" else left.parent).mkdir(parents=True)
    kept.mkdir()
    if kind != "folder":
        left.symlink_to(kept) if kind == "link" else left.write_text("half")
    RunFolder(left.parent).begin(CONFIG)
    assert [path.name for path in left.parent.iterdir()] == [
        "config.yaml"
    ] and kept.is_dir()


def test_processes_can_write_the_same_file(tmp_path):
    file = tmp_path / "a"
    with (
        replaced_whole(file, shared=True) as one,
        replaced_whole(file, shared=True) as two,
    ):
        one.write_text("one")
        two.write_text("two")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [
        ("a", "one")
    ]


def test_an_unfinished_run_of_the_same_config_is_opened_again(tmp_path):
    folder = RunFolder.open(tmp_path, CONFIG)
    folder.metrics.write_text("old")
    assert RunFolder.open(tmp_path, CONFIG).metrics.read_text() == "old"
    reported = {
        "log_every": 5,
        "eval_every": 7,
        "eval_batches": 2,
        "checkpoint": {"keep_last": 9},
    }
    elsewhere = {
        **CONFIG,
        "trainer": reported,
        "remat": "nested",
        "data": {"cache_dir": "elsewhere"},
    }
    RunFolder.open(tmp_path, elsewhere)  # none of this changes what is computed
    assert yaml.safe_load(folder.config.read_text()) == CONFIG
    folder.begin(elsewhere)
    assert yaml.safe_load(folder.config.read_text()) == elsewhere


def test_a_run_of_another_config_is_refused_with_the_keys_that_differ(tmp_path):
    folder = RunFolder.open(tmp_path, CONFIG)
    with pytest.raises(
        ConfigError,
        match=r"model.depth was not set and is 1\n  model.width was 2 and is 3\n",
    ):
        RunFolder.open(tmp_path, changed(width=3, depth=1))
    assert yaml.safe_load(folder.config.read_text()) == CONFIG
    RunFolder.open(tmp_path, changed(width=3), accept_changes=True).begin(
        changed(width=3)
    )
    assert yaml.safe_load(folder.config.read_text()) == changed(width=3)


def test_a_finished_run_is_not_touched(tmp_path):
    folder = RunFolder.open(tmp_path, CONFIG)
    folder.finish({"held_out_after": {"held_out": 1.5}})
    assert json.loads(folder.result.read_text()) == {
        "held_out_after": {"held_out": 1.5}
    }
    for accept_changes in (False, True):
        with pytest.raises(
            FileExistsError,
            match=r"a finished run.*--trainer.run_dir.*--trainer.checkpoint.overwrite",
        ):
            RunFolder.open(tmp_path, CONFIG, accept_changes=accept_changes)
    assert folder.result.exists()
    RunFolder.open(tmp_path, changed(width=3), accept_changes=True)  # a longer run, say
    assert folder.result.exists()
    folder.begin(changed(width=3))
    assert not folder.result.exists()


def test_a_folder_that_cannot_be_made_is_refused_before_the_run(tmp_path):
    (tmp_path / "file").touch()
    for name in ("file/run", "file/deep/run"):
        with pytest.raises(
            FileNotFoundError, match="can't be made: .*file is no folder"
        ):
            RunFolder(tmp_path / name).check(CONFIG)
    RunFolder(tmp_path / "deep" / "run").check(CONFIG)


def test_overwriting_deletes_results_and_nothing_else(tmp_path):
    folder = RunFolder.open(tmp_path, CONFIG)
    folder.metrics.write_text("old")
    folder.finish({})
    for results in (folder.checkpoints, folder.profile, tmp_path / "big_disk"):
        (results / "1").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "tensorboard").symlink_to(tmp_path / "big_disk")
    RunFolder.open(tmp_path, changed(width=3), overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.yaml",
        "notes.txt",
        "big_disk",
    }
    assert (tmp_path / "big_disk" / "1").is_dir()
    assert yaml.safe_load(folder.config.read_text()) == changed(width=3)


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        (b"", "is empty"),
        (b"model: \xff", "utf-8"),
        (b"- model", r"holds \['model'\]"),
    ],
)
def test_a_damaged_config_is_an_error_and_stays(tmp_path, damaged, message):
    folder = RunFolder.open(tmp_path, CONFIG)
    folder.config.write_bytes(damaged)
    with pytest.raises(ConfigError, match=f"(?s)config.yaml.*{message}"):
        RunFolder.open(tmp_path, CONFIG)
    assert folder.config.read_bytes() == damaged


def test_one_process_locks_a_folder_until_it_is_done(tmp_path):
    refused = pytest.raises(
        FileExistsError, match=r"Another process trains in .*run. .*--trainer.run_dir"
    )
    with lock_run_folder(tmp_path / "run"), refused, lock_run_folder(tmp_path / "run"):
        pass
    with lock_run_folder(tmp_path / "run"):
        pass


@pytest.mark.parametrize("file", ["model.safetensors", "config.yaml"])
def test_a_folder_of_something_else_is_refused_and_stays(tmp_path, file):
    (tmp_path / file).touch()
    for _ in range(2):
        refused = pytest.raises(
            FileExistsError, match=f"no run.*: {file}. .*--trainer.run_dir"
        )
        with refused, lock_run_folder(tmp_path):
            RunFolder.open(tmp_path, CONFIG, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == [file]


def test_a_start_that_was_killed_early_starts_again_and_takes_no_files_that_came_since(
    tmp_path,
):
    with lock_run_folder(tmp_path):
        (tmp_path / ".config.yaml.unfinished").write_text("half")
        RunFolder.open(tmp_path, CONFIG).config.unlink()
        (tmp_path / "text.txt").touch()
        with pytest.raises(FileExistsError, match="no run.*: text.txt. "):
            RunFolder.open(tmp_path, CONFIG)
        RunFolder.open(tmp_path, CONFIG, overwrite=True)


def test_another_order_of_learning_rates_is_another_config(tmp_path):
    def config(*patterns):
        return {"optimizer": {"learning_rates": dict.fromkeys(patterns, 0.5)}}

    RunFolder.open(tmp_path / "run", config("*norm*", "*attention*"))
    RunFolder.open(tmp_path / "run", config("*norm*", "*attention*"))
    with pytest.raises(ConfigError, match="order of the patterns of learning_rates"):
        RunFolder.open(tmp_path / "run", config("*attention*", "*norm*"))
