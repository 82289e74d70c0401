"""What a checkpoint policy means for a number of layers: what a scan or a sweep over them executes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import jax

from ._jax_policies import JaxPolicy, policy_with_names
from ._schedule import Schedule, equal

Carries: TypeAlias = Literal["device", "host"] | None  # where they are kept, if they are


@dataclass(frozen=True)
class Kept:
    """Which internals of a layer are kept for its derivative.

    Attributes:
        internals: True for all, their names, or a policy of JAX.
        offloaded: names of those that are moved to the host.
    """

    internals: Literal[True] | tuple[str, ...] | JaxPolicy = ()
    offloaded: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...] | Literal[True]:
        """The names of what is kept anywhere; True for everything. What a policy of JAX keeps has none."""
        return True if self.internals is True else (*self._saved, *self.offloaded)

    @property
    def _saved(self) -> tuple[str, ...]:
        return self.internals if isinstance(self.internals, tuple) else ()

    def policy(self, carry_name: str = "", carries: Carries = None) -> JaxPolicy:
        """The `jax.checkpoint` policy of a layer, which keeps its carry of this name too.

        Of names alone it is one of JAX's own, which are data and so survive `JAX_REMAT3=1`.
        """
        saved, offloaded = ([carry_name] * (carries == where) for where in ("device", "host"))
        return policy_with_names(self.internals, (*saved, *self._saved), (*offloaded, *self.offloaded))

    def checkpoint(self, layer: Callable) -> Callable:
        """Wrap a layer of a rolled loop; with the barriers of `jax.checkpoint` where nothing is kept."""
        if self.internals is True:
            return layer
        return jax.checkpoint(layer, policy=self.policy(), prevent_cse=self == NOTHING)


EVERYTHING, NOTHING = Kept(True), Kept()


@dataclass(frozen=True)
class Remat:
    """A policy for a number of layers.

    Attributes:
        length: the number of layers.
        kept: of each layer after the first ones; where there is a schedule, while its segment is reversed.
        carries: where those that are kept are; None: none are, and the layers first run again.
        schedule: how the layers after the first ones are cut; None where they are not.
        first_layers: how many layers run before those of the schedule and keep their carries, on the device
            if there are others.
        first_kept: what else these keep.
    """

    length: int
    kept: Kept = NOTHING
    carries: Carries = "device"
    schedule: Schedule | None = None
    first_layers: int = 0
    first_kept: Kept = EVERYTHING

    @property
    def offloads(self) -> bool:
        """Whether anything is moved to the host."""
        return self.carries == "host" or bool(self.kept.offloaded or self.first_kept.offloaded)

    @property
    def boundaries_on_host(self) -> bool:
        """Whether the first carries of segments are kept on the host."""
        return self.carries == "host" and self.schedule is not None

    def layer_policy(self, carry_name: str) -> JaxPolicy:
        """The `jax.checkpoint` policy of one layer whose input has this name."""
        return self.kept.policy(carry_name, self.carries if self.schedule is None else "device")

    def swept(self) -> "Remat":
        """The same for a sweep: layers that are not cut are segments of one layer, or all of them first."""
        if self.schedule is not None or not self.length:
            return self
        if self.kept == NOTHING:
            return replace(self, schedule=equal(self.length, self.length))
        return replace(self, first_layers=self.length, first_kept=self.kept, kept=NOTHING)
