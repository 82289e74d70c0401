"""Values of a traced program that depend on weights, and scores from their derivatives along directions."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import eval_jaxpr
from jax.custom_batching import custom_vmap
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, primitives
from jax.interpreters import partial_eval

from .._activity import is_differentiable
from .._sweep.store import varying_over
from ._layerwise import followed


class UnsupportedLeafError(ValueError):
    """A weight is used in a way for which its scores can't be found leaf by leaf."""


@dataclasses.dataclass(frozen=True, eq=False)
class Along:
    """A direction of an array of the model, or the derivative along it of a value computed from the array.

    Attributes:
        path: of the array in the model.
        direction: of the shape of the value.
        probe: zeros, a number or one for each layer; its cotangent is the score.
        layers: which dimension of the direction holds the layers that the probe has numbers for.
    """

    path: str
    direction: Any
    probe: Any
    layers: int | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """A value of the program.

    Attributes:
        array: the value itself.
        alongs: its derivatives, where it depends on weights and not on data.
        depends: whether it depends on data.
    """

    array: Any
    alongs: tuple[Along, ...] = ()
    depends: bool = False


def bind(equation: Any, operands: Sequence[Any]) -> list[Any]:
    """Evaluate one equation."""
    pairs = zip(equation.invars, operands, strict=True)
    given = {atom: value for atom, value in pairs if not isinstance(atom, Literal)}
    debug_info = jax.make_jaxpr(lambda: ())().jaxpr.debug_info
    alone = Jaxpr([], list(given), equation.outvars, [equation], equation.effects, debug_info)
    return eval_jaxpr(alone, (), *given.values())


def without_rules(program: Any) -> Any:
    """A jaxpr, open or closed, with what `jax.custom_vjp`s compute in their place; anything else as it is.

    It has no `stop_gradient`s either, which leave derivatives to the rules.
    """
    if isinstance(program, Jaxpr):
        return program.replace(eqns=[*map(equation_without_rules, program.eqns)])
    if isinstance(program, ClosedJaxpr):
        return program.replace(jaxpr=without_rules(program.jaxpr))
    return program


def equation_without_rules(equation: Any) -> Any:
    """The same of an equation."""
    params = {name: without_rules(value) for name, value in equation.params.items()}
    if equation.primitive is primitives.stop_gradient_p:
        return equation.replace(primitive=primitives.copy_p)
    if equation.primitive is primitives.custom_vjp_call_p:
        params = {"call_jaxpr": params["call_jaxpr"]}
        return equation.replace(primitive=primitives.closed_call_p, params=params)
    return equation.replace(params=params)


def tangents_of(equation: Any, arrays: Sequence[Any], directions: Mapping[int, Any]) -> list[Any]:
    """The derivatives of an equation's results along directions of some of its operands."""

    def run(*some: Any) -> list[Any]:
        own = dict(zip(directions, some, strict=True))
        return bind(equation, [own.get(at, array) for at, array in enumerate(arrays)])

    given = [arrays[at] for at in directions]
    along = [own.astype(array.dtype) for own, array in zip(directions.values(), given, strict=True)]
    return jax.jvp(run, given, along)[1]


def of_weights(equation: Any, operands: Sequence[Value]) -> list[Value]:
    """The results of an equation on weights, and on values that are the same for all examples."""
    given = [value.array for value in operands]
    arrays = bind(equation, given)
    found: list[list[Along]] = [[] for _ in arrays]
    groups: dict[int, dict[int, Along]] = {}
    for at, value in enumerate(operands):
        for along in value.alongs if equation.primitive is not primitives.stop_gradient_p else ():
            groups.setdefault(id(along.probe), {})[at] = along
    for group in groups.values():
        layers = [group[at].layers if at in group else None for at in range(len(operands))]
        results = followed(equation, layers)
        for own in [group] if results else by_layer(group):
            tangents = tangents_of(equation, given, {at: along.direction for at, along in own.items()})
            (path, probe), *_ = ((along.path, along.probe) for along in own.values())
            pairs = zip(found, tangents, results or [(None, None)] * len(arrays), strict=True)
            for alongs, tangent, (rows, dimension) in pairs:
                if is_differentiable(jnp.result_type(tangent)):
                    of_rows = probe if rows is None else probe[rows]
                    alongs.append(Along(path, lax.stop_gradient(tangent), of_rows, dimension))
    return [Value(array, tuple(alongs)) for array, alongs in zip(arrays, found, strict=True)]


def by_layer(group: Mapping[int, Along]) -> list[dict[int, Along]]:
    """Directions with one probe as directions of one layer each."""
    probes = [*next(iter(group.values())).probe]
    return [
        {
            at: Along(along.path, _of_layer(along.direction, along.layers or 0, n), probe)
            for at, along in group.items()
        }
        for n, probe in enumerate(probes)
    ]


def _of_layer(direction: Any, layers: int, number: Any) -> Any:
    """The direction of one layer, zero elsewhere; `layers` is the dimension that has them."""
    numbers = lax.broadcasted_iota("int32", direction.shape, layers)
    return jnp.where(numbers == number, direction, jnp.zeros((), direction.dtype))


def deposit(results: list[Any], along: Along, tangents: Callable[[Any], list[Any]]) -> list[Any]:
    """The results as they are; the backward pass adds the score to the cotangent of the probe.

    `tangents` gives those of the results along a direction. Traced here, and evaluated in the backward pass.
    """
    closed = jax.make_jaxpr(tangents)(along.direction)
    jaxpr = closed.jaxpr.replace(constvars=[], invars=[*closed.jaxpr.invars, *closed.jaxpr.constvars])
    keep = [True] + [False] * len(closed.consts)
    jaxpr, used = partial_eval.dce_jaxpr(jaxpr, [True] * len(results), instantiate=keep)
    arrays = [lax.stop_gradient(array) for array in itertools.compress(closed.consts, used[1:])]
    direction = lax.stop_gradient(along.direction)
    given = (*results, direction, *arrays, along.probe)
    varying = frozenset().union(*(jax.typeof(array).manual_axis_type.varying for array in given))
    layers = along.layers

    @jax.custom_vjp
    def run(results: list[Any], probe: Any, direction: Any, arrays: list[Any]) -> list[Any]:
        return _of_each_example(probe, results)

    def forward(results: list[Any], probe: Any, *kept: Any) -> tuple[list[Any], Any]:
        return _of_each_example(probe, results), kept

    def backward(kept: Any, cotangents: list[Any]) -> tuple[Any, Any, None, None]:
        direction, arrays = kept
        # Between two barriers: else XLA merges its products with those of the forward pass, or leaves them
        # for later, and their results stay in memory.
        cotangents, arrays = lax.optimization_barrier((cotangents, arrays))

        def score(direction: Any) -> Any:
            pairs = zip(cotangents, eval_jaxpr(jaxpr, (), direction, *arrays), strict=True)
            return sum((_product(*pair) for pair in pairs), jnp.zeros((), jnp.float32))

        if layers is None:
            found = score(direction)
        else:
            parts = lambda number, at=layers: score(_of_layer(direction, at, number))  # noqa: E731
            found = lax.map(parts, jnp.arange(direction.shape[layers]))
        cotangents, found = lax.optimization_barrier((cotangents, found))
        return cotangents, varying_over(found, varying), None, None

    run.defvjp(forward, backward)
    return run(results, varying_over(along.probe, varying), direction, arrays)


def settled(value: Value) -> Any:
    """A value as an array, with deposits for the weights that it alone depends on."""
    arrays = [value.array]
    for along in value.alongs:
        arrays = deposit(arrays, along, lambda direction: [direction])
    return arrays[0]


def _product(cotangent: Any, tangent: Any) -> Any:
    if jnp.iscomplexobj(tangent):
        return jnp.sum(jnp.real(cotangent * tangent))
    return jnp.sum(cotangent.astype(jnp.float32) * tangent.astype(jnp.float32))


@custom_vmap
def _of_each_example(probe: Any, arrays: list[Any]) -> list[Any]:
    """The arrays, mapped wherever the probe is.

    A cotangent of an array that is the same for all examples would be their sum.
    """
    return arrays


@_of_each_example.def_vmap
def _mapped(
    size: int, is_mapped: Sequence[Any], probe: Any, arrays: list[Any]
) -> tuple[list[Any], list[bool]]:
    if not is_mapped[0]:
        return arrays, is_mapped[1]
    pairs = zip(arrays, is_mapped[1], strict=True)
    found = [array if is_ else jnp.broadcast_to(array, (size, *array.shape)) for array, is_ in pairs]
    return found, [True] * len(found)
