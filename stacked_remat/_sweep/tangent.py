"""The sweep whose layers are differentiated in forward mode."""

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from .._compat import without_constants
from .gradient import Perturbed, merge, pick
from .kinds import Kind
from .rules import primal_of
from .slots import Arrays, Carry
from .spec import SweepSpec


def tangent_sweep(
    spec: SweepSpec, perturbed: Perturbed, primals: Sequence[Arrays], tangents: Sequence[Arrays]
) -> tuple[SweepSpec, tuple[Carry, Arrays, Arrays]]:
    """The sweep that carries tangents behind its carry, and its arguments `init, xs, shared`.

    `primals` are the arguments of `spec`, `tangents` those of the perturbed ones. Its outputs are the
    tangents of the perturbed `ys`.
    """
    (init, xs, shared), (of_init, of_xs, of_shared) = primals, tangents
    every_shared = [*shared, *of_shared]
    places = iter(range(len(shared), len(every_shared)))
    place_of = [next(places) if is_ else None for is_ in perturbed.shared]
    kinds, stacks, unsliced, x, y = [], [], [], 0, 0
    for kind in spec.kinds:
        own, before = perturbed.of_part(kind.xs, kind.ys), sum(perturbed.xs[: kind.xs.start])
        stacks += [*xs[kind.xs], *of_xs[before : before + sum(own.xs)]]
        unsliced += [*spec.unsliced[kind.xs], *pick(spec.unsliced[kind.xs], own.xs)]
        parts = slice(x, len(stacks)), slice(y, y + sum(own.ys))
        tangent_places = tuple(place for place in kind.pick_shared(place_of) if place is not None)
        jaxpr, constants = _tangent_layer(kind, own)
        constant_places = range(len(every_shared), len(every_shared) + len(constants))
        every_shared += constants
        kinds.append(Kind(kind.number, jaxpr, (*constant_places, *kind.shared, *tangent_places), *parts))
        x, y = len(stacks), parts[1].stop
    missing = [given for given, has in zip(perturbed.init, perturbed.carry, strict=True) if has]
    every = [jnp.zeros_like(leaf) for leaf in pick(init, perturbed.carry)]
    carry = [*init, *merge(every, of_init, missing)]
    return replace(spec, kinds=tuple(kinds), unsliced=tuple(unsliced)), (carry, stacks, every_shared)


def by_rules(spec: SweepSpec, perturbed: Perturbed) -> SweepSpec:
    """The sweep with layers whose values are found by their derivative rules.

    For derivatives of its gradient: a `jax.custom_vjp` has none in forward mode, and its forward rule has.
    """

    def of(kind: Kind) -> Kind:
        mask = [*kind.pick_shared(perturbed.shared), *perturbed.carry, *perturbed.xs[kind.xs]]
        jaxpr, constants = without_constants(primal_of(kind.jaxpr, mask))
        return replace(kind, by_rules=jaxpr, constants=tuple(constants))

    return replace(spec, kinds=tuple(map(of, spec.kinds)))


def _tangent_layer(kind: Kind, perturbed: Perturbed) -> tuple[Jaxpr, Arrays]:
    """A layer on `(constants, shared, tangents, carry, tangents, x, tangents)`, and the constants."""
    masks = kind.pick_shared(perturbed.shared), perturbed.carry, perturbed.xs
    ends = len(masks[0]), len(masks[0]) + len(masks[1])
    types = [var.aval for var in kind.jaxpr.invars]
    parts = types[: ends[0]], types[ends[0] : ends[1]], types[ends[1] :]

    def layer(*parts: tuple[Arrays, Arrays]) -> Arrays:
        primals, tangents = zip(*parts, strict=True)

        def run(*given: Arrays) -> tuple[Arrays, Arrays]:
            shared, carry, x = (merge(*triple) for triple in zip(primals, given, masks, strict=True))
            carry, y = kind.layer_of(shared, carry, x)
            return [*pick(carry, perturbed.carry), *pick(y, perturbed.ys)], carry

        given = tuple(pick(part, mask) for part, mask in zip(primals, masks, strict=True))
        _, found, carry = jax.jvp(run, given, tangents, has_aux=True)
        return [*carry, *found]

    examples = [(part, pick(part, mask)) for part, mask in zip(parts, masks, strict=True)]
    return without_constants(jax.make_jaxpr(layer)(*examples))
