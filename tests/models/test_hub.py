"""Model folders are found by path or by their name on the Hugging Face Hub."""

import json
from pathlib import Path

import huggingface_hub
import huggingface_hub.errors
import pytest
from huggingface_hub.utils import filter_repo_objects

from models.hf_io.formats import config_to_hf
from models.hf_io.hub import adapted_model, model_folder
from models.hf_io.safetensors_folder import WeightsError
from models.qwen3 import Qwen3Config
from models.run_config import LmRunConfig, find_model


@pytest.fixture
def asked(monkeypatch, tmp_path):
    calls = set()

    def download(repository, *, revision, **_):
        calls.add((repository, revision))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return calls


@pytest.mark.parametrize("name", ["Qwen/Qwen3--30B", "Qwen/.."])
def test_names_that_the_hub_does_not_allow_are_refused(name):
    with pytest.raises(
        WeightsError, match="could not be fetched from the Hugging Face Hub"
    ):
        model_folder(name)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("Qwen/Qwen3-0.6B", ("Qwen/Qwen3-0.6B", None)),
        ("Qwen/Qwen3-0.6B@v1", ("Qwen/Qwen3-0.6B", "v1")),
    ],
)
def test_other_names_are_looked_up_on_the_hub(name, call, asked, tmp_path):
    assert model_folder(name) == model_folder(name, weights=False) == Path(tmp_path)
    assert asked == {call}


BESIDE = {
    "config.json": "{}",
    "generation_config.json": "{}",
    "tokenizer.json": "{}",
    "chat_template.jinja": "",
}
SHARDS = {
    "model-1.safetensors": "",
    "model-2.safetensors": "",
    "more/[3].safetensors": "",
}
INDEX = {
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {str(i): k for i, k in enumerate(SHARDS)}}
    )
}
ELSEWHERE = ["consolidated.safetensors", "pytorch_model.bin", "original/config.json"]
ELSEWHERE += [
    "original/model.safetensors",
    "original/model-1.safetensors",
    "onnx/vocab.txt",
    "README.md",
]


@pytest.mark.parametrize(
    "weights", [SHARDS | INDEX, {"model.safetensors": ""}], ids=["shards", "single"]
)
def test_no_other_copy_of_the_weights_is_fetched(monkeypatch, tmp_path, weights):
    """As the published folders of gpt-oss and Mistral have them."""
    wanted = BESIDE | weights

    def download(_, *, revision, allow_patterns, ignore_patterns):
        assert revision is None
        for file in filter_repo_objects(
            [*wanted, *ELSEWHERE],
            allow_patterns=allow_patterns,
            ignore_patterns=ignore_patterns,
        ):
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).write_text(wanted.get(file, ""))
        return str(tmp_path)

    def fetched():
        return {
            str(path.relative_to(tmp_path))
            for path in tmp_path.rglob("*")
            if path.is_file()
        }

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    model_folder("some/model", weights=False)
    assert fetched() == {name for name in wanted if not name.endswith(".safetensors")}
    model_folder("some/model")
    assert fetched() == {*wanted}


def test_a_config_from_the_hub_is_read_without_the_weights(asked, tmp_path):
    model = Qwen3Config(hidden_dim=8, num_layers=1, num_heads=2, num_kv_heads=1)
    (tmp_path / "config.json").write_text(
        json.dumps(config_to_hf(model, 300, dtype="float32"))
    )
    config = LmRunConfig(initialize_from_hf="owner/model").resolved()
    assert config.vocab_size == 300 and config.model.num_layers == 1
    assert asked == {("owner/model", None)}


def test_the_base_of_adapters_has_the_revision_that_they_name(asked, tmp_path):
    base = {"base_model_name_or_path": "owner/base", "revision": "v1"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(base))
    with pytest.raises(WeightsError, match="begins with itself. Name another base"):
        find_model(str(tmp_path))
    assert asked == {("owner/base", "v1")}


@pytest.mark.parametrize(
    "name", ["/nowhere/model", "./nowhere/model", "model", "a/b/c", "a" * 5_000]
)
def test_names_of_neither_a_folder_nor_a_repository_are_refused(name, asked):
    with pytest.raises(
        FileNotFoundError, match=f"no folder {name}, and it is not a name on the"
    ):
        model_folder(name)
    assert not asked


@pytest.mark.parametrize(
    ("base", "error", "message"),
    [
        ("", WeightsError, "has no base_model_name_or_path: name the model there"),
        ("a" * 5_000, FileNotFoundError, "it is not a name on the Hugging Face Hub"),
    ],
)
def test_adapters_of_no_model_are_refused(asked, tmp_path, base, error, message):
    settings = {"base_model_name_or_path": base}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(error, match=message):
        find_model(str(tmp_path))
    with pytest.raises(FileNotFoundError, match="There is no folder ''"):
        model_folder("")


def test_repositories_missing_on_the_hub_are_named(monkeypatch):
    def download(*_, **__):
        raise huggingface_hub.errors.LocalEntryNotFoundError("offline.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(
        WeightsError,
        match=(
            "some/model is not a folder here, and it could not be fetched .* Check the"
            " name.* says: offline.$"
        ),
    ):
        model_folder("some/model")


@pytest.mark.parametrize(
    "base",
    ["{here}/base", "base", "./base", "~/base", "owner/base", "../base", "C:\\base"],
)
def test_adapters_of_the_hub_name_no_model_of_this_machine(
    asked, tmp_path, monkeypatch, base
):
    for folder in ("base", "owner/base"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    settings = {"base_model_name_or_path": base.format(here=tmp_path)}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(
        WeightsError,
        match=r"adapters some/adapters from the .*hf download .* --model FOLDER",
    ):
        find_model("some/adapters")
    snapshot = tmp_path / "models--some--adapters/snapshots/1a"
    snapshot.mkdir(parents=True)
    (snapshot / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(
        WeightsError, match="which is a folder here or no name on the Hub"
    ):
        find_model(str(snapshot))
    if base != "C:\\base":
        mine = tmp_path / "mine"
        mine.mkdir()
        (mine / "adapter_config.json").write_text(json.dumps(settings))
        monkeypatch.chdir(mine if base == "../base" else tmp_path)
        # One's own
        assert adapted_model(mine, str(mine)) == settings["base_model_name_or_path"]
