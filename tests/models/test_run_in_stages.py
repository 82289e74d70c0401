"""Training with layers over devices: what it does not go with, and runs that are killed
and resumed.
"""

import dataclasses
import shutil
import signal

import pytest

from models.candidate import Candidate
from models.parts.sections import MtpConfig
from models.qwen3 import Qwen3Config
from models.run_config import LmRunConfig, read_run_config
from models.run_state import restored_state
from stacked_remat.lora import LoraConfig
from stacked_remat.training import (
    ConfigError,
    GhostConfig,
    MeshConfig,
    PipelineConfig,
    PrecisionConfig,
    TrainerConfig,
    UpdateConfig,
)

from ..blocks import assert_equal
from .test_deepseek_v3 import CONFIG as DEEPSEEK
from .test_mesh_mappings import WINDOWS
from .test_processes import (
    SMALL,
    assert_same_run,
    checkpoints_of,
    ended,
    metrics_of,
    start,
    wait_for,
)
from .tiny_run import make_workplace

EXPERTS = dataclasses.replace(DEEPSEEK.experts, dense_layers=())
BIASED = dataclasses.replace(DEEPSEEK, bias="by_load", experts=EXPERTS)
TRAINER = TrainerConfig(
    mesh=MeshConfig({"stage": 2, "data": -1}),
    pipeline=PipelineConfig("stage"),
    update=UpdateConfig(microbatches=2),
)
QUANTIZED = dataclasses.replace(TRAINER, precision=PrecisionConfig(frozen="int8"))
FURTHER = dataclasses.replace(
    DEEPSEEK, experts=EXPERTS, mtp=MtpConfig(depths=1, weight=0.3)
)
BY_POSITION = dataclasses.replace(
    TRAINER,
    mesh=MeshConfig({"stage": 2, "data": -1}, {"position": "data"}, {"embed": "data"}),
)
STAGES = (
    *("--trainer.mesh", "{axes: {stage: 2, data: -1}}"),
    *("--trainer.pipeline", "{axis: stage}"),
)
# The second of two stages has one layer
THREE_LAYERS = (
    *("--trainer.update.microbatches", "2"),
    *("--data.batch_size", "8"),
    *("--model.num_layers", "3"),
)
# Whose steps compile faster than those of experts
DENSE = (*SMALL, *THREE_LAYERS, "--trainer.num_steps", "40")

pytestmark = pytest.mark.usefixtures("standard_promotion")


def config(**changes):
    model = Qwen3Config(hidden_dim=8, num_layers=4, num_heads=2)
    given = {"model": model, "vocab_size": 260, "trainer": TRAINER}
    return LmRunConfig(**given | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": WINDOWS},
            "layers that are all of one kind, and those of this model are of 2",
        ),
        ({"model": BIASED}, "does not go with model.bias: by_load"),
        ({"ghost": GhostConfig("grad_dot")}, "or leave out trainer.pipeline"),
        (
            {"lora": LoraConfig(), "trainer": QUANTIZED},
            "trainer.precision.frozen = 'int8' does not go with trainer.pipeline",
        ),
        ({"model": FURTHER, "trainer": BY_POSITION}, "model.mtp with trainer.pipeline"),
        ({"remat": "recompute"}, "remat = 'recompute' keeps no carries"),
    ],
)
def test_what_does_not_go_with_a_pipeline_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


@pytest.mark.parametrize(
    ("layers", "message"), [(1, "= 1 over 2 devices"), (5, "5 over 4 devices")]
)
def test_stages_without_layers_are_refused(layers, message):
    model = Qwen3Config(hidden_dim=8, num_layers=layers, num_heads=2)
    mesh = MeshConfig({"stage": 2 if layers == 1 else 4, "data": 1})
    trainer = dataclasses.replace(TRAINER, mesh=mesh)
    step = Candidate(config(model=model, trainer=trainer).resolved(), devices=4)
    with pytest.raises(ConfigError, match=message):
        step.shapes  # noqa: B018


def test_stages_of_devices_along_two_more_axes_are_refused():
    mesh = MeshConfig({"stage": 2, "data": 2, "model": 2})
    trainer = dataclasses.replace(TRAINER, mesh=mesh)
    step = Candidate(config(trainer=trainer).resolved(), devices=8)
    with pytest.raises(ConfigError, match=r"\(data: 2, model: 2\)\. Give all but one"):
        step.shapes  # noqa: B018


def test_a_plan_in_stages_streams_nothing():
    adapted = config(lora=LoraConfig(rank=2), remat="auto", budget="4GiB")
    assert not Candidate(adapted).can_stream
    alone = dataclasses.replace(TRAINER, pipeline=None)
    on_one = dataclasses.replace(alone, mesh=MeshConfig({"data": 1}))
    assert Candidate(dataclasses.replace(adapted, trainer=on_one)).can_stream
    # Which would ask for weights on the host
    Candidate(adapted).check(at_least=True)


def trained(workplace, processes, *arguments, run):
    """What the first process of a run shows."""
    status, shown = ended(start(workplace, processes, *arguments, run=run))
    assert status == [0] * processes, shown
    return shown[0]


def copy_of(run, name, steps):
    """A run with the checkpoints of its first steps alone."""
    copied = run.parent / name
    shutil.copytree(run, copied)
    (copied / "result.json").unlink(missing_ok=True)
    for path in checkpoints_of(copied):
        if int(path.name) > steps:
            shutil.rmtree(path)
    return copied


@pytest.mark.deep
def test_a_killed_run_in_stages_resumes_bit_for_bit_and_without_stages(tmp_path):
    """A stage on each of two processes, with two devices."""
    workplace = make_workplace(tmp_path)
    whole, killed = workplace / "whole", workplace / "killed"
    trained(workplace, 2, *DENSE, *STAGES, run="whole")

    started = start(workplace, 2, *DENSE, *STAGES, run="killed")
    # The checkpoint of step 8 is begun once that of step 4 is there
    wait_for(killed / "metrics.jsonl", '"step": 9', started)
    for process in started:
        process.kill()
    assert ended(started)[0] == [-signal.SIGKILL] * 2
    last = int(checkpoints_of(killed)[-1].name)
    assert last < 40
    on_data = copy_of(killed, "on_data", last)
    resuming = f"resuming after step {last}"
    assert resuming in trained(workplace, 2, *DENSE, *STAGES, run="killed")
    assert metrics_of(killed) == metrics_of(whole)
    states = [restored_state(run, read_run_config(run)) for run in (killed, whole)]
    assert_equal(*states)

    assert resuming in trained(workplace, 1, *DENSE, run="on_data")
    assert_same_run(on_data, whole)


@pytest.mark.deep
def test_a_run_of_experts_goes_on_in_stages(tmp_path):
    """In one process, from a run whose layers are on all devices."""
    workplace = make_workplace(tmp_path)
    trained(workplace, 1, *THREE_LAYERS, run="one")
    one = workplace / "one"
    earlier = int(checkpoints_of(one)[-2].name)
    in_stages = copy_of(one, "in_stages", earlier)
    shown = trained(workplace, 1, *THREE_LAYERS, *STAGES, run="in_stages")
    assert f"resuming after step {earlier}" in shown
    assert_same_run(in_stages, one)
