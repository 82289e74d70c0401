"""The backward pass of a layer taken apart: the carry's cotangent, and the weights'.

The stage before waits for the cotangent of the carry, and nothing waits for those of
the weights. So the program of a layer's vector-Jacobian product is divided into two:

- B, the equations that the cotangents of the carry and of the arguments depend on;
- W, the others: of a linear map the product of its input with the cotangent of its
  output.

What W reads of B is kept between the two: the *kept values*. So that they are few, an
equation of W that is cheap runs in B where its results are smaller than what
would have to be kept for it, and an equation of B that depends on the layer's weights
and arguments alone runs again in W. A long equation of the layer's forward pass runs in
B, where a policy that saves its result has it too. A cotangent of a weight that B has
anyway, as where one equation (a kernel, a loop) makes it with that of the carry, is a
result of B.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from .._activity import CALLS, PRODUCTS, bytes_of, program_of, programs_in
from .._compat import without_constants
from .._sweep.gradient import pick
from .._sweep.slots import inverted
from .._xla_hints import BARRIERS

# Equations that take long: products, kernels, loops
_LONG = (*PRODUCTS, "scan", "while")


@dataclass(frozen=True, eq=False)
class LateCotangents:
    """W of a layer, which can run in any trace.

    Attributes:
        is_late: for each weight whether its cotangent is a result of W.
        kept: the types of the kept values.
    """

    is_late: list[bool]
    kept: list[Any]
    # What each equation is and reads
    _outline: list[Any]
    # What W reads: arrays that no trace made, some of the available ones, kept values
    _constants: list[Any]
    _rereads: list[int]
    _program: Jaxpr

    def is_like(self, other: "LateCotangents") -> bool:
        """Whether W of the other takes the kept values of this one, in their order."""
        types = [[*map(str, one.kept)] for one in (self, other)]
        return (self.is_late, types[0], self._outline) == (
            other.is_late,
            types[1],
            other._outline,
        )

    def run(self, available: Sequence[Any], kept: Sequence[Any]) -> list[Any]:
        """The late cotangents. `available` is as in `take_apart`, of the same layer."""
        read_again = [available[number] for number in self._rereads]
        return eval_jaxpr(self._program, (), *self._constants, *read_again, *kept)


@dataclass(frozen=True, eq=False)
class TwoCotangents:
    """The two programs of one layer's vector-Jacobian product: B and W."""

    late: LateCotangents
    # The arrays that the product was computed from: the inputs of B
    _inputs: list[Any]
    _early: Jaxpr

    def run_early(self) -> tuple[list[Any], list[Any], list[Any]]:
        """B, in the trace of `take_apart`: the cotangents of what is no weight, those
        of weights that are not late, and the kept values.
        """
        results = eval_jaxpr(self._early, (), *self._inputs)
        kept_from = len(results) - len(self.late.kept)
        weights_from = kept_from - self.late.is_late.count(False)
        of_weights = results[weights_from:kept_from]
        return results[:weights_from], of_weights, results[kept_from:]


def take_apart(
    vjp: Callable[[], tuple[list[Any], list[Any]]],
    available: Sequence[Any],
    carry: Sequence[Any] = (),
) -> TwoCotangents:
    """Divide a vector-Jacobian product, which is traced here.

    Args:
        vjp: returns the cotangents of what is no weight, and those of weights. It
            closes over the arrays that it is computed from.
        available: those of these arrays that W will be given again.
        carry: the layer's input, of which and of these its forward pass is computed.
    """
    closed, (others, _) = jax.make_jaxpr(vjp, return_shape=True)()
    jaxpr, constants = _without_calls(closed)
    wanted = jaxpr.outvars[: len(others)]
    of_weights = jaxpr.outvars[len(others) :]
    of_constants = jaxpr.invars[: len(constants)]
    of_arrays = jaxpr.invars[len(constants) :]
    # By identity: an array that is available is an input of this program
    rereads = _among(available, closed.consts, of_arrays)
    of_carry = _among(carry, closed.consts, of_arrays).values()
    # What W is given in any trace, and what it can compute of that
    given = [*of_constants, *rereads.values()]
    known = _computed_from(jaxpr.eqns, given)
    # What the layer's forward pass computes
    forward = _computed_from(jaxpr.eqns, [*given, *of_carry])

    # A policy that saves what a long equation makes has it in B: W would run it again
    of_forward = _long_results(jaxpr.eqns, of_weights, forward, known)
    in_early = _needed(jaxpr.eqns, [*wanted, *of_forward])
    # References may not be read by two programs
    in_early = (
        jaxpr.eqns
        if jaxpr.effects
        else _with_smaller_results(jaxpr.eqns, in_early, of_weights, known)
    )
    made_early = {*jaxpr.invars, *_results(in_early)}
    is_late = [isinstance(atom, Var) and atom not in made_early for atom in of_weights]
    late = pick(of_weights, is_late)
    early = pick(of_weights, inverted(is_late))
    in_late = _needed(_in_late(jaxpr.eqns, in_early, known), late)
    kept = _kept(in_late, late, known)
    # Of B now what is returned, and what W turned out to read
    in_early = _needed(jaxpr.eqns, [*wanted, *early, *kept])
    names = _names(of_constants, rereads, kept)
    return TwoCotangents(
        late=LateCotangents(
            is_late=is_late,
            kept=[var.aval for var in kept],
            _outline=_outline(in_late, late, names),
            _constants=constants,
            _rereads=[*rereads],
            _program=_program([*given, *kept], late, in_late),
        ),
        _inputs=[*constants, *closed.consts],
        _early=_program(jaxpr.invars, [*wanted, *early, *kept], in_early),
    )


def _among(
    arrays: Sequence[Any], inputs: Sequence[Any], variables: Sequence[Var]
) -> dict[int, Var]:
    """Of arrays that are among a program's inputs, their number and variable there."""
    numbers = {id(array): number for number, array in enumerate(arrays)}
    found = {}
    for var, array in zip(variables, inputs, strict=True):
        if id(array) in numbers:
            found[numbers[id(array)]] = var
    return found


def _computed_from(equations: Sequence[JaxprEqn], given: Iterable[Var]) -> set[Var]:
    """These variables, and those that are computed from them alone."""
    found = {*given}
    for equation in equations:
        if found.issuperset(_variables([equation], ())):
            found.update(equation.outvars)
    return found


def _long_results(
    equations: Sequence[JaxprEqn],
    of_weights: Sequence[Any],
    forward: set[Var],
    known: set[Var],
) -> list[Var]:
    """Results of long equations of the forward pass that cotangents of weights read
    and W can not run again.
    """
    long = []
    for equation in equations:
        read = _variables([equation], ())
        is_forward = forward.issuperset(read) and not known.issuperset(read)
        if is_forward and not _is_cheap(equation):
            long.append(equation)
    needed = _results(_needed(equations, of_weights))
    return [var for var in _results(long) if var in needed]


def _names(
    of_constants: Sequence[Var], rereads: dict[int, Var], kept: Sequence[Var]
) -> dict[Var, Any]:
    """Of what W is given, names that are the same in any trace."""
    names: dict[Var, Any] = {
        var: ("available", number) for number, var in rereads.items()
    }
    for what, variables in ("constant", of_constants), ("kept", kept):
        for number, var in enumerate(variables):
            names[var] = what, number
    return names


def _in_late(
    equations: Sequence[JaxprEqn], in_early: Iterable[JaxprEqn], known: set[Var]
) -> list[JaxprEqn]:
    """The equations that W has or may run again."""
    of_early = {id(equation) for equation in in_early}
    in_late = []
    for equation in equations:
        runs_again = known.issuperset(equation.outvars)
        if runs_again or id(equation) not in of_early:
            in_late.append(equation)
    return in_late


def _kept(
    in_late: Sequence[JaxprEqn], late: Sequence[Any], known: set[Var]
) -> list[Var]:
    """The variables that W reads and neither makes nor is given."""
    made = known | _results(in_late)
    read = dict.fromkeys(_variables(in_late, late))
    return [var for var in read if var not in made]


def _with_smaller_results(
    equations: Sequence[JaxprEqn],
    in_early: Sequence[JaxprEqn],
    of_weights: Sequence[Any],
    known: set[Var],
) -> list[JaxprEqn]:
    """The equations of B, with those of W that are to run in B.

    In their order, each equation that is cheap and reads nothing that W makes: it runs
    in B unless its results are larger than what no other equation of W reads.
    """
    of_early = {id(equation) for equation in in_early}
    in_late = _needed(_in_late(equations, in_early, known), of_weights)
    in_late = [one for one in in_late if not known.issuperset(one.outvars)]
    made_late = _results(in_late)
    # How often W reads each variable, with the equations that it still has
    readers: dict[Var, int] = {}
    for var in _variables(in_late, of_weights):
        readers[var] = readers.get(var, 0) + 1
    for equation in in_late:
        read = {*_variables([equation], ())}
        if made_late & read or not _is_cheap(equation):
            continue
        # What would be kept for this equation only; in its place its results are
        alone = []
        for var in read - known:
            if readers[var] == _variables([equation], ()).count(var):
                alone.append(var)
        results = [var for var in equation.outvars if readers.get(var)]
        if _bytes_of(results) > _bytes_of(alone):
            continue
        of_early.add(id(equation))
        made_late.difference_update(equation.outvars)
        for var in _variables([equation], ()):
            readers[var] -= 1
    return [equation for equation in equations if id(equation) in of_early]


def _is_cheap(equation: JaxprEqn) -> bool:
    if equation.primitive.name in _LONG:
        return False
    inner = [one for program in programs_in(equation) for one in program.eqns]
    return all(map(_is_cheap, inner))


def _outline(
    equations: Sequence[JaxprEqn], results: Sequence[Any], names: dict[Var, Any]
) -> list[Any]:
    """Outline of a program with these names of inputs. Where arrays are placed is left
    out: layers that are gathered ahead place their gradients in another way than
    others.
    """
    names = {**names}
    made = itertools.count()

    def name_of(atom: Any) -> Any:
        return names[atom] if isinstance(atom, Var) else str(atom)

    lines = []
    for equation in equations:
        if (placed := _placed(equation)) is not None:
            names[equation.outvars[0]] = name_of(placed)
            continue
        if equation.primitive.name == "platform_index":
            # The number of the platform, by which a conditional chooses
            names[equation.outvars[0]] = "platform"
            continue
        for var in equation.outvars:
            names[var] = "made", next(made)
        types = [str(var.aval) for var in equation.outvars]
        read = [*map(name_of, equation.invars)]
        lines.append((equation.primitive.name, read, types))
    return [*lines, [*map(name_of, results)]]


def _placed(equation: JaxprEqn) -> Any:
    """The operand that the result of an equation is, placed otherwise on all platforms
    or on some; None for other equations.
    """
    is_choice = equation.primitive.name == "cond"
    if is_choice and all(map(_only_places, programs_in(equation))):
        return equation.invars[-1]
    is_constraint = equation.primitive.name == "sharding_constraint"
    return equation.invars[0] if is_constraint else None


def _only_places(program: Jaxpr) -> bool:
    """Whether a program returns its only input, placed otherwise or as it is."""
    value = program.invars[-1] if program.invars else None
    for equation in program.eqns:
        if equation.primitive.name != "sharding_constraint":
            return False
        if equation.invars[0] is value:
            value = equation.outvars[0]
    return len(program.invars) == 1 and program.outvars[0] is value


def _bytes_of(variables: Iterable[Var]) -> int:
    return sum(bytes_of(var.aval) for var in variables)


def needed_for(equations: Sequence[JaxprEqn], outputs: Iterable[Any]) -> list[JaxprEqn]:
    """The equations that outputs depend on."""
    return _needed(equations, outputs, with_effects=False)


def _needed(
    equations: Sequence[JaxprEqn], outputs: Iterable[Any], with_effects: bool = True
) -> list[JaxprEqn]:
    """The equations that outputs depend on, and those with effects."""
    needed = {atom for atom in outputs if isinstance(atom, Var)}
    kept = []
    for equation in reversed(equations):
        has_effects = with_effects and equation.effects
        if has_effects or needed.intersection(equation.outvars):
            kept.append(equation)
            needed.update(_variables([equation], ()))
    return kept[::-1]


def _results(equations: Iterable[JaxprEqn]) -> set[Var]:
    return {var for equation in equations for var in equation.outvars}


def _variables(equations: Iterable[JaxprEqn], others: Iterable[Any]) -> list[Var]:
    """What equations read, and the variables among other atoms."""
    read = [atom for equation in equations for atom in equation.invars]
    return [atom for atom in (*read, *others) if isinstance(atom, Var)]


def _program(
    inputs: Sequence[Any], outputs: Sequence[Any], equations: list[JaxprEqn]
) -> Jaxpr:
    effects = frozenset().union(*(equation.effects for equation in equations))
    debug_info = jax.make_jaxpr(lambda: ())().jaxpr.debug_info
    return Jaxpr([], [*inputs], [*outputs], equations, effects, debug_info)


def _without_calls(closed: ClosedJaxpr) -> tuple[Jaxpr, list[Any]]:
    """The program with what it calls (`jax.jit`) in place of calls, and without
    barriers: both would tie the two cotangents together. What it closes over are its
    inputs, after constants of its own.
    """
    jaxpr = closed.jaxpr

    def run(*inputs: Any) -> list[Any]:
        return _evaluated(jaxpr, inputs)

    return without_constants(jax.make_jaxpr(run)(*closed.consts))


def _evaluated(jaxpr: Jaxpr, inputs: Sequence[Any]) -> list[Any]:
    """The results of a program whose constants are its first inputs."""
    values: dict[Var, Any] = {}
    values.update(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))

    def value_of(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        operands = [*map(value_of, equation.invars)]
        name = equation.primitive.name
        if name in BARRIERS:
            results = operands
        elif name in CALLS:
            called = program_of(equation)
            constants = getattr(called, "consts", ())
            inner = getattr(called, "jaxpr", called)
            results = _evaluated(inner, [*constants, *operands])
        else:
            # A program of this equation, so that its own rules bind it
            read = [*dict.fromkeys(_variables([equation], ()))]
            alone = _program(read, equation.outvars, [equation])
            results = eval_jaxpr(alone, (), *map(value_of, read))
        values.update(zip(equation.outvars, results, strict=True))
    return [*map(value_of, jaxpr.outvars)]
