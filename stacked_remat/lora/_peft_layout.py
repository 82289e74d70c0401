"""The layout of PEFT's tensors: two for an adapter, shared by the adapters of a fused parameter.

The adapter of a module has `MODULE.lora_A.weight`, `[rank, in]`, and `MODULE.lora_B.weight`, `[out, rank]`.
For a parameter with many matrices, such as the experts of a layer, the rows of all A are concatenated and the
columns of all B interleaved. Adapters of the parts of one fused matrix (gate and up) form one adapter of the
summed rank: the A concatenated, the B on the diagonal of a larger B.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
        part: which of the equal blocks of that matrix's rows are the linear's outputs.
        parts: how many blocks there are.
        order: the position of the parameter in the order of definition in its module, on which the names of
            tensors depend.
    """

    module: str
    parameter: str
    index: int = 0
    size: int = 1
    part: int = 0
    parts: int = 1
    order: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.index < self.size and 0 <= self.part < self.parts):
            raise ValueError(f"index and part of {self} must be below size and parts.")

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


@dataclass(frozen=True)
class Place:
    """Two tensors, and the linears whose adapters they hold: one if no parameter is shared.

    Attributes:
        target: see `PeftParameter`.
        members: the linears, by part and index.
        size: see `PeftParameter`.
        parts: see `PeftParameter`.
    """

    target: str
    members: Mapping[tuple[int, int], PeftParameter]
    size: int
    parts: int


def places_of(members: Sequence[PeftParameter]) -> dict[str, Place]:
    """Group members by target.

    Raises:
        ValueError: two linears have one position, or members of a target disagree on its layout.
    """
    groups: dict[str, dict[tuple[int, int], PeftParameter]] = {}
    for one in members:
        group = groups.setdefault(one.target, {})
        if (one.part, one.index) in group:
            raise ValueError(f"Two linears are named {one}.")
        group[one.part, one.index] = one
    places = {}
    for target, group in groups.items():
        kinds = {(one.size, one.parts, one.order) for one in group.values()}
        if len(kinds) > 1:
            raise ValueError(f"The linears named {target} disagree on (size, parts, order): {sorted(kinds)}.")
        ((size, parts, _),) = kinds
        places[target] = Place(target, group, size, parts)
    return places


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
    b: Float[np.ndarray, "parts*out rank*size"]
    rank: int
    scale: float
    part_ranks: tuple[int, ...]


def assemble(place: Place, pairs: Mapping[tuple[int, int], Pair]) -> Assembled:
    """The two tensors for `pairs`, which are by part and index.

    Raises:
        ValueError: only some of the matrices have an adapter, or scales differ.
    """
    present = sorted({part for part, _ in pairs})
    lacking = [(p, i) for p in present for i in range(place.size) if (p, i) not in pairs]
    scales = {pair.scale for pair in pairs.values()}
    if lacking or len(scales) > 1:
        reason = f"(part, index) {lacking} have none" if lacking else f"they have the scales {sorted(scales)}"
        raise ValueError(f"The adapters of {place.target} can't be written as one: {reason}.")
    ranks = {part: pairs[part, 0].a.shape[0] for part in present}
    some = pairs[present[0], 0]
    wide, rank = some.b.shape[0], sum(ranks.values())
    a = np.zeros((place.size, rank, some.a.shape[1]), np.float32)
    b = np.zeros((place.parts * wide, rank, place.size), np.float32)
    first = 0
    for part in present:
        columns = slice(first, first + ranks[part])
        for index in range(place.size):
            a[index, columns] = pairs[part, index].a
            b[part * wide : (part + 1) * wide, columns, index] = pairs[part, index].b
        first = columns.stop
    part_ranks = tuple(ranks.get(part, 0) for part in range(place.parts))
    return Assembled(a.reshape(-1, a.shape[-1]), b.reshape(b.shape[0], -1), rank, scales.pop(), part_ranks)


def take_apart(
    place: Place, a: np.ndarray, b: np.ndarray, scale: float, part_ranks: Sequence[int] | None
) -> dict[tuple[int, int], Pair]:
    """The inverse of `assemble`.

    Args:
        place: the layout of the tensors.
        a: the tensor of all A.
        b: the tensor of all B.
        scale: of all of them.
        part_ranks: the rank of each part if they are on the diagonal of B, as `assemble` writes them, 0 for a
            part without adapter. `None` if the parts share A: each has the whole rank.
    """
    a = a.reshape(place.size, -1, a.shape[-1])
    b = b.reshape(b.shape[0], -1, place.size)
    wide, first, pairs = b.shape[0] // place.parts, 0, {}
    for part in range(place.parts):
        columns = slice(None)
        if part_ranks is not None:
            columns = slice(first, first + part_ranks[part])
            first = columns.stop
        if columns.start == columns.stop is not None:
            continue
        for index in range(place.size):
            if (part, index) in place.members:
                rows = b[part * wide : (part + 1) * wide, columns, index]
                pairs[part, index] = Pair(a[index, columns], rows, scale)
    return pairs
