"""The meshes, policies and microbatches with which a step fits, on memory that is computed."""

import dataclasses
import io
import json
import re
from types import SimpleNamespace

import jax
import pytest
import yaml
from rich.console import Console

from models.candidate import Candidate
from models.decoder.config import ExpertsConfig
from models.plan_lm import PlanLmConfig, main
from models.plan_search import Budget, find_divisions, meshes
from models.qwen3 import Qwen3MoeConfig
from models.run_state import state_shapes
from stacked_remat._policy import resolve_policy
from stacked_remat.memory import BudgetError, Flops, HostBytes, MemoryReport
from stacked_remat.training import ConfigError, DataConfig, MeshConfig, TrainerConfig, UpdateConfig

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
REPORT = Candidate.report
SENT = {"data": 400, "expert": 300, "context": 200, "tensor": 100}

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
    """What was asked for: steps take 90,000 bytes a microbatch under `False`, less with recomputation."""
    asked = []

    def report(step):
        mesh, policy = step.config.trainer.mesh, step.config.policy
        microbatches = step.config.trainer.update.microbatches
        asked.append((dict(mesh.axes), microbatches, step.config.remat))
        parts = 3 if policy.is_nested else 1 if policy == resolve_policy(False) else 2
        host = HostBytes(temporaries=10 if policy.offloads else 0)
        sent = sum(SENT[axis] for axis, size in mesh.axes.items() if size > 1)
        flops = Flops({1: 10, 2: 13, 3: 15}[parts])
        total = 90_000 // parts // microbatches - 100 * policy.offloads
        return MemoryReport("local", total, 0, 0, 0, host, flops, 0.0, devices=4, sent=sent)

    monkeypatch.setattr(Candidate, "report", report)
    return asked


def policy_of(division):
    config = division.step.config
    return config.remat, config.trainer.update.microbatches


def found(budget, config=CONFIG, host=None):
    return find_divisions(config.candidate, Budget(budget, host))


def test_meshes_are_those_that_the_model_and_the_batch_allow():
    named = [(mesh.axes, mesh.compute_mapping) for mesh in meshes(CONFIG.candidate)]
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
    assert meshes(own.candidate)[0].axes == {"rows": 4}


def test_on_gpus_experts_are_divided_by_their_number_too(monkeypatch):
    gpu = SimpleNamespace(devices=lambda count: [SimpleNamespace(platform="gpu")])
    monkeypatch.setattr("models.plan_search.find_target", lambda name: gpu)
    found = [mesh.param_mapping for mesh in meshes(CONFIG.candidate)]
    assert [list(mapping) for mapping in found[:2]] == [["embed"], ["experts", "embed"]]


def test_the_least_arithmetic_comes_first_and_of_equals_what_sends_less(compiled):
    divisions = found("1MB")
    assert {policy_of(one) for one in divisions} == {(False, 1)}
    assert [one.report.sent for one in divisions] == sorted(one.report.sent for one in divisions)
    assert len(compiled) == 2 * len(divisions) == 12


def test_more_microbatches_are_tried_where_they_save_arithmetic_or_memory(compiled):
    divisions = [one for one in found("30KB") if one.step.config.trainer.mesh.axes.get("expert") == 4]
    assert [policy_of(one) for one in divisions] == [(True, 2), ("nested", 1)]
    of_one_mesh = [ask[1:] for ask in compiled if ask[0] == {"data": 1, "expert": 4}]
    assert of_one_mesh == [(1, True), (1, "offload"), (1, "nested"), (2, True), (2, False)]
    assert {policy_of(one) for one in found("44.95KB")} == {("offload", 1)}
    with pytest.raises(BudgetError, match="no mesh of 4 devices fits 1KB"):
        found("1KB")


@pytest.mark.deep
@pytest.mark.parametrize(("positions", "first"), [(16, "expert"), (256, "data")])
def test_experts_are_divided_first_where_tokens_are_few(monkeypatch, positions, first):
    config = dataclasses.replace(CONFIG, data=dataclasses.replace(CONFIG.data, seq_len=positions))
    tried = [mesh for mesh in meshes(config.candidate) if 4 in mesh.axes.values()][:2]
    assert [{axis for axis, size in mesh.axes.items() if size > 1} for mesh in tried] == [
        {"data"},
        {"expert"},
    ]
    monkeypatch.setattr(Candidate, "report", REPORT)
    monkeypatch.setattr("models.plan_search.meshes", lambda *_: tried)
    monkeypatch.setattr("models.plan_search._POLICIES", ("nested",))
    monkeypatch.setattr("models.plan_search._MORE_MICROBATCHES", (1,))
    assert found("1GB", config)[0].step.config.trainer.mesh.axes[first] == 4


def with_trainer(**fields):
    return dataclasses.replace(CONFIG, trainer=dataclasses.replace(CONFIG.trainer, **fields))


def test_fused_updates_are_planned_with_one_microbatch(compiled):
    fused = with_trainer(update=UpdateConfig(fused=True))
    assert {policy_of(one) for one in found("30KB", fused)} == {("nested", 1)}
    assert {microbatches for _, microbatches, _ in compiled} == {1}


@pytest.mark.parametrize("error", [ValueError, jax.errors.JaxRuntimeError])
def test_where_no_mesh_is_allowed_or_none_compiles_the_reason_is_raised(monkeypatch, error):
    with pytest.raises(ConfigError, match="no mesh of 7 devices divides data.batch_size = 8"):
        find_divisions(dataclasses.replace(CONFIG.candidate, devices=7), Budget("1MB", None))

    def refuse(step):
        raise error("it runs on TPUs")

    monkeypatch.setattr(Candidate, "report", refuse)
    shown = []
    with pytest.raises(error, match="it runs on TPUs"):
        find_divisions(CONFIG.candidate, Budget("1MB", None, shown.append))
    assert shown[:2] == [
        "what is divided, and into how many parts; two to nine compilations each:",
        " 1  batch, embed: 4",
    ]
    assert "1, True: it runs on TPUs" in shown


def test_the_command_prints_what_to_write_in_the_config(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "plan.yaml"
    path.write_text(
        "model: {type: qwen3, hidden_dim: 8, num_layers: 2, num_heads: 2}\n"
        "data: {batch_size: 8, seq_len: 16}\nremat: auto\nbudget: 30KB"
    )

    def printed(*arguments):
        console = Console(file=io.StringIO(), width=80)
        assert main(["--config_path", str(path), "--find", "mesh", *arguments], console) == 0
        return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]

    shown = printed("--devices", "4")
    assert "what fits 30KB on each of 4 devices of local" in shown and "sent" in shown
    assert max(map(len, shown.splitlines())) <= 80
    pasted = yaml.safe_load(shown.partition("for the config:")[2])
    found = json.loads(printed("--devices", "4", "--json", "true"))
    best, *_ = found["rows"]
    assert found["chosen"] == {"mesh": best["mesh"], "microbatches": 2, "remat": True}
    trainer = {"mesh": best["mesh"], "update": {"microbatches": best["microbatches"]}}
    assert best["microbatches"] == 2 and pasted == {"trainer": trainer, "remat": True}
    assert best["name"] == "{position, embed: 4}, 2 microbatches, True"
    number = re.search(r"^ (\d)  position, embed: 4$", shown, re.MULTILINE)
    assert number is not None and f"\n{number[1]}, 2 microbatches, True: " in shown
    with pytest.raises(ValueError, match="find: mesh.*give devices"):
        dataclasses.replace(CONFIG, find="mesh", devices=None)
