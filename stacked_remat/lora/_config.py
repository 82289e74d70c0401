"""The config of low-rank adapters."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021) on the linears whose path matches a pattern.

    A linear's path is the names of its attributes, with dots between them. The layers of a stack are `*`,
    those of a `BlockSeq` their numbers: `layers.*.attention.q_proj`, `layers.*.mlp.experts.*.up_proj`,
    `head`. In a pattern, `*` matches any characters, dots included, `?` one character and `[ab]` one of
    these; it has to match the whole path. `*.q_proj` is every linear of that name, `*experts*` every linear
    with that word in its path.

    Attributes:
        rank: columns of A and rows of B.
        alpha: the adapter's output is multiplied by `alpha / rank`.
        targets: patterns; a linear that matches one of them is adapted. The default is names that end in
            `_proj`: in models with Hugging Face's names, attention and experts, but not routers or the head.
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
            raise ValueError(f"lora.targets must be a list of patterns, got the text {self.targets!r}.")
        object.__setattr__(self, "targets", tuple(self.targets))
        if not self.targets or not all(isinstance(target, str) and target for target in self.targets):
            raise ValueError(
                f"lora.targets must be patterns such as '*.q_proj', at least one, got {self.targets!r}."
            )

    @property
    def scale(self) -> float:
        """Factor of the adapters' outputs."""
        return self.alpha / self.rank
