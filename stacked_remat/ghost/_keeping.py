"""The rows of the results of single operations that keep the rows of examples."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ._units import (
    EXAMPLE,
    PLACE,
    POSITION,
    Dimension,
    Factor,
    Rows,
    agreed,
    counted,
    either,
    has_examples,
    has_units,
    of_places,
    unit_dims,
    with_inherited,
)


def _regrouped(rows: Sequence[Dimension], shape: Sequence[int]) -> Rows:
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


def _elementwise(equation: Any, inputs: Sequence[Rows], sized: Sequence[Rows]) -> Rows | None:
    """Dimension by dimension what the operands have, None where they differ."""
    shapes, shape = [var.aval.shape for var in equation.invars], equation.outvars[0].aval.shape
    full = [(rows, own) for rows, own in zip(inputs, shapes, strict=True) if len(own) == len(shape)]
    return tuple(
        agreed(*(rows[at] for rows, own in full if own[at] == size)) for at, size in enumerate(shape)
    )


def _converted(equation: Any, inputs: Sequence[Rows], sized: Sequence[Rows]) -> Rows | None:
    """Numbers made of a mask between positions may be a permutation of them."""
    dtypes = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
    is_of_mask = [jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes] == [False, True]
    return _elementwise(equation, [_masking(inputs[0]) if is_of_mask else inputs[0]], sized)


def _selected(equation: Any, inputs: Sequence[Rows], sized: Sequence[Rows]) -> Rows | None:
    """As a product with the mask."""
    return _elementwise(equation, [_masking(inputs[0]), *inputs[1:]], sized)


def _masking(rows: Rows) -> Rows:
    """The rows of a mask that numbers are multiplied with."""
    is_between = sum(len(counted(dim)) for dim in rows if not has_examples((dim,))) > 1
    return of_places(rows) if is_between else rows


def _leading(equation: Any, inputs: Sequence[Rows], sized: Sequence[Rows]) -> Rows | None:
    """The first dimensions are the operand's, and the others are of no examples."""
    given = inputs[0][: len(sized[0])]
    return (*given, *sized[0][len(given) :])


def _apart_from(key: str) -> Any:
    """Elementwise, unless the dimension of this parameter holds examples: their order may change."""

    def rows(equation: Any, inputs: Sequence[Rows], sized: Sequence[Rows]) -> Rows | None:
        given = equation.params[key]
        moved = set(given) if isinstance(given, tuple | list) else {given}
        if any(moved & unit_dims(rows) for rows in inputs):
            return None
        found = _elementwise(equation, inputs, sized)
        return found and tuple(
            own if at in moved else dim for at, (dim, own) in enumerate(zip(found, sized[0], strict=True))
        )

    return rows


def _concatenated(equation: Any, inputs: Sequence[Rows], sized: Sequence[Rows]) -> Rows | None:
    filled = [rows for rows in inputs if all(n for dim in rows for n, _ in dim or ((1, None),))]
    at = equation.params["dimension"]
    if len(filled) == 1:
        return filled[0]
    if all(has_examples((rows[at],)) for rows in filled):
        of_parts = [_turns(rows[at]) for rows in filled]
        examples = agreed(*(dim for _, dim in of_parts))
        if examples is None:
            return None
        others = [agreed(*dims) for dims in zip(*filled, strict=True)]
        return (*others[:at], ((sum(n for n, _ in of_parts), None), *examples), *others[at + 1 :])
    return _apart_from("dimension")(equation, inputs, sized)


def _turns(dim: Dimension) -> tuple[int, Dimension]:
    """How many times a dimension has all examples, one time after the other, and what it has each time."""
    if not dim or dim[0][1] is not None:
        return 1, dim
    return dim[0][0], dim[1:]


def part_of(dim: Dimension, start: int, size: int) -> Dimension:
    """A part of a dimension with examples: some of the times that it has all of them. None for any other."""
    _, examples = _turns(dim)
    own = math.prod(n for n, _ in examples or ())
    if not examples or examples[0][1] != EXAMPLE or start % own or size % own or not size:
        return None
    return examples if size == own else ((size // own, None), *examples)


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
        if changed & unit_dims(inputs[0]) or changed & unit_dims(inputs[1]):
            return None
        return tuple(
            rows if at in changed else agreed(rows, part)
            for at, (rows, part) in enumerate(zip(*inputs[:2], strict=True))
        )
    found = [dim if at not in changed else sized[0][at] for at, dim in enumerate(inputs[0])]
    for at in changed & unit_dims(inputs[0]):
        found[at] = None
        if equation.primitive.name == "slice" and not equation.params["strides"]:
            found[at] = part_of(inputs[0][at], equation.params["start_indices"][at], after[at])
    return tuple(found)


def _broadcast(equation: Any, inputs: Sequence[Rows], sized: Sequence[Rows]) -> Rows | None:
    shape, places = equation.params["shape"], equation.params["broadcast_dimensions"]
    found = list(with_inherited(sized[0], shape, inputs))
    for at, dim, size in zip(places, inputs[0], equation.invars[0].aval.shape, strict=True):
        if size == shape[at]:
            found[at] = dim
    return tuple(found)


def _stacked(equation: Any, inputs: Sequence[Rows], sized: Sequence[Rows]) -> Rows | None:
    at, rows = equation.params["axis"], [agreed(*dims) for dims in zip(*inputs, strict=True)]
    return None if None in rows else (*rows[:at], sized[0][at], *rows[at:])


def _windowed(equation: Any, inputs: Sequence[Rows], sized: Sequence[Rows]) -> Rows | None:
    """Windows over dimensions of no examples."""
    windows = equation.params["window_dimensions"]
    if any(windows[at] != 1 for at in unit_dims(inputs[0])):
        return None
    return _resized(equation, inputs, sized)


def _transformed(equation: Any, inputs: Sequence[Rows], sized: Sequence[Rows]) -> Rows | None:
    """Fourier transforms of the last dimensions."""
    leading = len(inputs[0]) - len(equation.params["fft_lengths"])
    if max(unit_dims(inputs[0]), default=-1) >= leading:
        return None
    return (*inputs[0][:leading], *sized[0][leading:])


def _squeezed(equation: Any, inputs: Sequence[Rows], sized: Sequence[Rows]) -> Rows | None:
    left = equation.params["dimensions"]
    return tuple(dim for at, dim in enumerate(inputs[0]) if at not in left)


def _reduced(equation: Any, inputs: Sequence[Rows], sized: Sequence[Rows]) -> Rows | None:
    """Unknown where examples are reduced in one dimension and kept in another: they may be permuted."""
    axes = equation.params["axes"]
    return _without([inputs[0][at] for at in axes], [d for at, d in enumerate(inputs[0]) if at not in axes])


def _without(summed: Sequence[Dimension], kept: Sequence[Dimension]) -> Rows:
    """The dimensions that a sum over others keeps.

    Each position's own sum over positions, as in attention, is of this position. A sum for each of as many
    places may send tokens to them, in any order.
    """
    if None in summed:
        return tuple(None if has_units((dim,)) else dim for dim in kept)
    units = {unit for dim in summed for _, unit in dim or ()}
    lost = units & {EXAMPLE, PLACE} | ({PLACE} if POSITION in units else set())
    if PLACE in units:
        lost.add(POSITION)
    return tuple(None if any(unit in lost for _, unit in dim or ()) else dim for dim in kept)


def _cumulated(equation: Any, inputs: Sequence[Rows], sized: Sequence[Rows]) -> Rows | None:
    """Sums over the rows before: numbers that have derivatives mix those of examples."""
    mixes = jnp.issubdtype(equation.invars[0].aval.dtype, jnp.inexact)
    is_of_examples = has_examples((inputs[0][equation.params["axis"]],))
    return None if mixes and is_of_examples else _elementwise(equation, inputs, sized)


def _transposed(equation: Any, inputs: Sequence[Rows], sized: Sequence[Rows]) -> Rows | None:
    return tuple(inputs[0][at] for at in equation.params["permutation"])


def _reshaped(equation: Any, inputs: Sequence[Rows], sized: Sequence[Rows]) -> Rows | None:
    shape, order = equation.outvars[0].aval.shape, equation.params["dimensions"]
    if 0 in shape or any(dim is None for dim in inputs[0]):
        return None
    return _regrouped(inputs[0] if order is None else [inputs[0][at] for at in order], shape)


def _multiplied(equation: Any, inputs: Sequence[Rows], sized: Sequence[Rows]) -> Rows | None:
    """Rows of examples are kept, unless the product sums over examples: they may be permuted."""
    left, right = inputs[:2]
    (left_summed, right_summed), (left_batch, right_batch) = equation.params["dimension_numbers"]
    pairs = [(left[i], right[j]) for i, j in zip(left_summed, right_summed, strict=True)]
    summed = tuple(either(*pair) for pair in pairs if has_units(pair))
    if has_examples(summed):
        return None
    batch = [agreed(left[i], right[j]) for i, j in zip(left_batch, right_batch, strict=True)]
    free = [dim for at, dim in enumerate(left) if at not in (*left_summed, *left_batch)]
    of_right = [dim for at, dim in enumerate(right) if at not in (*right_summed, *right_batch)]
    return _without(summed, [*batch, *free, *of_right])


def _convolved(equation: Any, inputs: Sequence[Rows], sized: Sequence[Rows]) -> Rows | None:
    numbers = equation.params["dimension_numbers"]
    batch = numbers.lhs_spec[0]
    if unit_dims(inputs[0]) - {batch} or unit_dims(inputs[1]) or equation.params["batch_group_count"] != 1:
        return None
    return tuple(inputs[0][batch] if at == numbers.out_spec[0] else dim for at, dim in enumerate(sized[0]))


def _by_index(rule: Any) -> Any:
    """Without rows of examples that the indices number."""
    return lambda equation, inputs, sized: rule(equation, inputs, sized[0], ())


def _gathered(
    equation: Any, inputs: Sequence[Rows], sized: Rows, own: Sequence[tuple[int, int]]
) -> Rows | None:
    """The rows of what is taken from an array by index.

    Args:
        equation: of a gather.
        inputs: the rows of the array and the indices.
        sized: those by the size of the result.
        own: pairs of a dimension of the array and one of the indices, each of which takes its own row.
    """
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    shape, batched = equation.invars[0].aval.shape, numbers.operand_batching_dims
    taken = [at for at, _ in own]
    if any(at not in (*batched, *taken) and sizes[at] != shape[at] for at in unit_dims(inputs[0])):
        return None
    of_indices = list(inputs[1])
    for at, of_index in (*zip(batched, numbers.start_indices_batching_dims, strict=True), *own):
        of_indices[of_index] = agreed(inputs[0][at], inputs[1][of_index])
        if of_indices[of_index] is None:
            return None
    kept = [at for at in range(len(shape)) if at not in (*numbers.collapsed_slice_dims, *batched)]
    windows = iter([inputs[0][at] if sizes[at] == shape[at] else ((sizes[at], None),) for at in kept])
    others = iter(of_indices[:-1])
    return tuple(next(windows if at in numbers.offset_dims else others) for at in range(len(sized)))


def _scattered(
    equation: Any, inputs: Sequence[Rows], sized: Rows, own: Sequence[tuple[int, int]]
) -> Rows | None:
    """The operand's rows, where updates have the same ones in their windows, as a batch, or by number.

    Args:
        equation: of a scatter.
        inputs: the rows of the array, the indices and the updates.
        sized: those by the size of the result.
        own: pairs of a dimension of the array and one of the indices, each of which updates its own row.
    """
    numbers, (operand, indices, updates) = equation.params["dimension_numbers"], inputs
    of_updates, batched = numbers.update_window_dims, numbers.operand_batching_dims
    windowed = [at for at in range(len(operand)) if at not in (*numbers.inserted_window_dims, *batched)]
    others = [at for at in range(len(updates)) if at not in of_updates]
    pairs = [*zip(batched, numbers.scatter_indices_batching_dims, strict=True), *own]
    places = dict(zip(windowed, of_updates, strict=True)) | {at: others[index] for at, index in pairs}
    wanted = unit_dims(operand)
    kept = {places[at] for at in wanted if at in places and agreed(updates[places[at]], operand[at])}
    same = {index for at, index in pairs if agreed(indices[index], operand[at])}
    moved = wanted & {*numbers.scatter_dims_to_operand_dims} - {at for at, _ in own}
    if moved or len(kept) < len(wanted) or unit_dims(updates) - kept or unit_dims(indices) - same:
        return None
    return operand if len(same) == len(pairs) else None


def _of_matrices(equation: Any, inputs: Sequence[Rows], sized: Sequence[Rows]) -> Rows | None:
    """Linear algebra on the last two dimensions, of which none may hold examples."""
    leading = len(inputs[0]) - 2
    if any(max(unit_dims(rows), default=-1) >= leading for rows in inputs):
        return None
    parts = [rows[:leading] for rows in inputs]
    return (*(agreed(*dims) for dims in zip(*parts, strict=True)), *sized[0][leading:])


_ELEMENTWISE = """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil
clamp clz complex conj copy copy_p cos cosh
device_put digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac imag integer_pow
is_finite layout_constraint le lgamma log log1p logistic lt max min mul name ne neg nextafter noinline
nontraceable not or pbroadcast pcast pmax pmin polygamma population_count pow psum psum_invariant pvary
random_fold_in random_gamma real reduce_precision regularized_incomplete_beta rem reshard round rsqrt
sharding_constraint shift_left shift_right_arithmetic shift_right_logical
sign sin sinh sqrt square stop_gradient sub tan tanh threefry2x32 xor
igamma_grad_a log2 one_minus_square zeta""".split()
_REDUCTIONS = """argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum
reduce_xor""".split()

BY_INDEX: dict[str, Any] = {
    "gather": _gathered,
    **{f"scatter{kind}": _scattered for kind in ("", "-add", "-max", "-min", "-mul", "-sub")},
}
"""The same as of `KEEPING` for what reads or updates by index, from the rows by the result's size and the
dimensions of which each row of the indices has its own row."""

KEEPING: dict[str, Any] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(_REDUCTIONS, _reduced),
    **dict.fromkeys(("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"), _cumulated),
    **dict.fromkeys(
        (
            "bitcast_convert_type",
            "lu_pivots_to_permutation",
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
    **dict.fromkeys(("select_if_vmap", "select_n"), _selected),
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenated,
    "conv_general_dilated": _convolved,
    "convert_element_type": _converted,
    "dot_general": _multiplied,
    "reshape": _reshaped,
    "rev": _apart_from("dimensions"),
    "sort": _apart_from("dimension"),
    "fft": _transformed,
    **{name: _by_index(rule) for name, rule in BY_INDEX.items()},
    "squeeze": _squeezed,
    "stack": _stacked,
    "tile": _resized,
    "top_k": _apart_from("axis"),
    "transpose": _transposed,
}
"""What primitives that keep the rows of examples make of them: from the equation, the rows of its operands
and those by the results' sizes. None where they do not keep them."""
