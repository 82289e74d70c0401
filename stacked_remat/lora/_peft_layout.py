"""The layout of PEFT's tensors: two for an adapter, shared by the adapters of a fused parameter.

The adapter of a module has `MODULE.lora_A.weight`, `[rank, in]`, and `MODULE.lora_B.weight`, `[out, rank]`.
For a parameter with many matrices, such as the experts of a layer, the rows of all A are concatenated and the
columns of all B interleaved. Adapters of the parts of one fused matrix (gate and up; query, key and value)
form one adapter of the summed rank: the A concatenated, the B on the diagonal of a larger B.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
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
        parameter: its name there, `gate_up_proj`.
        index: which of its matrices this is; an expert's number.
        size: how many matrices it has; 1 for a single matrix.
        part: which of the parts of that matrix's rows are the linear's outputs.
        parts: how many parts there are.
        order: the position of the parameter in the order of definition in its module, on which the names of
            tensors depend.
        interleaved: whether parts alternate row by row, rather than being blocks of rows.
        widths: how many rows each part has; empty if all have the same number.
    """

    module: str
    parameter: str
    index: int = 0
    size: int = 1
    part: int = 0
    parts: int = 1
    order: int = 0
    interleaved: bool = False
    widths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not (0 <= self.index < self.size and 0 <= self.part < self.parts):
            raise ValueError(f"index and part of {self} must be below size and parts.")
        if self.widths and (self.interleaved or len(self.widths) != self.parts):
            raise ValueError(f"widths of {self} must be one for each part, and parts not interleaved.")

    def num_rows(self, wide: int) -> int:
        """How many rows the matrix has if those of the linear are `wide`."""
        return sum(self.widths) or wide * self.parts

    def rows(self, matrix: np.ndarray) -> np.ndarray:
        """The view of the matrix's rows that are the linear's outputs."""
        if self.interleaved:
            return matrix[self.part :: self.parts]
        if self.widths:
            first = sum(self.widths[: self.part])
            return matrix[first : first + self.widths[self.part]]
        wide = matrix.shape[0] // self.parts
        return matrix[self.part * wide : (self.part + 1) * wide]

    @property
    def target(self) -> str:
        """The name that patterns are matched with."""
        return f"{self.module}.{self.parameter}" if self.parameter else self.module


@dataclass(frozen=True)
class Pair:
    """The adapter of one linear of one layer, in PEFT's orientation.

    Attributes:
        a: A transposed.
        b: B transposed.
        scale: factor of its output.
    """

    a: Float[np.ndarray, "rank in"]
    b: Float[np.ndarray, "out rank"]
    scale: float


Place: TypeAlias = Mapping[tuple[int, int], PeftParameter]
"""The linears whose adapters two tensors hold, by part and index; one if no parameter is shared."""


def any_of(place: Place) -> PeftParameter:
    """One of the linears; all have the same target, sizes and order."""
    return next(iter(place.values()))


def places_of(members: Iterable[PeftParameter]) -> dict[str, Place]:
    """Group members by target.

    Raises:
        ValueError: two linears have one position, or members of a target disagree on its layout.
    """
    places: dict[str, dict[tuple[int, int], PeftParameter]] = {}
    for one in members:
        place = places.setdefault(one.target, {})
        if (one.part, one.index) in place:
            raise ValueError(f"Two linears are named {one}.")
        place[one.part, one.index] = one
    for target, place in places.items():
        kinds = {(one.size, one.parts, one.order, one.interleaved, one.widths) for one in place.values()}
        if len(kinds) > 1:
            raise ValueError(
                f"The linears named {target} disagree on (size, parts, order, interleaved, widths): "
                f"{sorted(kinds)}."
            )
    return {**places}


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


@dataclass(frozen=True)
class Assembled:
    """The tensors of one place.

    Attributes:
        a: the tensor of all A.
        b: the tensor of all B.
        rank: of one matrix, summed over its parts.
        scale: factor of every output.
        part_ranks: the rank of each part.
    """

    a: Float[np.ndarray, "size*rank in"]
    b: Float[np.ndarray, "rows rank*size"]
    rank: int
    scale: float
    part_ranks: tuple[int, ...]


def assemble(place: Place, pairs: Mapping[PeftParameter, Pair]) -> Assembled | None:
    """The two tensors for those of `pairs` that are of this place; None if none is.

    Raises:
        ValueError: only some of the matrices have an adapter, or scales differ.
    """
    own = {at: pairs[member] for at, member in place.items() if member in pairs}
    if not own:
        return None
    layout, present = any_of(place), sorted({part for part, _ in own})
    lacking = [(p, i) for p in present for i in range(layout.size) if (p, i) not in own]
    scales = {pair.scale for pair in own.values()}
    if lacking or len(scales) > 1:
        reason = f"(part, index) {lacking} have none" if lacking else f"they have the scales {sorted(scales)}"
        raise ValueError(f"The adapters of {layout.target} can't be written as one: {reason}.")
    ranks = {part: own[part, 0].a.shape[0] for part in present}
    some = own[present[0], 0]
    num_rows, rank = layout.num_rows(some.b.shape[0]), sum(ranks.values())
    a = np.zeros((layout.size, rank, some.a.shape[1]), np.float32)
    b = np.zeros((num_rows, rank, layout.size), np.float32)
    first = 0
    for part in present:
        columns = slice(first, first + ranks[part])
        for index in range(layout.size):
            a[index, columns] = own[part, index].a
            place[part, index].rows(b)[:, columns, index] = own[part, index].b
        first = columns.stop
    part_ranks = tuple(ranks.get(part, 0) for part in range(layout.parts))
    return Assembled(a.reshape(-1, a.shape[-1]), b.reshape(b.shape[0], -1), rank, scales.pop(), part_ranks)


def take_apart(
    place: Place, a: np.ndarray, b: np.ndarray, scale: float, part_ranks: Sequence[int] | None
) -> dict[PeftParameter, Pair]:
    """The inverse of `assemble`.

    Args:
        place: the linears whose adapters the tensors hold.
        a: the tensor of all A.
        b: the tensor of all B.
        scale: of all of them.
        part_ranks: the rank of each part if they are on the diagonal of B, as `assemble` writes them, 0 for a
            part without adapter. `None` if the parts share A: each has the whole rank.
    """
    layout = any_of(place)
    a = a.reshape(layout.size, -1, a.shape[-1])
    b = b.reshape(b.shape[0], -1, layout.size)
    columns = [slice(None)] * layout.parts
    if part_ranks is not None:
        ends = itertools.accumulate(part_ranks)
        columns = [slice(end - rank, end) for rank, end in zip(part_ranks, ends, strict=True)]
    pairs = {}
    for (part, index), member in place.items():
        own = a[index, columns[part]]
        if len(own):
            pairs[member] = Pair(own, member.rows(b)[:, columns[part], index], scale)
    return pairs
