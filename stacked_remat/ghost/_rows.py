"""Which dimensions of the values in a traced program are examples, or tokens.

The program is traced twice, the second time with more examples: a dimension that grew by the same factor
holds examples. What a reshape merges is followed through the program.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jax.extend.core import Literal, jaxprs_in_params

from .._noted import is_noted

Factor: TypeAlias = tuple[int, int | None]
"""A size, and which of the units (0 the example, 1 the position) it counts; None for any other."""
Dimension: TypeAlias = tuple[Factor, ...] | None
"""The factors of a dimension, the slowest first; None where the order of its rows is not known."""
Rows: TypeAlias = tuple[Dimension, ...]
"""One entry for each dimension of an array."""


class Units(NamedTuple):
    """What scores are given for.

    Attributes:
        sizes: of examples, or of examples and positions. Empty where there is only one example: all
            rows are its rows.
        growth: by how much each is larger in the second trace; different primes.
    """

    sizes: tuple[int, ...]
    growth: tuple[int, ...]

    def of_growth(self, size: int, other: int) -> tuple[int, ...] | None:
        """The units in a dimension that has the size `other` in the second trace; None if unclear."""
        for number in range(len(self.sizes) + 1):
            for some in itertools.combinations(range(len(self.sizes)), number):
                if other == size * math.prod(self.growth[unit] for unit in some):
                    return some
        return None


def has_units(rows: Rows) -> bool:
    """Whether a value has rows of several examples, or may have."""
    return any(dim is None or any(unit is not None for _, unit in dim) for dim in rows)


def of_input(shape: Sequence[int], other: Sequence[int], units: Units) -> Rows:
    """The rows of an input of the program, from its shape in both traces."""
    return tuple(_by_size(size, larger, units) for size, larger in zip(shape, other, strict=True))


def of_outputs(equation: Any, twin: Any, inputs: Sequence[Rows], units: Units) -> list[Rows]:
    """The rows of an equation's results.

    Where operands have rows of examples, a primitive that is not known to keep them gives results with
    unknown rows.

    Args:
        equation: of the first trace.
        twin: the same of the second trace, None where the traces differ.
        inputs: the rows of the operands.
        units: see there.
    """
    shapes = [var.aval.shape for var in equation.outvars]
    if not units.sizes:
        return [of_input(shape, shape, units) for shape in shapes]
    if twin is None:
        return [(None,) * len(shape) for shape in shapes]
    others = [var.aval.shape for var in twin.outvars]
    if len(others) != len(shapes):  # examples taken apart
        return [(None,) * len(shape) for shape in shapes]
    sized = [of_input(*pair, units) for pair in zip(shapes, others, strict=True)]
    if not any(map(has_units, inputs)):
        return sized
    name = equation.primitive.name
    if _is_trusted(equation):
        if any(dim is None for rows in inputs for dim in rows):
            return [_unknown(*pair) for pair in zip(shapes, others, strict=True)]
        return [_with_inherited(rows, shape, inputs) for rows, shape in zip(sized, shapes, strict=True)]
    if name in _BODIES:
        return _BODIES[name](equation, twin, inputs, units)
    if name in _KEEPING:
        found = [_KEEPING[name](equation, inputs, [rows]) for rows in sized]
        if None not in found:
            return found
    return [_unknown(*pair) for pair in zip(shapes, others, strict=True)]


def _unknown(shape: Sequence[int], other: Sequence[int]) -> Rows:
    return tuple(
        ((size, None),) if size == larger else None for size, larger in zip(shape, other, strict=True)
    )


def _is_trusted(equation: Any) -> bool:
    """Whether a call keeps the rows: the noted ones do, and layers with deposits were checked."""
    return is_noted(equation) or any(map(_has_deposit, jaxprs_in_params(equation.params)))


def _has_deposit(jaxpr: Any) -> bool:
    return jaxpr.debug_info.func_src_info.startswith("_deposit at ") or any(
        _has_deposit(inner) for equation in jaxpr.eqns for inner in jaxprs_in_params(equation.params)
    )


def _by_size(size: int, other: int, units: Units) -> Dimension:
    some = units.of_growth(size, other)
    if some == ():
        return ((size, None),)
    if some is not None and len(some) == 1 and size == units.sizes[some[0]]:
        return ((size, some[0]),)
    return None


def _with_inherited(rows: Rows, shape: Sequence[int], inputs: Sequence[Rows]) -> Rows:
    return tuple(
        _inherited(size, inputs) if dim is None else dim for dim, size in zip(rows, shape, strict=True)
    )


def _inherited(size: int, inputs: Sequence[Rows]) -> Dimension:
    """The factors of the operands' dimensions of this size that hold several, if they agree."""
    candidates = {
        dim
        for rows in inputs
        for dim in rows
        if dim is not None and len(dim) > 1 and math.prod(n for n, _ in dim) == size
    }
    return candidates.pop() if len(candidates) == 1 else None


def _regrouped(rows: Rows, shape: Sequence[int]) -> Rows:
    """The rows after a reshape: the same factors in the same order, in other groups."""
    factors = [factor for dim in rows for factor in dim or ()]
    found: list[Dimension] = []
    for size in shape:
        group: list[Factor] = []
        left = size
        while left > 1:
            while factors and factors[0][0] == 1:
                factors.pop(0)
            if not factors:
                return (None,) * len(shape)
            own, unit = factors.pop(0)
            if left % own == 0:
                group.append((own, unit))
                left //= own
            elif unit is None and own % left == 0:
                group.append((left, None))
                factors.insert(0, (own // left, None))
                left = 1
            else:
                return (None,) * len(shape)
        found.append(_merged(group) or ((size, None),))
    return tuple(found)


def _merged(group: Sequence[Factor]) -> tuple[Factor, ...]:
    found: list[Factor] = []
    for size, unit in group:
        if found and unit is None and found[-1][1] is None:
            found[-1] = (found[-1][0] * size, None)
        else:
            found.append((size, unit))
    return tuple(found)


def _unit_dims(rows: Rows) -> set[int]:
    return {at for at, dim in enumerate(rows) if dim is None or any(unit is not None for _, unit in dim)}


def _elementwise(equation: Any, inputs: Sequence[Rows], sized: Sequence[Rows]) -> Rows | None:
    """Dimension by dimension what the operands have, None where they differ."""
    shapes, shape = [var.aval.shape for var in equation.invars], equation.outvars[0].aval.shape
    found: list[Dimension] = []
    for at, size in enumerate(shape):
        dims = {
            rows[at]
            for rows, own in zip(inputs, shapes, strict=True)
            if len(own) == len(shape) and own[at] == size
        }
        found.append(dims.pop() if len(dims) == 1 else None)
    return tuple(found)


def _leading(equation: Any, inputs: Sequence[Rows], sized: Sequence[Rows]) -> Rows | None:
    """The first dimensions are the operand's, and the others are of no examples."""
    given = inputs[0][: len(sized[0])]
    return (*given, *sized[0][len(given) :])


def _apart_from(key: str) -> Any:
    """Elementwise, unless the dimension of this parameter holds examples: their order may change."""

    def rows(equation: Any, inputs: Sequence[Rows], sized: Sequence[Rows]) -> Rows | None:
        given = equation.params[key]
        moved = set(given) if isinstance(given, tuple | list) else {given}
        if any(moved & _unit_dims(rows) for rows in inputs):
            return None
        found = _elementwise(equation, inputs, sized)
        return found and tuple(
            own if at in moved else dim for at, (dim, own) in enumerate(zip(found, sized[0], strict=True))
        )

    return rows


def _concatenated(equation: Any, inputs: Sequence[Rows], sized: Sequence[Rows]) -> Rows | None:
    filled = [rows for rows in inputs if all(n for dim in rows for n, _ in dim or ((1, None),))]
    return filled[0] if len(filled) == 1 else _apart_from("dimension")(equation, inputs, sized)


def _resized(equation: Any, inputs: Sequence[Rows], sized: Sequence[Rows]) -> Rows | None:
    """A part of an array, or more around it: unknown rows where that is so along examples."""
    before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    changed = {at for at, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]}
    if equation.primitive.name == "pad":
        padding = equation.params["padding_config"]
        changed |= {at for at, (low, _, inner) in enumerate(padding) if low or inner}
    if equation.primitive.name == "dynamic_update_slice":
        part = equation.invars[1].aval.shape
        changed = {at for at, pair in enumerate(zip(before, part, strict=True)) if pair[0] != pair[1]}
        if changed & _unit_dims(inputs[0]) or changed & _unit_dims(inputs[1]):
            return None
        return tuple(
            rows if at in changed or rows == part else None
            for at, (rows, part) in enumerate(zip(*inputs[:2], strict=True))
        )
    return tuple(
        dim if at not in changed else None if at in _unit_dims(inputs[0]) else sized[0][at]
        for at, dim in enumerate(inputs[0])
    )


def _broadcast(equation: Any, inputs: Sequence[Rows], sized: Sequence[Rows]) -> Rows | None:
    shape, places = equation.params["shape"], equation.params["broadcast_dimensions"]
    found = list(_with_inherited(sized[0], shape, inputs))
    for at, dim, size in zip(places, inputs[0], equation.invars[0].aval.shape, strict=True):
        if size == shape[at]:
            found[at] = dim
    return tuple(found)


def _stacked(equation: Any, inputs: Sequence[Rows], sized: Sequence[Rows]) -> Rows | None:
    at, rows = equation.params["axis"], inputs[0]
    same = all(other == rows for other in inputs)
    return (*rows[:at], sized[0][at], *rows[at:]) if same else None


def _windowed(equation: Any, inputs: Sequence[Rows], sized: Sequence[Rows]) -> Rows | None:
    """Windows over dimensions of no examples."""
    windows = equation.params["window_dimensions"]
    if any(windows[at] != 1 for at in _unit_dims(inputs[0])):
        return None
    return _resized(equation, inputs, sized)


def _transformed(equation: Any, inputs: Sequence[Rows], sized: Sequence[Rows]) -> Rows | None:
    """Fourier transforms of the last dimensions."""
    leading = len(inputs[0]) - len(equation.params["fft_lengths"])
    if max(_unit_dims(inputs[0]), default=-1) >= leading:
        return None
    return (*inputs[0][:leading], *sized[0][leading:])


def _without(key: str) -> Any:
    def rows(equation: Any, inputs: Sequence[Rows], sized: Sequence[Rows]) -> Rows | None:
        left = equation.params[key]
        return tuple(dim for at, dim in enumerate(inputs[0]) if at not in left)

    return rows


def _transposed(equation: Any, inputs: Sequence[Rows], sized: Sequence[Rows]) -> Rows | None:
    return tuple(inputs[0][at] for at in equation.params["permutation"])


def _reshaped(equation: Any, inputs: Sequence[Rows], sized: Sequence[Rows]) -> Rows | None:
    shape = equation.outvars[0].aval.shape
    if 0 in shape or any(dim is None for dim in inputs[0]):
        return None
    return _regrouped(inputs[0], shape)


def _multiplied(equation: Any, inputs: Sequence[Rows], sized: Sequence[Rows]) -> Rows | None:
    """Rows of examples are kept, unless the product sums over examples: they may be permuted."""
    left, right = inputs[:2]
    (left_summed, right_summed), (left_batch, right_batch) = equation.params["dimension_numbers"]
    if _unit_dims(left) & set(left_summed) or _unit_dims(right) & set(right_summed):
        return None
    batch = [left[i] if left[i] == right[j] else None for i, j in zip(left_batch, right_batch, strict=True)]
    free = [dim for at, dim in enumerate(left) if at not in (*left_summed, *left_batch)]
    return (*batch, *free, *(dim for at, dim in enumerate(right) if at not in (*right_summed, *right_batch)))


def _convolved(equation: Any, inputs: Sequence[Rows], sized: Sequence[Rows]) -> Rows | None:
    numbers = equation.params["dimension_numbers"]
    batch = numbers.lhs_spec[0]
    if _unit_dims(inputs[0]) - {batch} or _unit_dims(inputs[1]) or equation.params["batch_group_count"] != 1:
        return None
    return tuple(inputs[0][batch] if at == numbers.out_spec[0] else dim for at, dim in enumerate(sized[0]))


def _gathered(equation: Any, inputs: Sequence[Rows], sized: Sequence[Rows]) -> Rows | None:
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    shape, batched = equation.invars[0].aval.shape, numbers.operand_batching_dims
    if any(at not in batched and sizes[at] != shape[at] for at in _unit_dims(inputs[0])):
        return None
    for at, of_index in zip(batched, numbers.start_indices_batching_dims, strict=True):
        if inputs[0][at] != inputs[1][of_index]:
            return None
    kept = [at for at in range(len(shape)) if at not in (*numbers.collapsed_slice_dims, *batched)]
    own = iter([inputs[0][at] if sizes[at] == shape[at] else ((sizes[at], None),) for at in kept])
    of_indices = iter(inputs[1][:-1])
    return tuple(next(own if at in numbers.offset_dims else of_indices) for at in range(len(sized[0])))


def _of_matrices(equation: Any, inputs: Sequence[Rows], sized: Sequence[Rows]) -> Rows | None:
    """Linear algebra on the last two dimensions, of which none may hold examples."""
    leading = len(inputs[0]) - 2
    if any(max(_unit_dims(rows), default=-1) >= leading for rows in inputs):
        return None
    parts = [rows[:leading] for rows in inputs]
    batch = [dims[0] if len(set(dims)) == 1 else None for dims in zip(*parts, strict=True)]
    return (*batch, *sized[0][leading:])


_ELEMENTWISE = """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil
clamp clz complex conj convert_element_type copy copy_p cos cosh cumlogsumexp cummax cummin cumprod cumsum
device_put digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac imag integer_pow
is_finite layout_constraint le lgamma log log1p logistic lt max min mul name ne neg nextafter noinline
nontraceable not or pbroadcast pcast pmax pmin polygamma population_count pow psum psum_invariant pvary
random_fold_in random_gamma real reduce_precision regularized_incomplete_beta rem reshard round rsqrt
select_if_vmap select_n sharding_constraint shift_left shift_right_arithmetic shift_right_logical
sign sin sinh sqrt square stop_gradient sub tan tanh threefry2x32 xor""".split()
_REDUCTIONS = """argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum
reduce_xor""".split()

_KEEPING: dict[str, Any] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(_REDUCTIONS, _without("axes")),
    **dict.fromkeys(
        (
            "bitcast_convert_type",
            "random_bits",
            "random_seed",
            "random_split",
            "random_unwrap",
            "random_wrap",
        ),
        _leading,
    ),
    **dict.fromkeys(("slice", "dynamic_slice", "pad", "dynamic_update_slice"), _resized),
    **dict.fromkeys(("reduce_window_max", "reduce_window_min", "reduce_window_sum"), _windowed),
    **dict.fromkeys(("cholesky", "lu", "triangular_solve", "qr", "eigh", "svd"), _of_matrices),
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenated,
    "conv_general_dilated": _convolved,
    "dot_general": _multiplied,
    "gather": _gathered,
    "reshape": _reshaped,
    "rev": _apart_from("dimensions"),
    "sort": _apart_from("dimension"),
    "fft": _transformed,
    "squeeze": _without("dimensions"),
    "stack": _stacked,
    "tile": _resized,
    "top_k": _apart_from("axis"),
    "transpose": _transposed,
}
"""What primitives that keep the rows of examples make of them: from the equation, the rows of its operands
and those by the results' sizes. None where they do not keep them."""


def _of_body(jaxpr: Any, other: Any, inputs: Sequence[Rows], units: Units) -> list[Rows]:
    """The rows of the results of a jaxpr."""
    jaxpr, other = getattr(jaxpr, "jaxpr", jaxpr), getattr(other, "jaxpr", other)
    consts = [
        of_input(var.aval.shape, larger.aval.shape, units)
        for var, larger in zip(jaxpr.constvars, other.constvars, strict=False)
    ]
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))

    def read(atom: Any) -> Rows:
        if isinstance(atom, Literal):
            return tuple(((size, None),) for size in np.shape(atom.val))
        return values[atom]

    others = list(other.eqns)
    for at, equation in enumerate(jaxpr.eqns):
        twin = others[at] if at < len(others) else None
        if twin is None or twin.primitive is not equation.primitive:
            others, twin = [], None
        found = of_outputs(equation, twin, [read(atom) for atom in equation.invars], units)
        values |= dict(zip(equation.outvars, found, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _called(key: str) -> Any:
    def rows(equation: Any, twin: Any, inputs: Sequence[Rows], units: Units) -> list[Rows]:
        return _of_body(equation.params[key], twin.params[key], inputs, units)

    return rows


def _agreed(some: Sequence[Rows], others: Sequence[Rows]) -> list[Rows]:
    return [
        tuple(one if one == other else None for one, other in zip(*pair, strict=True))
        for pair in zip(some, others, strict=True)
    ]


def _looped(body: Any, carry: Sequence[Rows]) -> tuple[list[Rows], list[Rows]]:
    """The rows of what a loop carries, and of the rest of its results in each turn."""
    carry = list(carry)
    while True:
        found = body(carry)
        agreed = _agreed(carry, found[: len(carry)])
        if agreed == carry:
            return carry, found[len(carry) :]
        carry = agreed


def _scanned(equation: Any, twin: Any, inputs: Sequence[Rows], units: Units) -> list[Rows]:
    inner = equation.params["jaxpr"].jaxpr
    carried = _alike(equation.outvars, inner.outvars)
    consts = _alike(equation.invars, inner.invars) - carried
    xs = inputs[consts + carried :]

    def body(carry: list[Rows]) -> list[Rows]:
        given = [*inputs[:consts], *carry, *(rows[1:] for rows in xs)]
        return _of_body(equation.params["jaxpr"], twin.params["jaxpr"], given, units)

    carry, each = _looped(body, inputs[consts : consts + carried])
    turns, more = equation.params["length"], twin.params["length"]
    first = {*of_input((turns,), (more,), units), *(rows[0] for rows in xs)}
    turn = first.pop() if len(first) == 1 else None
    return [*carry, *((turn, *rows) for rows in each)]


def _repeated(equation: Any, twin: Any, inputs: Sequence[Rows], units: Units) -> list[Rows]:
    condition, consts = equation.params["cond_nconsts"], equation.params["body_nconsts"]

    def body(carry: list[Rows]) -> list[Rows]:
        given = [*inputs[condition : condition + consts], *carry]
        return _of_body(equation.params["body_jaxpr"], twin.params["body_jaxpr"], given, units)

    return _looped(body, inputs[condition + consts :])[0]


def _chosen(equation: Any, twin: Any, inputs: Sequence[Rows], units: Units) -> list[Rows]:
    pairs = zip(equation.params["branches"], twin.params["branches"], strict=True)
    first, *rest = (_of_body(one, other, inputs[1:], units) for one, other in pairs)
    for found in rest:
        first = _agreed(first, found)
    return first


def _identical(equation: Any, twin: Any, inputs: Sequence[Rows], units: Units) -> list[Rows]:
    return list(inputs)


def _split(equation: Any, twin: Any, inputs: Sequence[Rows], units: Units) -> list[Rows]:
    at, rows = equation.params["axis"], inputs[0]
    return [
        (*rows[:at], None if at in _unit_dims(rows) else ((size, None),), *rows[at + 1 :])
        for size in equation.params["sizes"]
    ]


def _unstacked(equation: Any, twin: Any, inputs: Sequence[Rows], units: Units) -> list[Rows]:
    at, rows = equation.params["axis"], inputs[0]
    left = tuple(None for _ in rows[1:]) if at in _unit_dims(rows) else (*rows[:at], *rows[at + 1 :])
    return [left] * len(equation.outvars)


_IDENTITIES = """nondifferentiable_backward not_differentiable not_transposable optimization_barrier
reverse_mode_only""".split()

_BODIES: dict[str, Any] = {
    "split": _split,
    "unstack": _unstacked,
    **dict.fromkeys(_IDENTITIES, _identical),
    **dict.fromkeys(("jit", "pjit", "closed_call", "remat", "remat2", "checkpoint"), _called("jaxpr")),
    **dict.fromkeys(("core_call", "custom_jvp_call", "custom_vjp_call"), _called("call_jaxpr")),
    "cond": _chosen,
    "scan": _scanned,
    "while": _repeated,
}
"""The rows of the results of primitives that evaluate other programs, or have several results."""


def _alike(outer: Sequence[Any], inner: Sequence[Any]) -> int:
    """How many variables of a scan are not stacked, whichever way this JAX says it in the parameters."""
    return sum(one.aval.shape == other.aval.shape for one, other in zip(outer, inner, strict=True))
