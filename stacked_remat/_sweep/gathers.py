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
from collections.abc import Container, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
from jax.core import eval_jaxpr
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.sharding import AxisType
from jaxtyping import Array

from .. import _xla_hints as xla_hints
from .._activity import PRODUCTS, programs_in
from .slots import Arrays, types_of

T = TypeVar("T")
# Of one leaf, to what the rest of a layer takes in its place.
Gather: TypeAlias = Jaxpr

# What may be in front of a gather, or between two: it costs little.
_PREPARES = frozenset(["convert_element_type", "reshape", "squeeze", "transpose"])
_ALL_GATHERS = frozenset(["all_gather", "all_gather_invariant"])
_EXCHANGES = frozenset(["all_to_all", "ragged_all_to_all"])
_LOOPS = frozenset(["scan", "while"])


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


def last_exchange(jaxpr: Jaxpr) -> int | None:
    """The equation of a layer in which devices exchange rows, where the layer ends with
    that: the place of the last one, if it needs a product, and no other comes after it.

    An equation may have both in it, as a loop over rounds of an exchange has.
    """
    for place in reversed(range(len(jaxpr.eqns))):
        equation = jaxpr.eqns[place]
        if _has([equation], _EXCHANGES):
            needed = _needed(jaxpr.eqns[:place], equation.invars)
            return place if _has(needed, PRODUCTS) else None
        if _has([equation], PRODUCTS):
            return None
    return None


def exchanges_out_of_loops(jaxpr: Jaxpr) -> bool:
    """Whether devices exchange rows in a layer, other than in a loop of its own."""
    return _has(jaxpr.eqns, _EXCHANGES, leave=_LOOPS)


def _needed(equations: Sequence[JaxprEqn], atoms: Iterable[Any]) -> list[JaxprEqn]:
    """Those of the equations that these values depend on, from the last."""
    wanted = {atom for atom in atoms if isinstance(atom, Var)}
    needed = []
    for equation in reversed(equations):
        if not wanted.isdisjoint(equation.outvars):
            needed.append(equation)
            wanted.update(atom for atom in equation.invars if isinstance(atom, Var))
    return needed


def _has(
    equations: Iterable[JaxprEqn], names: Container[str], leave: Container[str] = ()
) -> bool:
    """Whether some of these, or of those in them, have a primitive of these names. What
    is in a primitive of the names in `leave` does not count.
    """
    for equation in equations:
        if equation.primitive.name in names:
            return True
        if equation.primitive.name in leave:
            continue
        if any(_has(program.eqns, names, leave) for program in programs_in(equation)):
            return True
    return False


def run_beside_gathers(jaxpr: Jaxpr, inputs: Arrays, ahead: Sequence[Any]) -> list[Any]:
    """`eval_jaxpr`, where an exchange at the end of a layer begins once what is
    gathered for the next layer, the arrays in `ahead`, is there.
    """
    place = last_exchange(jaxpr) if ahead else None
    if place is None:
        return eval_jaxpr(jaxpr, (), *inputs)

    # Two programs: what comes before the exchange returns what the rest reads of it.
    read_later = {var for var in jaxpr.outvars if isinstance(var, Var)}
    for equation in jaxpr.eqns[place:]:
        read_later.update(var for var in equation.invars if isinstance(var, Var))
    computed: list[Var] = []
    for equation in jaxpr.eqns[:place]:
        computed += [var for var in equation.outvars if var in read_later]
    before = jaxpr.replace(eqns=jaxpr.eqns[:place], outvars=computed)
    after = jaxpr.replace(eqns=jaxpr.eqns[place:], invars=[*jaxpr.invars, *computed])

    values = dict(zip(computed, eval_jaxpr(before, (), *inputs), strict=True))
    exchange = jaxpr.eqns[place]
    sent = [var for var in computed if var in exchange.invars]
    rows = xla_hints.exchange_after_gathers([values[var] for var in sent], ahead)
    values.update(zip(sent, rows, strict=True))
    return eval_jaxpr(after, (), *inputs, *values.values())
