"""The layout of PEFT's tensors: two for an adapter, shared by the adapters of a fused
parameter.

The adapter of a module has `MODULE.lora_A.weight`, `[rank, in]`, and
`MODULE.lora_B.weight`, `[out, rank]`. For a parameter with many matrices, such as the
experts of a layer, the rows of all A are concatenated and the columns of all B
interleaved. Adapters of the parts of one fused matrix (gate and up; query, key and
value) form one adapter of the summed rank: the A concatenated, the B on the diagonal of
a larger B.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
from jaxtyping import Float

PREFIX = "base_model.model."
Rows: TypeAlias = tuple[int, int, int] | None
Where: TypeAlias = tuple[str, tuple[int, ...]]
"""One matrix of the model: the path of its linear, and its index in the stacks of that.
"""


@dataclass(frozen=True)
class PeftParameter:
    """The position of one linear's adapter in a parameter (PEFT's `target_parameters`).

    Attributes:
        module: the module that holds the parameter, `model.layers.0.mlp.experts`.
        parameter: its name there, `gate_up_proj`; empty for an adapter of the module
            itself.
        index: which of its matrices this is; an expert's number.
        size: how many matrices it has; 1 for a single matrix.
        order: the position of the parameter in the order of definition in its module,
            on which the names of tensors depend.
        rows: the rows of that matrix that are the linear's outputs, as `slice` takes
            them: the first, the one after the last, and the step; None for all of them.
    """

    module: str
    parameter: str
    index: int = 0
    size: int = 1
    order: int = 0
    rows: Rows = None

    @property
    def target(self) -> str:
        """The name that patterns are matched with."""
        return f"{self.module}.{self.parameter}" if self.parameter else self.module


@dataclass(frozen=True)
class Pair:
    """The A and B of one linear of one layer, or of all that share two tensors, as PEFT
    has them.
    """

    a: Float[np.ndarray, "rank in"]
    b: Float[np.ndarray, "out rank"]
    scale: float


@dataclass(frozen=True)
class Target:
    """What two tensors adapt: a module, or a parameter with the matrices of several
    linears.

    Attributes:
        parameter: the position of one of them; all have the same target, size and
            order.
        narrow, wide: the inputs of a matrix, and its outputs.
        members: the matrices of the model that are in it, by rows and index.
    """

    parameter: PeftParameter
    narrow: int
    wide: int
    members: Mapping[tuple[Rows, int], Where] = field(repr=False)

    def assemble(self, pairs: Mapping[Where, Pair]) -> Pair | None:
        """The two tensors, `[size * rank, in]` and `[out, rank * size]`, of those
        members that have a pair.

        Raises:
            ValueError: only some of the matrices have an adapter, or scales differ.
        """
        own = {at: pairs[where] for at, where in self.members.items() if where in pairs}
        if not own:
            return None
        size, present = (
            self.parameter.size,
            sorted({rows for rows, _ in own}, key=lambda rows: rows or ()),
        )
        lacking = [
            (rows, i) for rows in present for i in range(size) if (rows, i) not in own
        ]
        scales = {pair.scale for pair in own.values()}
        if lacking or len(scales) > 1:
            reason = (
                f"(rows, index) {lacking} have none"
                if lacking
                else f"their scales are {sorted(scales)}"
            )
            raise ValueError(
                f"The adapters of {self.parameter.target} can't be written as one:"
                f" {reason}."
            )
        rank = sum(own[rows, 0].a.shape[0] for rows in present)
        a = np.zeros((size, rank, self.narrow), np.float32)
        b = np.zeros((self.wide, rank, size), np.float32)
        first = 0
        for rows in present:
            columns = slice(first, first + own[rows, 0].a.shape[0])
            for index in range(size):
                a[index, columns] = own[rows, index].a
                _outputs(b, rows)[:, columns, index] = own[rows, index].b
            first = columns.stop
        return Pair(a.reshape(-1, self.narrow), b.reshape(self.wide, -1), scales.pop())

    def take_apart(self, pair: Pair) -> dict[Where, Pair]:
        """The inverse of `assemble`.

        A part of a matrix gets the columns of B that are not all zero in its rows, and
        none has an adapter if all are; in a B of zeros, every part has the whole rank.
        """
        size, parts = self.parameter.size, {rows for rows, _ in self.members}
        a, b = (
            pair.a.reshape(size, -1, self.narrow),
            pair.b.reshape(self.wide, -1, size),
        )
        whole, pairs = len(parts) == 1 or not b.any(), {}
        used = {rows: whole or _outputs(b, rows).any(axis=(0, 2)) for rows in parts}
        for (rows, index), where in self.members.items():
            columns = np.broadcast_to(used[rows], a.shape[1])
            if columns.any():
                pairs[where] = Pair(
                    a[index, columns], _outputs(b, rows)[:, columns, index], pair.scale
                )
        return pairs


def _outputs(matrix: np.ndarray, rows: Rows) -> np.ndarray:
    return matrix if rows is None else matrix[slice(*rows)]


def find_targets(
    linears: Iterable[tuple[Where, PeftParameter, int, int]],
) -> dict[str, Target]:
    """The targets of matrices, each with its position, and how many inputs and outputs
    it has.

    Raises:
        ValueError: two matrices have one position.
    """
    members: dict[str, dict[tuple[Rows, int], Where]] = {}
    found: dict[str, Target] = {}
    for where, one, narrow, wide in linears:
        own = members.setdefault(one.target, {})
        if (one.rows, one.index) in own:
            raise ValueError(f"Two linears are named {one}.")
        own[one.rows, one.index] = where
        before = found.get(one.target, Target(one, narrow, 0, own))
        found[one.target] = replace(
            before, wide=max(before.wide, one.rows[1] if one.rows else wide)
        )
    return found


def tensor_keys(targets: Mapping[str, Target]) -> dict[str, tuple[str, str]]:
    """The keys of A and B for every adapted target.

    PEFT wraps a module once for every adapted parameter, the first defined innermost,
    and the names of an inner wrapper's tensors have the path through the outer ones.
    """
    by_module: dict[str, list[str]] = {}
    for name, target in sorted(
        targets.items(), key=lambda item: item[1].parameter.order
    ):
        by_module.setdefault(target.parameter.module, []).append(name)
    keys = {}
    for module, inside_out in by_module.items():
        for around, target in enumerate(reversed(inside_out)):
            stem = f"{PREFIX}{module}{'.base_layer' * around}"
            keys[target] = (f"{stem}.lora_A.weight", f"{stem}.lora_B.weight")
    return keys
