"""What a layer gathers of its own weights, found in its jaxpr, to be gathered earlier.

With fully sharded weights each layer makes its own whole before it uses them:

    lax.with_sharding_constraint(weight, whole)     axes of the mesh are Auto
    jax.sharding.reshard(weight, P())               they are Explicit
    lax.all_gather(weight, "data", tiled=True)      within `jax.shard_map`

A layer that began with that would wait for it. So the loops of a sweep gather the
weights of the layer that comes next while a layer runs (`SweepSpec.fetch`), and what
they run is the layer without its gathers (`Kind.gathers_apart`).

A gather of a leaf is a jaxpr of it alone: the equations from the leaf up to the last
gather, as long as each is the only one that reads what the one before returns. A cast
in front of a gather is in it, so that what is sent has the smaller type.
"""

import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

import jax
from jax.core import eval_jaxpr
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.sharding import AxisType
from jaxtyping import Array

from .. import _xla_hints as xla_hints
from .slots import types_of

T = TypeVar("T")
# Of one leaf, to what the rest of a layer takes in its place.
Gather: TypeAlias = Jaxpr

# What may be in front of a gather, or between two: it costs little.
_PREPARES = frozenset(["convert_element_type", "reshape", "squeeze", "transpose"])
_ALL_GATHERS = frozenset(["all_gather", "all_gather_invariant"])


def gathers_of(jaxpr: Jaxpr, leaves: Sequence[Var]) -> list[Gather | None]:
    """How a program gathers each of these inputs; None where it doesn't, or uses it
    otherwise too.
    """
    readers: dict[Var, list[JaxprEqn | None]] = defaultdict(list)
    for equation in jaxpr.eqns:
        for atom in equation.invars:
            if isinstance(atom, Var):
                readers[atom].append(equation)
    for atom in jaxpr.outvars:
        if isinstance(atom, Var):
            readers[atom].append(None)
    return [_gather_of(jaxpr, leaf, readers) for leaf in leaves]


def _gather_of(
    jaxpr: Jaxpr, leaf: Var, readers: dict[Var, list[JaxprEqn | None]]
) -> Gather | None:
    # Follows the leaf while one equation reads it, of those that have one input.
    equations = []
    until_last_gather = 0
    var = leaf
    while len(readers[var]) == 1:
        (equation,) = readers[var]
        if equation is None:
            break
        is_gather = _gathers(equation)
        if not is_gather and equation.primitive.name not in _PREPARES:
            break
        equations.append(equation)
        (var,) = equation.outvars
        if is_gather:
            until_last_gather = len(equations)
    if not until_last_gather:
        return None
    equations = equations[:until_last_gather]
    return _program(jaxpr, leaf, equations)


def _program(jaxpr: Jaxpr, leaf: Any, equations: list[JaxprEqn]) -> Jaxpr:
    outvars = equations[-1].outvars
    return jaxpr.replace(constvars=[], invars=[leaf], outvars=outvars, eqns=equations)


def _gathers(equation: JaxprEqn) -> bool:
    """Whether an equation makes an array whole over some axis of a mesh of several
    devices.
    """
    name = equation.primitive.name
    # One over an axis of size 1, or to the sharding that is there, moves nothing.
    if name == "reshard":
        before, after = types_of((*equation.invars, *equation.outvars))
        axes = _dividing(before.sharding.spec) - _dividing(after.sharding.spec)
        return any(before.sharding.mesh.shape[axis] > 1 for axis in axes)
    if name == "sharding_constraint":
        # How its operand is divided is known to XLA alone.
        sharding = equation.params["sharding"]
        is_whole = not equation.params["unconstrained_dims"]
        if not isinstance(sharding, jax.sharding.NamedSharding) or not is_whole:
            return False
        mesh = sharding.mesh
        axes = set()
        for axis, type_ in zip(mesh.axis_names, mesh.axis_types, strict=True):
            if type_ == AxisType.Auto and mesh.shape[axis] > 1:
                axes.add(axis)
        return bool(axes - _dividing(sharding.spec))
    return name in _ALL_GATHERS and equation.params["axis_size"] > 1


def _dividing(spec: jax.sharding.PartitionSpec) -> set[str]:
    """The axes of the mesh that divide an array."""
    axes = set()
    for entry in spec:
        axes.update(entry if isinstance(entry, tuple) else [entry])
    return axes - {None}


def without_gathers(jaxpr: Jaxpr, gathers: Sequence[Gather | None]) -> Jaxpr:
    """The program on inputs that are gathered."""
    whole: dict[Var, Any] = {}
    moved = set()
    for gather in gathers:
        if gather is not None:
            whole[gather.invars[0]] = gather.outvars[0]
            moved.update(map(id, gather.eqns))
    invars = [whole.get(var, var) for var in jaxpr.invars]
    equations = [equation for equation in jaxpr.eqns if id(equation) not in moved]
    return jaxpr.replace(invars=invars, eqns=equations)


def gathered(leaf: T, gather: Gather | None) -> T | Array:
    """The leaf, gathered; itself if it isn't, or None."""
    if gather is None or leaf is None:
        return leaf
    (whole,) = eval_jaxpr(gather, (), leaf)
    return whole


def scattered(cotangent: Array, gather: Gather | None) -> Array:
    """The cotangent of a leaf, from that of what it is gathered to."""
    if gather is None:
        return cotangent
    # One by one, as a constraint needs more than its transpose.
    for equation in reversed(gather.eqns):
        (operand,) = equation.invars
        run = functools.partial(gathered, gather=_program(gather, operand, [equation]))
        transpose = jax.linear_transpose(run, operand.aval)
        if equation.primitive.name == "sharding_constraint":
            cotangent = xla_hints.whole_cotangent(transpose, cotangent)
        else:
            (cotangent,) = transpose(cotangent)
    return cotangent
