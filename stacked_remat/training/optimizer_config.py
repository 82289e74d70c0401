"""Configs of optimizers and learning-rate schedules, chosen by `type:`."""

import abc
import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Annotated

from annotated_types import Ge, Le

from .config_checks import Count, NotNegative, Positive, Share, check_fields
from .config_sections import ChoiceRegistry


class ScheduleConfig(ChoiceRegistry, abc.ABC):
    """The learning rate after the warm-up: `schedule: {type: NAME, ...}`, cosine by
    default.
    """

    @classmethod
    def default_choice_name(cls) -> str:
        """The schedule of a section without `type`."""
        return "cosine"


@ScheduleConfig.register_subclass("constant")
@dataclass(frozen=True)
class ConstantSchedule(ScheduleConfig):
    """The highest rate to the end."""


@dataclass(frozen=True)
class _Decay(ScheduleConfig):
    """A learning rate that falls.

    Attributes:
        min_lr_ratio: learning rate that is reached right after the last step, as a
            share of the highest.
    """

    min_lr_ratio: Annotated[float, Ge(0), Le(1)] = 0.0

    def __post_init__(self) -> None:
        check_fields("optimizer.schedule.", self)


@ScheduleConfig.register_subclass("cosine")
@dataclass(frozen=True)
class CosineSchedule(_Decay):
    """Half a cosine down to the end of the run (Loshchilov & Hutter 2017)."""

    min_lr_ratio: Annotated[float, Ge(0), Le(1)] = 0.1


@ScheduleConfig.register_subclass("linear")
@dataclass(frozen=True)
class LinearSchedule(_Decay):
    """A straight line down to the end of the run."""


@ScheduleConfig.register_subclass("wsd")
@dataclass(frozen=True)
class WarmupStableDecaySchedule(_Decay):
    """The highest rate, then a straight line down over the last part of the run (Hu et
    al. 2024).

    Attributes:
        decay_fraction: share of all steps that the decay takes, rounded to the nearest
            number of steps.
    """

    decay_fraction: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.decay_fraction <= 1:
            raise ValueError(
                "optimizer.schedule.decay_fraction must lie in (0, 1], got"
                f" {self.decay_fraction}; for no decay write optimizer.schedule.type:"
                " constant."
            )

    def decay_steps(self, num_steps: int) -> int:
        """The steps below the highest rate at the end of a run of `num_steps`; at least
        one.
        """
        return max(1, _share_of(num_steps, self.decay_fraction))


@dataclass(frozen=True)
class OptimizerConfig(ChoiceRegistry, abc.ABC):
    """Base of all optimizers: `optimizer: {type: NAME, ...}`, AdamW by default.

    Weight decay is decoupled from the gradient for every optimizer: `learning_rate *
    weight_decay` per step.

    Attributes:
        learning_rate: the highest learning rate, of the step after the warm-up.
        learning_rates: factors of the learning rate for some parameters, by a pattern
            of their paths, such as `{"*embed*": 0.1}`; the first that matches counts.
            Paths and patterns are those of `freeze`.
        warmup: steps at lower learning rates, which grow by equal parts from zero;
            below 1 a share of all steps, rounded to the nearest number that leaves a
            step.
        schedule: the learning rate after the warm-up.
        weight_decay: decay of all weights except norms, biases, and the parameters of
            modules whose class has `weight_decay = False`.
        max_grad_norm: gradients with a larger global norm are scaled down to it; null
            turns this off.
    """

    learning_rate: Positive = 1e-3
    # A dict has no hash, and two configs that are equal have equal ones.
    learning_rates: dict[str, float] = field(default_factory=dict, hash=False)
    warmup: NotNegative = 0.01
    schedule: ScheduleConfig = field(default_factory=CosineSchedule)
    weight_decay: NotNegative = 0.1
    max_grad_norm: Positive | None = 1.0

    @classmethod
    def default_choice_name(cls) -> str:
        """The optimizer of a section without `type`."""
        return "adamw"

    def __post_init__(self) -> None:
        """Refuses values out of range, of subclasses too."""
        check_fields("optimizer.", self)
        for pattern, factor in self.learning_rates.items():
            if not 0 < factor < math.inf:
                raise ValueError(
                    f"optimizer.learning_rates[{pattern!r}] is a factor of"
                    f" optimizer.learning_rate, above 0 and finite; got {factor}. To"
                    " train none of it, name it in freeze."
                )
        if self.warmup >= 1 and self.warmup != int(self.warmup):
            raise ValueError(
                "optimizer.warmup must be a share of all steps, below 1, or a whole"
                f" number of steps, got {self.warmup}."
            )

    def warmup_steps(self, num_steps: int) -> int:
        """The steps before the one at the highest learning rate in a run of
        `num_steps`.
        """
        if self.warmup >= 1:
            return int(self.warmup)
        return min(_share_of(num_steps, self.warmup), num_steps - 1)


def _share_of(num_steps: int, share: float) -> int:
    """The number of steps nearest to a share of all, by the decimal number that a
    config has.

    In binary, 0.29 of 100 is less than 29.
    """
    return round(Fraction(str(share)) * num_steps)


@OptimizerConfig.register_subclass("adamw")
@dataclass(frozen=True)
class AdamWConfig(OptimizerConfig):
    """AdamW (Loshchilov & Hutter 2019). Memory: two arrays like the parameters.

    Attributes:
        beta1: decay of the mean of gradients.
        beta2: decay of the mean of squared gradients.
        epsilon: added to the root of the mean of squared gradients.
    """

    beta1: Share = 0.9
    beta2: Share = 0.95
    epsilon: Positive = 1e-8


@OptimizerConfig.register_subclass("lion")
@dataclass(frozen=True)
class LionConfig(OptimizerConfig):
    """Lion (Chen et al. 2023): the sign of a mean of gradients. Memory: one array like
    the parameters.

    Use a learning rate three to ten times lower than AdamW's, and a weight decay higher
    by the same factor.

    Attributes:
        beta1: share of the mean in the direction of a step.
        beta2: decay of the mean of gradients.
    """

    beta1: Share = 0.9
    beta2: Share = 0.99


@OptimizerConfig.register_subclass("adafactor")
@dataclass(frozen=True)
class AdafactorConfig(OptimizerConfig):
    """Adafactor (Shazeer & Stern 2018): factored squared gradients, no mean of
    gradients.

    Memory: one row and one column for each layer's and expert's matrix, as the two
    longest dimensions of an array are factored. Scaling and clipping go by the root
    mean square of a whole stack.

    Attributes:
        decay_rate: the decay of the mean of squared gradients at a step is `1 - step **
            -decay_rate`.
        clipping_threshold: largest root mean square of an array's update; null turns
            this off.
        scale_by_parameter: whether updates are scaled by the root mean square of the
            parameter.
        min_factored_dim: arrays whose second longest dimension is shorter are not
            factored.
    """

    decay_rate: Positive = 0.8
    clipping_threshold: Positive | None = 1.0
    scale_by_parameter: bool = True
    min_factored_dim: Count = 128


@OptimizerConfig.register_subclass("muon")
@dataclass(frozen=True)
class MuonConfig(OptimizerConfig):
    """Muon (Jordan 2024) for the matrix of each layer and expert, AdamW with Nesterov
    momentum for the rest.

    A matrix is the weight of a linear map, `In` by `Out`; each layer and expert has its
    own. Updates are scaled to AdamW's size (Liu et al. 2025), so that AdamW's learning
    rates apply. Memory: one array like the matrices, two like the rest.

    Attributes:
        momentum: decay of the mean of gradients of a matrix.
        update_rms: root mean square of a matrix's update.
        beta1: AdamW's decay of the mean of gradients.
        beta2: AdamW's decay of the mean of squared gradients.
        epsilon: of AdamW and of the orthogonalisation.
    """

    momentum: Share = 0.95
    update_rms: Positive = 0.2
    beta1: Share = 0.9
    beta2: Share = 0.95
    epsilon: Positive = 1e-8


@OptimizerConfig.register_subclass("sgd")
@dataclass(frozen=True)
class SgdConfig(OptimizerConfig):
    """Gradient descent with momentum. Memory: one array like the parameters, none
    without momentum.

    Attributes:
        momentum: decay of the sum of gradients; 0 for none.
        nesterov: whether to use Nesterov's momentum.
    """

    momentum: Share = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not self.momentum:
            raise ValueError(
                "optimizer.nesterov has no effect without optimizer.momentum: set one"
                " of them."
            )
