"""What Haliax's users write: other names for what policies and stacks have here.

Of the fields of Haliax's `ScanCheckpointPolicy`, `disable` and `simple` say what other
fields say here too; `save_inputs` and `prevent_cse` choose what no policy here leaves
open. All are accepted, so that code and configs written for Haliax keep their policies.
A policy's repr shows the settings that take effect.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

from haliax import Axis
from haliax.nn import ScanCheckpointPolicy as HaliaxPolicy


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class HaliaxFields:
    """Fields of Haliax's `ScanCheckpointPolicy` that are here for its users alone."""

    save_inputs: bool | Literal["offload"] = False
    """No effect: layers read their slices of the weights and other inputs where they
    are, and no policy copies them, which in Haliax `True` does. `"offload"` is refused:
    move them before the loop.
    """

    prevent_cse: bool = False
    """No effect: each loop has the barriers that it needs. Layers in one program
    (`BlockSeq`, a fully unrolled scan) have them, or XLA would merge the recomputation
    with the forward pass; layers of a rolled loop need none.
    """

    disable: bool = False
    """Layers are not checkpointed: sets `save_block_internals=True`."""

    simple: bool = False
    """Carries are kept and no internals, which is the default."""

    def check_haliax_fields(self) -> None:
        """Refuse values of another type, and inputs that are to be offloaded."""
        for field in dataclasses.fields(HaliaxFields):
            value = getattr(self, field.name)
            if field.name == "save_inputs" and value == "offload":
                raise ValueError(
                    "save_inputs='offload' would copy each layer's inputs from the"
                    " device. Leave it out, and move them before the loop: weights with"
                    " stacked_remat.streaming.to_host(blocks), others with"
                    " jax.device_put(x, jax.memory.Space.Host)."
                )
            if not isinstance(value, bool):
                raise TypeError(f"{field.name} is True or False; got {value!r}.")


NAMES = frozenset(field.name for field in dataclasses.fields(HaliaxFields))


def contradictions(policy: Any) -> Iterator[tuple[str, str, str]]:
    """Two settings of a policy that can't be made both, the first one of Haliax's, and
    the reason.
    """
    if policy.simple:
        reason = "it keeps carries on the device and nothing else. Leave out simple."
        for name in (
            "disable",
            "save_carries",
            "save_block_internals",
            "offload_block_internals",
        ):
            yield "simple", name, reason
    if policy.disable:
        reason = "it keeps all internals on the device. Leave out one of them."
        yield "disable", "save_carries", reason
        yield "disable", "offload_block_internals", reason
        if policy.save_block_internals is not True:
            yield "disable", "save_block_internals", reason
        if not policy.has_cut:
            yield "disable", "first_layers", reason


def settings_of(policy: HaliaxPolicy) -> dict[str, Any]:
    """What a policy of Haliax says, without the settings that have no effect there."""
    if policy.disable or policy.simple:
        return {"nested": policy.nested, "disable": policy.disable}
    settings = {
        name: getattr(policy, name)
        for name in (
            "save_carries",
            "save_block_internals",
            "offload_block_internals",
            "nested",
        )
    }
    # Haliax's "offload" says so of both, and here it moves the carries alone.
    if policy.save_carries != "offload":
        settings["save_inputs"] = policy.save_inputs
    return settings


class HaliaxStackNames:
    """Haliax's names for the axis and the policy of a stack."""

    @property
    def Block(self: Any) -> Axis:
        """The axis of the layers: `Layers`."""
        return self.Layers

    @property
    def gradient_checkpointing(self: Any) -> Any:
        """The checkpoint policy: `remat`."""
        return self.remat
