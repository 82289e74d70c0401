"""`lax.scan` whose reverse sweep follows a schedule: few carries, no copies of weights, gradients in place.

Two nested scans under `jax.checkpoint` would keep as few carries, but slice a segment of weights into a new
buffer and stack a segment of gradients before copying it out. Here the stack is indexed by layer number in
the innermost loop, and the gradient buffer is a loop carry that is updated in place.

Gradients of gradients go through the plain checkpointed scan, since loops with dynamic trip counts have no
transpose.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Jaxpr
from jaxtyping import Array

from .._compat import not_forwarded
from .._schedule import Schedule
from .activity import is_differentiable
from .derivative_errors import reverse_mode_only
from .effects import check_effects
from .gradient import Wanted, merge, pick, spread
from .slots import Carry, Kept
from .spec import Head, Problem

Arrays = list[Array]


def sweep(
    body: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any,
    *,
    length: int,
    schedule: Schedule,
    reverse: bool = False,
    unroll: int | bool = 1,
    checkpoint: Callable[[Callable], Callable] = jax.checkpoint,
    boundaries: Literal["device", "host"] = "device",
    head: Head | None = None,
) -> tuple[Any, Any]:
    """`lax.scan(body, init, xs)` in value and gradients, with the reverse sweep that `schedule` describes.

    Args:
        body: `(carry, x) -> (carry, y)` on pytrees of arrays; it may close over traced values.
        init: the first carry.
        xs: pytree of arrays with a leading axis of size `length`, or without leaves.
        length: number of layers.
        schedule: a cut of as many layers, less those of `head`.
        reverse: whether to go from the last entry of `xs` to the first.
        unroll: layers per iteration of the innermost loops; `True` unrolls everything.
        checkpoint: how a layer's internals are kept within the segment being walked. The replay keeps what it
            saves for that segment's layers, save for inputs and what comes from them without the carry.
        boundaries: `"host"` keeps the segments' first inputs in host memory; the schedule must be cut once.
        head: the layers that run first, if these are to keep their inputs and residuals.

    Returns:
        The last carry and the stacked `y`s.

    Raises:
        ValueError: the schedule is for another length, or too deep for the host.
        TypeError: forward-mode differentiation, a layer that uses a `jax.Ref`, or one that has ordered
            effects while boundaries are on the host.
    """
    _check(schedule, length - (head.length if head else 0), boundaries)
    _check_lengths(xs, length)
    init, jaxpr, shared, trees = _close(body, init, xs, length)
    check_effects(jaxpr, shared, offloads=boundaries == "host")
    problem = Problem(
        jaxpr, len(jax.tree.leaves(init)), schedule, reverse, unroll, checkpoint, boundaries == "host", head
    )
    leaves = (jax.tree.leaves(init), jax.tree.leaves(xs), shared)
    carry, ys = _differentiable(problem)(*jax.tree.map(_reverse_mode_only, leaves))
    return jax.tree.unflatten(trees[0], carry), jax.tree.unflatten(trees[1], ys)


def _check(schedule: Schedule, length: int, boundaries: str) -> None:
    if schedule.length != length:
        raise ValueError(f"the schedule is for {schedule.length} layers, but there are {length}")
    if boundaries not in ("device", "host"):
        raise ValueError(f'boundaries must be "device" or "host", got {boundaries!r}')
    if boundaries == "host" and not schedule.segments:
        raise ValueError(
            "boundaries can be kept on the host only where the layers are cut once: use equal segments"
        )


def _check_lengths(xs: Any, length: int) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(xs):
        if jnp.shape(leaf)[:1] != (length,):
            where = f"xs{jax.tree_util.keystr(path)}"
            raise ValueError(
                f"{where} has shape {jnp.shape(leaf)}; its leading axis must have size {length}, one a layer"
            )


def _close(body: Callable, init: Any, xs: Any, length: int) -> tuple[Any, Jaxpr, Arrays, tuple[Any, Any]]:
    """Settle the carry's types and trace the body.

    Returns:
        The first carry, the body's jaxpr, the values that it closes over, the trees of its carry and output.
    """
    init = jax.tree.map(jnp.asarray, init)
    x = jax.eval_shape(lambda xs: jax.tree.map(lambda leaf: leaf[0], xs), xs)
    closed, (carry, y) = jax.make_jaxpr(body, return_shape=True)(init, x)
    if not _same_types(init, carry):
        # lax.scan settles weakly typed carries, and has the error messages for the other cases.
        carry, _ = jax.eval_shape(lambda init, xs: lax.scan(body, init, xs, length=length), init, xs)
        init = jax.tree.map(lambda leaf, like: lax.convert_element_type(leaf, like.dtype), init, carry)
        closed, (carry, y) = jax.make_jaxpr(body, return_shape=True)(init, x)
    return init, closed.jaxpr, list(closed.consts), (jax.tree.structure(carry), jax.tree.structure(y))


def _same_types(init: Any, carry: Any) -> bool:
    def types(tree: Any) -> list[Any]:
        return [(leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)) for leaf in jax.tree.leaves(tree)]

    return jax.tree.structure(init) == jax.tree.structure(carry) and types(init) == types(carry)


def _differentiable(problem: Problem) -> Callable[[Carry, Arrays, Arrays], tuple[Carry, Arrays]]:
    """The sweep as a function of leaves, with its derivative rule."""
    # A layer may hold sweeps, and the sweep around them differentiates it in several places: made once, and
    # called by name, the rules are traced and compiled to a program of their own once.
    forward_rule = functools.cache(functools.partial(_forward_rule, problem))
    backward_rule = functools.cache(functools.partial(_backward_rule, problem))

    @jax.custom_vjp
    def run(init: Carry, xs: Arrays, shared: Arrays) -> tuple[Carry, Arrays]:
        return problem.plain(problem.layer, init, xs, shared)

    def forward(init: Any, xs: Any, shared: Any) -> tuple[tuple[Carry, Arrays], Any]:
        perturbed = tuple(
            tuple(leaf.perturbed and is_differentiable(leaf.value.dtype) for leaf in part)
            for part in (init, xs, shared)
        )
        init, xs, shared = ([leaf.value for leaf in part] for part in (init, xs, shared))
        outputs = problem.jaxpr.outvars[problem.carries :]
        every_y = [is_differentiable(getattr(out.aval, "dtype", bool)) for out in outputs]
        init_wanted, xs_wanted, shared_wanted = perturbed
        wanted = problem.wanted(init_wanted, xs_wanted, shared_wanted, every_y)
        carry, ys, kept = forward_rule(wanted)(init, xs, shared)
        return (carry, ys), (kept.with_constant_boundaries(), xs, shared, _Static(perturbed))

    def backward(residuals: Any, cotangents: Any) -> tuple[Any, Any, Any]:
        kept, xs, shared, static = residuals
        carry_ct, ys_ct = cotangents
        # The head's residuals were kept for the cotangents of all outputs.
        has_ct = [
            is_differentiable(ct.dtype) and (problem.head is not None or not isinstance(ct, SymbolicZero))
            for ct in ys_ct
        ]
        init_wanted, xs_wanted, shared_wanted = static.value
        wanted = problem.wanted(init_wanted, xs_wanted, shared_wanted, has_ct)
        carry_ct = [_instantiate(ct) for ct in pick(carry_ct, wanted.carry)]
        ys_ct = [_instantiate(ct) for ct in pick(ys_ct, has_ct)]
        found = backward_rule(wanted)(kept, xs, shared, carry_ct, ys_ct)
        init_ct, xs_ct, shared_ct = found
        return spread(init_ct, init_wanted), spread(xs_ct, xs_wanted), spread(shared_ct, shared_wanted)

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run


def _forward_rule(
    problem: Problem, wanted: Wanted
) -> Callable[[Carry, Arrays, Arrays], tuple[Carry, Arrays, Kept]]:
    """The forward sweep, differentiable once more: by the plain scan, and the first carry that it keeps."""

    @jax.custom_vjp
    @jax.jit
    def run(init: Carry, xs: Arrays, shared: Arrays) -> tuple[Carry, Arrays, Kept]:
        return problem.forward(wanted, init, xs, shared)

    def forward(init: Carry, xs: Arrays, shared: Arrays) -> Any:
        return run(init, xs, shared), not_forwarded((init, xs, shared))

    def backward(inputs: Any, cotangents: Any) -> Any:
        carry_ct, ys_ct, kept_ct = cotangents
        _, pullback = jax.vjp(problem.reference, *inputs)
        init_ct, xs_ct, shared_ct = pullback((carry_ct, ys_ct))
        return [_plus(a, b) for a, b in zip(init_ct, kept_ct.first(), strict=True)], xs_ct, shared_ct

    run.defvjp(forward, backward)
    return run


def _backward_rule(problem: Problem, wanted: Wanted) -> Callable[..., tuple[Carry, Arrays, Arrays]]:
    """The reverse sweep, differentiable once more: by the plain scan's pullback, from the first carry."""

    @jax.custom_vjp
    @jax.jit
    def run(kept: Kept, *rest: Any) -> tuple[Carry, Arrays, Arrays]:
        return problem.pullback(wanted, kept, *rest)

    def reference(
        init: Carry, xs: Arrays, shared: Arrays, carry_ct: Carry, ys_ct: Arrays
    ) -> tuple[Carry, Arrays, Arrays]:
        def part(*parts: Any) -> tuple[Carry, Arrays]:
            whole = (merge(*triple) for triple in zip((init, xs, shared), parts, picks, strict=True))
            carry, ys = problem.reference(*whole)
            return pick(carry, wanted.carry), pick(ys, wanted.ys)

        picks = (wanted.init, wanted.xs, wanted.shared)
        _, pullback = jax.vjp(part, *(pick(*pair) for pair in zip((init, xs, shared), picks, strict=True)))
        return pullback((carry_ct, ys_ct))

    def forward(kept: Kept, *rest: Any) -> Any:
        return run(kept, *rest), not_forwarded((kept, rest))

    def backward(residuals: Any, cotangents: Any) -> Any:
        kept, rest = residuals
        _, pullback = jax.vjp(reference, kept.first(), *rest)
        init_ct, *rest_ct = pullback(cotangents)
        return kept.cotangent_of_first(init_ct), *rest_ct

    run.defvjp(forward, backward)
    return run


@functools.partial(jax.tree_util.register_dataclass, data_fields=(), meta_fields=("value",))
@dataclass(frozen=True)
class _Static:
    """A hashable value that travels among residuals."""

    value: Any


def _reverse_mode_only(leaf: Array) -> Array:
    return reverse_mode_only(leaf) if is_differentiable(leaf.dtype) else leaf


def _instantiate(cotangent: Any) -> Array:
    if isinstance(cotangent, SymbolicZero):
        aval: Any = cotangent.aval
        return jnp.zeros(aval.shape, aval.dtype)
    return cotangent


def _plus(a: Array, b: Array) -> Array:
    return a if a.dtype == jax.dtypes.float0 else lax.add(a, b)
