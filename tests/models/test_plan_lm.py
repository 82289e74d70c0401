"""The planner prints the memory of each policy and the one that fits a budget."""

import dataclasses
import json
import re
from types import MappingProxyType

import jax
import pytest

import models.candidate as candidate
import models.plan_lm as plan_lm
from models.candidate import STREAMED, Candidate
from models.command import error_message
from models.parts.decoder import Decoder
from models.plan_lm import PlanLmConfig, compared, main
from models.qwen3 import Qwen3Config
from models.run_state import state_shapes
from stacked_remat import ScanCheckpointPolicy
from stacked_remat.lora import LoraConfig
from stacked_remat.memory import (
    TARGETS,
    BudgetError,
    Comparison,
    Frontier,
    Plan,
    Trial,
)
from stacked_remat.ops._backends import Backend, choose_backend
from stacked_remat.training import (
    ConfigError,
    DataConfig,
    MeshConfig,
    Partitioning,
    TrainerConfig,
    UpdateConfig,
    parse_config,
    remat_policy,
)

from .tiny_run import printed

CONFIG = PlanLmConfig(
    model=Qwen3Config(
        hidden_dim=32, num_layers=12, num_heads=2, num_kv_heads=1, mlp_dim=32
    ),
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
        return {
            name: under(CONFIG, compared(CONFIG)[name])
            for name in ("False", "True", "nested")
        }


@pytest.mark.deep
def test_keeping_less_takes_less_memory_and_more_flops_and_updates_in_place(
    reports,
):
    memory = {name: found.temporaries for name, found in reports.items()}
    assert memory["False"] > 2 * memory["True"] > 2 * memory["nested"]
    arithmetic = {name: found.flops.matmul for name, found in reports.items()}
    assert (
        arithmetic["False"]
        < arithmetic["True"]
        < arithmetic["nested"]
        < 1.3 * arithmetic["True"]
    )
    for found in reports.values():
        assert found.aliased > 0.95 * found.arguments - 3 * 64 * 16 * 4


SMALL = "{{type: {}, hidden_dim: 8, num_layers: 2, num_heads: 2}}"


def shown(*arguments, kind="qwen3", status=0):
    """What the command prints for a small model."""
    sizes = (
        "--data",
        "{batch_size: 2, seq_len: 8}",
        "--trainer.mesh",
        "{axes: {data: 1}}",
    )
    found, text = printed(main, "--model", SMALL.format(kind), *sizes, *arguments)
    assert found == status
    return text


def test_the_command_prints_the_table(monkeypatch, reports):
    def report(self):
        choose_backend("attention", {"kernel": Backend(None)}, "auto", None, "window 4")
        return reports["nested" if self.config.policy.has_cut else "True"]

    monkeypatch.setattr(Candidate, "report", report)
    monkeypatch.setattr(plan_lm, "POLICIES", {"True": True, "nested": "nested"})
    monkeypatch.setattr(
        Qwen3Config,
        "remat_presets",
        {"kept": ScanCheckpointPolicy(save_block_internals=True)},
    )
    text = shown()
    assert (
        "2 x 8 tokens" in text
        and "config: True" in text
        and re.search("^ *kept ", text, re.MULTILINE)
    )
    assert (
        "attention, window 4 runs by the backend kernel (model.attention.backend)"
        in text
    )
    # Each as it begins, which may take minutes
    lines = text.splitlines()
    began = [lines.index(f"compiling {name}") for name in ("True", "nested", "kept")]
    assert began == sorted(began) and lines[began[-1] + 1 :]
    more = reports["nested"].flops.matmul / reports["True"].flops.matmul
    assert re.search(rf"^ *nested .* {more:.2f}\b", text, re.MULTILINE)
    text = shown("--remat", "{nested: 2}")
    assert "config: {'nested': 2}" in text and re.search(
        "^ *{'nested': 2} ", text, re.MULTILINE
    )


def test_a_preset_of_values_that_tiles_hide_is_refused_by_its_name():
    tiled = dataclasses.replace(CONFIG.model, tiles=2)
    with pytest.raises(
        ValueError,
        match=r"remat \(products_saved\).save_block_internals has .*model.tiles",
    ):
        dataclasses.replace(CONFIG, model=tiled, remat="products_saved")


ADAPTERS = dataclasses.replace(CONFIG, lora=LoraConfig(rank=2))
FUSED_TRAINER = dataclasses.replace(CONFIG.trainer, update=UpdateConfig(fused=True))
FUSED = dataclasses.replace(CONFIG, trainer=FUSED_TRAINER)


@pytest.mark.parametrize(
    ("config", "copies"), [(ADAPTERS, 1), (FUSED, 3)], ids=["adapters", "fused"]
)
def test_matrices_of_layers_go_to_the_host_with_what_updates_them(
    config, copies, monkeypatch
):
    called = {}
    monkeypatch.setattr(
        candidate, "report", lambda fn, *args, **_: called.update(args=args)
    )
    assert config.candidate.can_stream and not CONFIG.candidate.can_stream
    under(config, "nested", STREAMED)
    shapes = jax.tree.leaves(called["args"])
    on_host = [
        leaf.shape
        for leaf in shapes
        if leaf.sharding and leaf.sharding.memory_kind == "pinned_host"
    ]
    weights = jax.tree.leaves(state_shapes(CONFIG).trained)
    matrices = [
        leaf.shape
        for leaf in weights
        if leaf.ndim > 2 and leaf.shape[0] == CONFIG.model.num_layers
    ]
    monkeypatch.setattr(
        candidate, "plan", lambda _, *args, streamed, **__: called.update(args=streamed)
    )
    config.candidate.plan(budget="1GiB")
    assert jax.tree.leaves(called["args"]) == shapes
    # With both of AdamW's moments where they are trained
    assert sorted(on_host) == sorted(copies * matrices)


def test_weights_that_could_be_on_the_host_are_said_to_be():
    small = dataclasses.replace(TARGETS["local"], memory=1000)
    for config, said in ((CONFIG, False), (FUSED, True), (ADAPTERS, True)):
        step = Candidate(config, small)
        with pytest.raises(ConfigError) as caught:
            step.check()
        assert (
            "keep the layers on the host (trainer.streaming" in str(caught.value)
        ) == said
        if said:
            with pytest.raises(ConfigError) as caught:
                step.check(at_least=True)
            assert "trainer.streaming" not in str(caught.value)


@pytest.mark.parametrize("config", [CONFIG, FUSED], ids=["plain", "fused"])
def test_errors_of_a_model_are_not_errors_of_its_config(monkeypatch, config):
    """They keep their class, and a command shows their traceback."""

    def broken(self, *args, **kwargs):
        raise ValueError("operands do not fit")

    monkeypatch.setattr(Decoder, "further_states", broken)
    with pytest.raises(ValueError, match="operands do not fit") as raised:
        config.candidate.check_applies()
    assert type(raised.value) is ValueError and error_message(raised.value) is None


def test_places_that_no_layer_has_are_an_error_of_the_config():
    policy = ScanCheckpointPolicy(save_block_internals=["dot_general 98/99"])
    with pytest.raises(ConfigError, match="remat: .*'dot_general 98/99'"):
        CONFIG.candidate.having({}, policy).check_applies()


def test_layers_on_the_host_of_gpus_that_are_not_attached_are_refused(monkeypatch):
    unsized = dataclasses.replace(TARGETS["local"], name="two_gpus")
    monkeypatch.setattr(type(unsized), "sizes_host_arguments", False)
    trainer = dataclasses.replace(
        FUSED_TRAINER, streaming=True, mesh=MeshConfig(axes={"data": 2})
    )
    step = Candidate(dataclasses.replace(CONFIG, trainer=trainer), unsized, 2)
    with pytest.raises(
        ConfigError, match="for 2 devices of target 'two_gpus' .* Give devices: 1, with"
    ):
        step.check()
    # Nothing asks for memory of the host where nothing is there.
    monkeypatch.setattr(Partitioning, "_on_host", None)
    resident = dataclasses.replace(trainer, streaming=False)
    Candidate(dataclasses.replace(CONFIG, trainer=resident), unsized, 2).check()


@pytest.mark.parametrize("error", [ValueError, jax.errors.JaxRuntimeError])
def test_json_has_what_the_table_has(monkeypatch, reports, error):
    def report(step):
        if step.config.policy.has_cut:
            raise error("not with this\nreally")
        return reports["True"]

    def plan(step, **_):
        trials = (
            Trial(False, None, ValueError("too large")),
            Trial("nested", reports["nested"]),
        )
        return Plan("nested", reports["nested"], Comparison(trials), 2**30)

    def as_json(*arguments):
        return json.loads(shown("--json", "true", *arguments))

    monkeypatch.setattr(Candidate, "report", report)
    monkeypatch.setattr(Candidate, "plan", plan)
    table = as_json("--only", "offload.*|nested")
    assert table["tokens_per_step"] == 2 * 8
    assert [(row["name"], row["model.tiles"]) for row in table["rows"]] == [
        ("offload", 1),
        ("nested", 1),
        ("offload, 2 tiles", 2),
    ]
    offload, nested, _ = table["rows"]
    assert (
        remat_policy(offload["remat"]) == remat_policy("offload")
        and nested["refused"] == "not with this"
    )
    assert (offload["total"], offload["flops"]["matmul"]) == (
        reports["True"].total,
        reports["True"].flops.matmul,
    )
    # A boolean in YAML
    assert [row["name"] for row in as_json("--only", "True")["rows"]] == ["True"]
    planned = as_json("--remat", "auto", "--budget", "1GiB")
    assert planned["chosen"] == {"remat": "nested", "streamed": False, "model.tiles": 1}
    refused, fitting = planned["rows"]
    assert (
        refused["refused"] == "too large"
        and fitting["temporaries"] == reports["nested"].temporaries
    )


def test_experts_in_blocks_are_compared_and_tried_before_tiles(monkeypatch, reports):
    planned = []

    def plan(step, **_):
        planned.append((*step.settings.values(),))
        if len(planned) < 4:
            raise BudgetError("no candidate fits")
        return Plan(
            "nested",
            reports["nested"],
            Comparison((Trial("nested", reports["nested"]),)),
            2**30,
        )

    monkeypatch.setattr(Candidate, "report", lambda step: reports["True"])
    monkeypatch.setattr(Candidate, "plan", plan)
    monkeypatch.setattr(candidate, "expert_backend", lambda dtype, device: "tokamax")
    text = shown("--remat", "auto", "--budget", "1GiB", kind="qwen3_moe")
    assert planned == [(1, "auto"), (1, "block"), (2, "auto"), (2, "block")]
    assert "\nin a config:\nremat: nested\n" in text
    for key in ("model.experts.backend: block", "model.tiles: 2"):
        assert f"with {key}; nothing fits without." in text
    text = shown("--only", "nested.*", kind="qwen3_moe")
    for row in (
        "nested, experts in blocks",
        "nested, 2 tiles",
        "nested, 2 tiles, experts in blocks",
    ):
        assert re.search(f"{row} +[KMG]iB +[0-9]", text)


NAMED = {
    **{name: name for name in CONFIG.model.remat_presets},
    "own names": {"offload_block_internals": ["mlp_internals"]},
}


@pytest.mark.parametrize("remat", NAMED.values(), ids=NAMED.keys())
def test_tiles_and_weights_on_the_host_are_compared_whatever_the_config_keeps(
    monkeypatch, reports, remat
):
    """They go with few policies, and the policy of the config is not one of those that
    are compared.
    """
    compiled = []

    def report(fn, batch, state, **_):
        on_host = any(
            leaf.sharding.memory_kind == "pinned_host"
            for leaf in jax.tree.leaves(state)
        )
        compiled.append((fn, on_host))
        return reports["True"]

    monkeypatch.setattr(candidate, "report", report)
    monkeypatch.setattr(plan_lm, "POLICIES", {"nested": "nested"})
    keeping = ("--remat", json.dumps(remat), "--lora.rank", "2", "--json", "true")
    rows = json.loads(shown(*keeping, "--only", "nested|nested, .*"))["rows"]
    assert [row["name"] for row in rows] == [
        "nested",
        "nested, 2 tiles",
        "nested, streamed",
    ]
    assert [on_host for _, on_host in compiled] == [False, False, True]


def test_the_row_of_true_is_named_by_a_bool_or_alone():
    for given in (["--only"], ["--only", "true"], ["--only=yes"]):
        assert parse_config(PlanLmConfig, given).only is True
    assert parse_config(PlanLmConfig, ["--only", "1|n.*"]).only == "1|n.*"


def test_the_frontier_is_a_table_json_and_a_picture(monkeypatch, reports, tmp_path):
    trials = tuple(Trial(name, reports[str(name)]) for name in ("nested", True, False))
    curve = Frontier(trials, Comparison(trials))
    monkeypatch.setattr(Candidate, "frontier", lambda step, **_: curve)
    auto = ("--remat", "auto", "--budget", "1GiB", "--find", "frontier")
    pictures = [tmp_path / "curve.svg", tmp_path / "curve.png"]
    text = shown(*auto, "--picture", str(pictures[0]))
    assert "FLOPs / False, by memory of a device:" in text
    found = json.loads(shown(*auto, "--json", "true", "--picture", str(pictures[1])))
    assert found["budget"] == 2**30
    assert [row["policy"] for row in found["rows"]] == ["'nested'", "True", "False"]
    drawn = pictures[0].read_text()
    assert "<svg" in drawn and "memory of a device, GiB" in drawn
    assert pictures[1].read_bytes().startswith(b"\x89PNG")


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
        (
            ["--only", "(nested"],
            "only is no regular expression: missing ), unterminated subpattern",
        ),
        (
            ["--remat", "auto", "--budget", "1GiB", "--only", "nested"],
            "only has no effect with remat: auto",
        ),
        (["--find", "context"], "find: context looks for what fits a budget"),
        (["--picture", "curve.svg"], "picture is of the curve of find: frontier alone"),
        (
            ["--picture", "curve.pdf"],
            "picture is written as .png or .svg, by its name; got 'curve.pdf'",
        ),
        (
            ["--find", "layers"],
            "`find` on the command line must be 'policy', 'context', 'batch'",
        ),
    ],
)
def test_user_errors_are_one_message(arguments, message):
    status, shown = printed(main, *arguments)
    assert status == 1 and message in shown and "error: " in shown
