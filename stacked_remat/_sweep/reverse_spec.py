"""What a sweep becomes where it is differentiated: its rules, held leaves and segments.

Before the forward sweep of a gradient three things are settled, from the jaxpr of a
layer and a trace of its pullback:

1. `differentiated`: a `jax.custom_vjp` or a primitive of hijax in a layer may compute
   other values where it is differentiated than elsewhere. The forward sweep and the
   replays compute those of its forward rule.
2. `for_reverse`: which leaves of the carry checkpoints hold. A leaf that no derivative
   reads, and on which no held leaf depends, is left out of all slots.
3. `for_reverse` too: whether `"nested"` should cut equal segments and keep the
   internals of one at a time, where they are small beside a carry: then a layer runs
   twice instead of three times.

A sweep with a visitor has step 1 alone.

`for_forward_mode` marks a sweep whose gradient is itself differentiated forwards.
"""

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import replace

from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters.partial_eval import dce_jaxpr

from .. import _xla_hints as xla_hints
from .._activity import bytes_of, has_rules, surely_read
from .._compat import without_constants
from .._remat import EVERYTHING, NOTHING, Remat
from .._schedule import equal
from .gradient import LayerPullback, Perturbed, Residuals, pick
from .programs import found_in
from .rules import floats, ruled, without_closures
from .slots import Arrays, Mask, OfKinds, inverted, types_of
from .spec import SweepSpec
from .trace import TracedLayers


def differentiated(
    spec: SweepSpec, perturbed: Perturbed, shared: OfKinds
) -> tuple[SweepSpec, Perturbed, OfKinds]:
    """A sweep whose leaves in the masks are differentiated: custom rules compute its
    values.

    What the rules close over becomes the first of what layers share; returns the masks
    and the shared arrays with these.
    """
    kinds = []
    masks = []
    inputs = []
    for kind, shared_mask, leaves in zip(
        spec.kinds, perturbed.shared, shared, strict=True
    ):
        layer = kind.jaxpr
        values = None
        constants = []
        if has_rules(kind.jaxpr):
            nonzero = sum(perturbed.of_layer(kind), ())
            active = (*perturbed.carry, *perturbed.ys[kind.number])
            layer, values, constants = found_in(
                kind.jaxpr,
                ("differentiated", nonzero, active),
                functools.partial(_layer_and_values, kind.jaxpr, nonzero, active),
            )
        kinds.append(replace(kind, jaxpr=layer, values_jaxpr=values))
        masks.append((*[False] * len(constants), *shared_mask))
        inputs.append([*constants, *leaves])
    spec = replace(spec, kinds=tuple(kinds))
    return spec, replace(perturbed, shared=tuple(masks)), inputs


def _layer_and_values(
    jaxpr: Jaxpr, nonzero: Mask, active: Mask
) -> tuple[Jaxpr, Jaxpr, Arrays]:
    """A layer's jaxpr for derivatives and that for values, and the constants that both
    take first.
    """
    values, _, closures = ruled(jaxpr, nonzero)
    layer = ClosedJaxpr(jaxpr, ())
    if closures:
        # Replays run the rules again, when what they close over may be gone.
        layer, values = without_closures(jaxpr, nonzero, active)
    # Both take the constants of both, so that layers are called alike.
    variables = [*layer.jaxpr.constvars, *values.jaxpr.constvars]
    constants = [*layer.consts, *values.consts]
    opened = []
    for closed in (layer, values):
        jaxpr_of_all = closed.jaxpr.replace(constvars=variables)
        opened.append(without_constants(ClosedJaxpr(jaxpr_of_all, constants))[0])
    layer_jaxpr, values_jaxpr = opened
    return layer_jaxpr, values_jaxpr, constants


def with_rules_as_arguments(traced: TracedLayers) -> TracedLayers:
    """Layers whose `jax.custom_vjp`s close over no traced value: what they closed over
    is the first of what layers share.

    For a `jax.checkpoint` around all layers, which JAX (0.12) fails to differentiate
    otherwise.
    """
    kinds = []
    shared = []
    for kind, leaves in zip(traced.kinds, traced.shared, strict=True):
        nonzero = floats(types_of(kind.jaxpr.invars))
        _, active, closures = ruled(kind.jaxpr, nonzero)
        constants = []
        if closures:
            layer, _ = without_closures(kind.jaxpr, nonzero, active)
            jaxpr, constants = without_constants(layer)
            kind = replace(kind, jaxpr=jaxpr)
        kinds.append(kind)
        shared.append([*constants, *leaves])
    return traced._replace(kinds=tuple(kinds), shared=shared)


def for_forward_mode(spec: SweepSpec) -> SweepSpec:
    """The sweep for derivatives of its gradient, in forward mode."""
    kinds = [replace(kind, in_forward_mode=True) for kind in spec.kinds]
    return replace(spec, kinds=tuple(kinds))


def for_reverse(
    spec: SweepSpec, perturbed: Perturbed, xs: OfKinds, shared: OfKinds
) -> SweepSpec:
    """The sweep that holds the leaves of carries that pullbacks or replays read, and
    no others.

    A leaf that they do not read is an output buffer that steps write to, or a sum that
    they add to: nothing but the final carry and outputs depends on its value.
    """
    if _surely_changes_nothing(spec):
        return replace(spec, held_leaves=(True,) * len(spec.carry_types))
    # As in `SweepSpec.pullbacks`.
    flags = int(spec.stops == "until")
    residuals = []
    for kind, types in zip(spec.kinds, spec.input_types(xs, shared), strict=True):
        pullback = LayerPullback(kind, perturbed)
        residuals.append(pullback.residuals_of(types, EVERYTHING, flags))
    held = [False] * len(spec.carry_types)
    for of_kind in residuals:
        held = [*map(operator.or_, held, of_kind.all_reads)]
    # Replays compute the leaves that are held, from all that these depend on; that
    # grows to a fixed point, at most once for each leaf.
    before = None
    while held != before:
        before = held
        for kind in spec.kinds:
            is_needed = [*held, *[False] * len(kind.output_types)]
            _, is_read = dce_jaxpr(kind.values_jaxpr or kind.jaxpr, is_needed)
            _, carry_is_read, _ = kind.split(is_read)
            held = [*map(operator.or_, held, carry_is_read)]
    spec = replace(spec, held_leaves=tuple(held))
    return replace(spec, remat=_remat_for(spec, residuals))


def _surely_changes_nothing(spec: SweepSpec) -> bool:
    """Whether pullbacks read all leaves and so much that `_remat_for` changes nothing;
    costs no trace.
    """
    carry_bytes = spec.carry_bytes()
    for kind in spec.kinds:
        inputs = len(kind.jaxpr.invars)
        _, carry_places, _ = kind.split(range(inputs))
        is_carry = [place in carry_places for place in range(inputs)]
        is_read, read_bytes = surely_read(kind.jaxpr, is_carry)
        _, carry_is_read, _ = kind.split(is_read)
        reads_enough = carry_bytes is None or 2 * read_bytes > carry_bytes
        if all(carry_is_read) and reads_enough:
            return True
    return False


def _remat_for(spec: SweepSpec, residuals: Sequence[Residuals]) -> Remat:
    """The policy, or for `"nested"` one that takes as much memory and evaluates each
    layer once less.

    Of N layers, `shrinking` holds √(2N) carries. Where the internals of a layer take
    r <= 1/2 of the memory of a carry, k segments whose internals are kept while they
    are reversed take k + r N / k carries: 2√(rN) <= √(2N) for k = √(rN).
    """
    remat = spec.remat
    length = spec.length
    if not remat.may_keep_internals or len(residuals) > 1:
        return remat
    if spec.carry_bytes() is None:
        return remat
    (of_layer,) = residuals
    is_held = spec.held_leaves or ()
    # A segment keeps for each layer its residuals, and leaves that are read beside.
    is_beside = [*map(operator.and_, of_layer.reads, is_held)]
    internals = [*of_layer.types, *pick(spec.carry_types, is_beside)]
    layer_bytes = sum(map(bytes_of, internals))
    carry_bytes = sum(map(bytes_of, spec.of_held(spec.carry_types)))
    if of_layer.on_host or not of_layer.types or 2 * layer_bytes > carry_bytes:
        return remat
    longest = math.ceil(math.sqrt(length * carry_bytes / layer_bytes))
    longest = xla_hints.layers_in_order(longest, [*map(bytes_of, internals)])
    schedule = equal(length, math.ceil(length / longest))
    return replace(remat, kept=EVERYTHING, schedule=schedule)


def serves(
    spec: SweepSpec,
    saved_for: Perturbed,
    perturbed: Perturbed,
    xs: OfKinds,
    shared: OfKinds,
) -> bool:
    """Whether checkpoints of a sweep for `saved_for` suffice for `perturbed`, which has
    fewer outputs.

    The forward sweep takes every output to have a cotangent. If the reverse sweep finds
    that some have none, it is cheaper without them, but may save other residuals.
    """
    remat = spec.remat
    # Residuals of the first layers are saved already, those for `saved_for`.
    if saved_for == perturbed or remat.first_layers:
        return saved_for == perturbed
    # No leaf lacks slots, or the slots of a segment are made in the reverse sweep.
    if remat.kept == NOTHING or remat.schedule is None or remat.boundaries_off_device:
        return True
    saved = spec.scheduled(saved_for, xs, shared)
    wanted = spec.scheduled(perturbed, xs, shared)
    lacks_slots = any(pick(wanted.is_read, inverted(saved.is_read)))
    return wanted.program == saved.program and not lacks_slots
