"""Policies that are like others, but keep more, or less, where these recompute."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from .. import ScanCheckpointPolicy
from ._model import NESTED, Model

# Of more numbers of layers or carries than the first, the second many are tried.
_MOST_NUMBERS = 128
_SOME_NUMBERS = 24
# About so many numbers of first layers are tried beside each cut and what it keeps.
_SOME_FIRST_LAYERS = 48


def variations(
    base: ScanCheckpointPolicy, model: Model
) -> Iterator[ScanCheckpointPolicy]:
    """A policy, and others that keep more where it recomputes."""
    yield base
    if not is_varied(base):
        return
    if base.max_carries is not None:
        for count in _numbers(2, model.layers):
            yield dataclasses.replace(base, max_carries=count)
        return
    for count in _numbers(1, model.layers - 1):
        yield dataclasses.replace(base, first_layers=count)
    if base.has_cut:
        yield from _cuts(base, model)
    # Values are not kept beside carries on disk.
    elif base.save_carries != "disk":
        yield from _kept_values(base, model)


def is_varied(policy: ScanCheckpointPolicy) -> bool:
    """Whether it says no more than where carries are kept and how layers are cut."""
    keeps = policy.save_block_internals or policy.offload_block_internals
    return not (keeps or policy.first_layers or policy.save_carries is False)


def _cuts(base: ScanCheckpointPolicy, model: Model) -> Iterator[ScanCheckpointPolicy]:
    """Other cuts than into the segments of a policy: so many carries, and so many
    segments of one length, some layers before them. Values may be kept of each segment
    while it is reversed.
    """
    kept: list[Any] = []
    # Values are not kept beside carries on disk.
    if model.keeps_values and base.save_carries != "disk":
        kept = [*filter(None, model.choices), True]
    if base == NESTED:
        for count in _numbers(2, model.layers - 1):
            for names in (False, *kept):
                yield ScanCheckpointPolicy(
                    max_carries=count, save_block_internals=names
                )
    # Segments of one length are better than as many carries on the device only where
    # layers are of several kinds.
    if base != NESTED or model.has_kinds:
        kept.append(False)
    is_long = model.layers > _MOST_NUMBERS
    step = math.ceil(model.layers / _SOME_FIRST_LAYERS)
    for first_layers in range(0, 1 if is_long else model.layers, step):
        rest = model.layers - first_layers
        counts = {math.ceil(rest / length) for length in _numbers(1, rest)}
        for count in sorted(counts):
            for names in kept:
                yield dataclasses.replace(
                    base,
                    nested=count,
                    save_block_internals=names,
                    first_layers=first_layers,
                )


def _numbers(least: int, most: int) -> list[int]:
    """The numbers between two, or some of them, in equal ratios, if there are many:
    each costs a schedule, which for a long loop takes long to make.
    """
    if most <= _MOST_NUMBERS:
        return [*range(least, most + 1)]
    ratios = (power / _SOME_NUMBERS for power in range(_SOME_NUMBERS + 1))
    return sorted({round(least * (most / least) ** ratio) for ratio in ratios})


def _kept_values(
    base: ScanCheckpointPolicy, model: Model
) -> Iterator[ScanCheckpointPolicy]:
    """The policy with values kept of every layer, on the device or the host."""
    choices = [names for names in model.choices if names]
    for names in choices:
        yield dataclasses.replace(base, save_block_internals=names)
    # What a choice keeps beside another is on the host.
    for saved in ((), *choices):
        for names in choices:
            if {*saved} < {*names}:
                yield dataclasses.replace(
                    base,
                    save_block_internals=saved,
                    offload_block_internals=sorted({*names} - {*saved}),
                )
