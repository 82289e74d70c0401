"""Which linears get adapters, and how large these are."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021) on the linears whose path fits a pattern.

    A linear's path is the names of the attributes that lead to it, with dots between them. The layers of a
    stack are `*`, those of a `BlockSeq` their numbers: `layers.*.attention.q_proj`,
    `layers.*.mlp.experts.*.up_proj`, `head`. A pattern is such a path in which `*` stands for any
    characters, dots among them, `?` for one and `[ab]` for one of these; it has to fit the whole path. So
    `*.q_proj` is every linear of that name, `*experts*` every linear with that word in its path, and a path
    is its own pattern.

    Attributes:
        rank: columns of A and rows of B.
        alpha: the adapter's output is multiplied by `alpha / rank`.
        targets: patterns; a linear that fits one of them is adapted. By default those whose name ends in
            `_proj`: attention and experts, where models are written with Hugging Face's names, but neither
            routers nor the head.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ("*_proj",)

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or isinstance(self.rank, bool) or self.rank < 1:
            raise ValueError(f"lora.rank must be a positive integer, got {self.rank!r}.")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ValueError(f"lora.alpha must be positive and finite, got {self.alpha!r}.")
        if isinstance(self.targets, str):
            raise ValueError(f"lora.targets is a list of patterns, got the text {self.targets!r}.")
        object.__setattr__(self, "targets", tuple(self.targets))
        if not self.targets or not all(isinstance(target, str) and target for target in self.targets):
            raise ValueError(
                f"lora.targets must be patterns such as '*.q_proj', at least one, got {self.targets!r}."
            )

    @property
    def scale(self) -> float:
        """What the adapters' outputs are multiplied by."""
        return self.alpha / self.rank
