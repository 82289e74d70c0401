"""Values of a traced program that depend on weights, and scores from their derivatives
along directions.
"""

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

from .. import _xla_hints as xla_hints
from .._activity import is_differentiable
from .._sweep.store import varying_over
from ..ops._expert_blocks import InStack
from ._traced import has_small_range


class UnsupportedLeafError(ValueError):
    """A weight is used in a way for which its scores can't be found leaf by leaf."""


@dataclasses.dataclass(frozen=True, eq=False)
class Along:
    """A direction of an array of the model, or the derivative along it of a value
    computed from the array.

    The probe is zeros, for each layer of a stack; its cotangent is the score.
    """

    path: str
    direction: Any
    probe: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """A value of the program, with its derivatives where it depends on weights and not
    on data.
    """

    array: Any
    alongs: tuple[Along, ...] = ()
    depends: bool = False

    @property
    def own(self) -> Any:
        """The array, also where it is read in a stack of all layers."""
        return self.array.own if isinstance(self.array, InStack) else self.array


def bind(equation: Any, operands: Sequence[Any]) -> list[Any]:
    pairs = zip(equation.invars, operands, strict=True)
    given = {atom: value for atom, value in pairs if not isinstance(atom, Literal)}
    # A jaxpr needs one, and the equation's own belongs to a program with other inputs.
    debug_info = jax.make_jaxpr(lambda: ())().jaxpr.debug_info
    alone = Jaxpr(
        [], list(given), equation.outvars, [equation], equation.effects, debug_info
    )
    return eval_jaxpr(alone, (), *given.values())


def without_rules(program: Any) -> Any:
    """A jaxpr, open or closed, with what `jax.custom_vjp`s compute in their place;
    anything else as it is.

    It has no `stop_gradient`s either, which leave derivatives to the rules.
    """
    if isinstance(program, Jaxpr):
        return program.replace(eqns=[*map(equation_without_rules, program.eqns)])
    if isinstance(program, ClosedJaxpr):
        return program.replace(jaxpr=without_rules(program.jaxpr))
    return program


def equation_without_rules(equation: Any) -> Any:
    # Programs within it, such as branches and bodies of loops, have rules too.
    params = {name: without_rules(value) for name, value in equation.params.items()}
    # Within a rule's function it marks what the rule differentiates itself.
    if equation.primitive is primitives.stop_gradient_p:
        return equation.replace(primitive=primitives.copy_p)
    if equation.primitive is primitives.custom_vjp_call_p:
        params = {"call_jaxpr": params["call_jaxpr"]}
        return equation.replace(primitive=primitives.closed_call_p, params=params)
    return equation.replace(params=params)


def tangents_of(
    equation: Any, arrays: Sequence[Any], directions: Mapping[int, Any]
) -> list[Any]:
    """The derivatives of an equation's results along directions of some of its
    operands.
    """

    def run(*some: Any) -> list[Any]:
        own = dict(zip(directions, some, strict=True))
        return bind(equation, [own.get(at, array) for at, array in enumerate(arrays)])

    given = [arrays[at] for at in directions]
    # JAX takes tangents in the dtype of their primals; a direction may be in float32.
    along = [
        own.astype(array.dtype)
        for own, array in zip(directions.values(), given, strict=True)
    ]
    return jax.jvp(run, given, along)[1]


# Primitives whose result is their operand, maybe cast.
SAME = "convert_element_type copy device_put name reshard sharding_constraint".split()


def of_weights(equation: Any, operands: Sequence[Value]) -> list[Value]:
    """The results of an equation on weights, and on values that are the same for all
    examples.
    """
    given = [value.own for value in operands]
    arrays = bind(equation, given)
    is_same = equation.primitive.name in SAME and is_differentiable(arrays[0].dtype)
    if is_same and has_small_range(
        [equation]
    ):  # which would lose small entries of a direction
        return [Value(arrays[0], operands[0].alongs)]
    found: list[list[Along]] = [[] for _ in arrays]
    # Operands that come from one array, such as `w * w`, share its probe: their
    # tangents are of one direction, and taken together.
    groups: dict[int, dict[int, Along]] = {}
    for at, value in enumerate(operands):
        for along in (
            value.alongs if equation.primitive is not primitives.stop_gradient_p else ()
        ):
            groups.setdefault(id(along.probe), {})[at] = along
    for group in groups.values():
        tangents = tangents_of(
            equation, given, {at: along.direction for at, along in group.items()}
        )
        first, *_ = group.values()
        for alongs, tangent in zip(found, tangents, strict=True):
            if is_differentiable(jnp.result_type(tangent)):
                # Reverse mode is to see the array alone, and not its derivative too.
                alongs.append(
                    Along(first.path, lax.stop_gradient(tangent), first.probe)
                )
    return [
        Value(array, tuple(alongs)) for array, alongs in zip(arrays, found, strict=True)
    ]


def deposit(
    results: list[Any], along: Along, tangents: Callable[[Any], list[Any]]
) -> list[Any]:
    """The results as they are; the backward pass adds the score to the cotangent of the
    probe.

    `tangents` gives those of the results along a direction. Traced here, and evaluated
    in the backward pass.
    """
    # A function of the direction, of which the backward pass evaluates only what the
    # results' tangents need. What it closes over are residuals of the deposit: stopped,
    # as scores have no derivatives.
    closed = jax.make_jaxpr(tangents)(along.direction)
    jaxpr = closed.jaxpr.replace(
        constvars=[], invars=[*closed.jaxpr.invars, *closed.jaxpr.constvars]
    )
    # The direction stays an input, used or not, so that the signature doesn't change.
    keep = [True] + [False] * len(closed.consts)
    jaxpr, used = partial_eval.dce_jaxpr(jaxpr, [True] * len(results), instantiate=keep)
    arrays = [
        lax.stop_gradient(array)
        for array in itertools.compress(closed.consts, used[1:])
    ]
    direction = lax.stop_gradient(along.direction)
    given = (*results, direction, *arrays, along.probe)
    # Within a shard_map a cotangent has to vary over the mesh axes that its primal
    # does, or JAX refuses it.
    varying = frozenset().union(
        *(jax.typeof(array).manual_axis_type.varying for array in given)
    )

    @jax.custom_vjp
    def run(
        results: list[Any], probe: Any, direction: Any, arrays: list[Any]
    ) -> list[Any]:
        return of_each_example(probe, results)

    def forward(results: list[Any], probe: Any, *kept: Any) -> tuple[list[Any], Any]:
        return of_each_example(probe, results), kept

    def backward(kept: Any, cotangents: list[Any]) -> tuple[Any, Any, None, None]:
        direction, arrays = kept
        cotangents, arrays = xla_hints.score_after(cotangents, arrays)

        pairs = zip(cotangents, eval_jaxpr(jaxpr, (), direction, *arrays), strict=True)
        found = sum((_product(*pair) for pair in pairs), jnp.zeros((), jnp.float32))
        cotangents, found = xla_hints.score_before(cotangents, found)
        return cotangents, varying_over(found, varying), None, None

    run.defvjp(forward, backward)
    return run(results, varying_over(along.probe, varying), direction, arrays)


def settled(value: Value) -> Any:
    """A value as an array, with deposits for the weights that it alone depends on."""
    arrays = [value.own]
    for along in value.alongs:
        arrays = deposit(arrays, along, lambda direction: [direction])
    return arrays[0]


def _product(cotangent: Any, tangent: Any) -> Any:
    if jnp.iscomplexobj(tangent):
        return jnp.sum(jnp.real(cotangent * tangent))
    # In float32 whatever the dtype of computation: many small products are added up.
    return jnp.sum(cotangent.astype(jnp.float32) * tangent.astype(jnp.float32))


@custom_vmap
def of_each_example(probe: Any, arrays: list[Any]) -> list[Any]:
    """The arrays, mapped wherever the probe is.

    A cotangent of an array that is the same for all examples would be their sum.
    """
    return arrays


@of_each_example.def_vmap
def _mapped(
    size: int, is_mapped: Sequence[Any], probe: Any, arrays: list[Any]
) -> tuple[list[Any], list[bool]]:
    if not is_mapped[0]:
        return arrays, is_mapped[1]
    pairs = zip(arrays, is_mapped[1], strict=True)
    found = [
        array if is_ else jnp.broadcast_to(array, (size, *array.shape))
        for array, is_ in pairs
    ]
    return found, [True] * len(found)
