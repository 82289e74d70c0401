"""The `remat` config entry, and the policy that it means."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, get_args, get_origin

from .._messages import did_you_mean
from .._policy import ScanCheckpointPolicy, ScanCheckpointSpec, resolve_policy
from ..memory import parse_bytes

RematEntry: TypeAlias = bool | Mapping[str, Any] | str
"""An alias, the name of a preset, `auto`, or a mapping of `ScanCheckpointPolicy`'s fields."""

RematPresets: TypeAlias = Mapping[str, ScanCheckpointPolicy]
"""Policies under names that a model gives them, since they name what is inside its layers."""

_ALIASES = [
    name for part in get_args(ScanCheckpointSpec) if get_origin(part) is Literal for name in get_args(part)
]

NO_PRESETS: RematPresets = MappingProxyType({})


def remat_policy(value: RematEntry, presets: RematPresets = NO_PRESETS) -> ScanCheckpointPolicy:
    """The policy that a config's `remat` entry stands for.

    Args:
        value: an alias (`true`, `false`, `nested`, ...), the name of a preset, or a mapping of
            `ScanCheckpointPolicy`'s fields.
        presets: the policies to which a model gives names.

    Raises:
        ValueError: an unknown alias or field, or fields that contradict each other.
    """
    if isinstance(value, str) and value in presets:
        return presets[value]
    if not isinstance(value, Mapping):
        try:
            return resolve_policy(value)  # pyright: ignore[reportArgumentType]
        except (TypeError, ValueError) as error:
            more = f" Presets of this model: {', '.join(presets)}." if presets else ""
            meant = did_you_mean(str(value), [*_ALIASES, *presets])
            raise ValueError(f"{error}{more}{meant}") from error
    valid = ScanCheckpointPolicy.__dataclass_fields__
    for name in value:
        if name not in valid:
            raise ValueError(
                f"remat.{name} is not a field of ScanCheckpointPolicy.{did_you_mean(name, valid)} Valid: "
                f"{', '.join(valid)}."
            )
    if isinstance(value.get("first_policy"), Mapping):
        value = {**value, "first_policy": remat_policy(value["first_policy"])}
    try:
        return ScanCheckpointPolicy(**value)
    except TypeError as error:  # a config's values have any type
        raise ValueError(f"{error} (a field of remat)") from error


def remat_entry(spec: ScanCheckpointSpec) -> bool | str | dict[str, Any]:
    """The `remat` config entry of a policy; the inverse of `remat_policy`.

    Raises:
        ValueError: the policy is one of JAX's functions, which a config cannot hold.
    """
    if callable(spec) or (isinstance(spec, ScanCheckpointPolicy) and callable(spec.save_block_internals)):
        raise ValueError(f"{spec!r} holds a function, which a config cannot. Name what is saved instead.")
    if not isinstance(spec, ScanCheckpointPolicy):
        return spec
    entry = {name: list(value) if isinstance(value, tuple) else value for name, value in spec.settings()}
    if "first_policy" in entry:
        entry["first_policy"] = remat_entry(spec.first_policy)
    return entry or True


def check_remat(
    remat: RematEntry,
    budget: str | None,
    host_budget: str | None,
    presets: RematPresets = NO_PRESETS,
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
        for name, size in (("budget", budget), ("host_budget", host_budget)):
            try:
                parse_bytes(0 if size is None else size)
            except ValueError as error:
                raise ValueError(f"{name}: {error}.") from error
        return None
    for name, size in (("budget", budget), ("host_budget", host_budget)):
        if size is not None:
            raise ValueError(f"{name} = {size} has no effect beside remat: {remat}. Write remat: auto.")
    return remat_policy(remat, presets)
