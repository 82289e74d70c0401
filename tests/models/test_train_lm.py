"""Training a language model from a config file, with the command's files and
messages.
"""

import json
import re
import shutil
import sys

import equinox as eqx
import jax
import pytest
import yaml
from haliax import Axis

import models.train_lm as train_lm
from models.hf_io.formats import config_to_hf
from models.parts.decoder import Decoder
from models.run_config import LmRunConfig
from stacked_remat import OffloadError
from stacked_remat.training import (
    SgdConfig,
    TrainState,
    build_optimizer,
    checkpoint_run,
    load_checkpoint,
    lock_run_folder,
    parse_config,
)

from .tiny_run import STEPS, train

pytestmark = pytest.mark.usefixtures("standard_promotion")


def metrics_of(folder):
    return [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


AUTO = ("--remat", "auto")
DEVICES = ("--trainer.mesh.axes.data",)
TWICE_ON_DATA = (
    *DEVICES,
    "2",
    "--trainer.mesh.compute_mapping",
    "{batch: data, position: data}",
)


def test_without_arguments_it_says_what_it_would_train(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train_lm.main([]) == 0
    shown = capsys.readouterr().out
    assert "nothing is trained" in shown and "Qwen3MoeConfig of 4 layers" in shown
    assert "python -m models.train_lm --trainer.num_steps 100" in shown
    assert not [*tmp_path.iterdir()]


def test_it_trains_and_leaves_config_metrics_and_checkpoint(finished):
    folder = finished
    lines = metrics_of(folder)
    held_out = [line["held_out_loss"] for line in lines if "held_out_loss" in line]
    assert len(held_out) == 2 and held_out[0] > 5.4 and held_out[1] < held_out[0] - 0.5
    assert len(lines[-2]["load_balance_per_layer"]) == 2
    # the resolved config, from which the run's model can be rebuilt and its checkpoint
    # read
    config = parse_config(LmRunConfig, ["--config_path", str(folder / "config.yaml")])
    assert (
        yaml.safe_load((folder / "config.yaml").read_text())["model"]["type"]
        == "qwen3_moe"
    )
    assert checkpoint_run(folder / "checkpoints")["config"]["remat"] == "nested"
    assert (
        json.loads((folder / "result.json").read_text())["held_out_after"]["held_out"]
        == held_out[1]
    )

    def initial():
        model = Decoder.init(
            config.model, Axis("vocab", 260), remat=True, key=jax.random.key(0)
        )
        return TrainState.init(
            model, build_optimizer(config.optimizer, config.trainer.num_steps)
        )

    state = load_checkpoint(folder / "checkpoints", eqx.filter_eval_shape(initial))
    assert int(state.step) == STEPS


@pytest.mark.deep
def test_each_source_of_a_mixture_is_evaluated_under_its_own_name(workplace, capsys):
    (workplace / "exam.txt").write_text("step on no pets. " * 40)
    other = (
        f"{{paths: ['{workplace}/text/1*.txt'], held_out: ['{workplace}/exam.txt']}}"
    )
    assert (
        train(workplace, "--data.sources.pets", other, "--trainer.num_steps", "3") == 0
    )
    names = ["held_out", "held_out/text", "held_out/pets"]
    result = json.loads((workplace / "run" / "result.json").read_text())
    assert list(result["held_out_before"]) == list(result["held_out_after"]) == names
    assert len(set(result["held_out_after"].values())) == 3
    evaluated = [
        line for line in metrics_of(workplace / "run") if "held_out_loss" in line
    ]
    assert [list(line)[1:] for line in evaluated] == [
        [f"{name}_loss" for name in names]
    ] * 2
    assert "held-out/pets loss after 3 steps: " in capsys.readouterr().out


def test_all_text_is_trained_on_where_none_is_held_out(workplace, capsys):
    nothing = ("--data.held_out_fraction", "0", "--trainer.num_steps", "3")
    assert train(workplace, *nothing, "--trainer.eval_every", "1") == 0
    assert "checkpoints, config and metrics are in" in capsys.readouterr().out
    assert [line["step"] for line in metrics_of(workplace / "run")] == [1, 2, 3]
    result = json.loads((workplace / "run" / "result.json").read_text())
    assert result == {"held_out_before": {}, "held_out_after": {}}


def test_a_run_that_no_longer_lowers_its_loss_is_finished(workplace, capsys):
    still = ("--optimizer", "{type: sgd, learning_rate: 1e-12, warmup: 2}")
    ends = ("--trainer.eval_every", "1", "--trainer.patience", "2")
    best = ("--trainer.checkpoint.keep_best", "--trainer.eval_batches", "1")
    assert train(workplace, *still, *ends, *best) == 0
    shown = capsys.readouterr().out
    result = json.loads((workplace / "run" / "result.json").read_text())
    step, loss = result["best_step"], result["best_held_out"]
    assert f"lowest held-out loss {loss:.4f}, after step {step}\n" in shown
    assert f"ended after step {step + 2}, since 2 evaluations found no lower" in shown
    assert f"models.generate --run_dir {workplace}/run --step {step} --p" in shown
    saved = {path.name for path in (workplace / "run" / "checkpoints").iterdir()}
    assert {str(step), str(step + 2)} <= saved
    assert train(workplace, *still, *ends, *best) == 1
    assert "has a finished run of this config" in capsys.readouterr().out


@pytest.mark.deep
def test_auto_is_resolved_before_the_first_step(workplace, capsys):
    auto = (*AUTO, "--trainer.num_steps", "3")
    assert train(workplace, *auto, "--budget", "1GiB") == 0
    assert (
        yaml.safe_load((workplace / "run" / "config.yaml").read_text())["remat"]
        is False
    )
    shown = capsys.readouterr().out
    chosen = (
        r"remat: false\ntakes .* of 1.00 GiB a device, and 0 B on the host\n"
        r".* FLOP in matrix products; \d+ policies were compiled\n"
    )
    (lines,) = re.finditer(chosen, shown)
    assert lines.end() <= shown.index("held-out loss after 0 steps")
    assert train(workplace, *auto, "--budget", "1KiB", run="other") == 1
    shown = capsys.readouterr().out
    assert (
        "error: no candidate fits 1.00 KiB" in shown
        and "smallest found is 'nested' with" in shown
    )
    assert not (workplace / "other").exists()


def test_a_policy_that_offloads_is_checked_on_the_device_first(
    workplace, capsys, monkeypatch
):
    monkeypatch.setattr(train_lm, "check_offload", refuse_to_offload)
    assert train(workplace, "--remat", "offload") == 1
    assert "error: offloading gives wrong gradients" in capsys.readouterr().out
    assert not (workplace / "run").exists()


def refuse_to_offload():
    raise OffloadError("offloading gives wrong gradients")


def as_if_finished_in(workplace, finished):
    """Puts the results of the finished run into a run folder of this workplace, with
    its config.
    """
    shutil.copytree(finished, workplace / "run")
    config = yaml.safe_load((workplace / "run" / "config.yaml").read_text())
    config["data"]["sources"]["text"]["paths"] = [f"{workplace}/text/*.txt"]
    config["data"]["cache_dir"] = str(workplace / "cache")
    (workplace / "run" / "config.yaml").write_text(yaml.safe_dump(config))


def test_a_refused_continuation_leaves_the_folder_as_it_was(
    workplace, capsys, finished
):
    as_if_finished_in(workplace, finished)
    names = ("config.yaml", "result.json", "metrics.jsonl")
    before = [(workplace / "run" / name).read_text() for name in names]
    accept = ("--trainer.checkpoint.accept_changes", "true")
    assert train(workplace) == 1
    assert "finished run of this config" in capsys.readouterr().out
    assert (
        train(workplace, "--trainer.seed", "5", "--trainer.num_steps", "99", *accept)
        == 1
    )
    assert "seed was 0 and is 5" in capsys.readouterr().out
    assert train(workplace, "--trainer.num_steps", "3", *accept) == 1
    assert f"has done {STEPS} steps" in " ".join(capsys.readouterr().out.split())
    with lock_run_folder(workplace / "run"):
        assert train(workplace, "--trainer.num_steps", "99", *accept) == 1
    assert "Another process trains in" in capsys.readouterr().out
    assert [(workplace / "run" / name).read_text() for name in names] == before


def test_a_run_that_can_not_begin_is_refused_before_text_is_tokenized(
    workplace, capsys, finished
):
    as_if_finished_in(workplace, finished)
    (workplace / "notes").mkdir()
    (workplace / "notes" / "a.md").write_text("mine")
    run = parse_config(LmRunConfig, ["--config_path", f"{finished}/config.yaml"])
    (workplace / "base").mkdir()
    fields = config_to_hf(run.model, run.vocab_size, dtype="float32")
    (workplace / "base" / "config.json").write_text(json.dumps(fields))
    base = ("--initialize_from_hf", str(workplace / "base"))
    refused = [
        ("run", ("--trainer.seed", "5"), "trainer.seed was 0 and is 5"),
        ("notes", (), "notes has files and no run"),
        ("config.yaml", (), "config.yaml is no folder"),
        ("new", base, "base lacks model.safetensors"),
    ]
    for name, more, message in refused:
        assert train(workplace, *more, run=name) == 1
        assert message in capsys.readouterr().out
    assert not (workplace / "cache").exists() and not (workplace / "new").exists()


@pytest.mark.deep
def test_every_part_of_the_trainers_config_reaches_the_run(
    workplace, capsys, monkeypatch, finished
):
    as_if_finished_in(workplace, finished)
    # Not asked for, so not checked
    monkeypatch.setattr(train_lm, "check_offload", refuse_to_offload)
    options = (
        "--optimizer.type",
        "sgd",
        "--trainer.update.microbatches",
        "2",
        "--trainer.num_steps",
        "3",
    )
    bfloat16 = "{parameters: bfloat16, gradients: bfloat16, optimizer_state: bfloat16}"
    skip = ("--trainer.update.on_nonfinite", "skip", "--trainer.precision", bfloat16)
    more = (
        "--trainer.profiler.peak_flops",
        "1e12",
        "--trainer.checkpoint.overwrite",
        "true",
    )
    assert train(workplace, *options, *skip, *more) == 0
    folder, shown = workplace / "run", capsys.readouterr().out
    after = json.loads((folder / "result.json").read_text())["held_out_after"][
        "held_out"
    ]
    summary = shown.partition("3 steps of 64 tokens in 0:")[2]
    assert (
        f"-> {after:.4f}\n" in summary
        and f"python -m models.generate --run_dir {folder} " in summary
    )
    config = parse_config(LmRunConfig, ["--config_path", str(folder / "config.yaml")])
    assert isinstance(config.optimizer, SgdConfig)
    last = [line for line in metrics_of(folder) if "loss" in line][-1]
    assert last["skips"] == 0
    layout = json.loads(
        (folder / "checkpoints" / "3" / "run" / "metadata").read_text()
    )["layout"]
    dtypes = {name: entry["dtype"] for name, entry in layout.items()}
    assert dtypes["trained.head.weight"] == "bfloat16"
    assert "float32" not in {
        kind for name, kind in dtypes.items() if name.endswith("head.weight")
    }


def test_the_first_example_is_shown_and_nothing_is_trained(workplace, capsys):
    completion = '{"prompt": "2+2=\\u001b[31m", "completion": "4 [red]", "by": "us"}'
    (workplace / "sums.jsonl").write_text(completion)
    source = f"{{paths: ['{workplace}/sums.jsonl'], train_on: answers}}"
    assert train(workplace, "--data.sources.sums", source, "--show_example") == 0
    shown = capsys.readouterr().out
    assert "«<|end|>!abcdabcdabcd<|end|>»" in shown
    assert "<|end|>2+2=\\x1b[31m«4 [red]<|end|>»" in shown
    assert "keys of records that are not read: by" in shown
    assert "longer than data.seq_len" not in shown
    assert not (workplace / "run").exists() and not (workplace / "cache").exists()
    whole = ("--data.sources.sums", source, "--data.packing", "whole")
    assert train(workplace, *whole, "--data.seq_len", "9", "--show_example") == 0
    shown = capsys.readouterr().out
    assert "this example is longer than data.seq_len = 9 and is cut" in shown
    longest = int(shown.rpartition("data.seq_len: ")[2].split()[0])
    fits = ("--data.seq_len", str(longest), "--show_example")
    assert train(workplace, *whole, *fits) == 0
    assert "sums.jsonl:1" in (shown := capsys.readouterr().out)
    assert "longer than" not in shown[shown.index("sums.jsonl:1") :]
    chat = [{"role": "user", "content": "2+2"}, {"role": "asistant", "content": "4"}]
    (workplace / "sums.jsonl").write_text(json.dumps({"messages": chat}))
    assert train(workplace, "--data.sources.sums", source, "--show_example") == 1
    shown = capsys.readouterr().out
    assert "asistant\n4<|im_end|>" in shown and "Did you mean `assistant`?" in shown
    assert "sums has no target in its first records" in shown
    (workplace / "sums.jsonl").write_text('{"text": ""}')
    assert train(workplace, "--data.sources.sums", source, "--show_example") == 1
    assert "sums has no target in its first records" in capsys.readouterr().out


def test_auto_compiles_nothing_before_all_records_are_read(workplace, capsys):
    lines = [*(json.dumps({"text": f"line {line}"}) for line in range(99)), "{"]
    (workplace / "lines.jsonl").write_text("\n".join(lines))
    source = f"{{paths: [{workplace}/lines.jsonl]}}"
    auto = (*AUTO, "--budget", "1GiB", "--data.sources.lines", source)
    assert train(workplace, *auto) == 1
    shown = capsys.readouterr().out
    assert "lines.jsonl:100" in shown and "looking for" not in shown


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            ("--optimizer.warmup", "99"),
            "warmup = 99 takes 99 steps, but trainer.num_steps = 60 is not more",
        ),
        (AUTO, "remat: auto takes the policy that fits a budget"),
        (
            ("--data.sources.text.paths", "[nowhere/*.md]"),
            "data.sources.text.paths matches no file",
        ),
        (  # before any policy is compiled
            (*AUTO, "--budget", "1GiB", "--data.sources.text.paths", "[nowhere/*.md]"),
            "data.sources.text.paths matches no file",
        ),
        (
            (
                "--data.held_out_fraction",
                "0",
                "--ghost",
                "{method: grad_dot, token_mean: batch, every: 1}",
            ),
            "The set held_out has 0 batches, fewer than ghost.validation.batches",
        ),
        (
            ("--trainer.update.microbatches", "3"),
            "data.batch_size = 4 can't be cut into",
        ),
        (TWICE_ON_DATA, "duplicate entries for `data`. In trainer.mesh, map only one"),
        (
            ("--trainer.mesh.param_mapping", "{embd: data}"),
            "has an axis `embd`. Did you mean `embed`?",
        ),
        (
            ("--model.attention.backend", "cudnn"),
            "can't be applied here: The backend of attention 'cudnn'",
        ),
        (("--model.hidden_dim", "200000"), "This can't fit: it takes at least"),
        (
            ("--trainer.trackers.wandb.project", "p"),
            "needs the package wandb: pip install wandb",
        ),
    ],
)
def test_user_errors_are_one_message_and_make_no_run_folder(
    workplace, capsys, override, message, monkeypatch
):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it fails
    assert train(workplace, *override) == 1
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1].startswith("error: ") and message in shown
    assert "compiling" not in shown
    assert not (workplace / "run").exists()
