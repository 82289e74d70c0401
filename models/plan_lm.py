"""Says what a training step would need under each remat policy: compiles it, and runs nothing.

    python -m models.plan_lm --config_path models/configs/qwen3_moe_deep.yaml [--target h200]
    python -m models.plan_lm --config_path ... --remat auto --budget 1GiB

Takes the same config files as `models.train_lm`.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from rich.console import Console
from rich.progress import Progress as RichProgress
from rich.table import Table

from models.command import run_command
from models.lm import LmConfig, check_remat_names
from models.qwen3_moe import Qwen3MoeConfig, hf as hf  # registers its types and its weights
from models.step_memory import check_memory, plan_step, step_report
from stacked_remat.lora import LoraConfig
from stacked_remat.memory import MemoryReport, find_target
from stacked_remat.training import (
    AdamWConfig,
    DataConfig,
    OptimizerConfig,
    TrainerConfig,
    check_remat,
    lasting_console,
    learning_rate_schedule,
    parse_config,
    remat_policy,
)

POLICIES: Mapping[str, bool | dict[str, Any] | str] = {
    "False": False,
    "save_all": "save_all",
    "True": True,
    "recompute": "recompute",
    "offload": "offload",
    "nested": "nested",
    "nested, offload": {"nested": True, "save_carries": "offload"},
}
"""What is compared: a name for the table, and what one would write after `remat:`.

The policies that the model names itself follow."""

_BASELINE = "True"


@dataclass(frozen=True)
class PlanLmConfig:
    """A training config, as `models.train_lm` reads it, and where it is to run.

    Attributes:
        model: the architecture, by `type`.
        initialize_from_hf: read only with `use_hf_model_config`.
        use_hf_model_config: whether the architecture is the one in that folder.
        vocab_size: rows of the embedding; if null, as many as the folder or the tokenizer has.
        lora: adapters to train instead of the model's own weights.
        remat: what `models.train_lm` would use; marked in the table. `auto` shows how it is found instead.
        budget: device memory that `remat: auto` has to fit in.
        host_budget: the same for the host.
        data: only `seq_len`, `batch_size` and the size of the tokenizer's vocabulary matter here.
        optimizer: its state is part of the memory.
        trainer: `mesh`, `update` and `precision` matter here, and `num_steps` for the schedule.
        target: the device to compile for: `local`, or one that is not here (`h200`, `v5p`, ...).
        devices: how many of them `trainer.mesh` has; if null, all that are here of `local`, one of another.
            What is reported is each device's.
    """

    model: LmConfig = field(default_factory=Qwen3MoeConfig)
    initialize_from_hf: str | None = None
    use_hf_model_config: bool = False
    vocab_size: int | None = None
    lora: LoraConfig | None = None
    remat: bool | dict[str, Any] | str = True
    budget: str | None = None
    host_budget: str | None = None
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=AdamWConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    target: str = "local"
    devices: int | None = None

    def __post_init__(self) -> None:
        policy = check_remat(self.remat, self.budget, self.host_budget, self.model.remat_presets)
        check_remat_names(self.model, policy)
        learning_rate_schedule(self.optimizer, self.trainer.num_steps)
        find_target(self.target)


def step_reports(
    config: PlanLmConfig, policies: Mapping[str, bool | dict[str, Any] | str]
) -> Iterator[tuple[str, MemoryReport]]:
    """Compiles the step under one policy after the other."""
    for name, remat in policies.items():
        policy = remat_policy(remat, config.model.remat_presets)
        yield name, step_report(config, policy, target=config.target, devices=config.devices)


def compared(config: PlanLmConfig) -> dict[str, bool | dict[str, Any] | str]:
    """`POLICIES`, and those that the model names itself."""
    return {**POLICIES, **{name: name for name in config.model.remat_presets}}


def policy_table(config: PlanLmConfig, reports: Mapping[str, MemoryReport]) -> Table:
    """A row a policy: memory in GiB, and matrix-product FLOPs as a multiple of those of `remat: true`."""
    some = next(iter(reports.values()))
    baseline = reports[_BASELINE].flops.matmul if _BASELINE in reports else None
    inexact = any(not found.flops.exact for found in reports.values())
    table = Table(
        title=f"one training step, {config.data.batch_size} x {config.data.seq_len} tokens, compiled for "
        f"{_where(some)} and not run",
        caption=f"arguments (weights, optimizer state, batch): {some.arguments / 2**30:.3f} GiB; "
        + (f"matrix products under True: {baseline / 1e12:.3f} TFLOP; " if baseline else "")
        + ("? loops whose turns depend on the data, such as documents, count once; " if inexact else "")
        + f"* what `remat:` says in this config{_cpu_note(config)}",
    )
    for heading in ("remat", "device temporaries", "host", "device total", "FLOPs / True", "compiled in"):
        table.add_column(
            heading, justify="left" if heading == "remat" else "right", no_wrap=heading == "remat"
        )
    presets, entries = config.model.remat_presets, compared(config)
    chosen = remat_policy(config.remat, presets)
    for name, found in reports.items():
        marked = name in entries and remat_policy(entries[name], presets) == chosen
        table.add_row(
            name + (" *" if marked else ""),
            f"{found.temporaries / 2**30:.3f} GiB",
            f"{found.host.total / 2**30:.3f} GiB",
            f"{found.total / 2**30:.3f} GiB",
            f"{found.flops.matmul / baseline:.2f}{'' if found.flops.exact else ' ?'}" if baseline else "",
            f"{found.compile_seconds:.1f} s",
        )
    return table


def _where(found: MemoryReport) -> str:
    return (
        found.target
        if found.devices == 1
        else f"{found.devices} devices of {found.target}, for each of them,"
    )


def _cpu_note(config: PlanLmConfig) -> str:
    on_cpu = config.target == "local" and jax.default_backend() == "cpu"
    return "; on a CPU, what is offloaded stays in the same memory" if on_cpu else ""


def main(arguments: Sequence[str], console: Console | None = None) -> int:
    """The command: returns the exit status, after one message for anything that the user can mend."""
    console = lasting_console() if console is None else console

    def show(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    return run_command(lambda arguments, _: _plan(arguments, console), arguments, show)


def _plan(arguments: Sequence[str], console: Console) -> int:
    config = parse_config(PlanLmConfig, arguments)
    check_memory(config, target=config.target, devices=config.devices)
    if config.remat == "auto" and config.budget is not None:
        with console.status("compiling"):
            planned = plan_step(
                config,
                budget=config.budget,
                host_budget=config.host_budget,
                target=config.target,
                devices=config.devices,
            )
        console.print(planned)
        return 0
    found: dict[str, MemoryReport] = {}
    with RichProgress(console=console, transient=True) as progress:
        policies = compared(config)
        task = progress.add_task("compiling", total=len(policies))
        for name, one in step_reports(config, policies):
            found[name] = one
            progress.advance(task)
    console.print(policy_table(config, found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
