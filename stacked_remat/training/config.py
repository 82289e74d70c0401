"""What a training run can be told of what the backward pass keeps."""

from collections.abc import Mapping
from typing import Any

from .._policy import ScanCheckpointPolicy, ScanCheckpointSpec, resolve_policy
from ..memory import parse_bytes


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
