"""`lax.scan` whose reverse sweep follows a schedule: few carries, no copies of weights, gradients in place.

Two nested scans under `jax.checkpoint` would keep as few carries, but slice a segment of weights into a new
buffer and stack a segment of gradients before copying it out. Here the stack is indexed by layer number in
the innermost loop, and the gradient buffer is a loop carry that is updated in place.

Gradients of gradients go through the plain checkpointed scan, since loops with dynamic trip counts have no
transpose.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import partial_eval
from jaxtyping import Array

from .._activity import is_differentiable
from .._compat import as_residual, not_forwarded, of_residual
from .._placement import is_on_host
from .._schedule import Schedule
from .back import pull_back
from .derivative_errors import reverse_mode_only
from .forward import forward as sweep_forward, primal
from .gradient import Perturbed, merge, pick, scatter_leaves
from .kinds import Pattern
from .slots import Arrays, Carry, Checkpoints
from .spec import FirstLayers, SweepSpec
from .store import zeros_like
from .trace import TracedLayer, kinds_of, trace_layers
from .vectorized import run_vectorized


def sweep(
    body: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any,
    *,
    length: int,
    unsliced: Sequence[bool] | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """`lax.scan(body, init, xs)` in value and gradients, with the reverse sweep that `schedule` describes.

    Args:
        body: `(carry, x) -> (carry, y)` on pytrees of arrays; it may close over traced values.
        init: the first carry.
        xs: pytree of arrays with a leading axis of size `length`, or without leaves.
        length: number of layers.
        unsliced: for which leaves of `xs` every layer takes the stack; none by default. Their gradients are
            summed in place, where a layer reads a part of them.
        **options: as of `sweep_kinds`.

    Returns:
        The last carry and the stacked `y`s.

    Raises:
        ValueError, TypeError: as `sweep_kinds`.
    """
    masks = None if unsliced is None else [unsliced]
    carry, (ys,) = sweep_kinds([body], init, [xs], length=length, unsliced=masks, **options)
    return carry, ys


def sweep_kinds(
    bodies: Sequence[Callable[[Any, Any], tuple[Any, Any]]],
    init: Any,
    xs: Sequence[Any],
    *,
    length: int,
    schedule: Schedule | None,
    pattern: Pattern | None = None,
    checkpoint: Callable[[Callable], Callable] = jax.checkpoint,
    boundaries: Literal["device", "host"] = "device",
    first_layers: FirstLayers | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    unsliced: Sequence[Sequence[bool]] | None = None,
    read_length: int = 1,
    keeps_in_segments: bool = False,
) -> tuple[Any, list[Any]]:
    """`sweep` over layers of several kinds, each with a body, own inputs and outputs.

    Args:
        bodies: a layer of each kind, `(carry, x) -> (carry, y)`; all have the same carry.
        init: the first carry.
        xs: for each kind a pytree of arrays with an entry for each of its layers.
        length: number of layers.
        schedule: a cut of as many layers, less `first_layers`, or of segments of `read_length`; None for
            none.
        pattern: which layer is of which kind; every kind has some. None if there is one.
        checkpoint: how a layer's internals are kept within the segment being reversed. The replay keeps what
            it saves for that segment's layers, except inputs and what comes from them without the carry.
        boundaries: `"host"` keeps the segments' first inputs in host memory; the schedule must be cut once.
        first_layers: the layers that run first, if these are to keep their inputs and residuals.
        reverse: whether to go from the last layer to the first.
        unroll: layers per iteration of the innermost loops; `True` unrolls everything.
        unsliced: for which leaves of `xs` every layer takes the stack of its kind; none by default.
        read_length, keeps_in_segments: as in `SweepSpec`, for one kind; the schedule is one of segments of
            `read_length`.

    Returns:
        The last carry and the stacked `y`s of each kind.

    Raises:
        ValueError: the schedule is for another length, or too deep for the host.
        TypeError: forward-mode differentiation, a layer that uses a `jax.Ref`, or one that has ordered
            effects while boundaries are on the host.
    """
    scheduled = length - (first_layers.length if first_layers else 0)
    of_schedule = schedule.length * read_length if schedule else 0
    if of_schedule != scheduled:
        raise ValueError(f"the schedule is for {of_schedule} layers, but there are {scheduled}")
    if boundaries not in ("device", "host"):
        raise ValueError(f'boundaries must be "device" or "host", got {boundaries!r}')
    if boundaries == "host" and not (schedule and schedule.segments):
        raise ValueError(
            "boundaries can be kept on the host only where the layers are cut once: use equal segments"
        )
    _check_lengths(xs, [length] if pattern is None else pattern.counts)
    stacks = [jax.tree.leaves(part) for part in xs]
    masks = [tuple(mask) for mask in unsliced or [[False] * len(part) for part in stacks]]
    shared_first = [lambda shared, carry, x, body=body: body(carry, x) for body in bodies]
    traced = trace_layers(
        shared_first, [[]] * len(bodies), init, xs, unsliced=masks, offloads=boundaries == "host"
    )
    unread: Arrays = []
    for k, (layer, part, mask) in enumerate(zip(traced, stacks, masks, strict=True)):
        traced[k], read = _without_unread(layer, part)
        unread += pick(part, [not is_read for is_read in read])
        stacks[k], masks[k] = pick(part, read), tuple(pick(mask, read))
    kinds, shared = kinds_of(traced)
    spec = SweepSpec(
        kinds,
        schedule,
        checkpoint,
        boundaries,
        first_layers,
        reverse,
        unroll,
        sum(masks, ()),
        pattern,
        read_length,
        keeps_in_segments,
    )
    carry, ys = run_vectorized(_run, spec, traced[0].init, sum(stacks, []), shared, unread)
    parts = [jax.tree.unflatten(of.y_tree, ys[kind.ys]) for of, kind in zip(traced, kinds, strict=True)]
    return jax.tree.unflatten(traced[0].carry_tree, carry), parts


def _check_lengths(xs: Sequence[Any], lengths: Sequence[int]) -> None:
    for tree, length in zip(xs, lengths, strict=True):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if jnp.shape(leaf)[:1] != (length,):
                raise ValueError(
                    f"xs{jax.tree_util.keystr(path)} has shape {jnp.shape(leaf)}; its leading axis must have "
                    f"size {length}, one a layer"
                )


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


def _run(spec: SweepSpec, init: Carry, xs: Arrays, shared: Arrays, unread: Arrays) -> tuple[Carry, Arrays]:
    return _differentiable(spec)(*jax.tree.map(_reverse_mode_only, (init, xs, shared, unread)))


def _differentiable(spec: SweepSpec) -> Callable[[Carry, Arrays, Arrays, Arrays], tuple[Carry, Arrays]]:
    """The sweep as a function of leaves, with its derivative rule.

    The last are arrays on the host that no layer reads. JAX would make their zero gradients on the device.
    """
    # Nested sweeps differentiate a layer in several places; caching traces and compiles each rule once.
    forward_of = functools.cache(functools.partial(forward_rule, spec))
    backward_of = functools.cache(functools.partial(backward_rule, spec))

    @jax.custom_vjp
    def run(init: Carry, xs: Arrays, shared: Arrays, unread: Arrays) -> tuple[Carry, Arrays]:
        return primal(spec, init, xs, shared)

    def forward(init: Any, xs: Any, shared: Any, unread: Any) -> tuple[tuple[Carry, Arrays], Any]:
        *masks, of_unread = [_perturbed(part) for part in (init, xs, shared, unread)]
        init, xs, shared, unread = ([leaf.value for leaf in part] for part in (init, xs, shared, unread))
        outputs = [type_ for kind in spec.kinds for type_ in kind.output_types]
        every_y = [is_differentiable(getattr(type_, "dtype", bool)) for type_ in outputs]
        perturbed = spec.perturbed(*masks, ys=every_y)
        carry, ys, checkpoints = forward_of(perturbed)(init, xs, shared)
        differentiated = as_residual((*masks, of_unread))
        return (carry, ys), (checkpoints.with_constant_boundaries(), xs, shared, unread, differentiated)

    def backward(residuals: Any, cotangents: Any) -> tuple[Any, Any, Any, Any]:
        checkpoints, xs, shared, unread, differentiated = residuals
        *masks, of_unread = of_residual(differentiated)
        carry_ct, ys_ct = cotangents
        # The first layers' residuals were kept for the cotangents of all outputs.
        has_ct = [
            is_differentiable(ct.dtype)
            and (spec.first_layers is not None or not isinstance(ct, SymbolicZero))
            for ct in ys_ct
        ]
        perturbed = spec.perturbed(*masks, ys=has_ct)
        carry_ct = [_instantiate(ct) for ct in pick(carry_ct, perturbed.carry)]
        ys_ct = [_instantiate(ct) for ct in pick(ys_ct, has_ct)]
        found = backward_of(perturbed)(checkpoints, xs, shared, carry_ct, ys_ct)
        init_ct, xs_ct, shared_ct = (scatter_leaves(*pair) for pair in zip(found, masks, strict=True))
        zeros = [zeros_like(leaf) for leaf in pick(unread, of_unread)]
        return init_ct, xs_ct, shared_ct, scatter_leaves(zeros, of_unread)

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run


def forward_rule(
    spec: SweepSpec, perturbed: Perturbed
) -> Callable[[Carry, Arrays, Arrays], tuple[Carry, Arrays, Checkpoints]]:
    """The forward sweep, differentiable once more: by the plain scan, and the first carry that it keeps."""

    @jax.custom_vjp
    @jax.jit
    def run(init: Carry, xs: Arrays, shared: Arrays) -> tuple[Carry, Arrays, Checkpoints]:
        return sweep_forward(spec, perturbed, init, xs, shared)

    def forward(init: Carry, xs: Arrays, shared: Arrays) -> Any:
        return run(init, xs, shared), not_forwarded((init, xs, shared))

    def backward(inputs: Any, cotangents: Any) -> Any:
        carry_ct, ys_ct, checkpoints_ct = cotangents
        _, pullback = jax.vjp(spec.reference, *inputs)
        init_ct, xs_ct, shared_ct = pullback((carry_ct, ys_ct))
        return [_plus(a, b) for a, b in zip(init_ct, checkpoints_ct.first(), strict=True)], xs_ct, shared_ct

    run.defvjp(forward, backward)
    return run


def backward_rule(spec: SweepSpec, perturbed: Perturbed) -> Callable[..., tuple[Carry, Arrays, Arrays]]:
    """The reverse sweep, differentiable once more: by the plain scan's pullback, from the first carry."""

    @jax.custom_vjp
    @jax.jit
    def run(checkpoints: Checkpoints, *rest: Any) -> tuple[Carry, Arrays, Arrays]:
        return pull_back(spec, perturbed, checkpoints, *rest)

    def reference(
        init: Carry, xs: Arrays, shared: Arrays, carry_ct: Carry, ys_ct: Arrays
    ) -> tuple[Carry, Arrays, Arrays]:
        def part(*parts: Any) -> tuple[Carry, Arrays]:
            whole = (merge(*triple) for triple in zip((init, xs, shared), parts, picks, strict=True))
            carry, ys = spec.reference(*whole)
            return pick(carry, perturbed.carry), pick(ys, perturbed.ys)

        picks = (perturbed.init, perturbed.xs, perturbed.shared)
        _, pullback = jax.vjp(part, *(pick(*pair) for pair in zip((init, xs, shared), picks, strict=True)))
        return pullback((carry_ct, ys_ct))

    def forward(checkpoints: Checkpoints, *rest: Any) -> Any:
        return run(checkpoints, *rest), not_forwarded((checkpoints, rest))

    def backward(residuals: Any, cotangents: Any) -> Any:
        checkpoints, rest = residuals
        _, pullback = jax.vjp(reference, checkpoints.first(), *rest)
        init_ct, *rest_ct = pullback(cotangents)
        return checkpoints.cotangent_of_first(init_ct), *rest_ct

    run.defvjp(forward, backward)
    return run


def _perturbed(leaves: Any) -> tuple[bool, ...]:
    return tuple(leaf.perturbed and is_differentiable(leaf.value.dtype) for leaf in leaves)


def _reverse_mode_only(leaf: Array) -> Array:
    return reverse_mode_only(leaf) if is_differentiable(leaf.dtype) else leaf


def _instantiate(cotangent: Any) -> Array:
    if isinstance(cotangent, SymbolicZero):
        aval: Any = cotangent.aval
        return jnp.zeros(aval.shape, aval.dtype)
    return cotangent


def _plus(a: Array, b: Array) -> Array:
    return a if a.dtype == jax.dtypes.float0 else lax.add(a, b)
