"""Which dimensions of the values in a traced program hold examples, or tokens.

The program is traced twice, the second time with more examples: a dimension that grew by the same factor
holds examples. What a reshape merges is followed through the program.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jax.extend.source_info_util import summarize

from .._activity import (
    CALLS,
    CHECKPOINTS,
    active_variables,
    expansion,
    is_differentiable,
    name_of,
    program_of,
)
from .._compat import raises_error
from .._noted import is_noted
from ._keeping import BY_INDEX, KEEPING, part_of
from ._numbers import numbers_of, numbers_of_constant, own_rows
from ._per_device import Division, is_across
from ._rules import RULES, after_rule, has_rule
from ._stacks import stack_p
from ._units import (
    Flow,
    Rows,
    Units,
    agreed,
    are_apart,
    either,
    has_examples,
    has_positions,
    has_units,
    known_rows,
    of_batch,
    of_input,
    unit_dims,
    unknown,
    with_inherited,
)


def of_outputs(equation: Any, twin: Any, inputs: Sequence[Flow], units: Units) -> list[Flow]:
    """What is known of an equation's results.

    Where operands have rows of examples, a primitive that is not known to keep them gives results with
    unknown rows.

    Args:
        equation: of the first trace.
        twin: the same of the second trace, None where the traces differ.
        inputs: what is known of the operands.
        units: see there.
    """
    shapes = [var.aval.shape for var in equation.outvars]
    if not units.sizes:
        return [Flow(of_input(shape, shape, units)) for shape in shapes]
    if twin is None:
        return _after(equation, inputs, [(None,) * len(shape) for shape in shapes], units)
    has_rows = any(has_units(flow.rows) for flow in inputs)
    # In a loop over examples a value is of one of them, and has no rows.
    is_ruled = any(flow.is_followed for flow in inputs) and has_rule(equation)
    if equation.primitive.name in _BODIES and (has_rows or is_ruled):
        found = _BODIES[equation.primitive.name](equation, twin, inputs, units)
        if found is not None:
            return found
    rows = [flow.rows for flow in inputs]
    if any(flow.is_followed and has_examples(flow.rows) for flow in inputs):
        # The others are constants for them, whatever order their rows have.
        rows = [
            own if flow.is_followed else _in_order(own, atom, larger, units)
            for flow, own, atom, larger in zip(inputs, rows, equation.invars, twin.invars, strict=True)
        ]
    rows = _rows_of_outputs(equation, twin, rows, units, inputs)
    numbers = numbers_of(equation, [flow.numbers for flow in inputs])
    found = _after(equation, inputs, rows, units)
    return [found[0]._replace(numbers=numbers), *found[1:]] if numbers else found


def _in_order(rows: Rows, atom: Any, larger: Any, units: Units) -> Rows:
    """The rows with those that the sizes tell for unknown ones."""
    sized = of_input(atom.aval.shape, larger.aval.shape, units)
    return tuple(own if dim is None else dim for dim, own in zip(rows, sized, strict=True))


def _rows_of_outputs(
    equation: Any, twin: Any, inputs: Sequence[Rows], units: Units, flows: Sequence[Flow]
) -> list[Rows]:
    shapes = [var.aval.shape for var in equation.outvars]
    pairs = [*zip(shapes, (var.aval.shape for var in twin.outvars), strict=True)]
    sized = [of_input(*pair, units) for pair in pairs]
    if not any(map(has_units, inputs)):
        return sized
    name = equation.primitive.name
    if is_noted(equation):
        if any(dim is None for rows in inputs for dim in rows):
            return [unknown(*pair) for pair in pairs]
        if any(map(has_positions, inputs)):
            sized = [of_batch(rows) for rows in sized]
        return [with_inherited(rows, shape, inputs) for rows, shape in zip(sized, shapes, strict=True)]
    if is_across(equation, units.mesh_axes):
        return [unknown(*pair) for pair in pairs]
    if name in _OF_SEVERAL:
        return _OF_SEVERAL[name](equation, inputs)
    if name in BY_INDEX and (own := own_rows(equation, flows[1].numbers, inputs)):
        return [BY_INDEX[name](equation, inputs, sized[0], own) or unknown(*pairs[0])]
    if name in KEEPING:
        found = [KEEPING[name](equation, inputs, [rows]) for rows in sized]
        if None not in found:
            return found
    return [unknown(*pair) for pair in pairs]


def _after(equation: Any, inputs: Sequence[Flow], rows: Sequence[Rows], units: Units) -> list[Flow]:
    """Results with these rows, each of which depends on all operands."""
    followed = any(flow.is_followed for flow in inputs)
    if equation.primitive.name == "stop_gradient" and not units.of_data:
        followed = False
    mixed = next((flow.mixed for flow in inputs if flow.mixed), "")
    had_examples = any(flow.is_followed and has_examples(flow.rows) for flow in inputs)
    found = []
    for own, var in zip(rows, equation.outvars, strict=True):
        if not followed or not (units.of_data or jnp.issubdtype(var.aval.dtype, jnp.inexact)):
            found.append(Flow(own))
        else:
            found.append(
                Flow(own, True, mixed or ("" if not had_examples or are_apart(own) else where(equation)))
            )
    return found


def where(equation: Any) -> str:
    """An equation, for errors."""
    line = summarize(equation.source_info)
    return f"`{name_of(equation)}`{line and ' at '}{line}"


def paired(equations: Sequence[Any], others: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Each equation with the same one of the second trace, or None from where the traces differ."""
    are_alike = True
    for equation, twin in itertools.zip_longest(equations, others[: len(equations)]):
        are_alike = are_alike and twin is not None and _kind(twin) == _kind(equation)
        yield equation, twin if are_alike else None


def _kind(equation: Any) -> Any:
    """What an equation has in both traces, unless examples are taken apart in one."""
    return equation.primitive, len(equation.invars), len(equation.outvars)


def of_body(
    jaxpr: Any, other: Any, inputs: Sequence[Flow], units: Units, consts: Sequence[Flow] | None = None
) -> list[Flow]:
    """What is known of the results of a jaxpr.

    Args:
        jaxpr: open or closed.
        other: the same of the second trace.
        inputs: what is known of its inputs.
        units: see there.
        consts: what is known of its constants; by default what their sizes tell.
    """
    arrays = getattr(jaxpr, "consts", ())
    jaxpr, other = getattr(jaxpr, "jaxpr", jaxpr), getattr(other, "jaxpr", other)
    if consts is None:
        consts = of_constants(arrays, jaxpr, other, units)
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))

    def read(atom: Any) -> Flow:
        if isinstance(atom, Literal):
            return Flow(tuple(((size, None),) for size in np.shape(atom.val)))
        return values[atom]

    for equation, twin in paired(jaxpr.eqns, other.eqns):
        found = of_outputs(equation, twin, [read(atom) for atom in equation.invars], units)
        values |= dict(zip(equation.outvars, found, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def of_constants(arrays: Sequence[Any], jaxpr: Any, other: Any, units: Units) -> list[Flow]:
    """What is known of the constants of an open jaxpr, of which the other is the same in the second trace."""
    found, of_inner = [], itertools.repeat(None)
    for array, var, larger in zip(
        itertools.chain(arrays, of_inner), jaxpr.constvars, other.constvars, strict=False
    ):
        rows = of_input(var.aval.shape, larger.aval.shape, units)
        found.append(Flow(rows, numbers=numbers_of_constant(array, rows)))
    return found


def _called(equation: Any, twin: Any, inputs: Sequence[Flow], units: Units) -> list[Flow] | None:
    if is_noted(equation):
        return None
    found = of_body(program_of(equation), program_of(twin), inputs, units)
    if equation.primitive.name not in RULES or units.in_rule:
        return found
    within = units._replace(in_rule=True)
    return after_rule(
        equation, twin, inputs, found, lambda one, other, given: of_body(one, other, given, within)
    )


def _expanded(equation: Any, twin: Any, inputs: Sequence[Flow], units: Units) -> list[Flow]:
    return of_body(expansion(equation), expansion(twin), inputs, units)


def _agreed(equation: Any, some: Sequence[Flow], others: Sequence[Flow]) -> list[Flow]:
    """What is known of values that may be either."""
    found = []
    for one, other in zip(some, others, strict=True):
        rows = tuple(either(*pair) for pair in zip(one.rows, other.rows, strict=True))
        followed, mixed = one.is_followed or other.is_followed, one.mixed or other.mixed
        if followed and not mixed and None in rows:
            mixed = where(equation)
        found.append(Flow(rows, followed, mixed))
    return found


def _looped(equation: Any, body: Any, carry: Sequence[Flow]) -> tuple[list[Flow], list[Flow]]:
    """What is known of what a loop carries, and of the rest of its results in each turn."""
    carry = list(carry)
    while True:
        found = body(carry)
        agreed = _agreed(equation, carry, found[: len(carry)])
        if agreed == carry:
            return carry, found[len(carry) :]
        carry = agreed


def _scanned(equation: Any, twin: Any, inputs: Sequence[Flow], units: Units) -> list[Flow]:
    inner = equation.params["jaxpr"].jaxpr
    consts, carried = unstacked_of_scan(equation)
    xs = inputs[consts + carried :]
    turns, more = equation.params["length"], twin.params["length"]
    turn = agreed(*of_input((turns,), (more,), units), *(flow.rows[0] for flow in xs))
    is_over_units, is_over_examples = has_units((turn,)), has_examples((turn,))
    given = zip(inner.invars[consts + carried :], xs, strict=True)
    counts = (lambda dtype: True) if units.of_data else is_differentiable
    of_followed = active_variables(inner, [var for var, flow in given if flow.is_followed], counts)

    def body(carry: list[Flow]) -> list[Flow]:
        rows = [flow._replace(rows=flow.rows[1:], numbers=()) for flow in xs]
        found = of_body(inner, twin.params["jaxpr"], [*inputs[:consts], *carry, *rows], units)
        for at, atom in enumerate(inner.outvars[:carried]):  # what examples before leave to those after
            if is_over_examples and not isinstance(atom, Literal) and atom in of_followed:
                found[at] = Flow(found[at].rows, True, found[at].mixed or where(equation))
        return found

    carry, each = _looped(equation, body, inputs[consts : consts + carried])
    mixed = _of_other_turns(inner, consts, carried) if is_over_units else [False] * len(each)
    rows = [(None if is_mixed else turn, *one.rows) for one, is_mixed in zip(each, mixed, strict=True)]
    return [*carry, *(_put(equation, *pair, is_over_examples) for pair in zip(each, rows, strict=True))]


def _put(equation: Any, flow: Flow, rows: Rows, had_examples: bool = False) -> Flow:
    """What is known of a value where it has these rows; `had_examples` where those of `flow` do not tell."""
    is_lost = flow.is_followed and (had_examples or has_examples(flow.rows)) and not are_apart(rows)
    return flow._replace(rows=rows, numbers=(), mixed=flow.mixed or (where(equation) if is_lost else ""))


def _of_other_turns(body: Any, consts: int, carried: int) -> list[bool]:
    """Which of the results that a scan stacks depend on what it was given for other turns."""

    def active(inputs: Sequence[Any]) -> list[bool]:
        found = active_variables(body, inputs, lambda dtype: True)
        return [not isinstance(atom, Literal) and atom in found for atom in body.outvars]

    carry, xs = body.invars[consts : consts + carried], body.invars[consts + carried :]
    brought: list[Any] = []
    while len(more := list(itertools.compress(carry, active([*xs, *brought])))) > len(brought):
        brought = more
    return active(brought)[carried:]


def _repeated(equation: Any, twin: Any, inputs: Sequence[Flow], units: Units) -> list[Flow]:
    condition, consts = equation.params["cond_nconsts"], equation.params["body_nconsts"]

    def body(carry: list[Flow]) -> list[Flow]:
        given = [*inputs[condition : condition + consts], *carry]
        return of_body(equation.params["body_jaxpr"], twin.params["body_jaxpr"], given, units)

    carry, _ = _looped(equation, body, inputs[condition + consts :])
    given = [*inputs[:condition], *carry]
    (turns,) = of_body(equation.params["cond_jaxpr"], twin.params["cond_jaxpr"], given, units)
    return [_chosen_by(turns, flow) for flow in carry]


def _chosen(equation: Any, twin: Any, inputs: Sequence[Flow], units: Units) -> list[Flow]:
    pairs = zip(equation.params["branches"], twin.params["branches"], strict=True)
    pairs = [pair for pair in pairs if not raises_error(pair[0])] or pairs
    first, *rest = (of_body(one, other, inputs[1:], units) for one, other in pairs)
    for found in rest:
        first = _agreed(equation, first, found)
    return [_chosen_by(inputs[0], flow) for flow in first]


def _chosen_by(number: Flow, flow: Flow) -> Flow:
    """What depends on a number that all examples share, beside its operands."""
    return Flow(flow.rows, flow.is_followed or number.is_followed, flow.mixed or number.mixed)


def _divided(equation: Any, twin: Any, inputs: Sequence[Flow], units: Units) -> list[Flow]:
    """What each device computes, put together."""
    division, params = Division(units, equation, [flow.rows for flow in inputs]), equation.params
    out_specs = params["out_specs"]
    if division.has_one_example:  # and reshapes may lose the size of 1
        pairs = zip(equation.outvars, twin.outvars, out_specs, strict=True)
        sized = [(of_input(one.aval.shape, other.aval.shape, units), spec) for one, other, spec in pairs]
        return _after(equation, inputs, [division.checked(*pair) for pair in sized], units)
    given = [_put(equation, *pair) for pair in zip(inputs, division.given, strict=True)]
    found = of_body(params["jaxpr"], twin.params["jaxpr"], given, division.units)
    return [
        _put(equation, flow, division.of_all(flow.rows, spec))
        for flow, spec in zip(found, out_specs, strict=True)
    ]


def _solved(equation: Any, twin: Any, inputs: Sequence[Flow], units: Units) -> list[Flow]:
    lengths = equation.params["const_lengths"]
    first = lengths.matvec + lengths.vecmat
    given = [*inputs[first : first + lengths.solve], *inputs[sum(lengths) :]]
    programs = equation.params["jaxprs"].solve, twin.params["jaxprs"].solve
    return of_body(*programs, given, units)


def _of_stack(equation: Any, twin: Any, inputs: Sequence[Flow], units: Units) -> list[Flow]:
    """The results of a stack: their rows, which its layers check, are as the sizes tell."""
    call, others = equation.params["call"], twin.params["call"].layers
    of_stack, of_init, _ = call.sizes
    weights, arguments = _joined(inputs[:of_stack]), _joined(inputs[of_stack + of_init :])
    carry, outputs = list(inputs[of_stack : of_stack + of_init]), []
    while True:
        before, outputs = list(carry), []
        for place, layer in call.layers.items():
            own, larger = layer.jaxpr.jaxpr, others[place].jaxpr.jaxpr
            operands = [*inputs[:of_stack], *carry, *inputs[of_stack + of_init :]]
            unknown = [arguments] * len(own.constvars) + [weights] * layer.of_block
            unknown += [_joined(carry)] * layer.of_carry
            unknown += [arguments] * (len(own.constvars) + len(own.invars) - len(unknown))
            known = [
                other if number is None else operands[number]
                for number, other in zip(call.operands_of(place), unknown, strict=True)
            ]
            given = [
                flow._replace(
                    rows=known_rows(of_input(var.aval.shape, grown.aval.shape, units), flow.rows), numbers=()
                )
                for flow, var, grown in zip(
                    known, [*own.constvars, *own.invars], [*larger.constvars, *larger.invars], strict=True
                )
            ]
            count = len(own.constvars)
            found = of_body(own, larger, given[count:], units, given[:count])
            more = found[: layer.of_carry]
            more = more if layer.of_carry == of_init else [_joined(more)] * of_init
            pairs = zip(carry, more, strict=True)
            carry = [_joined(pair)._replace(rows=pair[0].rows) for pair in pairs]
            outputs.append(found[layer.of_carry :])
        if [flow[1:] for flow in carry] == [flow[1:] for flow in before]:
            break
    return _of_results(equation, twin, carry, outputs, units)


def _of_results(
    equation: Any, twin: Any, carry: Sequence[Flow], outputs: Sequence[Sequence[Flow]], units: Units
) -> list[Flow]:
    """The carry and the outputs of a stack, from the outputs of a layer of each kind."""
    left = len(equation.outvars) - len(carry)
    if {len(one) for one in outputs} == {left}:
        each = [_joined(some) for some in zip(*outputs, strict=True)]
    else:
        each = [_joined([flow for one in outputs for flow in one])] * left
    found = []
    for flow, var, larger in zip([*carry, *each], equation.outvars, twin.outvars, strict=True):
        sized = of_input(var.aval.shape, larger.aval.shape, units)
        found.append(flow._replace(rows=known_rows(sized, flow.rows)))
    return found


def _joined(flows: Sequence[Flow]) -> Flow:
    """Of several values whether any is followed or mixed."""
    mixed = next((flow.mixed for flow in flows if flow.mixed), "")
    return Flow((), any(flow.is_followed for flow in flows), mixed)


def _identical(equation: Any, inputs: Sequence[Rows]) -> list[Rows]:
    return list(inputs)


def _split(equation: Any, inputs: Sequence[Rows]) -> list[Rows]:
    at, rows = equation.params["axis"], inputs[0]
    found, start = [], 0
    for size in equation.params["sizes"]:
        part = part_of(rows[at], start, size) if at in unit_dims(rows) else ((size, None),)
        found.append((*rows[:at], part, *rows[at + 1 :]))
        start += size
    return found


def _unstacked(equation: Any, inputs: Sequence[Rows]) -> list[Rows]:
    at, rows = equation.params["axis"], inputs[0]
    left = tuple(None for _ in rows[1:]) if at in unit_dims(rows) else (*rows[:at], *rows[at + 1 :])
    return [left] * len(equation.outvars)


_OF_SEVERAL: dict[str, Any] = {
    "split": _split,
    "unstack": _unstacked,
    "optimization_barrier": _identical,
}
"""The rows of the results of primitives that have several."""

_BODIES: dict[str, Any] = {
    **dict.fromkeys((*CALLS, *CHECKPOINTS, "custom_jvp_call", "custom_vjp_call"), _called),
    "call_hi_primitive": _expanded,
    "cond": _chosen,
    "custom_linear_solve": _solved,
    "scan": _scanned,
    "shard_map": _divided,
    "while": _repeated,
    stack_p.name: _of_stack,
}
"""What is known of the results of primitives that evaluate other programs."""


def unstacked_of_scan(equation: Any) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many the carry, whichever way this JAX says it."""
    inner = equation.params["jaxpr"].jaxpr
    carried, both = (
        sum(one.aval.shape == other.aval.shape for one, other in zip(*pair, strict=True))
        for pair in ((equation.outvars, inner.outvars), (equation.invars, inner.invars))
    )
    return both - carried, carried
