"""What a checkpoint policy means for a scan over layers: one of `SaveAll`, `PerLayer` and `Swept`.

Users write a `ScanCheckpointPolicy`; a scan first converts it to one of these.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import jax

from ._jax_policies import JaxPolicy, policy_with_names
from ._schedule import Schedule

Kept: TypeAlias = Literal["keep", "offload", "drop"]


@dataclass(frozen=True)
class SaveAll:
    """Everything that the backward pass reads is kept; nothing is recomputed."""

    @property
    def kept_names(self) -> Literal[True]:
        """All of them."""
        return True


@dataclass(frozen=True)
class PerLayer:
    """Each layer is recomputed from its carry and its inputs, except for the internals that are kept.

    Attributes:
        carries: the carries between layers; if dropped, the stack is first replayed from its input.
        internals: names of the internals that are kept, or a policy of JAX.
        offloaded: names of those that are moved to the host.
    """

    carries: Kept = "keep"
    internals: tuple[str, ...] | JaxPolicy = ()
    offloaded: tuple[str, ...] = ()

    @property
    def offloads(self) -> bool:
        """Whether anything is moved to the host."""
        return self.carries == "offload" or bool(self.offloaded)

    @property
    def saved_names(self) -> tuple[str, ...]:
        """The names of internals that are kept where they are. What a policy of JAX keeps has none."""
        return self.internals if isinstance(self.internals, tuple) else ()

    @property
    def kept_names(self) -> tuple[str, ...]:
        """These, and the names of those that are moved to the host."""
        return (*self.saved_names, *self.offloaded)

    def jax_policy(self, carry_name: str) -> JaxPolicy:
        """The `jax.checkpoint` policy of a layer whose carry has this name.

        One of JAX's own named policies, which are data and so survive `JAX_REMAT3=1`.
        """
        saved = [carry_name] if self.carries == "keep" else []
        offloaded = [carry_name] if self.carries == "offload" else []
        return policy_with_names(self.internals, (*saved, *self.saved_names), (*offloaded, *self.offloaded))


@dataclass(frozen=True)
class Swept:
    """Layers are cut into segments that are replayed one at a time, by the reverse sweep.

    Attributes:
        cut: maps a number of layers to a schedule.
        carries: where the first carry of each segment is kept.
        internals: what is kept of the layers of the segment that is being reversed.
        first_layers: how many layers are not cut, from the one that runs first.
        first: what is kept of those.
    """

    cut: Callable[[int], Schedule]
    carries: Literal["keep", "offload"]
    internals: "Internals"
    first_layers: int = 0
    first: "Internals" = SaveAll()

    @property
    def of_one_layer(self) -> "Internals":
        """The policy when every segment is one layer."""
        if isinstance(self.internals, PerLayer):
            return replace(self.internals, carries=self.carries)
        return self.internals


Internals: TypeAlias = SaveAll | PerLayer
Remat: TypeAlias = SaveAll | PerLayer | Swept


def for_length(remat: Remat, length: int) -> Remat:
    """Simplify for `length` layers: one layer needs no cut."""
    if not isinstance(remat, Swept):
        return remat
    if remat.first_layers >= max(length, 1):
        return remat.first
    if length > 1:
        return remat
    return remat.of_one_layer


def checkpoint_of(internals: Internals) -> Callable[[Callable], Callable]:
    """The `jax.checkpoint` wrapper of a layer whose residuals are saved; equal ones for equal policies."""
    match internals:
        case SaveAll():
            return _not_checkpointed
        case PerLayer() if internals.internals or internals.offloaded:
            return _Checkpoint(internals)
    return jax.checkpoint


def _not_checkpointed(layer: Callable) -> Callable:
    return layer


@dataclass(frozen=True)
class _Checkpoint:
    """`jax.checkpoint` that saves the internals of a policy."""

    remat: PerLayer

    def __call__(self, layer: Callable) -> Callable:
        policy = policy_with_names(self.remat.internals, self.remat.saved_names, self.remat.offloaded)
        return jax.checkpoint(layer, policy=policy, prevent_cse=False)
