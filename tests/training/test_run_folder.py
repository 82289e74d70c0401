import pytest
import yaml

from stacked_remat.training import RunFolder


def test_it_holds_the_resolved_config(tmp_path):
    folder = RunFolder.create(tmp_path / "a" / "b", {"model": {"type": "x"}, "n": 1})
    assert yaml.safe_load(folder.config.read_text()) == {"model": {"type": "x"}, "n": 1}
    assert {folder.metrics.parent, folder.checkpoint.parent} == {tmp_path / "a" / "b"}


def test_an_empty_folder_is_taken(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert RunFolder.create(tmp_path, {}).config.exists()


def test_results_of_an_earlier_run_are_not_touched(tmp_path):
    folder = RunFolder.create(tmp_path, {"n": 1})
    folder.metrics.write_text("old")
    with pytest.raises(FileExistsError, match=r"config.yaml, metrics.jsonl.*--trainer.run_dir.*overwrite"):
        RunFolder.create(tmp_path, {"n": 2})
    assert folder.metrics.read_text() == "old" and yaml.safe_load(folder.config.read_text()) == {"n": 1}


def test_overwriting_deletes_results_and_nothing_else(tmp_path):
    folder = RunFolder.create(tmp_path, {"n": 1})
    folder.metrics.write_text("old")
    folder.checkpoint.mkdir()
    (folder.checkpoint / "state.eqx").write_text("old")
    (tmp_path / "notes.txt").write_text("mine")
    RunFolder.create(tmp_path, {"n": 2}, overwrite=True)
    assert not folder.metrics.exists() and not folder.checkpoint.exists()
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert yaml.safe_load(folder.config.read_text()) == {"n": 2}
