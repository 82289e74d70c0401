"""Values of a traced program that depend on weights, and scores from their derivatives along directions."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import eval_jaxpr
from jax.custom_batching import custom_vmap
from jax.extend.core import Jaxpr, Literal
from jax.interpreters import partial_eval

from .._activity import program_of
from .._sweep.store import varying_over


class UnsupportedLeafError(ValueError):
    """A weight is used in a way for which its scores can't be found leaf by leaf."""


@dataclasses.dataclass(frozen=True, eq=False)
class Along:
    """A direction of an array of the model, or what it is of a value that was computed from the array.

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

    def of_layer(self, number: Any) -> Any:
        """The direction of one layer, zero elsewhere."""
        numbers = lax.broadcasted_iota("int32", self.direction.shape, self.layers or 0)
        return jnp.where(numbers == number, self.direction, jnp.zeros((), self.direction.dtype))

    def split(self) -> "list[Along]":
        """One direction for each layer."""
        return [Along(self.path, self.of_layer(number), probe) for number, probe in enumerate(self.probe)]


@dataclasses.dataclass(frozen=True, eq=False)
class Weight:
    """An array that is scored, along one direction or several."""

    array: Any
    alongs: tuple[Along, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """An equation on values that depend on weights, and others."""

    equation: Any
    operands: tuple[Any, ...]
    inline_custom: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Result:
    """One result of such a call."""

    call: Call
    index: int


Node: TypeAlias = Weight | Result


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """A value of the program.

    Attributes:
        array: the value itself.
        node: how it depends on weights, where it depends on them and not on data.
        depends: whether it depends on data.
    """

    array: Any
    node: Node | None = None
    depends: bool = False

    @property
    def operand(self) -> Any:
        """As an operand of a derivative."""
        return self.array if self.node is None else self.node

    def of(self, array: Any) -> "Value":
        """The same of another array."""
        return dataclasses.replace(self, array=array)


def bind(equation: Any, operands: Sequence[Any], inline_custom: bool = False) -> list[Any]:
    """Evaluate one equation.

    Args:
        equation: any.
        operands: the values of its inputs.
        inline_custom: evaluate what a `jax.custom_vjp` computes without its rules, which no derivative
            along a direction can pass, and without the `stop_gradient`s that leave derivatives to them.
    """
    if inline_custom and equation.primitive.name == "stop_gradient":
        return list(operands)
    if inline_custom and (inner := program_of(equation)):
        if equation.primitive.name in ("custom_vjp_call", "jit", "pjit", "rows"):
            return evaluate_without_rules(inner, operands)
        if equation.primitive.name == "shard_map":
            return _per_device(equation)(*operands)
    pairs = zip(equation.invars, operands, strict=True)
    given = {atom: value for atom, value in pairs if not isinstance(atom, Literal)}
    debug_info = jax.make_jaxpr(lambda: ())().jaxpr.debug_info
    alone = Jaxpr([], list(given), equation.outvars, [equation], equation.effects, debug_info)
    return eval_jaxpr(alone, (), *given.values())


def _per_device(equation: Any) -> Any:
    params = equation.params

    def own(*operands: Any) -> list[Any]:
        return evaluate_without_rules(params["jaxpr"], operands)

    return jax.shard_map(
        own,
        in_specs=tuple(params["in_specs"]),
        out_specs=list(params["out_specs"]),
        mesh=params["mesh"],
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )


def evaluate_without_rules(closed: Any, operands: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr, open or closed, without the rules of `jax.custom_vjp`s."""
    jaxpr = getattr(closed, "jaxpr", closed)
    values = dict(zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=True))
    values |= dict(zip(jaxpr.invars, operands, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        found = bind(equation, [read(atom) for atom in equation.invars], inline_custom=True)
        values |= dict(zip(equation.outvars, found, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _needed(nodes: Sequence[Any]) -> list[Any]:
    """The weights and arrays that nodes are computed from, each once."""
    found: dict[int, Any] = {}

    def visit(node: Any) -> None:
        if id(node) not in found:
            found[id(node)] = node
            for operand in node.call.operands if isinstance(node, Result) else ():
                visit(operand)

    for node in nodes:
        visit(node)
    return [node for node in found.values() if not isinstance(node, Result)]


def directions_of(nodes: Sequence[Any]) -> list[tuple[Weight, Along]]:
    """The weights that nodes depend on, with each direction along which they have derivatives."""
    return [(node, along) for node in _needed(nodes) if isinstance(node, Weight) for along in node.alongs]


def _values(nodes: Sequence[Any], known: dict[int, Any]) -> list[Any]:
    """Nodes as arrays, with those of weights and others by their `id`s."""

    def value(node: Any) -> Any:
        if isinstance(node, Result):
            call = node.call
            if id(call) not in known:
                operands = [value(operand) for operand in call.operands]
                known[id(call)] = bind(call.equation, operands, call.inline_custom)
            return known[id(call)][node.index]
        return known.get(id(node), node.array if isinstance(node, Weight) else node)

    return [value(node) for node in nodes]


def tangents_of(
    nodes: Sequence[Any], weight: Weight, direction: Any, known: dict[int, Any] | None = None
) -> list[Any]:
    """The derivatives of nodes along a direction of one weight, with other arrays where some are given."""
    given = known or {id(weight): weight.array}
    own = given[id(weight)]
    run = lambda array: _values(nodes, {**given, id(weight): array})  # noqa: E731
    return jax.jvp(run, (own,), (direction.astype(own.dtype),))[1]


@dataclasses.dataclass(frozen=True, eq=False)
class Tangent:
    """The derivatives of some nodes along a direction: `program` of this and the arrays that it needs."""

    program: Callable[..., list[Any]]
    arrays: list[Any]

    @staticmethod
    def of(nodes: Sequence[Any], weight: Weight, along: Along) -> "Tangent":
        """Trace it."""
        needed = _needed(nodes)

        def tangents(direction: Any, arrays: list[Any]) -> list[Any]:
            known = {id(node): array for node, array in zip(needed, arrays, strict=True)}
            return tangents_of(nodes, weight, direction, known)

        arrays = [node.array if isinstance(node, Weight) else node for node in needed]
        closed = jax.make_jaxpr(tangents)(along.direction, arrays)
        keep = [True] + [False] * len(arrays)
        jaxpr, used = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(nodes), instantiate=keep)
        program = functools.partial(eval_jaxpr, jaxpr, closed.consts)
        return Tangent(program, [one for one, is_used in zip(arrays, used[1:], strict=True) if is_used])


@dataclasses.dataclass(frozen=True, eq=False)  # hashed by identity
class _Meeting:
    """How the backward pass finds a score.

    Attributes:
        tangents: the program of a `Tangent`.
        layers: see `Along`.
        varying: the axes of the mesh along which the score differs within a `jax.shard_map`.
    """

    tangents: Callable[..., list[Any]]
    layers: int | None
    varying: frozenset[str]


def deposit(results: list[Any], along: Along, tangent: Tangent) -> list[Any]:
    """The results as they are; the backward pass adds the score to the cotangent of the probe.

    Args:
        results: arrays that depend on a weight.
        along: a direction of this weight.
        tangent: of the results along it. It is evaluated in the backward pass.
    """
    direction, *arrays = map(lax.stop_gradient, (along.direction, *tangent.arrays))
    given = (*results, direction, *arrays, along.probe)
    varying = frozenset().union(*(jax.typeof(array).manual_axis_type.varying for array in given))
    meeting = _Meeting(tangent.program, along.layers, varying)
    return _deposit(meeting, results, varying_over(along.probe, varying), direction, arrays)


def settled(value: Value) -> Any:
    """A value as an array, with deposits for the weights that it alone depends on."""
    return value.array if value.node is None else deposited([value.array], [value.node])[0]


def deposited(arrays: list[Any], nodes: Sequence[Any]) -> list[Any]:
    """The arrays that nodes have, with deposits for each direction."""
    for weight, along in directions_of(nodes):
        arrays = deposit(arrays, along, Tangent.of(nodes, weight, along))
    return arrays


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _deposit(
    meeting: _Meeting, results: list[Any], probe: Any, direction: Any, arrays: list[Any]
) -> list[Any]:
    return _of_each_example(probe, results)


def _forward(
    meeting: _Meeting, results: list[Any], probe: Any, direction: Any, arrays: list[Any]
) -> tuple[list[Any], Any]:
    return _of_each_example(probe, results), (direction, arrays)


def _backward(meeting: _Meeting, kept: Any, cotangents: list[Any]) -> tuple[Any, Any, None, None]:
    direction, arrays = kept

    def score(direction: Any) -> Any:
        pairs = zip(cotangents, meeting.tangents(direction, *arrays), strict=True)
        return sum((_product(*pair) for pair in pairs), jnp.zeros((), jnp.float32))

    if meeting.layers is None:
        found = score(direction)
    else:
        along = Along("", direction, None, meeting.layers)
        numbers = jnp.arange(direction.shape[meeting.layers])
        found = lax.map(lambda number: score(along.of_layer(number)), numbers)
    return cotangents, varying_over(found, meeting.varying), None, None


_deposit.defvjp(_forward, _backward)


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
