"""Scores and continuations for lm-eval: on a mesh as on one device, and those of its
own `hf` model.
"""

import functools
import json
import re
import sys
import warnings
from types import SimpleNamespace
from typing import Any, cast

import equinox as eqx
import jax
import numpy as np
import pytest
from haliax import Axis
from rich.console import Console

from models.eval_lm import ModelToEvaluate, lm_class, main
from models.gpt_oss import GptOssConfig
from models.hf_io.decoder_weights import write_decoder
from models.loading import load_model
from models.parts.decoder import Decoder
from models.parts.sections import (
    FULL,
    SLIDING,
    AttentionConfig,
    ExpertsConfig,
    RotaryConfig,
)
from models.run_config import find_model
from stacked_remat.training import ConfigError, MeshConfig, Partitioning
from stacked_remat.training.data.chat_template import ChatTemplate

from ..training.data import word_tokenizer

LENGTH = 12
SIZES = dict(
    hidden_dim=16, num_layers=2, num_heads=4, num_kv_heads=2, initializer_range=0.4
)
SIZES["rotary"] = RotaryConfig(max_position_embeddings=LENGTH)
CONFIG = GptOssConfig(
    **SIZES,
    attention=AttentionConfig(bias=True, window=3, layer_types=(SLIDING, FULL)),
    experts=ExpertsConfig(4, 2, 8),
)
PAIRS = [
    ("never odd or", " even"),
    ("never odd or ", "even or odd"),
    ("", "hello"),
    ("hello", " never odd or even" * 2),
    ("odd " * 20, "even"),
]
TEXTS = ["hello", "never odd or even " * 7, "odd"]
STOPS = {"until": ["\n"], "max_gen_toks": 6}
PROMPTS = [
    ("never odd or even", STOPS),
    ("hello " * 9, {"until": [], "max_gen_toks": 6}),
    (" hello", STOPS),
    ("odd", STOPS),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small random model with a tokenizer of words."""
    folder = tmp_path_factory.mktemp("eval") / "model"
    Vocab = Axis("vocab", word_tokenizer.word_tokenizer().get_vocab_size())
    write_decoder(
        folder, eqx.filter_jit(Decoder.init)(CONFIG, Vocab, key=jax.random.key(3))
    )
    specials = {"eos_token": "</s>", "bos_token": "<s>"}
    word_tokenizer.save(
        folder, config={"tokenizer_class": "PreTrainedTokenizerFast", **specials}
    )
    return folder


def requests(arguments):
    return [SimpleNamespace(args=own) for own in arguments]


@pytest.mark.deep
def test_a_mesh_gives_the_scores_and_texts_of_one_device(folder):
    found = find_model(str(folder))
    partitioning = Partitioning.of(MeshConfig({"data": 4}))
    one = ModelToEvaluate(found, load_model(found), batch_size=2)
    many = ModelToEvaluate(
        found, load_model(found, partitioning), batch_size=2, partitioning=partitioning
    )
    assert many.batch_size == 4
    texts = requests((text,) for text in TEXTS)
    np.testing.assert_allclose(
        one.loglikelihood_rolling(texts), many.loglikelihood_rolling(texts), rtol=1e-5
    )
    assert one.generate_until(requests(PROMPTS)) == many.generate_until(
        requests(PROMPTS)
    )
    with pytest.raises(
        ConfigError, match="continuation has 13 tokens, more than --max_length 12"
    ):
        one._loglikelihood_tokens([(None, [1], [1] * 13)])


def test_lm_eval_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    console = Console(record=True, width=200)
    assert main(["--model", "a", "--tasks", "b"], console) == 1
    assert "pip install 'stacked_remat[eval]'" in console.export_text()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--max_length=-5", "--max_length must be at least 1, got -5."),
        ("--batch_size=0", "--batch_size must be at least 1, got 0."),
        (
            "--tasks=none",
            (
                "lm-eval: invalid literal for int() with base 10: '--tasks=none'"
                " (`lm-eval ls"
            ),
        ),
    ],
)
def test_options_that_cannot_be_used_are_named(monkeypatch, option, message):
    package = SimpleNamespace(
        __main__=SimpleNamespace(cli_evaluate=lambda: int(sys.argv[-1]))
    )
    package.api = SimpleNamespace(registry=SimpleNamespace(register_model=lambda _: id))
    for name in ("lm_eval", "lm_eval.__main__", "lm_eval.api", "lm_eval.api.registry"):
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setattr("models.eval_lm.lm_class", SimpleNamespace)
    monkeypatch.setattr(sys, "argv", [])
    console = Console(record=True, width=200)
    assert main(["--model", "a", option], console) == 1
    assert message in console.export_text()


def test_a_chat_may_end_within_its_last_message(folder):
    found = find_model(str(folder))
    model = ModelToEvaluate(found, load_model(found))
    model.tokenizer = cast("Any", SimpleNamespace())
    model.tokenizer.chat_template = ChatTemplate(
        "<s>{{ messages[-1].content | trim }}</s>", {}
    )
    chat = [{"role": "user", "content": "hello "}]
    assert model.apply_chat_template(chat, add_generation_prompt=False) == "<s>hello"


@pytest.mark.torch
def test_scores_are_those_of_its_own_model(folder):
    pytest.importorskip("torch")
    pytest.importorskip("lm_eval")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from lm_eval.models.huggingface import (  # pyright: ignore[reportMissingImports]
            HFLM,
        )

        theirs = HFLM(
            str(folder), dtype="float32", device="cpu", batch_size=2, max_length=LENGTH
        )
        found = find_model(str(folder))
        ours = lm_class()(found, load_model(found), batch_size=2)
        assert ours.max_length == LENGTH
        for name, arguments in (
            ("loglikelihood", PAIRS),
            ("loglikelihood_rolling", [(t,) for t in TEXTS]),
        ):
            expected = getattr(theirs, name)(requests(arguments))
            actual = getattr(ours, name)(requests(arguments))
            np.testing.assert_allclose(
                actual, expected, rtol=1e-5, atol=1e-5, err_msg=name
            )
        free = theirs.generate_until(requests(PROMPTS))
        stopped = [
            (text, {"until": [free[0][2:4], "\n"], "max_gen_toks": 6})
            for text, _ in PROMPTS
        ]
        expected = theirs.generate_until(requests(stopped))
        assert (
            ours.generate_until(requests(PROMPTS)) == free and len({*"".join(free)}) > 4
        )
        assert ours.generate_until(requests(stopped)) == expected and len(
            expected[0]
        ) < len(free[0])


@pytest.mark.torch
def test_a_task_is_evaluated(folder, tmp_path, capsys, monkeypatch):
    pytest.importorskip("lm_eval")
    import lm_eval.tasks  # pyright: ignore[reportMissingImports]

    # Reading the harness's own thousands of tasks takes most of the time
    own_tasks = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", own_tasks)
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    )
    (tmp_path / "own.yaml").write_text(
        "task: own\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path / 'data.jsonl'}}}}}\n"
        "test_split: test\noutput_type: loglikelihood_rolling\n"
        "doc_to_text: ''\ndoc_to_target: '{{text}}'\n"
        "metric_list: [{metric: word_perplexity}]\n"
    )
    options = [
        "--include_path",
        str(tmp_path),
        "--output_path",
        str(tmp_path / "out.json"),
    ]
    monkeypatch.setattr(sys, "argv", [])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert (
            main(
                [
                    "--model",
                    str(folder),
                    *options,
                    "--tasks",
                    "own",
                    "--mesh",
                    "{data: 2}",
                ]
            )
            == 0
        )
    (written,) = tmp_path.glob("out*.json")
    found = json.loads(written.read_text())["results"]["own"]["word_perplexity,none"]
    model = find_model(str(folder))
    own = ModelToEvaluate(model, load_model(model)).loglikelihood_rolling(
        requests((text,) for text in TEXTS)
    )
    words = sum(len(re.split(r"\s+", text)) for text in TEXTS)
    np.testing.assert_allclose(found, np.exp(-sum(own) / words), rtol=1e-4)
    assert "word_perplexity" in capsys.readouterr().out
    options += [
        "--model",
        str(folder),
        "--tasks",
        "own",
        "--config",
        str(tmp_path / "settings.yaml"),
    ]
    for settings, message in (
        (
            "model_args: {dtype: float16}",
            "model_args and max_batch_size have no effect",
        ),
        ("max_batch_size: 8", "model_args and max_batch_size have no effect"),
        ("batch_size: five", "invalid literal for int() with base 10: 'five'"),
    ):
        (tmp_path / "settings.yaml").write_text(settings)
        console = Console(record=True, width=200)
        assert main(options, console) == 1
        assert message in console.export_text()
