"""Values of a config that are out of range, and the errors for them."""

from pathlib import Path

import numpy as np
import pytest

from models.run_config import LmRunConfig
from stacked_remat import training as t

STAGES = {
    "mesh": t.MeshConfig({"stage": 2, "data": -1}),
    "pipeline": t.PipelineConfig("stage"),
}


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (
            t.TrainerConfig,
            {"run_dir": "https://u:SECRET@h/x"},
            r"^trainer.run_dir = 'https://\*\*\*@h/x' is a URL",
        ),
        (
            t.TrainerConfig,
            {"seed": 2**63},
            r"trainer.seed must be at least 0 and below 2..63, got 9223",
        ),
        (
            t.UpdateConfig,
            {"microbatches": 0},
            r"trainer.update.microbatches must be at least 1, got 0",
        ),
        (
            t.UpdateConfig,
            {"fused": True, "microbatches": 2},
            r"or both trainer.update.microbatches",
        ),
        (
            t.UpdateConfig,
            {"fused": True, "on_nonfinite": "skip"},
            r"or both trainer.update.microbatches",
        ),
        (
            t.CheckpointConfig,
            {"keep_last": 0},
            r"checkpoint.keep_last must be at least 1",
        ),
        (t.MeshConfig, {"axes": {"data": 0}}, r"axes\.data must be at least 1"),
        (t.MeshConfig, {"axes": {"data": -1, "model": -1}}, "can have one -1"),
        (
            t.MeshConfig,
            {"param_mapping": {"embed": "modl"}},
            r"\.embed names the mesh axis 'modl'.* are data",
        ),
        (
            t.MeshConfig,
            {"axes": {"a": 8}},
            r"are a\. .* map batch to one .* trainer\.mesh\.compute_mapping: {}\.$",
        ),
        (
            t.TrainerConfig,
            {"pipeline": t.PipelineConfig("stage")},
            r"pipeline\.axis names the mesh axis 'stage'; those .* are data\. Add it",
        ),
        (
            t.TrainerConfig,
            {"pipeline": t.PipelineConfig("data")},
            r"compute_mapping\.batch maps to 'data', which trainer\.pipeline divides",
        ),
        (
            t.TrainerConfig,
            {**STAGES, "update": t.UpdateConfig(fused=True)},
            r"trainer\.update\.fused does not go with trainer\.pipeline",
        ),
        (
            t.TrainerConfig,
            {**STAGES, "streaming": True},
            r"trainer\.streaming does not go with trainer\.pipeline",
        ),
        (
            t.DataConfig,
            {"chat_date": "30.6.2025"},
            r"must be a date such as 2025-06-30, got '30.6.2025'",
        ),
        (
            t.DataConfig,
            {"held_out_fraction": 1.0},
            r"data.held_out_fraction must be below 1, got 1.0",
        ),
        (
            t.DataConfig,
            {"sources": {"..": t.SourceConfig(("x",))}},
            r"data.sources has the name '\.\.'",
        ),
        (t.SourceConfig, {"paths": ("",)}, r"A data source needs paths: .* got \[''\]"),
        (
            t.SourceConfig,
            {"paths": ("x",), "weight": float("nan")},
            r"positive and finite, got nan. To leave",
        ),
        (
            t.AdamWConfig,
            {"learning_rate": 0.0},
            r"optimizer.learning_rate must be above 0",
        ),
        (
            t.SgdConfig,
            {"warmup": 2.5},
            r"optimizer.warmup must be a share of all steps, below 1, or a whole",
        ),
        (
            t.AdafactorConfig,
            {"weight_decay": -1.0},
            r"optimizer.weight_decay must be at least 0",
        ),
        (
            t.AdamWConfig,
            {"beta2": 1.0},
            r"optimizer.beta2 must be below 1, got 1.0",
        ),
        (
            t.SgdConfig,
            {"momentum": 0.0, "nesterov": True},
            r"nesterov has no effect without",
        ),
        (
            t.CosineSchedule,
            {"min_lr_ratio": 2.0},
            r"schedule.min_lr_ratio must be at most 1",
        ),
        (
            t.WarmupStableDecaySchedule,
            {"decay_fraction": 0.0},
            r"decay_fraction must lie in \(0, 1\]",
        ),
    ],
)
def test_values_out_of_range_are_refused(make, changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (
            t.TrainerConfig,
            {"num_steps": "5"},
            "trainer.num_steps must be an int, got '5",
        ),
        (
            t.TrainerConfig,
            {"num_steps": True},
            "trainer.num_steps must be an int, got T",
        ),
        (
            t.TrainerConfig,
            {"eval_every": 1.5},
            "eval_every must be an int or None, got 1",
        ),
        (
            t.TrainerConfig,
            {"run_dir": Path("a")},
            "trainer.run_dir must be str or None",
        ),
        (
            t.TrainerConfig,
            {"streaming": 1},
            "trainer.streaming must be bool or str, got 1",
        ),
        (t.TrainerConfig, {"mesh": {}}, "trainer.mesh must be MeshConfig, got {}"),
        (
            t.AdamWConfig,
            {"schedule": "cosine"},
            "optimizer.schedule must be ScheduleCon",
        ),
        (
            t.AdamWConfig,
            {"learning_rate": None},
            "learning_rate must be a float, got No",
        ),
        (LmRunConfig, {"freeze": "abc"}, "^freeze must be a list, got 'abc'"),
    ],
)
def test_values_of_another_type_are_refused(make, changes, message):
    with pytest.raises(TypeError, match=message):
        make(**changes)


def test_numbers_of_numpy_and_whole_floats_are_numbers():
    assert t.TrainerConfig(num_steps=np.int64(3)).num_steps == 3
    assert t.AdamWConfig(learning_rate=1, warmup=np.float32(0.5)).learning_rate == 1
