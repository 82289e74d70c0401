"""The longest context and the largest batch that fit, on memory that is computed."""

import dataclasses
import json

import jax
import pytest

from models.candidate import Candidate
from models.plan_lm import PlanLmConfig, main
from models.plan_search import Budget, find_size
from models.qwen3 import Qwen3Config
from stacked_remat.memory import (
    BudgetError,
    Comparison,
    DoesNotFit,
    Flops,
    HostBytes,
    MemoryReport,
    Plan,
    Trial,
)
from stacked_remat.training import DataConfig, MeshConfig, TrainerConfig, UpdateConfig

from .tiny_run import printed

CONFIG = PlanLmConfig(
    model=Qwen3Config(
        hidden_dim=32, num_layers=4, num_heads=2, num_kv_heads=1, mlp_dim=32
    ),
    remat="auto",
    budget="1MB",
    data=DataConfig(seq_len=16, batch_size=8),
    trainer=TrainerConfig(
        mesh=MeshConfig(axes={"data": -1}), update=UpdateConfig(microbatches=2)
    ),
    devices=1,
).resolved()
WEIGHTS = 100_000
LEAN = {"save_carries": "offload", "nested": True}  # takes the least below

pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    """The steps that were asked for, each of which takes its weights and so many bytes
    a token.
    """
    asked = []

    def report(step):
        asked.append(step)
        data, devices, policy = step.config.data, step.devices or 1, step.config.policy
        a_token = (
            10
            if policy.offloads and policy.has_cut
            else 20
            if policy.max_carries
            else 40
        )
        total = (WEIGHTS + a_token * data.batch_size * data.seq_len) // devices
        host = HostBytes(temporaries=7 if policy.offloads else 0)
        return MemoryReport(
            "local", total, 0, 0, 0, host, Flops(1), 0.0, devices=devices
        )

    monkeypatch.setattr(Candidate, "report", report)
    return asked


def found(what, config=CONFIG, budget="1MB", host=None):
    shown = []
    size, sized = find_size(config.candidate, what, Budget(budget, host, shown.append))
    return size, sized, shown


def test_the_longest_context_is_found_to_a_thirty_second(compiled):
    size, step, shown = found("context")
    longest = 900_000 // 10 // 8
    assert longest * 31 // 32 < size <= longest and step.config.data.seq_len == size
    assert len(compiled) < 25 and len({s.config.data.seq_len for s in compiled}) < 20
    assert max(step.config.data.seq_len for step in compiled) <= 2 * longest
    assert (
        sum(
            line.startswith("data.seq_len ") and line.endswith(", fits")
            for line in shown
        )
        > 3
    )
    assert any(line.endswith(", does not fit") for line in shown)
    # Each is said as it begins, and once it is compiled.
    names = [line.removeprefix("compiling ") for line in shown[::2]]
    assert len(names) == len(compiled) and all(
        line.startswith("compiling ") for line in shown[::2]
    )
    assert all(
        line.startswith(f"{name}: ")
        for name, line in zip(names, shown[1::2], strict=True)
    )


def test_the_host_and_what_is_leanest_there_count():
    size, _, _ = found("context", host="0B")
    longest = 900_000 // 20 // 8
    assert longest * 31 // 32 < size <= longest


def test_a_context_that_is_too_long_is_shortened():
    long = dataclasses.replace(
        CONFIG, data=DataConfig(seq_len=10_000_000, batch_size=8)
    )
    assert found("context", long)[0] == found("context")[0]
    with pytest.raises(
        BudgetError, match=r"nothing fits 99kB a device with data.seq_len = 1 either"
    ):
        found("context", budget="99kB")


def test_the_largest_batch_can_be_divided_over_microbatches_and_devices():
    eight = dataclasses.replace(CONFIG, devices=8)
    assert found("batch", budget="120kB")[0] == 20_000 // 10 // 16 // 2 * 2
    size, step, _ = found("batch", eight, budget="120kB")
    most = (8 * 120_000 - WEIGHTS) // 10 // 16
    assert (
        size % 16 == 0
        and most * 31 // 32 - 16 <= size <= most
        and step.config.data.batch_size == size
    )


def test_only_a_refusal_for_want_of_memory_counts_as_too_large(monkeypatch):
    computed = Candidate.report

    def failing_beyond(error):
        def report(step):
            if step.config.data.seq_len > 1000:
                raise error
            return computed(step)

        return report

    monkeypatch.setattr(Candidate, "report", failing_beyond(DoesNotFit("too large")))
    assert 960 < found("context")[0] <= 1000
    for error in (
        jax.errors.JaxRuntimeError("INTERNAL: a bug"),
        ValueError("no such length"),
    ):
        monkeypatch.setattr(Candidate, "report", failing_beyond(error))
        with pytest.raises(type(error), match=str(error)) as raised:
            found("context")
        assert raised.value.__notes__ == [f"while compiling data.seq_len 1,024, {LEAN}"]


def test_the_command_says_what_was_found(monkeypatch, tmp_path):
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
    options += ("--budget", "1MB", "--trainer.mesh", "{axes: {data: 1}}")

    def plan(step, *, budget, host_budget, begin, show):
        trials = tuple(
            Trial(policy, step.having({}, policy).report())
            for policy in (True, "nested")
        )
        for trial in trials:
            show(trial)
        return Plan("nested", trials[-1].report, Comparison(trials), 10**6)

    monkeypatch.setattr(Candidate, "plan", plan)

    status, shown = printed(main, *options, "--find", "context")
    assert (
        status == 0
        and "longest context: data.seq_len: " in shown
        and "'nested': " in shown
    )
    as_json = json.loads(
        printed(main, *options, "--find", "batch", "--json", "true")[1]
    )
    assert (
        as_json["chosen"]["remat"] == "nested"
        and as_json["chosen"]["data.batch_size"] == 5_504
    )
    assert as_json["tokens_per_step"] == 16 * 5_504
