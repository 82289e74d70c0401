"""Layers, traced, one after the other: by a sweep or by a plain scan.

Two nested scans under `jax.checkpoint` would keep as few carries as a sweep, but slice a segment of weights
into a new buffer and stack a segment of gradients before copying it out. A sweep reads the stack by layer
number in the innermost loop, and its gradient buffers are loop carries that are updated in place.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.interpreters import partial_eval

from .._placement import is_on_host
from .._static import PyTree
from .gradient import merge, pick
from .primitive import plain_scan, sweep_of
from .slots import Arrays
from .spec import Checkpoint, SweepSpec
from .trace import TracedLayer, kinds_of, without_passed_on


def run_layers(
    traced: Sequence[TracedLayer],
    unsliced: Sequence[Sequence[bool]],
    init: Sequence[PyTree],
    stacks: Sequence[Arrays],
    *,
    plain: Checkpoint | None = None,
    **fields: Any,
) -> tuple[Any, list[PyTree]]:
    """Run layers of one or several kinds; returns the last carry and the stacked outputs of each kind.

    Of each kind there is a traced layer, its layers' own inputs, and for which of these each takes the stack.
    `plain` is how each layer is checkpointed in a plain scan; None for a sweep. The fields are of the
    `SweepSpec`.
    """
    traced, carry_tree = [layer._replace(init=[*init]) for layer in traced], traced[0].carry_tree
    traced, passed_on = without_passed_on(traced)
    stacks, masks = list(stacks), [tuple(mask) for mask in unsliced]
    if plain is None:
        for k, (layer, part) in enumerate(zip(traced, stacks, strict=True)):
            traced[k], read = _without_unread(layer, part)
            stacks[k], masks[k] = pick(part, read), tuple(pick(masks[k], read))
    kinds, shared = kinds_of(traced)
    spec, xs = SweepSpec(kinds, unsliced=sum(masks, ()), **fields), sum(stacks, [])
    if plain is None:
        carry, ys = sweep_of(spec, traced[0].init, xs, shared)
    else:
        carry, ys = plain_scan(spec, plain, traced[0].init, xs, shared)
    outputs = [layer.output(ys[kind.ys]) for layer, kind in zip(traced, kinds, strict=True)]
    carry = merge(init, carry, [not is_ for is_ in passed_on])
    return jax.tree.unflatten(carry_tree, carry), outputs


def _without_unread(traced: TracedLayer, stacks: Arrays) -> tuple[TracedLayer, list[bool]]:
    """A layer without those of its own inputs that are on the host and that it does not use.

    They need not travel. Also returns which of the inputs it still takes.
    """
    jaxpr, others = traced.jaxpr, len(traced.jaxpr.invars) - len(stacks)
    kept = [True] * others + [not is_on_host(stack) for stack in stacks]
    if all(kept):
        return traced, kept[others:]
    jaxpr, used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=kept)
    return traced._replace(jaxpr=jaxpr), used[others:]
