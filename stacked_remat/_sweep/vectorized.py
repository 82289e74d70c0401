"""A sweep within `jax.vmap`: its layers are vectorized, and not its derivative rule.

JAX would vectorize the rule: gradients of all weights for each example, and their sum at the end. Of layers
that are vectorized, gradients are summed over examples where a layer makes them.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching

from .._activity import is_differentiable
from .._compat import is_vectorized
from .kinds import Kind
from .slots import Arrays, Carry
from .spec import SweepSpec
from .trace import kinds_of, trace_layers

Axes = Sequence[int | None]  # which axis of each array has the examples; None where they share the array
Run = Callable[[SweepSpec, Carry, Arrays, Arrays, Arrays], tuple[Carry, Arrays]]

_sweep_p = Primitive("vectorized_sweep")
_sweep_p.multiple_results = True


def run_vectorized(
    run: Run, spec: SweepSpec, init: Carry, xs: Arrays, shared: Arrays, unread: Arrays
) -> tuple[Carry, Arrays]:
    """`run(spec, init, xs, shared, unread)`; within `jax.vmap`, with layers that take all examples.

    Every example has a carry of its own then. Where examples have own stacks that are differentiable, these
    stay as they are, and JAX vectorizes the rule.
    """
    leaves, tree = jax.tree.flatten((init, xs, shared, unread))
    if not is_vectorized(leaves):
        return run(spec, init, xs, shared, unread)
    # JAX applies `_of_examples` at once, so no other transformation meets the primitive.
    found = _sweep_p.bind(*leaves, run=run, spec=spec, tree=tree)
    return found[: len(init)], found[len(init) :]


def _of_examples(
    mapped: Any, leaves: Arrays, axes: Axes, *, run: Run, spec: SweepSpec, tree: Any
) -> tuple[Arrays, Axes]:
    init, xs, shared, unread = jax.tree.unflatten(tree, leaves)
    of_init, of_xs, of_shared, _ = jax.tree.unflatten(tree, axes)
    if any(at is not None and is_differentiable(x.dtype) for x, at in zip(xs, of_xs, strict=True)):

        def of_one(*leaves: Any) -> Arrays:
            return sum(run(spec, *jax.tree.unflatten(tree, leaves)), [])

        results = jax.vmap(of_one, tuple(axes), axis_name=mapped.name)(*leaves)
        return results, [0] * len(results)
    init = [
        jnp.broadcast_to(leaf, (mapped.size, *leaf.shape)) if at is None else jnp.moveaxis(leaf, at, 0)
        for leaf, at in zip(init, of_init, strict=True)
    ]
    xs = [x if at is None else jnp.moveaxis(x, at, 1) for x, at in zip(xs, of_xs, strict=True)]
    of_x = [at if at is None else int(whole) for at, whole in zip(of_xs, spec.unsliced, strict=True)]

    def of_kind(kind: Kind) -> Callable[[Arrays, Carry, Arrays], tuple[Carry, Arrays]]:
        layer = replace(kind, shared=tuple(range(len(kind.shared)))).layer
        axes = kind.pick_shared(of_shared), 0, of_x[kind.xs]
        return jax.vmap(layer, axes, axis_name=mapped.name, axis_size=mapped.size)

    traced = trace_layers(
        [of_kind(kind) for kind in spec.kinds],
        [kind.pick_shared(shared) for kind in spec.kinds],
        init,
        [xs[kind.xs] for kind in spec.kinds],
        unsliced=[spec.unsliced[kind.xs] for kind in spec.kinds],
        offloads=spec.on_host,
    )
    kinds, shared = kinds_of(traced)
    carry, ys = run(replace(spec, kinds=kinds), traced[0].init, xs, shared, unread)
    return [*carry, *ys], [0] * len(carry) + [1] * len(ys)


batching.fancy_primitive_batchers[_sweep_p] = _of_examples
