"""What policies cost beside each other, by a model of a program's layers.

Of N layers a policy keeps some carries, on the device or the host, and values inside
some layers; the rest runs again. Both follow from what it executes (`Remat`): the
number of slots and of replayed layers from its schedule, the bytes and the FLOPs of
values from the layers (`_values.py`). What all policies have in common, arguments and
one layer's work, is measured by compiling one of them.

FLOPs are those of the traced program, for the gradient of a loss. Bytes are near those
that XLA allocates (Qwen3-30B-A3B on an H200, temporaries in GB: `True` 16.76, compiled
16.82; `attention_saved` 42.99, compiled 42.78). So the model says which policies to
compile, and no more.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .. import ScanCheckpointPolicy
from .._place_names import is_place
from .._remat import NOTHING, Kept, Remat
from .._schedule import Program, Schedule
from ._call import TracedCall
from ._values import LayerStack, LayerValues, ProgramValues


@dataclass(frozen=True)
class Cost:
    """What a policy costs."""

    # FLOPs: of a stack those of what runs again, of a program all.
    flops: float = 0
    # Bytes that are kept in either memory, beside what every policy keeps.
    device: float = 0
    host: float = 0

    def of_device(self, devices: int) -> "Cost":
        """The part of one of several devices."""
        return Cost(self.flops / devices, self.device / devices, self.host / devices)


@dataclass(frozen=True, eq=False)
class StackFigures:
    """Figures of the layers of a stack."""

    # Bytes of a carry, of all examples.
    carry: float
    # Of each kind, for one run of one example.
    layers: tuple[LayerValues, ...]
    # How many layers of each kind run before each layer, `[layer, kind]`, and one row
    # for the end.
    before: np.ndarray
    # How often the program runs the stack, and for how many examples at once.
    times: int = 1
    examples: int = 1
    # What `"nested"` executes, where that is something else for these layers.
    nested: Remat | None = None

    @property
    def length(self) -> int:
        """The number of layers."""
        return len(self.before) - 1

    @property
    def forward_flops(self) -> float:
        """FLOPs of the forward pass of all layers."""
        of_layer = np.array([layer.forward_flops for layer in self.layers], float)
        return float(self.times * (self.before[-1] @ of_layer))

    def cost(self, remat: Remat) -> Cost:
        """What a policy costs that executes this."""
        if remat.may_keep_internals and self.nested is not None:
            remat = self.nested
        # Of a layer of each kind, for one example.
        of_kept = [_of_kept(layer, remat.kept) for layer in self.layers]
        columns = zip(*of_kept, strict=True)
        on_device, on_host, again, reads_carry = map(np.array, columns)
        # As floats: those of a large model are too many for int64.
        forward = np.array([layer.forward_flops for layer in self.layers], float)
        residuals = np.array([layer.residual_bytes for layer in self.layers])
        carry_is_read = np.array([layer.carry_is_residual for layer in self.layers])
        # The numbers of layers of each kind: of the first ones and of the rest; that
        # run again; and that hold values at once.
        first = self.before[remat.first_layers]
        rest = self.before[-1] - first
        carries_on_host = 0
        if remat.schedule is None:
            held = rest
            carries = self.length - remat.first_layers if reads_carry.any() else 0
            # Without carries, all layers run once more before the first is reversed.
            runs = rest if remat.carries is None else 0 * rest
            if remat.carries in ("host", "disk"):
                carries, carries_on_host = 0, carries
        else:
            saves = remat.kept != NOTHING
            program = _program(remat.schedule, saves)
            held = self._counts(program.visited).max(0)
            # To save the values of a segment, its layers run once more.
            runs = self._counts(program.replayed).sum(0) + saves * rest
            carries = program.slots
            if saves and not reads_carry.any():
                carries = program.sources
            if remat.boundaries_off_device:
                carries_on_host = len(program.stays)
        if remat.carries == "disk":
            carries_on_host = 0  # they take no memory
        # The carries that first layers keep are beside these.
        carries += first @ carry_is_read
        kept_bytes = first @ residuals + held @ on_device
        return Cost(
            flops=float(self.times * (runs @ forward + rest @ again.astype(float))),
            device=float(carries * self.carry + self.examples * kept_bytes),
            host=float(carries_on_host * self.carry + self.examples * (held @ on_host)),
        )

    def _counts(self, parts: Sequence[range]) -> np.ndarray:
        """How many layers of each kind some ranges have, `[range, kind]`."""
        starts = [part.start for part in parts]
        stops = [part.stop for part in parts]
        return self.before[stops] - self.before[starts]


def _of_kept(layer: LayerValues, kept: Kept) -> tuple[float, float, float, bool]:
    """Bytes that a layer keeps on the device and on the host, FLOPs of what is computed
    again, and whether that, or the derivative, reads the carry.
    """
    if kept.names is True:
        return layer.residual_bytes, 0, 0, layer.carry_is_residual
    values = layer.kept(kept.names)
    on_host = sum(values.sizes.get(name, 0) for name in kept.offloaded)
    on_device = sum(values.sizes.values()) - on_host
    return on_device, on_host, values.again_flops, values.reads_carry


@functools.cache
def _program(schedule: Schedule, saves: bool) -> Program:
    return schedule.program(saves=saves)


@dataclass(frozen=True)
class Variant:
    """A program as it is where its layers are told that some names are kept."""

    stacks: tuple[StackFigures, ...]
    # FLOPs of the program without those of what runs again.
    flops: float
    # Sets of names that may be kept.
    choices: tuple[tuple[str, ...], ...] = ()
    # Names that a policy keeps, and the layers that it then runs are these.
    required: frozenset[str] = frozenset()

    def cost(self, policy: ScanCheckpointPolicy) -> Cost:
        flops = self.flops
        device = 0.0
        host = 0.0
        for stack in self.stacks:
            cost = stack.cost(policy.for_layers(stack.length))
            flops += cost.flops
            device += cost.device
            host += cost.host
        return Cost(flops, device, host)


@dataclass(frozen=True)
class Model:
    """The costs of a program under policies."""

    # A policy has the costs of the last one whose required names it keeps.
    variants: tuple[Variant, ...]
    # The policy that is compiled to measure what all have in common, and its cost.
    reference: ScanCheckpointPolicy
    reference_cost: Cost
    # Whether the program takes policies that keep values inside layers.
    keeps_values: bool = True

    def cost(self, policy: ScanCheckpointPolicy) -> Cost:
        """FLOPs of the program, and bytes that are kept."""
        if policy == self.reference:
            return self.reference_cost
        kept = Kept.of(policy.save_block_internals, policy.offload_block_internals)
        chosen = self.variants[0]
        for variant in self.variants[1:]:
            if kept.names is True or variant.required <= {*kept.names}:
                chosen = variant
        return chosen.cost(policy)

    @property
    def layers(self) -> int:
        """The number of layers of the longest stack."""
        return max(stack.length for stack in self.variants[0].stacks)

    @property
    def forward_flops(self) -> float:
        """FLOPs of the forward pass of all layers."""
        return sum(stack.forward_flops for stack in self.variants[0].stacks)

    @property
    def has_kinds(self) -> bool:
        """Whether a stack has layers of several kinds."""
        return any(len(stack.layers) > 1 for stack in self.variants[0].stacks)

    @property
    def choices(self) -> list[tuple[str, ...]]:
        """Sets of names that a policy may keep."""
        return [names for variant in self.variants for names in variant.choices]


NESTED = ScanCheckpointPolicy(nested=True)
NESTED_ALL = replace(NESTED, save_block_internals=True)


def traced_model(
    trace: Callable[[ScanCheckpointPolicy], TracedCall | None],
) -> Model | None:
    """The model of a program that is traced under two policies; None if it has no sweep
    over layers. `trace` returns None for a policy that the program does not take.

    A block may ask what is kept of it, and compute something else then
    (`internals_are_saved`). So the layers are those that are told of nothing, and those
    that are told of everything if these have other values that can be kept.
    """
    program = trace(NESTED)
    if program is None:
        return None
    values = ProgramValues.of(program.traced.jaxpr, NESTED)
    if values is None:
        return None
    stacks = _figures(values)
    remats = [stack.spec.remat for stack in values.stacks]
    kept = [*map(StackFigures.cost, stacks, remats)]
    flops = program.flops.matmul
    reference_cost = Cost(
        flops,
        sum(cost.device for cost in kept),
        sum(cost.host for cost in kept),
    )
    flops -= sum(cost.flops for cost in kept)
    if flops < 0:
        return None  # the program does not run what its sweeps say
    told_program = trace(NESTED_ALL)
    if told_program is None:
        variant = Variant(stacks, flops)
        return Model((variant,), NESTED, reference_cost, keeps_values=False)
    told = ProgramValues.of(told_program.traced.jaxpr, NESTED_ALL)
    if told is None or len(told.stacks) != len(values.stacks):
        return None  # some have the policy `nested` of their own
    # Names of more bytes than otherwise: a block has asked whether they are kept.
    required = frozenset(
        name
        for name, size in told.sizes.items()
        if not is_place(name) and size > values.sizes.get(name, 0)
    )
    choices = tuple(values.choices(without=required))
    variants = [Variant(stacks, flops, choices)]
    if required:
        stacks = _figures(told)
        flops = told_program.flops.matmul
        for stack, of_values in zip(stacks, told.stacks, strict=True):
            flops -= stack.cost(of_values.spec.remat).flops
        choices = tuple(told.choices(required))
        variants.append(Variant(stacks, flops, choices, required))
    return Model(tuple(variants), NESTED, reference_cost)


def _figures(values: ProgramValues) -> tuple[StackFigures, ...]:
    return tuple(map(_figures_of, values.stacks))


def _figures_of(stack: LayerStack) -> StackFigures:
    spec = stack.spec
    if spec.pattern is None:
        before = np.arange(spec.length + 1)[:, None]
    else:
        before = spec.layers_before
    nested = spec.remat if spec.remat.may_keep_internals else None
    return StackFigures(
        stack.carry_bytes, stack.layers, before, stack.times, stack.examples, nested
    )
