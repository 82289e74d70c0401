"""Model folders are found by path or by their name on the Hugging Face Hub."""

import json
from pathlib import Path

import huggingface_hub
import huggingface_hub.errors
import pytest

from models.hf_io.formats import config_to_hf
from models.hf_io.hub import model_folder
from models.hf_io.safetensors_folder import WeightsError
from models.qwen3_moe import Qwen3Config
from models.run_config import LmRunConfig


@pytest.fixture
def asked(monkeypatch, tmp_path):
    calls = []

    def download(repository, *, revision, allow_patterns):
        calls.append((repository, revision, "*.safetensors" in allow_patterns))
        assert "config.json".endswith(allow_patterns[0][1:])
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return calls


def test_a_local_folder_is_used_as_it_is(tmp_path, asked):
    assert model_folder(str(tmp_path)) == tmp_path
    assert not asked


def test_a_tilde_is_expanded(tmp_path, asked, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert model_folder(f"~/{tmp_path.name}") == tmp_path


@pytest.mark.parametrize("name", ["Qwen/Qwen3--30B", "Qwen/.."])
def test_names_that_the_hub_does_not_allow_are_refused(name):
    with pytest.raises(WeightsError, match="could not be fetched from the Hugging Face Hub"):
        model_folder(name)


@pytest.mark.parametrize(
    ("name", "call"),
    [("Qwen/Qwen3-0.6B", ("Qwen/Qwen3-0.6B", None)), ("Qwen/Qwen3-0.6B@v1", ("Qwen/Qwen3-0.6B", "v1"))],
)
def test_other_names_are_looked_up_on_the_hub(name, call, asked, tmp_path):
    assert model_folder(name) == model_folder(name, weights=False) == Path(tmp_path)
    assert asked == [(*call, True), (*call, False)]


def test_a_config_from_the_hub_is_read_without_the_weights(asked, tmp_path):
    model = Qwen3Config(hidden_dim=8, num_layers=1, num_heads=2, num_kv_heads=1)
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(model, 300, dtype="float32")))
    config = LmRunConfig(initialize_from_hf="owner/model", use_hf_model_config=True).resolved()
    assert config.vocab_size == 300 and config.model.num_layers == 1
    assert asked == [("owner/model", None, False)]


@pytest.mark.parametrize("name", ["/nowhere/model", "./nowhere/model", "model", "a/b/c"])
def test_names_of_neither_a_folder_nor_a_repository_are_refused(name, asked):
    with pytest.raises(FileNotFoundError, match=f"no folder {name}, and it is not a name on the"):
        model_folder(name)
    assert not asked


def test_repositories_missing_on_the_hub_are_named(monkeypatch):
    def download(*_, **__):
        raise huggingface_hub.errors.LocalEntryNotFoundError("offline.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(
        WeightsError, match="some/model is not a folder here, and it could not be fetched .*: offline. Check"
    ):
        model_folder("some/model")


@pytest.mark.parametrize("name", ["x" * 5000, "~nobody_of_this_name/model", "a\0b"])
def test_names_that_no_folder_can_have_are_refused(name, asked):
    with pytest.raises(FileNotFoundError, match="can't be a folder|no folder"):
        model_folder(name)
    assert not asked
