import json
import os
import shutil
import signal
import sys

import equinox as eqx
import jax
import numpy as np
import pytest
import yaml
from haliax import Axis

import models.train_lm as train_lm
from models.lm import build_model
from models.train_lm import TrainLmConfig, main
from stacked_remat import OffloadError
from stacked_remat.training import (
    EXIT_INTERRUPTED,
    ConsoleProgress,
    SgdConfig,
    TrainState,
    build_optimizer,
    checkpoint_config,
    load_checkpoint,
    parse_config,
)

CONFIG = """
model:
  type: qwen3_moe
  hidden_dim: 16
  num_layers: 2
  num_heads: 2
  num_kv_heads: 1
  experts: {num_experts: 2, experts_per_token: 1, intermediate_dim: 8}
remat: nested
data: {held_out_fraction: 0.3, seq_len: 16, batch_size: 4}
optimizer: {learning_rate: 0.02, warmup_steps: 2}
trainer: {num_steps: 9, log_every: 1, eval_batches: 2}
"""


def make_workplace(folder):
    """A config file and a text of twenty files."""
    (folder / "text").mkdir()
    for number in range(20):
        (folder / "text" / f"{number}.txt").write_text("never odd or even. " * 10)
    (folder / "config.yaml").write_text(CONFIG)
    return folder


@pytest.fixture
def workplace(tmp_path, standard_promotion):
    """A config file and a text; optax's Adam needs the standard promotion."""
    return make_workplace(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of the plain config."""
    folder = make_workplace(tmp_path_factory.mktemp("finished"))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert train(folder) == 0
    return folder / "run"


def train(workplace, *overrides, run="run"):
    return main(
        [
            "--config_path",
            str(workplace / "config.yaml"),
            "--data.sources.text.paths",
            f"[{workplace}/text/*.txt]",
            "--data.cache_dir",
            str(workplace / "cache"),
            "--trainer.run_dir",
            str(workplace / run),
            *overrides,
        ]
    )


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_it_trains_and_leaves_config_metrics_and_checkpoint(finished):
    folder = finished
    lines = metrics_of(folder)
    held_out = [line["held_out_loss"] for line in lines if "held_out_loss" in line]
    assert len(held_out) == 2 and held_out[0] > 5.4 and held_out[1] < held_out[0] - 0.5
    assert len(lines[-2]["load_balance_per_layer"]) == 2
    # the resolved config, from which the run's model can be rebuilt and its checkpoint read
    config = parse_config(TrainLmConfig, ["--config_path", str(folder / "config.yaml")])
    assert yaml.safe_load((folder / "config.yaml").read_text())["model"]["type"] == "qwen3_moe"
    assert checkpoint_config(folder / "checkpoints")["remat"] == "nested"
    assert json.loads((folder / "result.json").read_text())["held_out_after"]["held_out"] == held_out[1]

    def initial():
        model = build_model(config.model, Axis("vocab", 257), remat=True, key=jax.random.key(0))
        return TrainState.init(model, build_optimizer(config.optimizer, config.trainer.num_steps))

    state = load_checkpoint(folder / "checkpoints", eqx.filter_eval_shape(initial))
    assert int(state.step) == 9


def test_auto_is_resolved_before_the_first_step(workplace, capsys):
    auto = ("--remat", "auto", "--trainer.num_steps", "3")
    assert train(workplace, *auto, "--budget", "1GiB") == 0
    assert yaml.safe_load((workplace / "run" / "config.yaml").read_text())["remat"] is False
    shown = capsys.readouterr().out
    assert shown.index("False fits 1.00 GiB") < shown.index("held-out loss after 0 steps")
    assert train(workplace, *auto, "--budget", "1KiB", run="other") == 1
    shown = capsys.readouterr().out
    assert "error: no candidate fits 1.00 KiB" in shown and "The smallest found is" in shown
    assert not (workplace / "other").exists()


def test_a_policy_that_offloads_is_checked_on_the_device_first(workplace, capsys, monkeypatch):
    monkeypatch.setattr(train_lm, "check_offload", refuse_to_offload)
    assert train(workplace, "--remat", "offload") == 1
    assert "error: offloading gives wrong gradients" in capsys.readouterr().out
    assert not (workplace / "run").exists()


def refuse_to_offload():
    raise OffloadError("offloading gives wrong gradients")


def as_if_finished_in(workplace, finished):
    """Puts the results of the finished run into a run folder of this workplace, with its config."""
    shutil.copytree(finished, workplace / "run")
    config = yaml.safe_load((workplace / "run" / "config.yaml").read_text())
    config["data"]["sources"]["text"]["paths"] = [f"{workplace}/text/*.txt"]
    config["data"]["cache_dir"] = str(workplace / "cache")
    (workplace / "run" / "config.yaml").write_text(yaml.safe_dump(config))


def test_overwriting_a_finished_run_needs_to_be_told_and_remat_does_not_change_the_result(
    workplace, capsys, finished
):
    folder = workplace / "run"
    as_if_finished_in(workplace, finished)
    before = metrics_of(folder)
    assert train(workplace, "--remat", "false") == 1
    assert "finished run of this config" in capsys.readouterr().out
    assert metrics_of(folder) == before
    assert train(workplace, "--remat", "false", "--trainer.overwrite", "true") == 0
    assert "held-out loss after 9 steps" in capsys.readouterr().out
    after = metrics_of(folder)
    assert [line["step"] for line in after] == [line["step"] for line in before]
    for name in ("loss", "held_out_loss"):
        losses = ([line[name] for line in lines if name in line] for lines in (before, after))
        np.testing.assert_allclose(*losses, rtol=1e-4)


def test_it_trains_adapters_alone(workplace, capsys):
    folder = workplace / "run"
    assert train(workplace, "--lora.rank", "2", "--trainer.num_steps", "6", "--trainer.log_every", "1") == 0
    # A and B of four maps of attention, and of three of each expert.
    adapters = 2 * (2 * ((16 + 16) + 2 * (16 + 8) + (16 + 16)) + 2 * 2 * 3 * (16 + 8))
    assert f", {adapters:,} of them trained;" in capsys.readouterr().out
    written = yaml.safe_load((folder / "config.yaml").read_text())
    assert written["lora"] == {"rank": 2, "alpha": 32.0, "targets": ["*_proj"]}
    losses = [line["loss"] for line in metrics_of(folder) if "loss" in line]
    assert losses[-1] < losses[0]


def test_a_run_that_a_signal_ends_goes_on_with_the_same_command_and_no_other_model(
    workplace, capsys, monkeypatch, finished
):
    advance = ConsoleProgress.advance

    def terminated_at_5(self, step, *arguments):
        if step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        advance(self, step, *arguments)

    monkeypatch.setattr(ConsoleProgress, "advance", terminated_at_5)
    assert train(workplace) == EXIT_INTERRUPTED == 75
    assert "stopped by SIGTERM after step 5" in capsys.readouterr().out
    monkeypatch.undo()

    wider, accept = (
        ("--model.experts.intermediate_dim", "16"),
        ("--trainer.checkpoint.accept_changes", "true"),
    )
    assert train(workplace, *wider) == 1
    assert "model.experts.intermediate_dim: 8 there, 16 now" in capsys.readouterr().out
    assert train(workplace, *wider, *accept) == 1
    shown = capsys.readouterr().out
    assert "trained.stacks.0.stacked.mlp.experts.stacked.gate_proj.weight: float32[layers 2, " in shown
    assert "expert_dim 8" in shown and "expert_dim 16" in shown

    assert train(workplace) == 0
    assert "going on after step 5" in capsys.readouterr().out
    repeated = ("loss", "grad_norm", "load_balance_per_layer", "learning_rate", "held_out_loss")
    one, other = (
        [{name: line.get(name) for name in repeated} for line in metrics_of(folder)]
        for folder in (finished, workplace / "run")
    )
    assert one == other


def test_every_part_of_the_trainers_config_reaches_the_run(workplace, monkeypatch):
    monkeypatch.setattr(train_lm, "check_offload", refuse_to_offload)  # not asked for, so not checked
    options = ("--optimizer.type", "sgd", "--trainer.update.microbatches", "2", "--trainer.num_steps", "3")
    bfloat16 = "{parameters: bfloat16, gradients: bfloat16, optimizer_state: bfloat16}"
    skip = ("--trainer.update.on_nonfinite", "skip", "--trainer.precision", bfloat16)
    assert train(workplace, *options, *skip, "--trainer.profiler.peak_flops", "1e12") == 0
    folder = workplace / "run"
    config = parse_config(TrainLmConfig, ["--config_path", str(folder / "config.yaml")])
    assert isinstance(config.optimizer, SgdConfig)
    last = [line for line in metrics_of(folder) if "loss" in line][-1]
    assert last["skips"] == 0
    layout = json.loads((folder / "checkpoints" / "3" / "run" / "metadata").read_text())["layout"]
    dtypes = {name: entry["dtype"] for name, entry in layout.items()}
    assert dtypes["trained.head.weight"] == "bfloat16"
    assert "float32" not in {kind for name, kind in dtypes.items() if name.endswith("head.weight")}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (("--trainer.num_step", "3"), "Did you mean `num_steps`?"),
        (("--model.num_heads", "3"), "model.hidden_dim = 16 is not divisible by model.num_heads = 3"),
        (("--remat", "nestd"), "Unknown remat policy 'nestd'"),
        (("--remat", "{nestd: 2}"), "remat.nestd is not a field"),
        (("--optimizer.warmup_steps", "50"), "warmup_steps = 50 must be less than trainer.num_steps = 9"),
        (("--lora.rnk", "3"), "Unknown key `lora.rnk`"),
        (("--lora.targets", "['*.qproj']"), "'*.qproj' fits no linear. Nearest of 9: "),
        (("--remat", "auto"), "remat: auto takes the policy that fits a budget"),
        (("--budget", "1GiB"), "budget = 1GiB has no effect beside remat: nested"),
        (("--data.sources.text.paths", "[nowhere/*.md]"), "'nowhere/*.md' in data.sources.text.paths stands"),
        (("--data.tokenizer", "./nowhere"), "data.tokenizer = './nowhere' is neither `byte`"),
        (("--trainer.eval_batches", "99"), "Lower trainer.eval_batches"),
        (("--trainer.update.microbatches", "3"), "data.batch_size = 4 can't be cut into"),
        (("--optimizer.type", "addam"), "Did you mean `adamw`?"),
        (("--trainer.trackers.wandb.project", "p"), "needs the package wandb: pip install wandb"),
    ],
)
def test_what_the_user_can_mend_is_one_message_and_no_run_folder(
    workplace, capsys, override, message, monkeypatch
):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it fails
    assert train(workplace, *override) == 1
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1].startswith("error: ") and message in shown
    assert not (workplace / "run").exists()


def test_the_config_files_are_configs_of_this_command():
    tiny, deep = (
        parse_config(TrainLmConfig, ["--config_path", f"models/configs/qwen3_moe_{name}.yaml"])
        for name in ("tiny", "deep")
    )
    assert tiny.remat == deep.remat == "nested"
    assert deep.model.num_layers == 48  # pyright: ignore[reportAttributeAccessIssue]
