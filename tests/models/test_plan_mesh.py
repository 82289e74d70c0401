"""The meshes and policies with which a step fits, on plans that are computed."""

import dataclasses
import json
from types import SimpleNamespace

import pytest

from models.candidate import Candidate
from models.lfm2 import Lfm2Config
from models.parts.sections import FULL, LINEAR, ExpertsConfig
from models.plan_lm import PlanLmConfig, main
from models.plan_search import Budget, divided, find_meshes, meshes
from models.qwen3_moe import Qwen3MoeConfig
from models.qwen3_next import Qwen3NextConfig
from models.run_state import state_shapes
from stacked_remat.memory import (
    BudgetError,
    Comparison,
    Flops,
    HostBytes,
    MemoryReport,
    Plan,
    Trial,
    parse_bytes,
)
from stacked_remat.training import (
    ConfigError,
    DataConfig,
    MeshConfig,
    PipelineConfig,
    TrainerConfig,
    UpdateConfig,
    config_as_dict,
)

from .tiny_run import printed

CONFIG = PlanLmConfig(
    model=Qwen3MoeConfig(
        hidden_dim=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        experts=ExpertsConfig(num_experts=8, experts_per_token=2, intermediate_dim=16),
    ),
    remat="auto",
    budget="1MB",
    data=DataConfig(seq_len=16, batch_size=8),
    trainer=TrainerConfig(mesh=MeshConfig()),
    devices=4,
).resolved()
SENT = {"data": 400, "expert": 300, "context": 200, "tensor": 100, "stage": -350}

pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.fixture(autouse=True, scope="module")
def shapes_are_traced_once():
    """The tests of this file ask for the shapes of the same states."""
    found = {}

    def once(config, partitioning, **options):
        key = str((config, partitioning.mesh, options))
        if key not in found:
            found[key] = state_shapes(config, partitioning, **options)
        return found[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("models.candidate.state_shapes", once)
        yield


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    """The meshes that were planned: on each, `nested` takes 30,000 bytes and other
    policies more.
    """
    asked = []

    def plan(step, *, budget, host_budget, begin, show):
        mesh = step.config.trainer.mesh
        asked.append(mesh.axes)
        if parse_bytes(budget) < 30_000:
            raise BudgetError("no candidate fits")
        policy, flops = ("nested", 15) if parse_bytes(budget) < 90_000 else (False, 10)
        sent = sum(SENT[axis] for axis, size in mesh.axes.items() if size > 1)
        found = MemoryReport(
            "local",
            30_000,
            0,
            0,
            0,
            HostBytes(),
            Flops(flops),
            0.0,
            devices=4,
            sent=sent,
        )
        return Plan(
            policy, found, Comparison((Trial(policy, found),)), parse_bytes(budget)
        )

    monkeypatch.setattr(Candidate, "plan", plan)
    return asked


def meshes_of(config):
    return [step.config.trainer.mesh for step in meshes(config.candidate)]


def found(budget, config=CONFIG):
    return find_meshes(config.candidate, Budget(budget))


def test_meshes_are_those_that_the_model_and_the_batch_allow():
    named = [(mesh.axes, mesh.compute_mapping) for mesh in meshes_of(CONFIG)]
    assert [axes for axes, _ in named] == [
        {"data": 4},
        {"data": 1, "expert": 4},
        {"data": 1, "context": 4},
        {"data": 2, "expert": 2},
        {"data": 2, "context": 2},
        {"data": 2, "tensor": 2},
    ]  # two key-value heads can't be divided by four
    assert "mlp" not in named[-1][1] and named[-1][1]["kv_heads"] == "tensor"
    own = with_trainer(mesh=MeshConfig({"rows": -1}, {"batch": "rows"}, {}))
    assert meshes_of(own)[0].axes == {"rows": 4}


@pytest.mark.parametrize(
    ("hybrid", "of_linear"),
    [(Qwen3NextConfig, "key_heads"), (Lfm2Config, "channels")],
)
def test_heads_of_linear_layers_are_divided_with_those_of_attention(hybrid, of_linear):
    sizes = {"hidden_dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}

    def heads_divided(layer_types):
        model = hybrid(**sizes, layer_types=layer_types)
        config = dataclasses.replace(CONFIG, model=model)
        mappings = [mesh.param_mapping for mesh in meshes_of(config)]
        of_tensor = [mapping for mapping in mappings if "tensor" in mapping.values()]
        assert of_tensor
        return {*of_tensor[-1]} - {"embed", "mlp"}

    assert heads_divided((LINEAR, FULL)) == {"kv_heads", of_linear}
    assert heads_divided((LINEAR,)) == {of_linear}


def test_layers_are_divided_where_the_batch_has_microbatches(monkeypatch):
    config = with_trainer(update=UpdateConfig(microbatches=2))
    stages = [step for step in meshes(config.candidate) if step.stages > 1]
    # Two layers
    assert [step.config.trainer.mesh.axes for step in stages] == [
        {"stage": 2, "data": 2}
    ]
    assert divided(stages[0]) == "layers: 2; batch, embed: 2"
    assert stages[0].config.trainer.pipeline == PipelineConfig("stage")
    assert stages[0].idle == 1 / 3
    # Of equal arithmetic the pipeline waits, so it is last, though it sends least
    plans = found("1MB", config)
    assert [step.stages for _, step in plans] == [1] * (len(plans) - 1) + [2]
    # The last stage may have fewer layers, and none may have none
    three = dataclasses.replace(config.model, num_layers=3)
    uneven = dataclasses.replace(config, model=three)
    stages = [step for step in meshes(uneven.candidate) if step.stages > 1]
    assert [step.stages for step in stages] == [2]
    # Of two microbatches a stage of two layers waits for the third layer
    assert stages[0].idle == 1 / 5
    # One of the config's own, with another axis
    own = with_trainer(
        update=UpdateConfig(microbatches=4),
        mesh=MeshConfig({"pp": 2, "data": -1}),
        pipeline=PipelineConfig("pp", "zero_bubble"),
    )
    steps = meshes(own.candidate)
    assert steps[0].config.trainer.pipeline == PipelineConfig("pp", "zero_bubble")
    assert {step.stages for step in steps} == {1, 2}
    fused = with_trainer(update=UpdateConfig(fused=True))
    assert {step.stages for step in meshes(fused.candidate)} == {1}


def test_on_gpus_experts_are_divided_by_their_number_too(monkeypatch):
    gpu = SimpleNamespace(devices=lambda count: [SimpleNamespace(platform="gpu")])
    monkeypatch.setattr("models.plan_search.find_target", lambda name: gpu)
    found = [mesh.param_mapping for mesh in meshes_of(CONFIG)]
    assert [list(mapping) for mapping in found[:2]] == [["embed"], ["experts", "embed"]]


def test_of_equal_arithmetic_what_sends_less_comes_first(compiled):
    plans = found("1MB")
    assert {plan.policy for plan, _ in plans} == {False} and len(compiled) == len(
        plans
    ) == 6
    assert [plan.report.sent for plan, _ in plans] == sorted(
        plan.report.sent for plan, _ in plans
    )
    with pytest.raises(BudgetError, match="no mesh of 4 devices fits 1KB"):
        found("1KB")


@pytest.mark.deep
@pytest.mark.parametrize(("positions", "first"), [(16, "expert"), (256, "data")])
def test_divided_experts_send_less_where_tokens_are_few(monkeypatch, positions, first):
    config = dataclasses.replace(
        CONFIG, data=dataclasses.replace(CONFIG.data, seq_len=positions)
    )
    tried = [
        step
        for step in meshes(config.candidate)
        if 4 in step.config.trainer.mesh.axes.values()
    ][:2]
    assert [
        {axis for axis, size in step.config.trainer.mesh.axes.items() if size > 1}
        for step in tried
    ] == [
        {"data"},
        {"expert"},
    ]
    monkeypatch.setattr(Candidate, "plan", lambda step, **_: of_nested(step))
    monkeypatch.setattr("models.plan_search.meshes", lambda *_: tried)
    _, step = min(found("1GB", config), key=lambda one: one[0].report.sent)
    assert step.config.trainer.mesh.axes[first] == 4


def of_nested(step):
    report = step.having({}, "nested").report()
    return Plan("nested", report, Comparison((Trial("nested", report),)), 2**30)


def with_trainer(**fields):
    return dataclasses.replace(
        CONFIG, trainer=dataclasses.replace(CONFIG.trainer, **fields)
    )


def test_a_mesh_that_does_not_compile_is_shown_and_one_must_be_allowed(monkeypatch):
    with pytest.raises(
        ConfigError, match="no mesh of 7 devices divides data.batch_size = 8"
    ):
        find_meshes(dataclasses.replace(CONFIG.candidate, devices=7), Budget("1MB"))

    def refuse(step, **_):
        raise ValueError("it runs on TPUs")

    monkeypatch.setattr(Candidate, "plan", refuse)
    shown = []
    with pytest.raises(BudgetError, match="no mesh of 4 devices"):
        find_meshes(CONFIG.candidate, Budget("1MB", None, shown.append))
    assert shown[:2] == ["on batch, embed: 4:", "it runs on TPUs"]


def test_the_command_prints_what_to_write_in_the_config(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = "{type: qwen3, hidden_dim: 8, num_layers: 2, num_heads: 2}"
    options = (
        "--model",
        config,
        "--data",
        "{batch_size: 8, seq_len: 16}",
        "--remat",
        "auto",
    )
    options += ("--budget", "30KB", "--find", "mesh", "--devices", "4")
    status, shown = printed(main, *options, width=80)
    assert status == 0
    assert "what fits 30KB on each of 4 devices of local" in shown
    found = json.loads(printed(main, *options, "--json", "true")[1])
    mesh = found["chosen"]["mesh"]
    assert mesh in [config_as_dict(mesh) for mesh in meshes_of(CONFIG)]
    assert (
        found["rows"][0]["name"] == "position, embed: 4: 'nested'"
        and found["chosen"]["remat"] == "nested"
    )
    assert f"fewest FLOPs, under trainer: mesh: {mesh}" in shown
    with pytest.raises(ValueError, match="find: mesh.*give devices"):
        dataclasses.replace(CONFIG, find="mesh", devices=None)
