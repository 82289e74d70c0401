"""What a training run can be told, apart from its model: frozen dataclasses that mirror the YAML file."""

from dataclasses import dataclass


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


def _require_at_least(lowest: int, section: str, **values: float) -> None:
    for name, value in values.items():
        if value < lowest:
            raise ValueError(f"{section}.{name} must be at least {lowest}, got {value}.")
