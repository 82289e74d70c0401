"""The `ghost` section of a config: scores of training examples against held-out
text.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

from .config_checks import Count, check_fields


@dataclass(frozen=True)
class GhostValidationConfig:
    """The held-out text whose loss the scores are about.

    Attributes:
        sources: weights of the held-out texts of sources of `data.sources`, by their
            names: the direction is the weighted mean of the gradients of their losses.
            All held-out text together if empty.
        batches: the first batches of each held-out text that are used, the same ones in
            every step.
    """

    sources: dict[str, float] = field(default_factory=dict)
    batches: Count = 1

    def __post_init__(self) -> None:
        check_fields("ghost.validation.", self)
        for name, weight in self.sources.items():
            if not (weight > 0 and math.isfinite(weight)):
                raise ValueError(
                    f"ghost.validation.sources.{name} must be positive and finite, got"
                    f" {weight}; leave it out for none."
                )


@dataclass(frozen=True)
class GhostConfig:
    """Scores of every k-th step's sequences: by how much training on each lowers the
    loss of held-out text.

    A score is the dot product of the gradient of the sequence's loss with that of the
    held-out loss, at the weights before the step (Wang et al. 2024). They are logged to
    `ghost/` in the run folder, for `python -m stacked_remat.ghost`. The weights are
    updated as without. Scores leave out losses that the model adds to the cross
    entropy, such as the load balance of experts, which depend on all sequences of a
    batch together; with such a model a scored step takes one more forward and backward
    pass.

    Attributes:
        method: `grad_dot`, the dot products in the backward pass that the step needs
            anyway.
        token_mean: the loss of a sequence: `batch` for its part of the batch's mean
            loss per token, so that a sequence of more targets counts more; `example`
            for the mean over its own tokens.
        every: steps between scored ones.
        norms: also the norm of the gradient of each sequence's cross entropy. The
            backward pass of a scored step then takes one sequence after the other, and
            what is outside of layers twice. On one device.
        by_token: the score of each target of a sequence instead of that of each array:
            by how much training on this target alone lowers the loss of held-out text.
            The sequence has their sum. A scored step takes one more forward pass with
            its derivative.
        validation: the held-out text.
    """

    method: Literal["grad_dot"] = "grad_dot"
    token_mean: Literal["batch", "example"] = "batch"
    every: Count = 10
    norms: bool = False
    by_token: bool = False
    validation: GhostValidationConfig = field(default_factory=GhostValidationConfig)

    def __post_init__(self) -> None:
        check_fields("ghost.", self)
        if self.norms and self.by_token:
            raise ValueError(
                "ghost.norms and ghost.by_token exclude each other: norms are of the"
                " gradients of whole sequences. Leave out one of them."
            )
