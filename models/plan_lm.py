"""Prints the memory that a training step needs under each remat policy: compiles it,
and runs nothing.

    python -m models.plan_lm --config_path my-model.yaml [--target h200]
        [--only 'False|True|nested']
    python -m models.plan_lm --config_path my-model.yaml --remat auto --budget 1GiB
        [--find context]
    python -m models.plan_lm --config_path my-model.yaml --remat auto --budget 72GiB
        --find mesh --devices 8
    python -m models.plan_lm --config_path my-model.yaml --remat auto --budget 72GiB
        --find frontier [--picture curve.svg]

Takes the same config files as `models.train_lm`.
"""

import contextlib
import dataclasses
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
from rich.console import Console
from rich.progress import Progress as RichProgress

from models.candidate import STREAMED, Candidate
from models.command import backend_lines, run_command, shown_on
from models.frontier_chart import write_picture
from models.plan_search import KEYS, Budget, divided, find_meshes, find_size, planned
from models.run_config import LmRunConfig
from stacked_remat import ScanCheckpointPolicy
from stacked_remat._pictures import check_picture
from stacked_remat.memory import (
    Comparison,
    DoesNotFit,
    Plan,
    Trial,
    find_target,
    parse_bytes,
    readable_bytes,
)
from stacked_remat.ops import backends_taken
from stacked_remat.training import ConfigError, parse_config, remat_policy
from stacked_remat.training.config_checks import Count
from stacked_remat.training.config_sections import FlagOrText
from stacked_remat.training.progress import lasting_console
from stacked_remat.training.remat import remat_entry, remat_lines

POLICIES: Mapping[str, bool | dict[str, Any] | str] = {
    "False": False,
    "True": True,
    "recompute": "recompute",
    "offload": "offload",
    "nested": "nested",
    "nested, offload": {"nested": True, "save_carries": "offload"},
}
"""What is compared: names for the table, and `remat` entries. The presets of the model
follow.
"""

LEANER = ("nested", "offload")
"""Which of them are compared with the layers' weights on the host too, where they can
be there, and with experts in blocks and layers in tiles, where the config has neither.
"""

_FOUND = {
    "context": "longest context",
    "batch": "largest batch",
    "mesh": "fewest FLOPs, under trainer",
    "pipeline": "with it, under trainer",
}


@dataclass(frozen=True)
class PlanLmConfig(LmRunConfig):
    """Shows the memory of a training step on a device, with each policy or that of
    `remat`; runs nothing.

        python -m models.plan_lm --config_path FILE --target h200
        python -m models.plan_lm --config_path FILE --remat auto --budget 72GiB

    `--debug` shows the traceback of an error.

    Attributes:
        target: the device to compile for: `local`, or one that is not attached (`h200`,
            `v5p`, ...).
        devices: how many of them `trainer.mesh` has; if null, all of `local`, one of
            another target. The report is for each device.
        only: regular expression of the rows of the table to compile, such as
            `False|True|nested`; null for all of them. Not with `remat: auto`.
        find: what to find with `remat: auto`: the `policy` with the fewest FLOPs that
            fits `budget`, or the longest `context` (`data.seq_len`) or the largest
            `batch` (`data.batch_size`) for which one does; or what `trainer.mesh` of
            that many devices can be, with the policy that fits, by FLOPs and by what
            devices send. Or the `frontier`: policies from the least memory to the
            fewest FLOPs, whether they fit `budget` or not.
        picture: file that `find: frontier` draws its curve to too, `.png` or `.svg`
            (needs matplotlib).
        json: whether to print JSON in place of the table, in bytes, FLOPs and seconds.
    """

    target: str = "local"
    devices: Count | None = None
    only: FlagOrText | None = None
    find: Literal["policy", "context", "batch", "mesh", "frontier"] = "policy"
    picture: str | None = None
    json: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.only is not None and self.policy is None:
            raise ValueError(
                "only has no effect with remat: auto, which makes no table: leave it"
                " out."
            )
        try:
            re.compile(_only(self))
        except re.error as error:
            raise ValueError(f"only is no regular expression: {error}.") from error
        if self.find != "policy" and self.policy is not None:
            raise ValueError(
                f"find: {self.find} looks for what fits a budget under any policy: give"
                " remat: auto and a budget, such as 72GiB."
            )
        if self.find == "mesh" and (self.devices is None or self.devices < 2):
            raise ValueError(
                "find: mesh divides the step over several devices: give devices, such"
                " as 8."
            )
        if self.picture is not None:
            check_picture("picture", self.picture)
            if self.find != "frontier":
                raise ValueError("picture is of the curve of find: frontier alone.")
        find_target(self.target)

    @property
    def candidate(self) -> Candidate:
        """The step to compile; only of a resolved config."""
        # The step knows nothing of this command's own keys.
        run = LmRunConfig(
            **{
                one.name: getattr(self, one.name)
                for one in dataclasses.fields(LmRunConfig)
            }
        )
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        return Candidate(
            run, self.target, self.devices, cache / "stacked_remat" / "reports"
        )


def compared(config: LmRunConfig) -> dict[str, ScanCheckpointPolicy]:
    """`POLICIES`, the presets of the model, and the config's own policy where it is
    none of these.
    """
    # A model in tiles has no names, so no preset would keep anything.
    presets = config.model.remat_presets
    names = config.model.remat_names
    policies = {name: remat_policy(entry, presets) for name, entry in POLICIES.items()}
    policies |= presets if names else {}
    if config.policy is not None and config.policy not in policies.values():
        policies[str(config.remat)] = config.policy
    return policies


def policy_table(config: PlanLmConfig, trials: Sequence[Trial]) -> Comparison:
    """A row a policy, with FLOPs of matrix products relative to `False`."""
    some = next(trial.report for trial in trials if trial.report is not None)
    # By value: the config may write out what an alias stands for.
    own = next(
        (name for name, policy in compared(config).items() if policy == config.policy),
        None,
    )
    each = f"each of {some.devices} devices of " if some.devices > 1 else ""
    on_cpu = config.target == "local" and jax.default_backend() == "cpu"
    return Comparison(
        tuple(trials),
        title=(
            f"one training step, {config.data.batch_size} x {config.data.seq_len}"
            f" tokens, compiled for {each}{some.target} and not run"
        ),
        notes=(
            (
                "arguments (weights, optimizer state, batch):"
                f" {readable_bytes(some.arguments)}"
            ),
            *(["on a CPU, offloaded arrays stay in the same memory"] if on_cpu else []),
            f"`remat` of this config: {own}",
        ),
    )


def main(arguments: Sequence[str], console: Console | None = None) -> int:
    """The command: returns the exit status."""
    console = lasting_console() if console is None else console
    # XLA's warnings about what it only compiles
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    return run_command(
        lambda arguments, _: _plan(arguments, console), arguments, shown_on(console)
    )


def _plan(arguments: Sequence[str], console: Console) -> int:
    # The folder need not be here: a config that is written out is enough.
    config = parse_config(PlanLmConfig, arguments).resolved(check_folder=False)
    if not any(
        one.startswith(("--config_path", "--model", "--initialize_from_hf"))
        for one in arguments
    ):
        raise ConfigError(
            "No model to plan for: give --config_path FILE, such as one of"
            " models/configs, or the keys of a model, beginning with --model.type."
        )
    quiet = (lambda _: None) if config.json else shown_on(console)
    with backends_taken() as taken:
        if config.policy is None and config.budget is not None:
            budget = Budget(config.budget, config.host_budget, quiet)
            find = _find_frontier if config.find == "frontier" else _find
            find(config, console, budget)
        else:
            config.candidate.check(at_least=True)
            _compare(config, console)
    for line in backend_lines(taken):
        quiet(line)
    return 0


def _find(config: PlanLmConfig, console: Console, budget: Budget) -> None:
    step = config.candidate
    found = {}
    if config.find in KEYS:
        size, step = find_size(step, config.find, budget)
        found = {KEYS[config.find]: size}
    elif config.find == "policy":
        step.check(at_least=True)
    plans = (
        find_meshes(step, budget) if config.find == "mesh" else [planned(step, budget)]
    )
    plan, chosen = plans[0]
    table: Comparison | Plan = plan
    trials = [(trial, chosen) for trial in plan.tried.trials]
    if config.find == "mesh":
        trials = [(_on_mesh(plan, own), own) for plan, own in plans]
        title = (
            f"what fits {budget.device} on each of {config.devices} devices of"
            f" {config.target}"
        )
        table = Comparison(tuple(trial for trial, _ in trials), title)
        found = {"mesh": dataclasses.asdict(chosen.config.trainer.mesh)}
        if (stages := chosen.config.trainer.pipeline) is not None:
            found["pipeline"] = dataclasses.asdict(stages)
    entries = {
        "remat": remat_entry(plan.policy),
        "streamed": plan.streamed,
        **chosen.settings,
    }
    if config.json:
        rows = [_row(trial, own) for trial, own in trials]
        _print_json(
            chosen.config,
            console,
            chosen=found | entries,
            budget=plan.budget,
            rows=rows,
        )
        return
    shown_on(console)(str(table))
    lines = remat_lines(plan.policy, streamed=plan.streamed)
    shown_on(console)(f"in a config:\n{lines}")
    for key, value in chosen.settings.items():
        if value != step.settings[key]:
            console.print(f"with {key}: {value}; nothing fits without.")
    for key, value in found.items():
        console.print(
            f"{_FOUND[config.find]}: {key}: {value}", soft_wrap=True, highlight=False
        )


def _find_frontier(config: PlanLmConfig, console: Console, budget: Budget) -> None:
    def show(trial: Trial) -> None:
        budget.show_report(trial.name, trial.report)

    step = config.candidate
    step.check(at_least=True)
    found = step.frontier(host_budget=budget.host, begin=budget.begin, show=show)
    limit = parse_bytes(budget.device)
    if config.picture is not None:
        write_picture(found.rows(), config.picture, found.tried.base, limit)
    if config.json:
        _print_json(config, console, rows=found.rows(), budget=limit)
    else:
        shown_on(console)(str(found))


def _on_mesh(plan: Plan, step: Candidate) -> Trial:
    """What was found on a mesh, as the row of a table."""
    row = Trial(plan.policy, plan.report, streamed=plan.streamed)
    return dataclasses.replace(row, label=f"{divided(step)}: {row.name}")


def _compare(config: PlanLmConfig, console: Console) -> None:
    rows = _rows(config)
    trials: list[Trial] = []
    with RichProgress(console=console, transient=True, disable=config.json) as progress:
        task = progress.add_task("compiling", total=len(rows))
        for name, step in rows.items():
            progress.update(task, description=f"compiling {name}")
            # Which has no bar
            if not (console.is_terminal or config.json):
                shown_on(console)(f"compiling {name}")
            report = failure = None
            try:
                report = step.report()
            except (DoesNotFit, jax.errors.JaxRuntimeError, ValueError) as error:
                failure = error  # such as a policy that a fused update does not take
            on_host = step.config.trainer.streaming is True
            trials.append(Trial(step.policy, report, failure, on_host, name))
            progress.advance(task)
    # Where every row fails, the reason is the config's, not a policy's.
    if not any(trial.report for trial in trials) and trials[0].failure:
        raise trials[0].failure
    if config.json:
        _print_json(
            config, console, rows=[_row(trial, rows[trial.name]) for trial in trials]
        )
        return
    shown_on(console)(str(policy_table(config, trials)))


def _row(trial: Trial, step: Candidate) -> dict[str, Any]:
    """A row of the JSON: its report, or why it was refused."""
    row = {
        "name": trial.name,
        "remat": remat_entry(trial.policy),
        "streamed": trial.streamed,
    }
    report = trial.report
    found = (
        {"total": report.total, **dataclasses.asdict(report)}
        if report
        else {"refused": str(trial.failure).splitlines()[0]}
    )
    return row | step.settings | found


def _print_json(config: LmRunConfig, console: Console, **fields: Any) -> None:
    tokens = config.data.batch_size * config.data.seq_len
    text = json.dumps({"tokens_per_step": tokens, **fields}, indent=1)
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _rows(config: PlanLmConfig) -> dict[str, Candidate]:
    """What is compiled for each row of the table."""
    step = config.candidate
    policies = compared(config)
    # All policies as the config is, and the leanest with settings that take less
    varied = [({}, [*policies]), *((settings, LEANER) for settings in step.leaner)]
    if step.can_stream:
        try:
            step.check()
        except ConfigError:  # with all weights on the device nothing fits
            varied = []
        varied.append((STREAMED, LEANER))
    rows: dict[str, Candidate] = {}
    for settings, names in varied:
        for name in (name for name in names if name in policies):
            with contextlib.suppress(
                ValueError
            ):  # one that trainer.streaming does not go with
                own = step.having(settings, policies[name])
                rows[name + (own.label if settings else "")] = own
    chosen = {
        name: row for name, row in rows.items() if re.fullmatch(_only(config), name)
    }
    if not chosen:
        raise ConfigError(
            f"only = {config.only!r} leaves no row. There are: {'; '.join(rows)}."
        )
    return chosen


def _only(config: PlanLmConfig) -> str:
    # YAML takes the names `True` and `False` for booleans.
    return ".*" if config.only is None else str(config.only)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
