"""The planner prints the memory of each policy and the one that fits a budget."""

import dataclasses
import io
import json
import re
from types import MappingProxyType

import jax
import pytest
from rich.console import Console

import models.candidate as candidate
import models.plan_lm as plan_lm
from models.candidate import STREAMED, Candidate
from models.plan_lm import PlanLmConfig, compared, main, policy_table
from models.qwen3 import Qwen3Config
from models.run_state import state_shapes
from stacked_remat import ScanCheckpointPolicy
from stacked_remat.lora import LoraConfig
from stacked_remat.memory import TARGETS, BudgetError, Comparison, Plan, TimeBound, Trial, arguments_on_host
from stacked_remat.ops._backends import Backend, choose_backend
from stacked_remat.training import (
    ConfigError,
    DataConfig,
    MeshConfig,
    Partitioning,
    TrainerConfig,
    UpdateConfig,
    remat_policy,
)

CONFIG = PlanLmConfig(
    model=Qwen3Config(hidden_dim=32, num_layers=12, num_heads=2, num_kv_heads=1, mlp_dim=32),
    remat="nested",
    data=DataConfig(seq_len=16, batch_size=64),
    trainer=TrainerConfig(mesh=MeshConfig(axes={"data": 1})),
).resolved()

# optax's Adam raises a float to an integer power.
pytestmark = pytest.mark.usefixtures("standard_promotion", "cache_of_its_own")


@pytest.fixture
def cache_of_its_own(monkeypatch, tmp_path):
    """No test reads or writes the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def under(config, policy, settings=MappingProxyType({})):
    """The report of a step under a policy."""
    return config.candidate.having(settings, policy).report()


@pytest.fixture(scope="module")
def reports():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return {name: under(CONFIG, compared(CONFIG)[name]) for name in ("False", "True", "nested")}


def test_keeping_less_takes_less_memory_and_more_arithmetic(reports):
    memory = {name: found.temporaries for name, found in reports.items()}
    assert memory["False"] > 2 * memory["True"] > 2 * memory["nested"]
    arithmetic = {name: found.flops.matmul for name, found in reports.items()}
    assert arithmetic["False"] < arithmetic["True"] < arithmetic["nested"] < 1.3 * arithmetic["True"]


def test_weights_and_optimizer_state_are_updated_in_place(reports):
    for found in reports.values():
        assert found.aliased > 0.95 * found.arguments - 3 * 64 * 16 * 4


def lines_of(shown, names):
    """The rows of a table, by what is in their first column."""
    for line in shown.splitlines():
        first = [name for name in names if line.strip().startswith(f"{name} ")]
        if first:
            yield max(first, key=len), line.strip()


def test_the_table_has_a_row_a_policy_and_names_that_of_the_config(reports):
    found = dict(reports)
    # Of a large model, for a GPU.
    for name in ("attention_saved", "nested_attention_saved", "nested, streamed"):
        moved = dataclasses.replace(reports["True"].flops, bytes_from_host=900 * 2**30)
        found[name] = dataclasses.replace(
            reports["True"],
            flops=moved,
            temporaries=80 * 2**30,
            compile_seconds=123.4,
            least_time=TimeBound(1, 8),
        )
    named = dataclasses.replace(CONFIG, remat="attention_saved")
    for config, own, of_all in ((CONFIG, "nested", reports), (named, "attention_saved", found)):
        console = Console(file=io.StringIO(), width=80)
        trials = [Trial(compared(config).get(name), report, label=name) for name, report in of_all.items()]
        console.print(policy_table(config, trials))
        shown = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
        table, _, caption = shown.replace(" ?", "").partition("FLOP in matrix products")
        named_lines = lines_of(table, list(of_all))
        rows = {name: line.removeprefix(name).split() for name, line in named_lines}
        assert list(rows)[: len(of_all)] == list(of_all)
        assert {len(cells) for cells in rows.values()} == {4 if of_all is reports else 7}  # nothing moves
        assert f"`remat` of this config: {own}" in caption
    assert rows["nested, streamed"][3:] == ["900.00", "8", "1.00", "123.4"]
    assert "64 x 16 tokens" in shown and "GiB" in shown
    assert table.rstrip().endswith(f"True: {reports['True'].flops.matmul / 1e6:.3g} M")


def test_the_command_prints_the_table(monkeypatch, tmp_path, reports):
    def report(self):
        choose_backend("attention", {"kernel": Backend(None)}, "auto", None, "window 4")
        return reports["True"]

    monkeypatch.setattr(Candidate, "report", report)
    monkeypatch.setattr(plan_lm, "POLICIES", {"True": True})
    monkeypatch.setattr(
        Qwen3Config, "remat_presets", {"kept": ScanCheckpointPolicy(save_block_internals=True)}
    )
    console = Console(file=io.StringIO(), width=200)
    path = tmp_path / "plan.yaml"
    path.write_text(
        "model: {type: qwen3, hidden_dim: 8, num_layers: 2, num_heads: 2}\ndata: {seq_len: 8}\n"
        "trainer: {mesh: {axes: {data: 1}}}"
    )
    assert main(["--config_path", str(path), "--data.batch_size", "2", "--data.seq_len", "8"], console) == 0
    shown = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "2 x 8 tokens" in shown
    assert "config: True" in shown and lines_of(shown, ["kept"])
    assert "attention, window 4: kernel\n" in shown
    assert main(["--config_path", str(path), "--remat", "{nested: 2}"], console) == 0
    shown = console.file.getvalue().partition("kept")[2]  # pyright: ignore[reportAttributeAccessIssue]
    assert "config: {'nested': 2}" in shown


def test_a_preset_of_values_that_tiles_hide_is_refused_by_its_name():
    tiled = dataclasses.replace(CONFIG.model, tiles=2)
    with pytest.raises(ValueError, match=r"remat \(products_saved\).save_block_internals has .*model.tiles"):
        dataclasses.replace(CONFIG, model=tiled, remat="products_saved")


ADAPTERS = dataclasses.replace(CONFIG, lora=LoraConfig(rank=2))
FUSED_TRAINER = dataclasses.replace(CONFIG.trainer, update=UpdateConfig(fused=True))
FUSED = dataclasses.replace(CONFIG, trainer=FUSED_TRAINER)


@pytest.mark.parametrize(("config", "copies"), [(ADAPTERS, 1), (FUSED, 3)], ids=["adapters", "fused"])
def test_matrices_of_layers_go_to_the_host_with_what_updates_them(config, copies, monkeypatch):
    called = {}
    monkeypatch.setattr(candidate, "report", lambda fn, *args, **_: called.update(args=args))
    assert config.candidate.can_stream and not CONFIG.candidate.can_stream
    under(config, "nested", STREAMED)
    shapes = jax.tree.leaves(called["args"])
    on_host = [leaf.shape for leaf in shapes if leaf.sharding and leaf.sharding.memory_kind == "pinned_host"]
    weights = jax.tree.leaves(state_shapes(CONFIG).trained)
    matrices = [leaf.shape for leaf in weights if leaf.ndim > 2 and leaf.shape[0] == CONFIG.model.num_layers]
    monkeypatch.setattr(
        candidate,
        "plan",
        lambda _, *args, streamed, **__: called.update(args=arguments_on_host(streamed, args)),
    )
    config.candidate.plan(budget="1GiB")
    assert jax.tree.leaves(called["args"]) == shapes
    assert sorted(on_host) == sorted(copies * matrices)  # with both of AdamW's moments where they are trained


def test_weights_that_could_be_on_the_host_are_said_to_be():
    small = dataclasses.replace(TARGETS["local"], memory=1000)
    for config, said in ((CONFIG, False), (FUSED, True), (ADAPTERS, True)):
        step = Candidate(config, small)
        with pytest.raises(ConfigError) as caught:
            step.check()
        assert ("keep the layers on the host (trainer.streaming" in str(caught.value)) == said
        if said:
            with pytest.raises(ConfigError) as caught:
                step.check(at_least=True)
            assert "trainer.streaming" not in str(caught.value)


def test_layers_on_the_host_of_gpus_that_are_not_attached_are_refused(monkeypatch):
    unsized = dataclasses.replace(TARGETS["local"], name="two_gpus")
    monkeypatch.setattr(type(unsized), "sizes_host_arguments", False)
    trainer = dataclasses.replace(FUSED_TRAINER, streaming=True, mesh=MeshConfig(axes={"data": 2}))
    step = Candidate(dataclasses.replace(CONFIG, trainer=trainer), unsized, 2)
    with pytest.raises(ConfigError, match="for 2 devices of target 'two_gpus' .* Give devices: 1, with"):
        step.check()
    # Nothing asks for memory of the host where nothing is there.
    monkeypatch.setattr(Partitioning, "_on_host", None)
    resident = dataclasses.replace(trainer, streaming=None)
    Candidate(dataclasses.replace(CONFIG, trainer=resident), unsized, 2).check()


@pytest.mark.parametrize("error", [ValueError, jax.errors.JaxRuntimeError])
def test_json_has_what_the_table_has(monkeypatch, tmp_path, reports, error):
    path = tmp_path / "plan.yaml"
    path.write_text("model: {type: qwen3, hidden_dim: 8, num_layers: 2}\ntrainer: {mesh: {axes: {data: 1}}}")

    def report(step):
        if step.config.policy.is_nested:
            raise error("not with this\nreally")
        return reports["True"]

    def plan(step, **_):
        trials = Trial(False, None, "too large"), Trial("nested", reports["nested"])
        return Plan("nested", reports["nested"], Comparison(trials), 2**30)

    def printed(*arguments):
        console = Console(file=io.StringIO(), width=80)
        assert main(["--config_path", str(path), "--json", "true", *arguments], console) == 0
        return json.loads(console.file.getvalue())  # pyright: ignore[reportAttributeAccessIssue]

    monkeypatch.setattr(Candidate, "report", report)
    monkeypatch.setattr(Candidate, "plan", plan)
    table = printed("--only", "offload.*|nested")
    assert table["tokens_per_step"] == 16 * 256
    assert [(row["name"], row["model.tiles"]) for row in table["rows"]] == [
        ("offload", 1),
        ("nested", 1),
        ("offload, 2 tiles", 2),
    ]
    offload, nested, _ = table["rows"]
    assert remat_policy(offload["remat"]) == remat_policy("offload") and nested["refused"] == "not with this"
    assert (offload["total"], offload["flops"]["matmul"]) == (
        reports["True"].total,
        reports["True"].flops.matmul,
    )
    assert [row["name"] for row in printed("--only", "True")["rows"]] == ["True"]  # a boolean in YAML
    planned = printed("--remat", "auto", "--budget", "1GiB")
    assert planned["chosen"] == {"remat": "nested", "streamed": False, "model.tiles": 1}
    refused, fitting = planned["rows"]
    assert refused["refused"] == "too large" and fitting["temporaries"] == reports["nested"].temporaries


def small_config(folder, kind):
    """A config file of a small model of a type."""
    path = folder / "plan.yaml"
    path.write_text(
        f"model: {{type: {kind}, hidden_dim: 8, num_layers: 2, num_heads: 2}}\n"
        "data: {batch_size: 2, seq_len: 8}\n"
        "trainer: {mesh: {axes: {data: 1}}}"
    )
    return path


def test_experts_in_blocks_are_compared_and_tried_before_tiles(monkeypatch, tmp_path, reports):
    console = Console(file=io.StringIO(), width=200)
    path = small_config(tmp_path, "qwen3_moe")
    planned = []

    def plan(step, **_):
        planned.append((*step.settings.values(),))
        if len(planned) < 4:
            raise BudgetError("no candidate fits")
        return Plan("nested", reports["nested"], Comparison((Trial("nested", reports["nested"]),)), 2**30)

    monkeypatch.setattr(Candidate, "report", lambda step: reports["True"])
    monkeypatch.setattr(Candidate, "plan", plan)
    monkeypatch.setattr(candidate, "expert_backend", lambda dtype, device: "tokamax")
    assert main(["--config_path", str(path), "--remat", "auto", "--budget", "1GiB"], console) == 0
    assert planned == [(1, "auto"), (1, "block"), (2, "auto"), (2, "block")]
    assert main(["--config_path", str(path), "--only", "nested.*"], console) == 0
    shown = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    for key in ("model.experts.backend: block", "model.tiles: 2"):
        assert f"with {key}; nothing fits without." in shown
    for row in ("nested, experts in blocks", "nested, 2 tiles", "nested, 2 tiles, experts in blocks"):
        assert re.search(f"{row} +[0-9]", shown)


NAMED = {
    **{name: name for name in CONFIG.model.remat_presets},
    "own names": {"offload_block_internals": ["mlp_internals"]},
    "first": {"first_layers": 1, "first_policy": {"save_block_internals": ["query"]}},
}


@pytest.mark.parametrize("remat", NAMED.values(), ids=NAMED.keys())
def test_tiles_and_weights_on_the_host_are_compared_whatever_the_config_keeps(monkeypatch, reports, remat):
    """They go with few policies, and the policy of the config is not one of those that are compared."""
    compiled = []

    def report(fn, batch, state, **_):
        on_host = any(leaf.sharding.memory_kind == "pinned_host" for leaf in jax.tree.leaves(state))
        compiled.append((fn, on_host))
        return reports["True"]

    monkeypatch.setattr(candidate, "report", report)
    monkeypatch.setattr(plan_lm, "POLICIES", {"nested": "nested"})
    model = "{type: qwen3, hidden_dim: 8, num_layers: 2, num_heads: 2}"
    small = ["--model", model, "--data.batch_size", "2", "--data.seq_len", "8", "--remat", json.dumps(remat)]
    small += ["--trainer.mesh", "{axes: {data: 1}}", "--lora.rank", "2", "--json", "true"]
    console = Console(file=io.StringIO(), width=200)
    assert main([*small, "--only", "nested|nested, .*"], console) == 0
    rows = json.loads(console.file.getvalue())["rows"]  # pyright: ignore[reportAttributeAccessIssue]
    assert [row["name"] for row in rows] == ["nested", "nested, 2 tiles", "nested, streamed"]
    assert [on_host for _, on_host in compiled] == [False, False, True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--remat", "auto"], "budget: 72GiB"),
        (["--target", "abacus"], "unknown target 'abacus': expected one of local"),
        (["--target", "h200"], "No model to plan for: give --config_path FILE"),
        (
            ["--model.type", "qwen3", "--only", "nestd"],
            "only = 'nestd' leaves no row. There are: False; True;",
        ),
        (["--only", "(nested"], "only is no regular expression: missing ), unterminated subpattern"),
        (["--remat", "auto", "--budget", "1GiB", "--only", "nested"], "only has no effect with remat: auto"),
        (["--find", "context"], "find: context looks for what fits a budget"),
        (["--find", "layers"], "`find` on the command line must be policy|context|batch|mesh"),
    ],
)
def test_user_errors_are_one_message(arguments, message):
    console = Console(file=io.StringIO(), width=200)
    assert main(arguments, console) == 1
    shown = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert message in shown and "error: " in shown
