"""Transformations of a function of a list of arrays: each gives another function of
that list.

A function returns a tree of arrays. Derivatives are with respect to some of the arrays.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import eval_jaxpr as eval_jaxpr_of
from jax.sharding import AxisType, PartitionSpec

Function = Callable[[Sequence[Any]], Any]


class Choice(NamedTuple):
    """What a transformation may choose by: which arrays are differentiated, the rows,
    random numbers.
    """

    differentiated: list[int]
    rows: int
    rng: np.random.Generator


TRANSFORMS: dict[str, Callable[[Function, Choice], Function]] = {}


def transform(
    apply: Callable[[Function, Choice], Function],
) -> Callable[[Function, Choice], Function]:
    """Register a transformation."""
    TRANSFORMS[apply.__name__.rstrip("_")] = apply
    return apply


def is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def floats(tree: Any) -> tuple[list[Any], list[Any]]:
    """The leaves that have derivatives, and the others."""
    leaves = jax.tree.leaves(tree)
    return [leaf for leaf in leaves if is_float(leaf)], [
        leaf for leaf in leaves if not is_float(leaf)
    ]


def wave(leaf: Any) -> jax.Array:
    """Fixed numbers of the shape and dtype of a leaf."""
    numbers = np.cos(np.arange(leaf.size) * 1.7 + 0.3).reshape(leaf.shape)
    return jnp.asarray(numbers, leaf.dtype)


def direction(leaf: Any) -> jax.Array:
    """A tangent or a cotangent of a leaf: a `wave` that varies over the devices of a
    `jax.shard_map` where the leaf does, without which JAX takes none.
    """
    varies = jax.typeof(leaf).manual_axis_type  # None outside of a `jax.shard_map`
    axes = tuple(varies.varying) if varies else ()
    numbers = wave(leaf)
    return lax.pcast(numbers, axes, to="varying") if axes else numbers


def along(tree: Any, factor: float = 1.0) -> jax.Array:
    """A scalar that depends on all leaves that have derivatives."""
    total = jnp.zeros((), float)
    for leaf in floats(tree)[0]:
        real = jnp.real(leaf) + jnp.imag(leaf) if jnp.iscomplexobj(leaf) else leaf
        real = real.astype(float)
        total += jnp.sum(jnp.sin(factor * real) * wave(real))
    return total


def _replaced(
    leaves: Sequence[Any], numbers: Sequence[int], new: Sequence[Any]
) -> list[Any]:
    leaves = list(leaves)
    for number, leaf in zip(numbers, new, strict=True):
        leaves[number] = leaf
    return leaves


def _of_differentiated(
    f: Function, choice: Choice, leaves: Sequence[Any]
) -> tuple[Function, list[Any]]:
    """The function of the differentiated arrays alone, and these."""
    numbers = choice.differentiated
    return lambda given: f(_replaced(leaves, numbers, given)), [
        leaves[number] for number in numbers
    ]


@transform
def value(f: Function, choice: Choice) -> Function:
    return f


@transform
def grad(f: Function, choice: Choice) -> Function:
    def gradient(leaves):
        of_given, given = _of_differentiated(f, choice, leaves)
        return jax.grad(lambda given: along(of_given(given)))(given)

    return gradient


@transform
def value_and_grad(f: Function, choice: Choice) -> Function:
    def both(leaves):
        def loss(given):
            result = of_given(given)
            return along(result), result

        of_given, given = _of_differentiated(f, choice, leaves)
        return jax.value_and_grad(loss, has_aux=True)(given)

    return both


@transform
def vjp(f: Function, choice: Choice) -> Function:
    def pulled_back(leaves):
        of_given, given = _of_differentiated(f, choice, leaves)
        result, pullback, others = jax.vjp(
            lambda given: floats(of_given(given)), given, has_aux=True
        )
        return result, others, pullback(list(map(direction, result)))

    return pulled_back


@transform
def jvp(f: Function, choice: Choice) -> Function:
    def pushed_forward(leaves):
        of_given, given = _of_differentiated(f, choice, leaves)
        tangents = list(map(direction, given))
        return jax.jvp(
            lambda given: floats(of_given(given)), (given,), (tangents,), has_aux=True
        )

    return pushed_forward


@transform
def linearize(f: Function, choice: Choice) -> Function:
    def linearized(leaves):
        of_given, given = _of_differentiated(f, choice, leaves)
        result, forward, others = jax.linearize(
            lambda given: floats(of_given(given)), given, has_aux=True
        )
        tangents = list(map(direction, given))
        return (
            result,
            others,
            forward(tangents),
            forward([tangent * 2 for tangent in tangents]),
        )

    return linearized


def _jacobian(derivative: Callable[..., Any], f: Function, choice: Choice) -> Function:
    number = next(
        (n for n in choice.differentiated if n == choice.rows), choice.differentiated[0]
    )

    def jacobian(leaves):
        def pair(array):
            result = f(_replaced(leaves, [number], [array]))
            return jnp.stack([along(result), along(result, 0.7)])

        if jnp.iscomplexobj(leaves[number]):
            return jax.vjp(pair, leaves[number])[1](jnp.ones(2))
        return derivative(pair)(leaves[number])

    return jacobian


@transform
def jacfwd(f: Function, choice: Choice) -> Function:
    return _jacobian(jax.jacfwd, f, choice)


@transform
def jacrev(f: Function, choice: Choice) -> Function:
    return _jacobian(jax.jacrev, f, choice)


@transform
def vmap(f: Function, choice: Choice) -> Function:
    is_mapped = choice.rng.random(100) < 0.7
    is_last = choice.rng.random(100) < 0.5

    def batched(leaves):
        given, in_axes = [], []
        for number, leaf in enumerate(leaves):
            axis = leaf.ndim if is_last[number % 100] else 0
            mapped = number == choice.rows or is_mapped[number % 100]
            given.append(jnp.stack([leaf, _another(leaf)], axis) if mapped else leaf)
            in_axes.append(axis if mapped else None)
        return jax.vmap(f, (in_axes,))(given)

    return batched


def _another(leaf: Any) -> Any:
    """Another array of the same type."""
    if is_float(leaf):
        return leaf * 0.9
    if (
        jnp.issubdtype(leaf.dtype, jnp.integer) and leaf.dtype != jnp.uint32
    ):  # which may be a key's
        return leaf // 2
    return leaf


@transform
def jit(f: Function, choice: Choice) -> Function:
    return lambda leaves: jax.jit(f)(list(leaves))


@transform
def checkpoint(f: Function, choice: Choice) -> Function:
    policies = (
        None,
        jax.checkpoint_policies.dots_saveable,
        jax.checkpoint_policies.save_only_these_names("a"),
    )
    policy = policies[choice.rng.integers(len(policies))]
    return lambda leaves: jax.checkpoint(f, policy=policy)(list(leaves))


def _with_rows(f: Function, choice: Choice, leaves: Sequence[Any], rows: Any) -> Any:
    return f(_replaced(leaves, [choice.rows], [rows]))


@transform
def scan(f: Function, choice: Choice) -> Function:
    def repeated(leaves):
        def step(rows, factor):
            result = _with_rows(f, choice, leaves, rows * factor)
            return rows + 0.01 * along(result).astype(rows.dtype), result

        first = leaves[choice.rows]
        return lax.scan(step, first, jnp.asarray([1.0, 0.8], first.dtype))

    return repeated


@transform
def fori(f: Function, choice: Choice) -> Function:
    def repeated(leaves):
        def body(_, rows):
            return rows + 0.01 * along(_with_rows(f, choice, leaves, rows)).astype(
                rows.dtype
            )

        return lax.fori_loop(0, 2, body, leaves[choice.rows])

    return repeated


@transform
def cond(f: Function, choice: Choice) -> Function:
    def chosen(leaves):
        def other(leaves):
            return _with_rows(f, choice, leaves, leaves[choice.rows] * 2)

        return lax.cond(jnp.sum(leaves[choice.rows]) > 0, f, other, list(leaves))

    return chosen


@transform
def eval_jaxpr(f: Function, choice: Choice) -> Function:
    def evaluated(leaves):
        closed, shape = jax.make_jaxpr(f, return_shape=True)(list(leaves))
        found = eval_jaxpr_of(closed.jaxpr, closed.consts, *leaves)
        return jax.tree.unflatten(jax.tree.structure(shape), found)

    return evaluated


@transform
def shard_map(f: Function, choice: Choice) -> Function:
    devices = (2, 8)[choice.rng.integers(2)]
    is_checked = bool(choice.rng.integers(2))

    def divided(leaves):
        def on_device(leaves, factor):
            rows = leaves[choice.rows]
            result = _with_rows(f, choice, leaves, rows * factor[0].astype(rows.dtype))
            return jax.tree.map(lambda leaf: leaf[None], result)

        mesh = jax.make_mesh((devices,), ("device",), axis_types=(AxisType.Auto,))
        specs = (PartitionSpec(), PartitionSpec("device"))
        run = jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=specs,
            out_specs=PartitionSpec("device"),
            check_vma=is_checked,
        )
        return run(list(leaves), jnp.linspace(0.8, 1.2, devices))

    return divided
