"""Runs with layers in host memory equal those with all on the device to the bit; fused
updates the others.
"""

import dataclasses
import os
import re
import shutil
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest

import models.train_lm as train_lm
from benchmarks.faults import metrics as curve
from models.candidate import Candidate
from models.export_hf import main as export_hf
from models.generate import main as generate
from models.lm import next_token_loss
from models.parts.sections import FULL, SLIDING, AttentionConfig, ExpertsConfig
from models.qwen3 import Qwen3Config
from models.qwen3_moe import Qwen3MoeConfig
from models.run_config import LmRunConfig
from models.run_state import initial_state, run_optimizer, state_shapes
from stacked_remat.lora import LoraConfig
from stacked_remat.training import (
    AdamWConfig,
    ConsoleProgress,
    DataConfig,
    MeshConfig,
    Partitioning,
    TokenBatch,
    TrainerConfig,
    TrainStep,
    UpdateConfig,
)
from stacked_remat.training.array_layout import arrays_by_name

from .tiny_run import make_workplace, printed, train

ROWS, POSITIONS = 8, 16
SIZES = {"hidden_dim": 16, "num_layers": 4, "num_heads": 2, "num_kv_heads": 1}
DENSE = Qwen3Config(**SIZES, mlp_dim=8)
EXPERTS = Qwen3MoeConfig(
    **SIZES,
    experts=ExpertsConfig(num_experts=2, experts_per_token=1, intermediate_dim=8),
)
MIXED = dataclasses.replace(
    EXPERTS,
    attention=AttentionConfig(window=4, layer_types=(FULL, SLIDING)),
    experts=dataclasses.replace(EXPERTS.experts, dense_layers=(0,)),
)
FUSED = UpdateConfig(fused=True)
LORA = LoraConfig(rank=2)
OPTIMIZER = AdamWConfig(max_grad_norm=None)
CASES = {
    "weights and optimizer state": {},
    "on several devices": {"model": EXPERTS, "devices": 4},
    "below adapters, layers of several kinds": {
        "lora": LORA,
        "model": MIXED,
        "update": UpdateConfig(microbatches=2, on_nonfinite="skip"),
    },
}


# With fewer passes XLA rounds two programs differently.
IS_QUICK = "xla_backend_optimization_level=0" in os.environ.get("XLA_FLAGS", "")


def assert_same(found, expected):
    if IS_QUICK:
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
    else:
        np.testing.assert_array_equal(found, expected)


def config_of(streaming, model=DENSE, update=FUSED, lora=None, devices=1, **more):
    trainer = TrainerConfig(
        mesh=MeshConfig({"data": devices}), update=update, streaming=streaming
    )
    data = DataConfig(seq_len=POSITIONS, batch_size=ROWS)
    more = {"remat": "nested", "optimizer": OPTIMIZER, **more}
    return LmRunConfig(
        model=model, vocab_size=264, lora=lora, data=data, trainer=trainer, **more
    )


def kinds(state):
    return {
        name: array.sharding.memory_kind
        for name, array in arrays_by_name(state).items()
    }


def trained(config):
    """The state after two steps, and its metrics; nothing moves between memories, or
    compiles twice.
    """
    partitioning = Partitioning.of(config.trainer.mesh)
    Candidate(config).check_applies()
    optimizer = run_optimizer(config)
    step = TrainStep.of(
        config.trainer,
        loss_function=next_token_loss,
        optimizer=optimizer,
        partitioning=partitioning,
    )
    run: Any = jax.jit(lambda batch, state: step(batch, state), donate_argnums=1)
    tokens, targets = (
        np.random.default_rng(0).integers(0, 264, (2, ROWS, POSITIONS)).astype(np.int32)
    )
    with partitioning.active():
        batch = partitioning.shard_batch(
            TokenBatch.of(tokens, targets, np.ones((ROWS, POSITIONS), np.float32))
        )
        state = initial_state(config, partitioning)
        before = kinds(state)
        assert before == kinds(state_shapes(config, partitioning))
        is_array = jax.tree.map(eqx.is_array, state)
        arrays, static = eqx.partition(state, is_array)
        for _ in range(2):
            donated = jax.tree.leaves((arrays.trained, arrays.optimizer_state))
            arrays, metrics = run(batch, arrays)
            assert all(array.is_deleted() for array in donated)
            assert kinds(arrays) == before
        assert run._cache_size() == 1
    return eqx.combine(arrays, static), metrics


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    "case",
    [
        name if i == 0 else pytest.param(name, marks=pytest.mark.deep)
        for i, name in enumerate(CASES)
    ],
)
def test_a_streamed_step_equals_a_resident_one(case):
    options = CASES[case]
    expected, expected_metrics = trained(config_of(False, **options))
    found, metrics = trained(config_of(True, **options))
    states = [
        jax.tree.leaves((one.trained, one.optimizer_state)) for one in (found, expected)
    ]
    for a, b in zip(*states, strict=True):
        assert_same(a, b)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(metrics[name], expected_metrics[name], rtol=1e-6)
    on_host = {name for name, kind in kinds(found).items() if kind == "pinned_host"}
    parts = {name.split(".")[0] for name in on_host}
    expected_parts = (
        {"trained", "optimizer_state"} if options.get("update", FUSED).fused else set()
    )
    assert parts == expected_parts | ({"frozen"} if "lora" in options else set())
    assert set(kinds(expected).values()) == {"device"}


RUN = ("--trainer.num_steps", "6", "--trainer.checkpoint.every_steps", "3")
STREAMED = ("--trainer.streaming", "true")
RUNS = {
    "full": ("--trainer.update.fused", "true"),
    "adapters": ("--lora.rank", "2", "--optimizer.max_grad_norm", "null"),
    "fused adapters": ("--lora.rank", "2", "--trainer.update.fused", "true"),
}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    return make_workplace(tmp_path_factory.mktemp("workplace"))


@pytest.mark.deep
@pytest.mark.parametrize("kind", RUNS)
def test_a_streamed_run_equals_a_resident_one_and_each_resumes_as_the_other(
    workplace, kind, capsys
):
    """With evaluation; then text is generated from both, and both are exported, once
    for all weights and once for adapters.
    """
    runs = {f"{kind} resident": (), f"{kind} streamed": STREAMED}
    for run, options in runs.items():
        assert train(workplace, *RUN, *RUNS[kind], *options, run=run) == 0
    expected = curve(workplace / f"{kind} resident")
    assert len(expected) == 8 and curve(workplace / f"{kind} streamed") == expected
    for (run, _), options in zip(runs.items(), ((*STREAMED,), ()), strict=True):
        resumed = f"{run}, resumed as the other"
        shutil.copytree(workplace / run, workplace / resumed)
        (workplace / resumed / "result.json").unlink()
        shutil.rmtree(workplace / resumed / "checkpoints" / "6")
        assert train(workplace, *RUN, *RUNS[kind], *options, run=resumed) == 0
        assert curve(workplace / resumed) == expected
    if kind != "full":
        # A and B of four maps of attention, and of three of each expert.
        of_attention = (16 + 16) + 2 * (16 + 8) + (16 + 16)
        adapters = 2 * (2 * of_attention + 2 * 2 * 3 * (16 + 8))
        shown = capsys.readouterr().out
        assert f", {adapters:,} of them trained;" in shown
        backend = "attention runs by the backend blockwise (model.attention.backend)\n"
        assert backend in shown
        losses = [line["loss"] for line in expected if "loss" in line]
        assert losses[-1] < losses[0]
    if kind == "adapters":
        return
    files, texts = [], []
    for run in runs:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            out = workplace / f"{run}, exported"
            assert (
                export_hf(["--run_dir", str(workplace / run), "--out", str(out)]) == 0
            )
            prompts = ("--prompt", "ab", "--max_new_tokens", "4", "--temperature", "0")
            status, text = printed(generate, "--run_dir", workplace / run, *prompts)
            assert status == 0
        files.append((out / "model.safetensors").read_bytes())
        texts.append(text)
    assert files[0] == files[1] and texts[0] == texts[1] != ""
    if kind == "full":
        return
    # From weights in files too; they go to the host as they are read.
    begin = ("--initialize_from_hf", str(out))
    model = ("--model", "{type: qwen3_moe}")
    for run, options in runs.items():
        arguments = (*RUN[:2], *RUNS[kind], *begin, *model, *options)
        assert train(workplace, *arguments, run=f"{run} from files") == 0
    assert curve(workplace / f"{kind} streamed from files") == curve(
        workplace / f"{kind} resident from files"
    )


@pytest.mark.deep
def test_a_clipped_run_with_fused_updates_on_four_devices_equals_one_without_on_one(
    workplace,
):
    def metrics(*overrides, run):
        assert train(workplace, *RUN[:2], *overrides, run=run) == 0
        return curve(workplace / run)

    expected = metrics(run="plain")
    found = metrics(*RUNS["full"], "--trainer.mesh.axes.data", "4", run="fused")
    assert [line.keys() for line in found] == [line.keys() for line in expected]
    for name in ("loss", "grad_norm", "held_out_loss"):
        values = [
            [line[name] for line in lines if name in line]
            for lines in (found, expected)
        ]
        assert len(values[0]) > 1
        np.testing.assert_allclose(*values, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"update": UpdateConfig()},
            "trainer.streaming keeps .*without trainer.update.fused",
        ),
        (
            {"remat": "recompute"},
            "With trainer.streaming .*remat with save_carries=False would keep",
        ),
    ],
)
def test_what_cannot_be_combined_with_streaming_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        config_of(True, **options).resolved()


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    ("update", "streaming"), [(FUSED, True), (UpdateConfig(), False)]
)
def test_auto_streams_where_nothing_else_fits_and_the_run_can(
    update, streaming, monkeypatch
):
    def plan(step, **_):
        return SimpleNamespace(
            policy="offload", streamed=step.can_stream, summary="takes 1 GiB"
        )

    monkeypatch.setattr(Candidate, "plan", plan)
    config = config_of(False, update=update, remat="auto", budget="1GiB")
    found = train_lm._fitting(Candidate(config.resolved()), ConsoleProgress()).config
    assert (found.remat, found.budget, found.trainer.streaming) == (
        "offload",
        None,
        streaming,
    )


def test_too_little_host_memory_is_found_before_anything_is_made(
    workplace, monkeypatch, capsys
):
    monkeypatch.setattr(
        "stacked_remat.training.memory_check.available_host_bytes", lambda: 2**10
    )
    assert train(workplace, *RUN, *RUNS["full"], *STREAMED, run="too large") == 1
    message = " ".join(capsys.readouterr().out.split())
    assert re.search(
        "takes at least .* of host memory .*this process can take 1.00 KiB", message
    )
    assert not (workplace / "too large").exists()
