"""A sweep within `jax.vmap`: its layers are vectorized, and not its derivative rule.

JAX would vectorize the rule: gradients of all weights for each example, and their sum at the end. Of layers
that are vectorized, gradients are summed over examples where a layer makes them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching

from .._activity import is_differentiable
from .._compat import is_vectorized, named_axes
from .kinds import Kind
from .slots import Arrays, Carry
from .spec import SweepSpec
from .store import at_least_one, read_layer
from .trace import kinds_of, trace_layers

Axes = list[int | None]  # which axis of each array has the examples; None where they share the array
Run = Callable[[SweepSpec, Carry, Arrays, Arrays, Arrays], tuple[Carry, Arrays]]

_sweep_p = Primitive("vectorized_sweep")
_sweep_p.multiple_results = True


def run_vectorized(
    run: Run, spec: SweepSpec, init: Carry, xs: Arrays, shared: Arrays, unread: Arrays
) -> tuple[Carry, Arrays]:
    """`run(spec, init, xs, shared, unread)`, within `jax.vmap` with layers that take all examples.

    Where examples have more weights of their own than they share, JAX vectorizes the rule: then stacks stay
    as they are.
    """
    leaves, tree = jax.tree.flatten((init, xs, shared, unread))
    if not is_vectorized(leaves, _names(spec)):
        return run(spec, init, xs, shared, unread)
    # JAX applies `_of_examples` at once, so no other transformation meets the primitive.
    found = _sweep_p.bind(*leaves, run=run, spec=spec, tree=tree)
    return found[: len(init)], found[len(init) :]


def _of_examples(
    mapped: Any, leaves: Arrays, axes: Axes, *, run: Run, spec: SweepSpec, tree: Any
) -> tuple[Arrays, Axes]:
    init, xs, shared, unread = jax.tree.unflatten(tree, leaves)
    of_init, of_xs, of_shared, _ = jax.tree.unflatten(tree, axes)
    if _mostly_own(spec, xs, of_xs) and mapped.name not in _names(spec):

        def of_one(*leaves: Any) -> Arrays:
            return sum(run(spec, *jax.tree.unflatten(tree, leaves)), [])

        results = jax.vmap(of_one, tuple(axes))(*leaves)
        return results, [0] * len(results)
    init, xs = _moved(init, of_init, 0), _moved(xs, of_xs, 1)
    of_x = [at if at is None else int(whole) for at, whole in zip(of_xs, spec.unsliced, strict=True)]
    layers = [
        _Layer(kind, mapped, kind.pick_shared(shared), kind.pick_shared(of_shared), of_x[kind.xs])
        for kind in spec.kinds
    ]
    stacks = [xs[kind.xs] for kind in spec.kinds]
    unsliced = [spec.unsliced[kind.xs] for kind in spec.kinds]
    of_carry: Axes = [at if at is None else 0 for at in of_init]
    init, of_carry, of_ys = _settled(init, of_carry, layers, [*map(_entries, stacks, unsliced)])
    traced = trace_layers(
        [layer.of_all(of_carry, (of_carry, of_y)) for layer, of_y in zip(layers, of_ys, strict=True)],
        [layer.shared for layer in layers],
        init,
        stacks,
        unsliced=unsliced,
        offloads=spec.on_host,
    )
    kinds, shared = kinds_of(traced)
    carry, ys = run_vectorized(run, replace(spec, kinds=kinds), traced[0].init, xs, shared, unread)
    return [*carry, *ys], [*of_carry, *(at if at is None else 1 for at in sum(of_ys, []))]


batching.fancy_primitive_batchers[_sweep_p] = _of_examples


@dataclass(frozen=True)
class _Layer:
    """A layer of a kind, as a function of what its kind shares, of the carry and of its own inputs.

    Attributes:
        kind: the kind.
        mapped: the axis of examples.
        shared: what the kind shares.
        of_shared: where examples are in it.
        of_x: the same of a layer's own inputs.
    """

    kind: Kind
    mapped: Any
    shared: Arrays
    of_shared: Axes
    of_x: Axes

    def of_one(self, shared: Arrays, carry: Carry, x: Arrays) -> tuple[Carry, Arrays]:
        """The layer of one example."""
        return replace(self.kind, shared=tuple(range(len(shared)))).layer(shared, carry, x)

    def of_all(self, of_carry: Axes, of_results: Any, layer: Callable | None = None) -> Callable:
        """The layer of all examples."""
        axes = self.of_shared, of_carry, self.of_x
        names: Any = {"axis_name": self.mapped.name, "axis_size": self.mapped.size}
        return jax.vmap(layer or self.of_one, axes, of_results, **names)

    def results(self, of_carry: Axes, carry: Carry, x: Arrays) -> Axes:
        """0 for each of the results that differs between examples, None for the others."""
        found: Axes = []

        def note(*arguments: Any) -> None:
            found.extend(0 if is_vectorized([leaf]) else None for leaf in sum(self.of_one(*arguments), []))

        jax.eval_shape(self.of_all(of_carry, None, note), self.shared, carry, x)
        return found


def _entries(stacks: Arrays, unsliced: Sequence[bool]) -> Arrays:
    """The types of a layer's own inputs."""
    return jax.eval_shape(lambda: read_layer([*map(at_least_one, stacks)], 0, unsliced))


def _settled(
    init: Carry, of_carry: Axes, layers: list[_Layer], entries: list[Arrays]
) -> tuple[Carry, Axes, list[Axes]]:
    """The first carry with examples where those of any layer have them; where; and the same of outputs."""
    while True:
        found = [layer.results(of_carry, init, x) for layer, x in zip(layers, entries, strict=True)]
        columns = zip(of_carry, *(results[: len(init)] for results in found), strict=True)
        settled: Axes = [0 if 0 in column else None for column in columns]
        if settled == of_carry:
            return init, of_carry, [results[len(init) :] for results in found]
        init = [
            jnp.broadcast_to(leaf, (layers[0].mapped.size, *leaf.shape)) if before != at else leaf
            for leaf, before, at in zip(init, of_carry, settled, strict=True)
        ]
        of_carry = settled


def _moved(arrays: Arrays, axes: Axes, to: int) -> Arrays:
    return [leaf if at is None else jnp.moveaxis(leaf, at, to) for leaf, at in zip(arrays, axes, strict=True)]


def _names(spec: SweepSpec) -> set[Any]:
    """The named axes of collectives in the layers."""
    return {name for kind in spec.kinds for name in named_axes(kind.jaxpr)}


def _mostly_own(spec: SweepSpec, xs: Arrays, axes: Axes) -> bool:
    """Whether examples have more of the differentiable stacks of their own than they share, and slice all."""
    own, common = 0, 0
    for leaf, at, whole in zip(xs, axes, spec.unsliced, strict=True):
        if whole and at is not None:
            return False  # JAX can't vectorize the reading of parts of them
        size = leaf.size * leaf.dtype.itemsize if is_differentiable(leaf.dtype) else 0
        own, common = (own, common + size) if at is None else (own + size, common)
    return own > common
