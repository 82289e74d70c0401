import json

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
from stacked_remat.training import TrainState, build_optimizer, load_checkpoint, parse_config

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
trainer: {num_steps: 12, log_every: 5, eval_batches: 2}
"""


@pytest.fixture
def workplace(tmp_path, standard_promotion):
    """A config file and a text of twenty files; optax's Adam needs the standard promotion."""
    (tmp_path / "text").mkdir()
    for number in range(20):
        (tmp_path / "text" / f"{number}.txt").write_text("never odd or even. " * 10)
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


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


def test_it_trains_and_leaves_config_metrics_and_checkpoint(workplace, capsys):
    assert train(workplace) == 0
    folder = workplace / "run"
    lines = metrics_of(folder)
    held_out = [line["held_out_loss"] for line in lines if "held_out_loss" in line]
    assert len(held_out) == 2 and held_out[0] > 5.4 and held_out[1] < held_out[0] - 0.5
    assert len(lines[-2]["load_balance_per_layer"]) == 2
    assert "held-out loss after 12 steps" in capsys.readouterr().out
    # the resolved config, from which the run's model can be rebuilt and its checkpoint read
    config = parse_config(TrainLmConfig, ["--config_path", str(folder / "config.yaml")])
    assert yaml.safe_load((folder / "config.yaml").read_text())["model"]["type"] == "qwen3_moe"
    assert json.loads((folder / "checkpoint" / "config.json").read_text())["remat"] == "nested"

    def initial():
        model = build_model(config.model, Axis("vocab", 257), remat=True, key=jax.random.key(0))
        return TrainState.init(model, build_optimizer(config.optimizer, config.trainer.num_steps))

    state = load_checkpoint(folder / "checkpoint", eqx.filter_eval_shape(initial))
    assert int(state.step) == 12


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
    def refuse():
        raise OffloadError("offloading gives wrong gradients")

    monkeypatch.setattr(train_lm, "check_offload", refuse)
    assert train(workplace, "--remat", "offload") == 1
    assert "error: offloading gives wrong gradients" in capsys.readouterr().out
    assert not (workplace / "run").exists()
    assert train(workplace, "--trainer.num_steps", "3") == 0


def test_overwriting_an_earlier_run_needs_to_be_told_and_remat_does_not_change_the_result(workplace, capsys):
    folder = workplace / "run"
    short = ("--trainer.num_steps", "3")
    assert train(workplace, *short) == 0
    before = metrics_of(folder)
    assert train(workplace, *short, "--remat", "false") == 1
    assert "--trainer.overwrite true" in capsys.readouterr().out
    assert metrics_of(folder) == before
    assert train(workplace, *short, "--remat", "false", "--trainer.overwrite", "true") == 0
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


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (("--trainer.num_step", "3"), "Did you mean `num_steps`?"),
        (("--model.num_heads", "3"), "model.hidden_dim = 16 is not divisible by model.num_heads = 3"),
        (("--remat", "nestd"), "Unknown remat policy 'nestd'"),
        (("--remat", "{nestd: 2}"), "remat.nestd is not a field"),
        (("--optimizer.warmup_steps", "50"), "warmup_steps = 50 must be less than trainer.num_steps = 12"),
        (("--lora.rnk", "3"), "Unknown key `lora.rnk`"),
        (("--lora.targets", "['*.qproj']"), "'*.qproj' fits no linear. Nearest of 9: "),
        (("--remat", "auto"), "remat: auto takes the policy that fits a budget"),
        (("--budget", "1GiB"), "budget = 1GiB has no effect beside remat: nested"),
        (("--data.sources.text.paths", "[nowhere/*.md]"), "'nowhere/*.md' in data.sources.text.paths stands"),
        (("--data.tokenizer", "./nowhere"), "data.tokenizer = './nowhere' is neither `byte`"),
        (("--trainer.eval_batches", "99"), "Lower trainer.eval_batches"),
    ],
)
def test_what_the_user_can_mend_is_one_message_and_no_run_folder(workplace, capsys, override, message):
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
