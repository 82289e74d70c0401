"""From the `remat` config entry to a policy, and back."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeAlias, get_args

import yaml

from .._messages import did_you_mean
from .._policy import (
    DISK,
    Alias,
    ScanCheckpointPolicy,
    ScanCheckpointSpec,
    alias_of,
    resolve_policy,
)
from ..memory import parse_bytes

RematEntry: TypeAlias = bool | Mapping[str, Any] | str
"""An alias, the name of a preset, `auto`, or a mapping of `ScanCheckpointPolicy`'s
fields.
"""

RematPresets: TypeAlias = Mapping[str, ScanCheckpointPolicy]
"""A model's own policies by name; they name values inside its layers."""

_ALIASES = get_args(Alias)

NO_PRESETS: RematPresets = MappingProxyType({})


def remat_policy(
    value: RematEntry, presets: RematPresets = NO_PRESETS
) -> ScanCheckpointPolicy:
    """The policy of a `remat` config entry.

    Args:
        value: an alias (`true`, `false`, `nested`, ...), the name of a preset, or a
            mapping of `ScanCheckpointPolicy`'s fields.
        presets: the model's named policies.

    Raises:
        ValueError: an unknown alias or field, or fields that contradict each other.
    """
    if not isinstance(value, Mapping):
        try:
            return presets[value] if value in presets else resolve_policy(value)  # pyright: ignore[reportArgumentType]
        except (TypeError, ValueError) as error:
            more = f" Presets of this model: {', '.join(presets)}." if presets else ""
            # As tables print policies
            if "=" in str(value):
                more += " Settings are a mapping: remat: {max_carries: 8}."
            meant = did_you_mean(str(value), presets)
            raise ValueError(f"{error}{more}{meant}") from error
    valid = ScanCheckpointPolicy.__dataclass_fields__
    for name in value:
        if name not in valid:
            raise ValueError(
                f"remat.{name} is not a field of"
                f" ScanCheckpointPolicy.{did_you_mean(name, valid)} Valid:"
                f" {', '.join(valid)}."
            )
    try:
        return ScanCheckpointPolicy(**value)
    except TypeError as error:  # a config may hold values of any type
        raise ValueError(f"{error} (a field of remat)") from error


def remat_entry(spec: ScanCheckpointSpec) -> bool | str | dict[str, Any]:
    """The `remat` config entry of a policy without functions; the inverse of
    `remat_policy`.
    """
    # A config is text, and is read in another process.
    if callable(spec) or (
        isinstance(spec, ScanCheckpointPolicy) and callable(spec.save_block_internals)
    ):
        raise ValueError(
            f"{spec!r} holds a function, which a config cannot. Name what is saved"
            " instead."
        )
    if isinstance(spec, bool | str):
        return spec
    spec = resolve_policy(spec)
    if (alias := alias_of(spec)) is not None:
        return alias
    entry = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in spec.settings()
    }
    return entry


def remat_lines(spec: ScanCheckpointSpec, *, streamed: bool) -> str:
    """The lines of a config with this policy, and with weights on the host or not."""
    entries: dict[str, Any] = {"remat": remat_entry(spec)}
    if streamed:
        entries["trainer"] = {"streaming": True}
    lines = []
    for name, value in entries.items():
        # In one line, which has the braces of a mapping around it
        line = yaml.safe_dump({name: value}, default_flow_style=True, width=2**16)
        lines.append(line.strip()[1:-1])
    return "\n".join(lines)


def check_remat(
    remat: RematEntry,
    budget: int | str | None,
    host_budget: int | str | None,
    presets: RematPresets = NO_PRESETS,
) -> ScanCheckpointPolicy | None:
    """The policy of a `remat` config entry, or None for `auto`, which is found later
    from the budgets.

    Raises:
        ValueError: as `remat_policy`; a budget is missing, has no effect, or cannot be
            read; carries on disk have no folder.
    """
    policy = None if remat == "auto" else remat_policy(remat, presets)
    budgets = {"budget": budget, "host_budget": host_budget}
    given = {name: size for name, size in budgets.items() if size is not None}
    for name, size in given.items():
        if policy is not None:
            raise ValueError(
                f"{name} = {size} has no effect beside remat: {remat}. Write remat:"
                " auto."
            )
        try:
            parse_bytes(size)
        except ValueError as error:
            raise ValueError(f"{name}: {error}.") from error
    if policy is None and budget is None:
        raise ValueError(
            "remat: auto takes the policy that fits a budget, and none is given. Say"
            " how much device memory the step may take: budget: 72GiB."
        )
    if policy is not None and policy.save_carries == DISK:
        policy.disk_folder()  # an error before the step is traced
    return policy
