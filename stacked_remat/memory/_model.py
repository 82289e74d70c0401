"""What policies cost beside each other, by a model of a program's layers.

Of N layers a policy keeps some carries, on the device or the host, and values inside
some layers; the rest runs again. Both follow from what it executes (`Remat`): the
number of slots and of replayed layers from its schedule, the bytes and the FLOPs of
values from the layers (`_values.py`). What all policies have in common, arguments and
one layer's work, is measured by compiling one of them.

FLOPs are those of the traced program: exactly where layers are alike, and else those of
a mean layer for each that runs again. Bytes are near those that XLA allocates
(Qwen3-30B-A3B on an H200, temporaries in GB: `True` 16.76, compiled 16.82;
`attention_saved` 42.99, compiled 42.78). So the model says which policies to compile,
and no more.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from .. import ScanCheckpointPolicy
from .._place_names import is_place
from .._remat import NOTHING, Kept, Remat
from .._schedule import Schedule
from ._call import TracedCall
from ._values import KeptValues, LayerStack, ProgramValues


@dataclass(frozen=True)
class Cost:
    """What a policy costs beside what every policy does."""

    # FLOPs of what runs again.
    flops: float = 0
    # Bytes that are kept in either memory.
    device: float = 0
    host: float = 0

    def of_device(self, devices: int) -> "Cost":
        """The part of one of several devices."""
        return Cost(self.flops / devices, self.device / devices, self.host / devices)


@dataclass(frozen=True)
class StackFigures:
    """Figures of a mean layer of a stack."""

    # The number of layers.
    length: int
    # Bytes of a carry, and of everything that a derivative reads beside it.
    carry: float
    internals: float
    # FLOPs of running the layer.
    forward: float
    # Whether a derivative reads the carry beside its internals.
    carry_is_read: bool
    # What keeping values of some names takes.
    keeping: Callable[[tuple[str, ...]], KeptValues]

    def cost(self, remat: Remat) -> Cost:
        """What a policy costs that executes this."""
        kept = remat.kept
        carries_on_host = 0
        first = remat.first_layers
        rest = remat.length - remat.first_layers
        on_device, on_host, again, reads_carry = self._of_kept(kept)
        if remat.schedule is None:
            held = rest
            carries = rest if reads_carry else 0
            # Without carries, all layers run once more before the first is reversed.
            runs = rest if remat.carries is None else 0
            if remat.carries in ("host", "disk"):
                carries, carries_on_host = 0, carries
        else:
            saves = kept != NOTHING
            carries, sources, held, runs, stays = _numbers_of(remat.schedule, saves)
            if saves and not reads_carry:
                carries = sources
            if remat.boundaries_off_device:
                carries_on_host = stays
        if remat.carries == "disk":
            carries_on_host = 0  # they take no memory
        return Cost(
            flops=runs * self.forward + rest * again,
            device=first * (self.carry_is_read * self.carry + self.internals)
            + carries * self.carry
            + held * on_device,
            host=carries_on_host * self.carry + held * on_host,
        )

    def _of_kept(self, kept: Kept) -> tuple[float, float, float, bool]:
        """Bytes that a layer keeps on the device and on the host, FLOPs of what is
        computed again, and whether that, or the derivative, reads the carry.
        """
        names = kept.names
        if names is True:
            return self.internals, 0, 0, self.carry_is_read
        mean = self.keeping(names)
        on_host = sum(mean.sizes.get(name, 0) for name in kept.offloaded)
        on_device = sum(mean.sizes.values()) - on_host
        return on_device, on_host, mean.again_flops, mean.reads_carry


@functools.cache
def _numbers_of(schedule: Schedule, saves: bool) -> tuple[int, int, int, int, int]:
    """The number of slots, and of those that replays start from; of layers that hold
    values, and of those that run again; and of carries that the forward sweep keeps.
    """
    program = schedule.program(saves=saves)
    # To save the values of a segment, its layers run once more.
    runs = sum(program.advances) + saves * schedule.length
    held = max(program.visits)
    return program.slots, program.sources, held, runs, len(program.stays)


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

    # The last one counts whose required names a policy keeps.
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
    def choices(self) -> list[tuple[str, ...]]:
        """Sets of names that a policy may keep."""
        return [names for variant in self.variants for names in variant.choices]


_NESTED = ScanCheckpointPolicy(nested=True)
_NESTED_ALL = replace(_NESTED, save_block_internals=True)


def traced_model(
    trace: Callable[[ScanCheckpointPolicy], TracedCall | None],
) -> Model | None:
    """The model of a program that is traced under two policies; None if it has no sweep
    over layers. `trace` returns None for a policy that the program does not take.

    A block may ask what is kept of it, and compute something else then
    (`internals_are_saved`). So the layers are those that are told of nothing, and those
    that are told of everything if these have other values that can be kept.
    """
    program = trace(_NESTED)
    if program is None:
        return None
    values = ProgramValues.of(program.traced.jaxpr, _NESTED)
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
    told_program = trace(_NESTED_ALL)
    if told_program is None:
        variant = Variant(stacks, flops)
        return Model((variant,), _NESTED, reference_cost, keeps_values=False)
    told = ProgramValues.of(told_program.traced.jaxpr, _NESTED_ALL)
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
    return Model(tuple(variants), _NESTED, reference_cost)


def _figures(values: ProgramValues) -> tuple[StackFigures, ...]:
    figures = []
    for stack in values.stacks:
        length = stack.spec.length
        layers = stack.layers

        def keeping(names: tuple[str, ...], stack: LayerStack = stack) -> KeptValues:
            sizes: dict[str, float] = {}
            flops = 0
            reads_carry = False
            for layer in stack.layers:
                kept = layer.kept(names)
                flops += layer.count * kept.again_flops
                reads_carry |= kept.reads_carry
                for name, size in kept.sizes.items():
                    sizes[name] = sizes.get(name, 0) + layer.count * size
            length = stack.spec.length
            share = stack.examples / length
            mean = {name: size * share for name, size in sizes.items()}
            return KeptValues(mean, stack.times * flops / length, reads_carry)

        of_example = sum(layer.count * layer.residual_bytes for layer in layers)
        forward = sum(layer.count * layer.forward_flops for layer in layers)
        figures.append(
            StackFigures(
                length,
                stack.carry_bytes,
                stack.examples * of_example / length,
                stack.times * forward / length,
                any(layer.carry_is_residual for layer in layers),
                keeping,
            )
        )
    return tuple(figures)
