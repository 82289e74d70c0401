"""Where PEFT keeps the two matrices of an adapter, and how several adapters share two tensors.

The adapter of a module has `MODULE.lora_A.weight`, `[rank, in]`, and `MODULE.lora_B.weight`, `[out, rank]`.
That of a parameter that holds many matrices, such as the experts of a layer, has the rows of all the A below
one another and the columns of all the B interleaved. Where matrices of their own are parts of one fused
matrix (gate and up, one above the other), their adapters are one of the summed rank: the A below one another,
the B on the diagonal of a larger B.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

PREFIX = "base_model.model."


@dataclass(frozen=True)
class PeftParameter:
    """The place of one linear's adapter among those of a parameter (PEFT's `target_parameters`).

    Attributes:
        module: the module that holds the parameter, `model.layers.0.mlp.experts`.
        parameter: its name there, `gate_up_proj`.
        index: which of its matrices this is; an expert's number.
        size: how many it holds; 1 for a matrix by itself.
        part: which of the equal blocks of that matrix's rows are the linear's outputs.
        parts: how many blocks there are.
        order: where the parameter stands among those of its module, in the order of their definition, on
            which the names of the tensors depend.
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
        """The name that patterns of ranks and targets are matched with."""
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
    """Two tensors, and all the linears whose adapters they hold: one where no parameter is shared.

    Attributes:
        target: see `PeftParameter`.
        members: who is in it, by part and index.
        size: see `PeftParameter`.
        parts: see `PeftParameter`.
    """

    target: str
    members: Mapping[tuple[int, int], PeftParameter]
    size: int
    parts: int


def places_of(members: Sequence[PeftParameter]) -> dict[str, Place]:
    """Groups members by their target.

    Raises:
        ValueError: two linears in one place, or members that disagree on what they are in.
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

    PEFT wraps a module once for every adapted parameter, the first defined innermost, and names the tensors
    of a wrapper that is inside others after the path through these.
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
    """What `assemble` makes of the pairs of one place.

    Attributes:
        a: the tensor of all A.
        b: the tensor of all B.
        rank: of one matrix, all its parts together.
        scale: factor of every output.
        part_ranks: how the rank is made up.
    """

    a: Float[np.ndarray, "size*rank in"]
    b: Float[np.ndarray, "parts*out rank*size"]
    rank: int
    scale: float
    part_ranks: tuple[int, ...]


def assemble(place: Place, pairs: Mapping[tuple[int, int], Pair]) -> Assembled:
    """The two tensors that hold `pairs`, by part and index.

    Raises:
        ValueError: matrices without an adapter beside others that have one, or pairs of several scales.
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
        place: what the tensors hold.
        a: the tensor of all A.
        b: the tensor of all B.
        scale: of all of them.
        part_ranks: the rank of each part where these stand on the diagonal of B, as `assemble` writes them, 0
            for a part without adapter. `None` where the parts share their A: each then has the whole rank.
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
