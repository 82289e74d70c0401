"""The command, on a run folder, on a run of adapters, and on exported folders."""

import io
import json
import os
import shutil
import signal
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from rich.console import Console

import models.generate as command
from models.export_hf import main as export_hf
from models.generate import main
from models.generation.sampling import Sampling
from models.generation.text_generation import Piece, chat_prompt, end_of_turn
from models.hf_io.adapters import save_adapters
from models.hf_io.decoder_weights import write_decoder
from models.hf_io.safetensors_folder import SafetensorsFolder, WeightsError
from models.loading import load_model, rows_that_fit
from models.parts.decoder import Decoder
from models.qwen3 import Qwen3Config
from models.run_config import find_model, read_run_config
from models.run_state import Placement
from stacked_remat._memory_spaces import is_on_host
from stacked_remat.lora import LoraConfig, merge_lora
from stacked_remat.training import ConfigError, MeshConfig, UpdateConfig, load_tokenizer

from ..lora.stacks import with_trained_adapters
from ..training.data import word_tokenizer
from .random_weights import random_weights
from .tiny_run import printed

pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.fixture(scope="module")
def exported(finished, tmp_path_factory):
    folder = tmp_path_factory.mktemp("generate") / "exported"
    assert printed(export_hf, "--run_dir", finished, "--out", folder)[0] == 0
    return folder


def generate(*arguments):
    return printed(main, *arguments, width=500)


def test_a_run_continues_what_it_learnt_and_ends_where_texts_end(finished):
    status, shown = generate(
        "--run_dir", finished, "--prompt", "abcdab", "--temperature", 0
    )
    assert (status, shown) == (0, "abcdabcdabcd\n")


def test_prompts_come_in_order_and_from_files_too(finished, tmp_path):
    (tmp_path / "lines.txt").write_text("abcdabcda\n\nab\n")
    options = (
        "--prompt",
        "abcdabcd",
        "--prompts",
        tmp_path / "lines.txt",
        "--temperature",
        0,
    )
    status, shown = generate("--run_dir", finished, *options)
    each = "abcdabcdabcd\n"
    assert (status, shown) == (
        0,
        f"--- 1 of 3\n{each}--- 2 of 3\n{each}--- 3 of 3\n{each}",
    )


@pytest.fixture
def asked(monkeypatch):
    """What is asked of the model, which says nothing."""
    calls = []

    def record(model, tokenizer, prompts, **options):
        calls.append((prompts, options))
        return (Piece(row, "", True) for row in range(len(prompts)))

    monkeypatch.setattr(command, "generate_text", record)
    return calls


def test_options_reach_the_model(finished, asked):
    options = (
        "--temperature",
        8,
        "--top_k",
        3,
        "--top_p",
        0.5,
        "--seed",
        7,
        "--max_new_tokens",
        12,
    )
    assert generate("--run_dir", finished, "--prompt", "ab", *options) == (0, "ab\n")
    (([prompt], found),) = asked
    assert prompt.tolist()[-2:] == list(b"ab")
    assert found["sampling"] == Sampling(8.0, 3, 0.5) and found["max_new_tokens"] == 12
    assert found["key"] == jax.random.key(7) and found["stops"] == [
        (load_tokenizer("byte").end,)
    ]


def test_a_chat_goes_into_the_template(finished, asked):
    assert generate("--run_dir", finished, "--chat", "--prompt", "hi") == (0, "hi\n\n")
    (([prompt], found),) = asked
    tokenizer = load_tokenizer("byte")
    np.testing.assert_array_equal(
        prompt, chat_prompt(tokenizer, [{"role": "user", "content": "hi"}])
    )
    assert found["stops"] == [(tokenizer.end,), end_of_turn(tokenizer)]


def test_a_conversation_keeps_its_history(finished, asked, monkeypatch, tmp_path):
    monkeypatch.setattr(command.sys, "stdin", io.StringIO("hi\nbye\n"))
    earlier = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "earlier.json").write_text(json.dumps(earlier))
    options = (
        "--system",
        "be brief",
        "--messages",
        tmp_path / "earlier.json",
        "--stop",
        "x",
    )
    assert generate("--run_dir", finished, "--chat", *options) == (0, "\n\n")
    said = [load_tokenizer("byte").decode(prompt) for ([prompt], _) in asked]
    turns = [
        "system\nbe brief",
        "user\na",
        "assistant\nb",
        "user\nhi",
        "assistant\n",
        "user\nbye",
    ]
    for text, last in zip(said, (4, 6), strict=True):
        expected = "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns[:last])
        assert text == expected + "<|im_start|>assistant\n"
    assert asked[0][1]["stop_texts"] == ["x"]


def test_variables_of_the_template_are_given(folders, asked):
    options = (
        "--chat",
        "--chat_template_kwargs",
        "{enable_thinking: false}",
        "--prompt",
        "hi",
    )
    assert generate("--model", folders["thinking"], *options)[0] == 0
    (([prompt], _),) = asked
    assert "hello" in find_model(str(folders["thinking"])).tokenizer.decode(prompt)


def test_adapters_that_cannot_be_used_are_named(spoken, tmp_path):
    adapted = with_trained_adapters(
        load_model(find_model(str(spoken), dtype="float32")), LoraConfig(2)
    )
    save_adapters(tmp_path, adapted, base_model=str(spoken))
    path = tmp_path / "adapter_config.json"
    fields = json.loads(path.read_text())
    fitting = (
        "r = 'two'",
        "use_dora = True",
        "do not fit the model",
        "nothing to repeat",
        "truncated",
    )
    changes = (
        {"r": "two"},
        {"use_dora": True},
        {"r": 3},
        {"target_modules": "*.q_proj"},
        {},
    )
    for change, message in zip(changes, fitting, strict=True):
        path.write_text(json.dumps(fields | change))
        if not change:
            os.truncate(tmp_path / "adapter_model.safetensors", 1000)
        status, shown = generate("--model", tmp_path, "--prompt", "ab")
        assert (
            status == 1
            and f"The adapters in {tmp_path} can't be used" in shown
            and message in shown
        )
    with pytest.raises(WeightsError, match="no adapters to save"):
        save_adapters(tmp_path, merge_lora(adapted))


@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_an_interrupted_text_stays_shown(finished, monkeypatch, name, status):
    def interrupted(*args, **options):
        yield Piece(0, "cd", False)
        os.kill(os.getpid(), getattr(signal, name))

    monkeypatch.setattr(command, "generate_text", interrupted)
    assert generate("--run_dir", finished, "--prompt", "ab") == (
        status,
        f"abcd\nstopped by {name}\n",
    )


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_text_is_escaped_for_terminals_alone(finished, monkeypatch, encoding):
    said = ["\x1b", "[2J\t\x9b", "1m\r\u202eé\n"]
    monkeypatch.setattr(
        command,
        "generate_text",
        lambda *args, **options: (
            Piece(0, text, last=text == said[-1]) for text in said
        ),
    )

    def written(is_terminal):
        buffer, options = (
            io.BytesIO(),
            {"force_terminal": is_terminal, "color_system": None},
        )
        console = Console(
            file=io.TextIOWrapper(buffer, encoding=encoding, newline=""),
            width=10,
            **options,
        )
        assert main(["--run_dir", str(finished), "--prompt", "a\x07"], console) == 0
        console.file.flush()
        return buffer.getvalue()

    last = "é" if encoding == "utf-8" else "\\xe9"
    assert written(True) == f"a\\x07\\x1b[2J\t\\x9b1m\\r\\u202e{last}\n\n".encode(
        encoding
    )
    assert written(False) == ("a\x07" + "".join(said) + "\n").encode()


def test_a_cache_that_cannot_fit_is_refused_before_weights_are_read(
    exported, finished, monkeypatch
):
    monkeypatch.setattr(SafetensorsFolder, "open", None)
    monkeypatch.setattr("models.run_state.load_checkpoint", None)
    monkeypatch.setattr("models.loading.memory_bytes", lambda _: 2**30)
    model = ("--model", exported, "--tokenizer", "byte")
    for source in (model, ("--run_dir", finished)):
        status, shown = generate(
            *source, "--prompt", "abc", "--prompt", "a", "--max_new_tokens", 10**9
        )
        # 2 of keys and values, layers, numbers of a head, bytes; a prompt is padded to
        # 16 tokens
        size = 2 * 2 * (10**9 + 16) * 8 * 4 >> 20
        assert (
            status == 1
            and f"keys and values of 1000000016 tokens {size:,} MiB" in shown
        )
        assert "has 1,024 MiB." in shown
    monkeypatch.setattr("models.loading.memory_bytes", lambda _: 100)
    status, shown = generate(*model, "--prompt", "abc", "--max_new_tokens", 1)
    assert (
        status == 1
        and "The weights take 0 MiB in float32" in shown
        and "this device has 0 MiB." in shown
    )
    monkeypatch.setattr("models.loading.memory_bytes", lambda _: None)
    status, shown = generate(*model, "--prompt", "abc", "--max_new_tokens", 10**25)
    assert status == 1 and "Use fewer tokens" in shown


@pytest.mark.parametrize("lora", [False, True], ids=["full", "adapters"])
def test_layers_that_are_read_to_the_host_count_there(finished, monkeypatch, lora):
    trained = read_run_config(finished)
    trainer = replace(
        trained.trainer,
        streaming=True,
        update=UpdateConfig(fused=not lora),
        mesh=MeshConfig(),
    )
    config = replace(
        trained, trainer=trainer, lora=LoraConfig(rank=2) if lora else None
    )
    monkeypatch.setattr("models.run_config.read_run_config", lambda *_: config)
    source = find_model(str(finished))
    weights = Placement.of(config).shapes(source, "float32")
    leaves = jax.tree.leaves(weights)
    on_host = sum(4 * leaf.size for leaf in leaves if is_on_host(leaf))
    on_device = sum(4 * leaf.size for leaf in leaves) - on_host
    assert 0 < on_host and 0 < on_device
    room = on_device + weights.cache_bytes(1, 8)
    monkeypatch.setattr("models.loading.memory_bytes", lambda _: room)
    assert rows_that_fit(source, 8) == 1 and rows_that_fit(source, 4) == 2
    with pytest.raises(ConfigError, match="of 9 tokens"):
        rows_that_fit(source, 9)
    monkeypatch.setattr(
        "stacked_remat.training.memory_check.available_host_bytes", lambda: on_host - 1
    )
    with pytest.raises(
        ConfigError,
        match="of host memory .*layers are read to the host. Give the process",
    ):
        rows_that_fit(source, 8)


@pytest.fixture(scope="module")
def spoken(tmp_path_factory):
    """A model of random weights in bfloat16 with a tokenizer of words beside it."""
    folder = tmp_path_factory.mktemp("spoken") / "model"
    Vocab = Axis("vocab", word_tokenizer.word_tokenizer().get_vocab_size())
    config = Qwen3Config(hidden_dim=16, num_layers=1, num_heads=2, num_kv_heads=1)
    model = random_weights(Decoder.init, config, Vocab)
    write_decoder(folder, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model))
    word_tokenizer.save(folder)
    return folder


def test_dtype_tokenizer_and_end_tokens_are_read_from_the_folder(spoken):
    (spoken / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    found = find_model(str(spoken))
    model = load_model(found)
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.dtype("bfloat16")}
    assert isinstance(model, Decoder) and model.config.compute_dtype == "bfloat16"
    assert found.ends == (found.tokenizer.end, 7, 9)
    (spoken / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    wide = find_model(str(spoken), dtype="float32")
    model = load_model(wide)
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.dtype("float32")}
    assert isinstance(model, Decoder) and model.config.compute_dtype == "float32"
    assert wide.ends == (found.tokenizer.end, 7)
    (spoken / "generation_config.json").unlink()
    assert find_model(str(spoken)).ends == (found.tokenizer.end,)
    status, shown = generate(
        "--model", spoken, "--chat", "--prompt", "hello", "--max_new_tokens", 3
    )
    assert status == 0 and shown.startswith("hello\n")


@pytest.fixture
def described(spoken, tmp_path):
    """A copy of that folder, and what changes fields of its files."""
    folder = shutil.copytree(spoken, tmp_path / "described")

    def change(file, **fields):
        path = folder / file
        before = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps(before | fields))
        return folder

    return change


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("ends", ["</s>", -1, 10**6, [3, None], {"a": 3}], ids=str)
def test_end_tokens_that_the_model_lacks_are_refused(described, file, ends):
    folder = described(file, eos_token_id=ends)
    with pytest.raises(
        WeightsError, match=f"{file}: eos_token_id is .*; the model has [0-9]+ tokens"
    ):
        assert find_model(str(folder)).ends


@pytest.mark.parametrize("content", [b"", b"[]"])
def test_damaged_generation_configs_are_named(described, content):
    folder = described("generation_config.json")
    (folder / "generation_config.json").write_bytes(content)
    status, shown = generate("--model", folder, "--prompt", "a")
    assert (
        status == 1
        and f"{folder / 'generation_config.json'} " in shown
        and shown.count("\n") == 1
    )


@pytest.fixture(scope="module")
def folders(finished, exported, spoken, tmp_path_factory):
    """A run, models, and tokenizers that something is wrong with, by name."""
    folder = tmp_path_factory.mktemp("folders")
    untemplated, refusing, dated, thinking = (
        shutil.copytree(spoken, folder / name)
        for name in ("untemplated", "refusing", "dated", "thinking")
    )
    word_tokenizer.save(
        thinking, template="{% if not enable_thinking %}hello{% endif %}"
    )
    word_tokenizer.save(untemplated, template=None)
    word_tokenizer.save(refusing, template="{{ raise_exception('never') }}")
    word_tokenizer.save(
        dated, template="{{ strftime_now('%d') }}{{ messages[0].content }}"
    )
    large = word_tokenizer.save(folder / "large")
    definition = json.loads((large / "tokenizer.json").read_text())
    definition["added_tokens"].append(
        {**definition["added_tokens"][-1], "id": 5000, "content": "<far>"}
    )
    (large / "tokenizer.json").write_text(json.dumps(definition))
    names = dict(
        run=finished,
        exported=exported,
        spoken=spoken,
        untemplated=untemplated,
        large=large,
    )
    return {**names, "refusing": refusing, "dated": dated, "thinking": thinking}


def test_chats_have_the_date_of_the_run(folders, monkeypatch):
    config = read_run_config(folders["run"])
    config = replace(
        config, data=replace(config.data, chat_date="2025-06-28"), vocab_size=300
    )
    monkeypatch.setattr("models.run_config.read_run_config", lambda *_: config)
    found = find_model(str(folders["run"]), tokenizer=str(folders["dated"])).tokenizer
    assert found.decode(chat_prompt(found, [{"role": "user", "content": "a"}])) == "28a"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--run_dir", "{run}"), "give --prompt TEXT, or --prompts FILE"),
        (
            ("--run_dir", "nowhere", "--prompt", "a"),
            "/nowhere, and it is not a name on the",
        ),
        (("--run_dir", "{run}", "--step", "7", "--prompt", "a"), "It has steps 60"),
        (
            ("--run_dir", "{run}", "--prompts", "nowhere.txt"),
            "nowhere.txt: No such file or directory. C",
        ),
        (
            ("--run_dir", "{run}", "--prompt", "a", "--seed", "9223372036854775808"),
            "--seed must be from",
        ),
        (
            ("--model", "{exported}", "--step", "2", "--prompt", "a"),
            "--step has no effect with",
        ),
        (
            ("--model", "{run}/checkpoints", "--prompt", "a"),
            "as in a run folder: name that",
        ),
        (("--model", "{spoken}", "--prompt", ""), "no token that begins a text"),
        (
            ("--model", "{exported}", "--tokenizer", "{large}", "--prompt", "a"),
            "Use the model's own token",
        ),
        (
            ("--model", "{spoken}", "--tokenizer", "{large}", "--prompt", "a <far>"),
            "A text has <far> (",
        ),
        (("--model", "{untemplated}", "--chat", "--prompt", "a"), "no chat template"),
        (
            (
                "--model",
                "{spoken}",
                "--chat_template_kwargs",
                "{{a: 1}}",
                "--prompt",
                "a",
            ),
            "no effect without",
        ),
        (
            (
                "--model",
                "{spoken}",
                "--chat",
                "--chat_template_kwargs",
                "[",
                "--prompt",
                "a",
            ),
            "is no mapping",
        ),
        (
            ("--model", "a", "--chat", "--chat_template_kwargs", "{{messages: 2}}"),
            "has 'messages', which no",
        ),
        (
            ("--model", "a", "--chat", "--chat_template_kwargs", "{{1: 2}}"),
            "has 1, which no variable",
        ),
        (("--model", "a", "--stop", "", "--prompt", "a"), "--stop needs a text"),
        (
            ("--model", "{spoken}", "--tokenizer", "a/b/c", "--prompt", "a"),
            "--tokenizer = 'a/b/c' is ",
        ),
        (
            ("--model", "{refusing}", "--chat", "--prompt", "a"),
            (
                "refusing does not take a user's message and an answer: never. Correct"
                " it (chat_template.jinja"
            ),
        ),
    ],
)
def test_user_errors_are_one_line(folders, arguments, message):
    status, shown = generate(*(argument.format(**folders) for argument in arguments))
    assert status == 1 and message in shown
    assert shown.startswith("error: ") and shown.count("\n") == 1


def test_exactly_one_source_is_required(capsys):
    for arguments in ((), ("--run_dir", "a", "--model", "b")):
        with pytest.raises(SystemExit):
            main(["--prompt", "a", *arguments])
    shown = capsys.readouterr().err
    assert "one of the arguments --run_dir --model is required" in shown
    assert "not allowed with argument" in shown
