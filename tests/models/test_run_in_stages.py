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
STEPS = 40
MICROBATCHES = (
    *("--trainer.update.microbatches", "2"),
    *("--data.batch_size", "8"),
    *("--trainer.num_steps", str(STEPS)),
    # The second of two stages has one
    *("--model.num_layers", "3"),
)
STAGES = (
    *("--trainer.mesh", "{axes: {stage: 2, data: -1}}"),
    *("--trainer.pipeline", "{axis: stage}"),
    *MICROBATCHES,
)

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


@pytest.mark.deep
def test_a_killed_run_in_stages_resumes_bit_for_bit_and_on_other_meshes(tmp_path):
    """A stage on each of two processes, with two devices."""
    workplace = make_workplace(tmp_path)

    def trained(processes, *arguments, run):
        status, shown = ended(start(workplace, processes, *arguments, run=run))
        assert status == [0] * processes, shown
        return shown[0]

    def copy_of(run, name, steps):
        """A run with the checkpoints of its first steps alone."""
        shutil.copytree(workplace / run, workplace / name)
        (workplace / name / "result.json").unlink(missing_ok=True)
        for path in checkpoints_of(workplace / name):
            if int(path.name) > steps:
                shutil.rmtree(path)

    trained(1, *MICROBATCHES, run="one")
    trained(2, *STAGES, run="whole")
    assert_same_run(workplace / "whole", workplace / "one")

    started = start(workplace, 2, *STAGES, run="killed")
    wait_for(workplace / "killed" / "metrics.jsonl", '"step": 5', started)
    for process in started:
        process.kill()
    assert ended(started)[0] == [-signal.SIGKILL] * 2
    last = int(checkpoints_of(workplace / "killed")[-1].name)
    assert last < STEPS
    copy_of("killed", "on_data", last)
    assert f"resuming after step {last}" in trained(2, *STAGES, run="killed")
    assert metrics_of(workplace / "killed") == metrics_of(workplace / "whole")
    states = []
    for run in ("killed", "whole"):
        config = read_run_config(workplace / run)
        states.append(restored_state(workplace / run, config))
    assert_equal(*states)

    # From stages to a mesh without, and from one without to stages
    assert f"resuming after step {last}" in trained(1, *MICROBATCHES, run="on_data")
    assert_same_run(workplace / "on_data", workplace / "one")
    earlier = int(checkpoints_of(workplace / "one")[-2].name)
    copy_of("one", "in_stages", earlier)
    assert f"resuming after step {earlier}" in trained(1, *STAGES, run="in_stages")
    assert_same_run(workplace / "in_stages", workplace / "one")
