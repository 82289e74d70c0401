"""What a training run can be told, apart from its model: frozen dataclasses that mirror the YAML file."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .._policy import ScanCheckpointPolicy, ScanCheckpointSpec, resolve_policy
from ..memory import parse_bytes


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (Loshchilov & Hutter 2019) with a linear warm-up and a cosine decay.

    Attributes:
        learning_rate: the highest learning rate, reached at the end of the warm-up.
        warmup_steps: steps from zero to the highest learning rate.
        min_lr_ratio: learning rate of the last step as a share of the highest.
        weight_decay: decoupled decay of every weight except those of norms and biases.
        beta1: decay of the mean of gradients.
        beta2: decay of the mean of squared gradients.
        epsilon: added to the root of the latter.
        max_grad_norm: gradients with a larger global norm are scaled down to it; null turns this off.
    """

    learning_rate: float = 1e-3
    warmup_steps: int = 20
    min_lr_ratio: float = 0.1
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    max_grad_norm: float | None = 1.0

    def __post_init__(self) -> None:
        _require_at_least(0, "optimizer", warmup_steps=self.warmup_steps, weight_decay=self.weight_decay)
        for name in ("learning_rate", "epsilon", "max_grad_norm"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"optimizer.{name} must be positive, got {value}.")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name} must lie in [0, 1), got {getattr(self, name)}.")
        if not 0 <= self.min_lr_ratio <= 1:
            raise ValueError(f"optimizer.min_lr_ratio must lie in [0, 1], got {self.min_lr_ratio}.")


@dataclass(frozen=True)
class TrainerConfig:
    """How long to train, what to report, and where to.

    Attributes:
        num_steps: optimizer steps.
        seed: of the initial weights and of the order of the batches.
        log_every: steps between lines in the metrics file.
        eval_every: steps between evaluations on held-out text, besides those at the start and the end; null
            for those two alone.
        eval_batches: batches in an evaluation, always the same ones.
        run_dir: folder for config, metrics and checkpoint; `runs/DATE-TIME` if not given.
        overwrite: whether the results of an earlier run in `run_dir` may be deleted.
    """

    num_steps: int = 100
    seed: int = 0
    log_every: int = 10
    eval_every: int | None = None
    eval_batches: int = 8
    run_dir: str | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        _require_at_least(
            1, "trainer", num_steps=self.num_steps, log_every=self.log_every, eval_batches=self.eval_batches
        )
        _require_at_least(0, "trainer", seed=self.seed)
        if self.eval_every is not None:
            _require_at_least(1, "trainer", eval_every=self.eval_every)


def remat_policy(value: bool | Mapping[str, Any] | str) -> ScanCheckpointPolicy:
    """The policy that a config's `remat` entry stands for.

    Args:
        value: an alias (`true`, `false`, `nested`, ...) or a mapping of `ScanCheckpointPolicy`'s fields.

    Raises:
        ValueError: an unknown alias or field, or fields that contradict each other.
    """
    if not isinstance(value, Mapping):
        return resolve_policy(value)  # pyright: ignore[reportArgumentType]
    valid = ScanCheckpointPolicy.__dataclass_fields__
    for name in value:
        if name not in valid:
            raise ValueError(
                f"remat.{name} is not a field of ScanCheckpointPolicy; valid: {', '.join(valid)}."
            )
    if isinstance(value.get("first_policy"), Mapping):
        value = {**value, "first_policy": remat_policy(value["first_policy"])}
    return ScanCheckpointPolicy(**value)


def remat_entry(spec: ScanCheckpointSpec) -> bool | str | dict[str, Any]:
    """What to write after `remat:` for a policy; the inverse of `remat_policy`."""
    if not isinstance(spec, ScanCheckpointPolicy):
        return spec
    entry = {name: list(value) if isinstance(value, tuple) else value for name, value in spec.settings()}
    if "first_policy" in entry:
        entry["first_policy"] = remat_entry(spec.first_policy)
    return entry or True


def check_remat(
    remat: bool | Mapping[str, Any] | str, budget: str | None, host_budget: str | None
) -> ScanCheckpointPolicy | None:
    """The policy that a config's `remat` entry stands for, or None for `auto`, which needs a budget.

    Raises:
        ValueError: as `remat_policy` does, a budget that is missing, without effect, or cannot be read.
    """
    if remat == "auto":
        if budget is None:
            raise ValueError(
                "remat: auto takes the policy that fits a budget, and there is none. Say how much memory of "
                "a device the step may take: budget: 72GiB."
            )
        for size in filter(None, (budget, host_budget)):
            parse_bytes(size)
        return None
    for name, size in (("budget", budget), ("host_budget", host_budget)):
        if size is not None:
            raise ValueError(f"{name} = {size} has no effect beside remat: {remat}. Write remat: auto.")
    return remat_policy(remat)


def _require_at_least(lowest: int, section: str, **values: float) -> None:
    for name, value in values.items():
        if value < lowest:
            raise ValueError(f"{section}.{name} must be at least {lowest}, got {value}.")
