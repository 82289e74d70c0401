"""The layout of PEFT's tensors: two for an adapter, shared by the adapters of a fused
parameter.

The adapter of a module has `MODULE.lora_A.weight`, `[rank, in]`, and
`MODULE.lora_B.weight`, `[out, rank]`. For a parameter with many matrices, such as the
experts of a layer, the rows of all A are concatenated and the columns of all B
interleaved. Adapters of the parts of one fused matrix (gate and up; query, key and
value) form one adapter of the summed rank: the A concatenated, the B on the diagonal of
a larger B.
"""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
from jaxtyping import Float

PREFIX = "base_model.model."
# As `slice` takes them: first, one after the last, step; None for all
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
        swapped: whether PEFT takes the linear's inputs for outputs, so that A has the
            place of B.
        row_blocks: into how many blocks of equal size the matrix's rows are cut;
            `rows` are of each, one block after the other.
    """

    module: str
    parameter: str
    index: int = 0
    size: int = 1
    order: int = 0
    rows: Rows = None
    swapped: bool = False
    row_blocks: int = 1

    @property
    def target(self) -> str:
        """The name that patterns are matched with."""
        if not self.parameter:
            return self.module
        return f"{self.module}.{self.parameter}"


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
        parameter: the position of one of them; all have the same target, size, order
            and blocks of rows.
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
        own: dict[tuple[Rows, int], Pair] = {}
        for at, where in self.members.items():
            if where in pairs:
                own[at] = pairs[where]
        if not own:
            return None
        size = self.parameter.size
        # The parts of a fused matrix that have adapters, from its first row on
        adapted = {rows for rows, _ in own}
        parts = sorted(adapted, key=lambda rows: rows or ())
        scale = self._common_scale(own, parts)
        # Each part has a rank of its own, the same in all matrices.
        ranks = {}
        for rows in parts:
            first_matrix = own[rows, 0]
            ranks[rows] = len(first_matrix.a)
        rank = sum(ranks.values())
        a = np.zeros((size, rank, self.narrow), np.float32)
        b = np.zeros((self.wide, rank, size), np.float32)
        first = 0  # of the columns of B, and rows of A, of a part
        for rows in parts:
            last = first + ranks[rows]
            columns = slice(first, last)
            outputs = self._outputs(b, rows)  # a view
            for index in range(size):
                pair = own[rows, index]
                a[index, columns] = pair.a
                own_outputs = outputs[..., columns, index]
                own_outputs[...] = pair.b.reshape(own_outputs.shape)
            first = last
        if self.parameter.swapped:
            a, b = np.transpose(b), np.transpose(a)
        rows_of_all = a.reshape(-1, self.shape[1])
        # The matrices are the fastest dimension: PEFT interleaves the columns.
        columns_of_all = b.reshape(self.shape[0], -1)
        return Pair(rows_of_all, columns_of_all, scale)

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs of a matrix, as PEFT takes them."""
        if self.parameter.swapped:
            return self.narrow, self.wide
        return self.wide, self.narrow

    def _common_scale(
        self, own: Mapping[tuple[Rows, int], Pair], parts: Iterable[Rows]
    ) -> float:
        """The scale of the pairs, of which there has to be one for each matrix of these
        parts: two tensors have one rank and scale.
        """
        places = itertools.product(parts, range(self.parameter.size))
        lacking = [place for place in places if place not in own]
        scales = {pair.scale for pair in own.values()}
        if not lacking and len(scales) == 1:
            return scales.pop()
        reason = f"their scales are {sorted(scales)}"
        if lacking:
            reason = f"(rows, index) {lacking} have none"
        raise ValueError(
            f"The adapters of {self.parameter.target} can't be written as one:"
            f" {reason}."
        )

    def take_apart(self, pair: Pair) -> dict[Where, Pair]:
        """The inverse of `assemble`.

        A part of a matrix gets the columns of B that are not all zero in its rows, and
        none has an adapter if all are; in a B of zeros, every part has the whole rank.
        """
        size = self.parameter.size
        parts = {rows for rows, _ in self.members}
        outputs, inputs = self.shape
        # [matrix, rank, in] and [out, rank, matrix], as they were put together
        a = pair.a.reshape(size, -1, inputs)
        b = pair.b.reshape(outputs, -1, size)
        if self.parameter.swapped:
            a, b = np.transpose(b), np.transpose(a)
        # As PEFT initialises adapters, B is zero: nothing says then which columns are
        # of which part.
        has_all_columns = len(parts) == 1 or not b.any()
        columns_of = {}
        for rows in parts:
            # In any of its matrices, since all have one rank
            outputs_of_part = self._outputs(b, rows)
            has_values = outputs_of_part.any(axis=(0, 1, 3))
            columns_of[rows] = has_values | has_all_columns
        pairs = {}
        for (rows, index), where in self.members.items():
            columns = columns_of[rows]
            if columns.any():
                outputs_of_part = self._outputs(b, rows)
                own_a = a[index, columns]
                own_b = outputs_of_part[..., columns, index]
                # The blocks of rows one after the other
                own_b = own_b.reshape(-1, own_b.shape[-1])
                pairs[where] = Pair(own_a, own_b, pair.scale)
        return pairs

    def _outputs(self, matrix: np.ndarray, rows: Rows) -> np.ndarray:
        """The rows of a matrix that are the outputs of a part, `[block, row, ...]`."""
        blocks = matrix.reshape(self.parameter.row_blocks, -1, *matrix.shape[1:])
        if rows is None:
            return blocks
        of_part = slice(*rows)
        return blocks[:, of_part]


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
    for where, parameter, narrow, wide in linears:
        own = members.setdefault(parameter.target, {})
        place = parameter.rows, parameter.index
        if place in own:
            raise ValueError(f"Two linears are named {parameter}.")
        own[place] = where
        # A fused matrix ends with the last row of any part.
        last = wide
        if parameter.rows is not None:
            _, after_last, _ = parameter.rows
            last = after_last * parameter.row_blocks
        before = found.get(parameter.target)
        if before is None:
            before = Target(parameter, narrow, 0, own)
        widest = max(before.wide, last)
        found[parameter.target] = replace(before, wide=widest)
    return found


def tensor_keys(targets: Mapping[str, Target]) -> dict[str, tuple[str, str]]:
    """The keys of A and B for every adapted target.

    PEFT wraps a module once for every adapted parameter, the first defined innermost,
    and the names of an inner wrapper's tensors have the path through the outer ones.
    """
    by_module: dict[str, list[str]] = {}
    for name in sorted(targets, key=lambda name: targets[name].parameter.order):
        module = targets[name].parameter.module
        by_module.setdefault(module, []).append(name)
    keys = {}
    for module, inside_out in by_module.items():
        # Each wrapper calls what it wraps `base_layer`.
        for wrappers, name in enumerate(reversed(inside_out)):
            stem = f"{PREFIX}{module}{'.base_layer' * wrappers}"
            keys[name] = (f"{stem}.lora_A.weight", f"{stem}.lora_B.weight")
    return keys
