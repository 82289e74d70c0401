"""The layout of PEFT's tensors: two for an adapter, shared by the adapters of a fused parameter.

The adapter of a module has `MODULE.lora_A.weight`, `[rank, in]`, and `MODULE.lora_B.weight`, `[out, rank]`.
For a parameter with many matrices, such as the experts of a layer, the rows of all A are concatenated and the
columns of all B interleaved. Adapters of the parts of one fused matrix (gate and up; query, key and value)
form one adapter of the summed rank: the A concatenated, the B on the diagonal of a larger B.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from jaxtyping import Float

PREFIX = "base_model.model."


@dataclass(frozen=True)
class PeftParameter:
    """The position of one linear's adapter in a parameter (PEFT's `target_parameters`).

    Attributes:
        module: the module that holds the parameter, `model.layers.0.mlp.experts`.
        parameter: its name there, `gate_up_proj`; empty for an adapter of the module itself.
        index: which of its matrices this is; an expert's number.
        size: how many matrices it has; 1 for a single matrix.
        order: the position of the parameter in the order of definition in its module, on which the names of
            tensors depend.
        rows: the rows of that matrix that are the linear's outputs, as `slice` takes them: the first, the one
            after the last, and the step; None for all of them.
    """

    module: str
    parameter: str
    index: int = 0
    size: int = 1
    order: int = 0
    rows: tuple[int, int, int] | None = None

    def outputs(self, matrix: np.ndarray) -> np.ndarray:
        """The view of the matrix's rows that are the linear's outputs."""
        return matrix if self.rows is None else matrix[slice(*self.rows)]

    @property
    def target(self) -> str:
        """The name that patterns are matched with."""
        return f"{self.module}.{self.parameter}" if self.parameter else self.module


@dataclass(frozen=True)
class Pair:
    """The A and B of one linear of one layer, or of all that share two tensors, as PEFT has them."""

    a: Float[np.ndarray, "rank in"]
    b: Float[np.ndarray, "out rank"]
    scale: float


Rows: TypeAlias = tuple[int, int, int] | None
Members: TypeAlias = Mapping[tuple[Rows, int], PeftParameter]
"""The linears whose adapters two tensors hold, by rows and index; one if no parameter is shared."""


def first_of(members: Members) -> PeftParameter:
    """One of the linears; all have the same target, size and order."""
    return next(iter(members.values()))


def num_rows(members: Members, wide: int) -> int:
    """How many rows a matrix has, if a linear that has all of them has so many outputs."""
    return max(wide if rows is None else rows[1] for rows, _ in members)


def members_by_target(parameters: Iterable[PeftParameter]) -> dict[str, Members]:
    """Group linears by target.

    Raises:
        ValueError: two linears have one position.
    """
    found: dict[str, dict[tuple[Rows, int], PeftParameter]] = {}
    for one in parameters:
        members = found.setdefault(one.target, {})
        if (one.rows, one.index) in members:
            raise ValueError(f"Two linears are named {one}.")
        members[one.rows, one.index] = one
    return {**found}


def tensor_keys(targets: Mapping[str, PeftParameter]) -> dict[str, tuple[str, str]]:
    """The keys of A and B for every adapted target, given one of its members.

    PEFT wraps a module once for every adapted parameter, the first defined innermost, and the names of an
    inner wrapper's tensors have the path through the outer ones.
    """
    by_module: dict[str, list[str]] = {}
    for target in sorted(targets, key=lambda target: targets[target].order):
        by_module.setdefault(targets[target].module, []).append(target)
    keys = {}
    for module, inside_out in by_module.items():
        for around, target in enumerate(reversed(inside_out)):
            stem = f"{PREFIX}{module}{'.base_layer' * around}"
            keys[target] = (f"{stem}.lora_A.weight", f"{stem}.lora_B.weight")
    return keys


def assemble(members: Members, pairs: Mapping[PeftParameter, Pair]) -> Pair | None:
    """The two tensors, `[size * rank, in]` and `[rows, rank * size]`, for those of `pairs` that are members.

    Raises:
        ValueError: only some of the matrices have an adapter, or scales differ.
    """
    own = {at: pairs[member] for at, member in members.items() if member in pairs}
    if not own:
        return None
    layout, present = first_of(members), sorted({rows for rows, _ in own}, key=lambda rows: rows or ())
    lacking = [(rows, i) for rows in present for i in range(layout.size) if (rows, i) not in own]
    scales = {pair.scale for pair in own.values()}
    if lacking or len(scales) > 1:
        reason = f"(rows, index) {lacking} have none" if lacking else f"they have the scales {sorted(scales)}"
        raise ValueError(f"The adapters of {layout.target} can't be written as one: {reason}.")
    some, rank = own[present[0], 0], sum(own[rows, 0].a.shape[0] for rows in present)
    a = np.zeros((layout.size, rank, some.a.shape[1]), np.float32)
    b = np.zeros((num_rows(members, some.b.shape[0]), rank, layout.size), np.float32)
    first = 0
    for rows in present:
        columns = slice(first, first + own[rows, 0].a.shape[0])
        for index in range(layout.size):
            a[index, columns] = own[rows, index].a
            members[rows, index].outputs(b)[:, columns, index] = own[rows, index].b
        first = columns.stop
    return Pair(a.reshape(-1, a.shape[-1]), b.reshape(b.shape[0], -1), scales.pop())


def take_apart(members: Members, pair: Pair) -> dict[PeftParameter, Pair]:
    """The inverse of `assemble`.

    A part of a matrix gets the columns of B that are not all zero in its rows, and none has an adapter if all
    are; in a B of zeros, every part has the whole rank.
    """
    size, parts = first_of(members).size, {rows for rows, _ in members}
    a = pair.a.reshape(size, -1, pair.a.shape[-1])
    b = pair.b.reshape(pair.b.shape[0], -1, size)
    whole, pairs = len(parts) == 1 or not b.any(), {}
    used = {member.rows: whole or member.outputs(b).any(axis=(0, 2)) for member in members.values()}
    for (rows, index), member in members.items():
        columns = np.broadcast_to(used[rows], a.shape[1])
        if columns.any():
            pairs[member] = Pair(a[index, columns], member.outputs(b)[:, columns, index], pair.scale)
    return pairs
