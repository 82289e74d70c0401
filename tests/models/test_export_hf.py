"""Trained runs are exported to folders in Hugging Face's format."""

import base64
import http.server
import json
import shutil
import threading
from dataclasses import replace

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from haliax import Axis
from safetensors.numpy import load_file, save_file

from models.export_hf import generation_files, main as export_hf
from models.hf_io.decoder_weights import write_decoder
from models.loading import load_model
from models.parts.decoder import Decoder
from models.qwen3_moe import Qwen3MoeConfig
from models.run_config import LmRunConfig, find_model, read_run_config
from models.run_state import initial_state
from stacked_remat.streaming import is_on_host
from stacked_remat.training import (
    ConfigError,
    PrecisionConfig,
    TrainerConfig,
    UpdateConfig,
    cast_parameters,
    parse_config,
)

from ..blocks import assert_equal
from ..training.data import word_tokenizer
from . import tiny_run
from .random_weights import random_weights
from .tiny_run import make_workplace, printed

pytestmark = pytest.mark.usefixtures("standard_promotion")

Vocab, FUSED = Axis("vocab", 260), UpdateConfig(fused=True)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with text, and a model to begin with."""
    folder = make_workplace(tmp_path_factory.mktemp("workplace"))
    config = parse_config(LmRunConfig, ["--config_path", str(folder / "config.yaml")])
    assert isinstance(config.model, Qwen3MoeConfig)
    texts = {"generation_config.json": '{"eos_token_id": [7, 256]}'}
    model = random_weights(Decoder.init, config.model, Vocab, spread=0.1)
    write_decoder(folder / "base", model, texts=texts)
    return folder


def train(workplace, run, *more):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workplace)
        return tiny_run.train(workplace, "--trainer.num_steps", "3", *more, run=run)


def model_of(folder):
    return load_model(find_model(str(folder)))


def export(*arguments):
    return printed(export_hf, *arguments)


def logits(decoder):
    return np.asarray(_logits(decoder))


@eqx.filter_jit
def _logits(decoder):
    tokens = hax.named(
        jnp.arange(12, dtype=jnp.int32).reshape(2, 6), ("batch", "position")
    )
    return decoder.logits(decoder.hidden_states(tokens)[0]).array


@pytest.fixture(scope="module")
def adapted(workplace):
    """A run that trained adapters of the model to begin with."""
    start = ("--initialize_from_hf", str(workplace / "base"))
    assert train(workplace, "adapted", *start, "--lora.rank", "2") == 0
    return workplace / "adapted"


@pytest.mark.deep
def test_a_trained_model_is_exported_and_read_again(finished, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert export("--run_dir", finished, "--out", "~/exported")[0] == 0
    assert (
        json.loads((tmp_path / "exported/config.json").read_text())["eos_token_id"]
        == 256
    )
    exported, expected = model_of(tmp_path / "exported"), model_of(finished)
    np.testing.assert_array_equal(logits(exported), logits(expected))


def test_a_damaged_checkpoint_is_named_and_nothing_is_written(finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    for arrays in (run / "checkpoints").rglob("d/*"):
        damaged = bytearray(arrays.read_bytes())
        damaged[::256] = bytes(len(damaged[::256]))
        arrays.write_bytes(damaged)
    status, shown = export("--run_dir", run, "--out", tmp_path / "damaged")
    assert (
        status == 1
        and "is damaged or incomplete" in shown
        and not (tmp_path / "damaged").exists()
    )


@pytest.mark.deep
def test_adapters_are_merged_or_written_alone_and_begin_runs(
    workplace, adapted, finished
):
    assert export("--run_dir", adapted, "--out", workplace / "merged")[0] == 0
    assert json.loads((workplace / "merged/config.json").read_text())[
        "eos_token_id"
    ] == [256, 7]
    assert "[7, 256]" in (workplace / "merged/generation_config.json").read_text()
    merged = model_of(workplace / "merged")
    np.testing.assert_array_equal(logits(model_of(adapted)), logits(merged))
    assert find_model(str(adapted)).ends == (256, 7)
    assert (
        export("--run_dir", adapted, "--out", workplace / "alone", "--adapters")[0] == 0
    )
    card = (workplace / "alone/README.md").read_text()
    assert "- base: a local folder, base\n" in card and str(workplace) not in card
    np.testing.assert_allclose(
        logits(model_of(workplace / "alone")), logits(merged), atol=1e-5
    )
    lora = replace(read_run_config(adapted), initialize_from_hf=str(adapted))
    with pytest.raises(
        ConfigError, match="adapted is trainer.run_dir and initialize_from_hf"
    ):
        lora.resolved()
    with pytest.raises(ConfigError, match="lora trains no adapters on top of those"):
        replace(lora, trainer=TrainerConfig()).resolved()
    for name, dtype in (
        (finished, "bfloat16"),
        (adapted, "bfloat16"),
        (workplace / "alone", "float32"),
    ):
        trainer = TrainerConfig(
            streaming=True, update=FUSED, precision=PrecisionConfig(parameters=dtype)
        )
        config = replace(
            lora, initialize_from_hf=str(name), lora=None, trainer=trainer
        ).resolved()
        state = initial_state(config)
        assert_equal(state.model, cast_parameters(model_of(name), dtype))
        assert any(map(is_on_host, jax.tree.leaves(state.model)))
    assert (
        train(
            workplace,
            "again",
            "--initialize_from_hf",
            str(finished),
            "--lora.rank",
            "2",
        )
        == 0
    )
    status, shown = export(
        "--run_dir", workplace / "again", "--out", workplace / "second", "--adapters"
    )
    assert status == 0 and f"for PEFT, export {finished} too" in shown
    second, again = (logits(model_of(workplace / name)) for name in ("second", "again"))
    np.testing.assert_allclose(second, again, atol=1e-6)


@pytest.mark.deep
def test_adapters_resume_only_with_the_weights_they_began_with(
    workplace, adapted, capsys
):
    shutil.copytree(adapted, workplace / "moved")
    (workplace / "moved/result.json").unlink(missing_ok=True)
    shutil.copytree(workplace / "base", workplace / "other")
    for file in (workplace / "other").glob("*.safetensors"):
        tensors = load_file(file)
        tensors["model.norm.weight"] *= 1.5
        save_file(tensors, file)
    before = (workplace / "moved/config.yaml").read_text()
    more = (
        "--initialize_from_hf",
        str(workplace / "other"),
        "--lora.rank",
        "2",
        "--trainer.num_steps",
        "4",
    )
    assert (
        train(workplace, "moved", *more, "--trainer.checkpoint.accept_changes", "true")
        == 1
    )
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "a run with other frozen weights" in shown
        and ": frozen.norm.weight. Give" in shown
    )
    assert (workplace / "moved/config.yaml").read_text() == before


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ("--model.hidden_dim", "32"),
            "model.hidden_dim: 32 in the config, 16 in the folder",
        ),
        (("--vocab_size", "300"), "vocab_size: 300 in the config, 260 in the folder"),
    ],
)
def test_a_model_other_than_that_of_the_folder_is_refused(
    workplace, capsys, more, message
):
    assert train(workplace, "refused", "--initialize_from_hf", "base", *more) == 1
    assert message in capsys.readouterr().out
    assert not (workplace / "refused").exists()


def test_what_cannot_be_exported_is_named(workplace, tmp_path):
    status, shown = export("--run_dir", tmp_path, "--out", tmp_path / "out")
    assert status == 1 and "as in a run folder: name that" in shown
    status, shown = export("--run_dir", tmp_path, "--out", workplace)
    assert status == 1 and "is not an empty folder" in shown
    status, shown = export(
        "--run_dir", tmp_path, "--out", tmp_path / "out", "--push_to_hub", "me/a/b"
    )
    assert status == 1 and "--push_to_hub 'me/a/b' is no OWNER/NAME of the Hub" in shown


def test_end_tokens_of_the_config_are_exported(workplace, tmp_path):
    folder = shutil.copytree(workplace / "base", tmp_path / "base")
    (folder / "generation_config.json").unlink()
    for ends, expected in (
        ([9, 256, 7], [256, 7, 9]),
        (9, [256, 9]),
        (256, 256),
        (None, 256),
    ):
        fields = json.loads((folder / "config.json").read_text()) | {
            "eos_token_id": ends
        }
        (folder / "config.json").write_text(json.dumps(fields))
        assert generation_files(find_model(str(folder), tokenizer="byte")) == (
            {},
            {"eos_token_id": expected},
        )
        # A file that says other things of how text is made goes along, and changes none
        # of them.
        (folder / "generation_config.json").write_text('{"temperature": 0.6}')
        texts = {"generation_config.json": '{"temperature": 0.6}'}
        found = find_model(str(folder), tokenizer="byte")
        assert generation_files(found) == (texts, {"eos_token_id": expected})
        (folder / "generation_config.json").unlink()


def test_a_config_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "checkpoints").mkdir()
    for saved in (
        {"vocab_size": 9, "model": {"type": "qwen9"}},
        {"vocab_size": 9, "later": 1},
        {},
        [],
        None,
    ):
        monkeypatch.setattr(
            "models.run_config.checkpoint_run",
            lambda *_, saved=saved, **__: {"config": saved},
        )
        status, shown = export("--run_dir", tmp_path, "--out", tmp_path / "out")
        assert status == 1 and ".. It is damaged" not in shown
        assert (
            f"The config in the checkpoint {tmp_path / 'checkpoints'} can't be used"
            in shown
        )


@pytest.mark.deep
def test_a_tokenizer_that_is_gone_is_noticed_before_anything_is_written(
    workplace, monkeypatch
):
    word_tokenizer.save(workplace / "words")
    (workplace / "words/tokenizer.json").rename(workplace / "words.json")
    (workplace / "words/tokenizer_config.json").rename(
        workplace / "tokenizer_config.json"
    )
    assert (
        train(
            workplace,
            "words_run",
            "--data.tokenizer",
            "words.json",
            "--vocab_size",
            "300",
        )
        == 0
    )
    monkeypatch.chdir(workplace)
    (workplace / "words.json").rename(workplace / "elsewhere.json")
    arguments = (
        "--run_dir",
        workplace / "words_run",
        "--out",
        workplace / "with_words",
    )
    status, shown = export(*arguments)
    assert status == 1 and "data.tokenizer = 'words.json' is neither" in shown
    assert not (workplace / "with_words").exists()
    (workplace / "elsewhere.json").rename(workplace / "words.json")
    assert export(*arguments)[0] == 0
    written = {path.name for path in (workplace / "with_words").iterdir()}
    texts = {"README.md", "tokenizer.json", "tokenizer_config.json"}
    assert written == {"config.json", "model.safetensors", *texts}
    assert (workplace / "with_words/tokenizer.json").read_text() == (
        workplace / "words.json"
    ).read_text()


COMMITTED = {}


class Hub(http.server.BaseHTTPRequestHandler):
    """What the Hub answers when a repository is made and files are committed to it."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Authorization"] != "Bearer hf_token":
            self.answer(401, {"error": "no token"})
        elif self.path == "/api/repos/create":
            COMMITTED["made"] = json.loads(body)
            self.answer(200, {"url": "https://huggingface.co/me/tiny"})
        elif self.path == "/api/validate-yaml":
            self.answer(200, {"errors": [], "warnings": []})
        elif self.path == "/api/models/me/tiny/preupload/main":
            files = [
                {"path": one["path"], "uploadMode": "regular"}
                for one in json.loads(body)["files"]
            ]
            self.answer(
                200, {"files": [file | {"shouldIgnore": False} for file in files]}
            )
        elif self.path == "/api/models/me/tiny/commit/main":
            lines = [json.loads(line) for line in body.splitlines()]
            files = [line["value"] for line in lines if line["key"] == "file"]
            COMMITTED["files"] = {
                file["path"]: base64.b64decode(file["content"]) for file in files
            }
            url = "https://huggingface.co/me/tiny/commit/o"
            self.answer(
                200, {"commitUrl": url, "commitOid": "o" * 40, "pullRequestUrl": None}
            )
        else:
            self.answer(404, {})

    def answer(self, status, document):
        text = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    """A server in place of the Hub."""
    monkeypatch.setenv("HF_TOKEN", "hf_token")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        monkeypatch.setattr(
            "huggingface_hub.constants.ENDPOINT",
            f"http://127.0.0.1:{server.server_port}",
        )
        threading.Thread(target=server.serve_forever).start()
        yield COMMITTED
        server.shutdown()


def test_an_export_is_pushed_with_a_card(finished, adapted, hub, tmp_path, monkeypatch):
    options = ("--run_dir", finished, "--push_to_hub", "me/tiny")
    status, shown = export(*options, "--out", tmp_path / "tiny", "--private")
    assert status == 0 and "pushed " in shown
    assert hub["made"]["name"] == "tiny" and hub["made"]["visibility"] == "private"
    assert hub["files"] == {
        path.name: path.read_bytes() for path in (tmp_path / "tiny").iterdir()
    }
    _, fields, text = hub["files"]["README.md"].decode().split("---\n", 2)
    assert yaml.safe_load(fields)["library_name"] == "transformers"
    assert "- base: none, from random weights" in text and "- data: text\n" in text
    result = json.loads((finished / "result.json").read_text())
    assert f"- held_out_after: {json.dumps(result['held_out_after'])}" in text
    config = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])
    assert config["model"]["type"] == "qwen3_moe"
    status, _ = export(
        "--run_dir", adapted, "--adapters", *options[2:], "--out", tmp_path / "adapters"
    )
    assert (
        status == 0
        and json.loads(hub["files"]["adapter_config.json"])["base_model_name_or_path"]
        is None
    )
    monkeypatch.setenv("HF_TOKEN", "another")
    status, shown = export(*options, "--out", tmp_path / "again")
    assert (
        status == 1
        and "could not be uploaded to me/tiny" in shown
        and "hf auth login" in shown
    )
