"""Values of a traced program that depend on weights alone, and the derivative along a direction."""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
from jax.core import eval_jaxpr
from jax.extend.core import Jaxpr, Literal
from jax.interpreters import partial_eval

from .._activity import program_of


@dataclasses.dataclass(frozen=True, eq=False)
class Leaf:
    """An array of the model that is scored.

    Attributes:
        path: of the array in the model.
        array: its value.
        direction: of the same shape.
        probe: zeros with a number for each unit; its cotangent is the score.
        in_stack: whether it is of several layers, and the probe has numbers for each.
        is_shared: whether each of them has all of it.
    """

    path: str
    array: Any
    direction: Any
    probe: Any
    in_stack: bool = False
    is_shared: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Applied:
    """The result `index` of an equation on values that depend on weights, and others."""

    equation: Any
    operands: tuple[Any, ...]
    index: int


Node: TypeAlias = Leaf | Applied


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
        if equation.primitive.name in ("custom_vjp_call", "jit", "pjit"):
            return _evaluate_without_rules(inner, operands)
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
        return _evaluate_without_rules(params["jaxpr"], operands)

    return jax.shard_map(
        own,
        in_specs=tuple(params["in_specs"]),
        out_specs=list(params["out_specs"]),
        mesh=params["mesh"],
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )


def _evaluate_without_rules(closed: Any, operands: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr, open or closed."""
    jaxpr = getattr(closed, "jaxpr", closed)
    values = dict(zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=True))
    values |= dict(zip(jaxpr.invars, operands, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        found = bind(equation, [read(atom) for atom in equation.invars], inline_custom=True)
        values |= dict(zip(equation.outvars, found, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def leaves_of(nodes: Sequence[Any]) -> list[Leaf]:
    """The weights that values depend on, each once."""
    return [node for node in _all_of(nodes) if isinstance(node, Leaf)]


def _all_of(nodes: Sequence[Any]) -> list[Any]:
    found: dict[int, Any] = {}

    def visit(node: Any) -> None:
        if id(node) not in found:
            found[id(node)] = node
            for operand in node.operands if isinstance(node, Applied) else ():
                visit(operand)

    for node in nodes:
        visit(node)
    return list(found.values())


@dataclasses.dataclass(frozen=True, eq=False)
class Tangent:
    """The derivative of one result along the direction of one weight, as a program.

    Attributes:
        jaxpr: of the arrays that it needs.
        consts: its constants.
        arrays: these arrays.
    """

    jaxpr: Any
    consts: Any
    arrays: list[Any]

    @staticmethod
    def of(
        equation: Any, operands: Sequence[Any], leaf: Leaf, indices: Sequence[int], *, inline_custom: bool
    ) -> "Tangent":
        """Trace the derivative of results `indices` of an equation, of which some operands are `Node`s."""
        nodes = _all_of(operands)
        given = [node for node in nodes if not isinstance(node, Applied | Leaf)]
        weights = [node for node in nodes if isinstance(node, Leaf)]

        def tangent(direction: Any, own: Any, others: list[Any], arrays: list[Any]) -> list[Any]:
            known = {id(node): array for node, array in zip(given, arrays, strict=True)}
            rest = [node for node in weights if node is not leaf]
            known |= {id(node): array for node, array in zip(rest, others, strict=True)}

            def results(weight: Any) -> list[Any]:
                values = {**known, id(leaf): weight}
                found = bind(equation, [_value(node, values) for node in operands], inline_custom)
                return [found[index] for index in indices]

            return jax.jvp(results, (own,), (direction.astype(own.dtype),))[1]

        others = [node.array for node in weights if node is not leaf]
        arguments = (leaf.direction, leaf.array, others, given)
        closed = jax.make_jaxpr(tangent)(*arguments)
        jaxpr, used = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(indices))
        arrays = jax.tree.leaves(arguments)
        assert len(arrays) == len(used), "an operand that is no array"
        needed = [array for array, is_used in zip(arrays, used, strict=True) if is_used]
        return Tangent(jaxpr, closed.consts, needed)

    @staticmethod
    def known(derivatives: list[Any]) -> "Tangent":
        """Derivatives that are evaluated already."""
        closed = jax.make_jaxpr(lambda *arrays: list(arrays))(*derivatives)
        return Tangent(closed.jaxpr, closed.consts, derivatives)

    def evaluate(self, arrays: Sequence[Any]) -> list[Any]:
        """The derivatives, for the arrays that it needs."""
        return eval_jaxpr(self.jaxpr, self.consts, *arrays)


def _value(node: Any, values: dict[int, Any]) -> Any:
    if id(node) not in values:
        found = bind(node.equation, [_value(operand, values) for operand in node.operands])
        values[id(node)] = found[node.index]
    return values[id(node)]


def tangent_of(node: Node, leaf: Leaf) -> Any:
    """The derivative of a value that depends on weights, along the direction of one of them."""

    def value(weight: Any) -> Any:
        nodes = _all_of([node])
        known = {
            id(one): one.array if isinstance(one, Leaf) else one
            for one in nodes
            if not isinstance(one, Applied)
        }
        return _value(node, {**known, id(leaf): weight})

    return jax.jvp(value, (leaf.array,), (leaf.direction.astype(leaf.array.dtype),))[1]
