"""Arithmetic on the small integers of a traced program: the ones that say how often a loop runs.

Trip counts are often not written in the program but computed: read from a table of segment lengths by
the counter of the loop outside, say. Everything here works on NumPy arrays on the host; an operation
that is not known simply has an unknown result.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

MAX_SIZE = 4096  # elements; larger integer arrays are data, not schedules
_MAX_TABLE = 512 * 512  # the same for constants of one byte, such as the table of blocks that a kernel visits

_Rule = Callable[..., Any]


def as_known(value: Any) -> np.ndarray | None:
    """Return `value` as a host array if it is a small integer or boolean one, else None."""
    dtype = getattr(value, "dtype", None)
    if isinstance(value, (bool, int)):
        return np.asarray(value)
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended) or np.dtype(dtype).kind not in "biu":
        return None
    most = _MAX_TABLE if np.dtype(dtype) == np.int8 else MAX_SIZE
    if isinstance(value, jax.core.Tracer) or np.size(value) > most:
        return None
    return np.asarray(value)


def is_small_integer(aval: Any) -> bool:
    """Whether values of this abstract type are followed at all."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended):
        return False
    return np.dtype(dtype).kind in "biu" and aval.size <= MAX_SIZE


def can_evaluate(eqn: Any) -> bool:
    """Whether `evaluate` knows the operation."""
    name = eqn.primitive.name
    return name in _ELEMENTWISE or name in _STRUCTURAL or name in _IDENTITIES or name in _BY_JAX


def evaluate(eqn: Any, values: Sequence[np.ndarray | None]) -> list[np.ndarray | None]:
    """Evaluate one equation on known inputs.

    Args:
        eqn: an equation without a jaxpr inside.
        values: its inputs; None for those that are not known.

    Returns:
        Its outputs, None for those that do not follow.
    """
    unknown: list[np.ndarray | None] = [None] * len(eqn.outvars)
    name = eqn.primitive.name
    if name in _IDENTITIES:
        return list(values) if len(values) == len(eqn.outvars) else unknown
    if any(value is None for value in values) or not all(is_small_integer(v.aval) for v in eqn.outvars):
        return unknown
    with np.errstate(all="ignore"):
        if name in _ELEMENTWISE:
            result = _ELEMENTWISE[name](*values)
        elif name in _STRUCTURAL:
            result = _STRUCTURAL[name](eqn.params, *values)
        elif name in _BY_JAX:
            result = _ask_jax(eqn, values)
        else:
            return unknown
        aval = eqn.outvars[0].aval
        return [np.asarray(result).astype(aval.dtype).reshape(aval.shape)]


def _ask_jax(eqn: Any, values: Sequence[np.ndarray | None]) -> Any:
    """Run an operation whose semantics are too rich to repeat, on the CPU, on integers alone."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]), jax.ensure_compile_time_eval():
        return eqn.primitive.bind(*values, **eqn.params)


def _divide(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """XLA's integer division: towards zero, and -1 for a zero divisor."""
    safe = np.where(y == 0, 1, y)
    return np.where(y == 0, -1, np.floor_divide(x - np.fmod(x, safe), safe))


def _remainder(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """XLA's remainder: the sign of the dividend, and the dividend itself for a zero divisor."""
    return np.where(y == 0, x, np.fmod(x, np.where(y == 0, 1, y)))


def _dynamic_slice(params: Any, operand: np.ndarray, *starts: np.ndarray) -> np.ndarray:
    window = []
    for start, size, length in zip(starts, params["slice_sizes"], operand.shape, strict=True):
        first = min(max(int(start), 0), length - size)
        window.append(slice(first, first + size))
    return operand[tuple(window)]


def _dynamic_update_slice(_: Any, operand: np.ndarray, update: np.ndarray, *starts: np.ndarray) -> np.ndarray:
    window = []
    for start, size, length in zip(starts, update.shape, operand.shape, strict=True):
        first = min(max(int(start), 0), length - size)
        window.append(slice(first, first + size))
    result = operand.copy()
    result[tuple(window)] = update
    return result


def _broadcast_in_dim(params: Any, operand: np.ndarray) -> np.ndarray:
    shape = [1] * len(params["shape"])
    for axis, size in zip(params["broadcast_dimensions"], operand.shape, strict=True):
        shape[axis] = size
    return np.broadcast_to(operand.reshape(shape), params["shape"])


def _iota(params: Any) -> np.ndarray:
    shape = [1] * len(params["shape"])
    shape[params["dimension"]] = params["shape"][params["dimension"]]
    return np.broadcast_to(np.arange(params["shape"][params["dimension"]]).reshape(shape), params["shape"])


def _slice(params: Any, operand: np.ndarray) -> np.ndarray:
    strides = params["strides"] or (1,) * operand.ndim
    return operand[tuple(map(slice, params["start_indices"], params["limit_indices"], strides))]


def _cumulative(ufunc: np.ufunc) -> _Rule:
    def run(params: Any, operand: np.ndarray) -> np.ndarray:
        axis = params["axis"]
        if params["reverse"]:
            return np.flip(ufunc.accumulate(np.flip(operand, axis), axis), axis)
        return ufunc.accumulate(operand, axis)

    return run


def _select_n(which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    return np.choose(np.broadcast_to(which.astype(np.int64), cases[0].shape), cases)


_IDENTITIES = frozenset(
    {"optimization_barrier", "device_put", "copy", "copy_p", "name", "pvary", "pcast"}
) | {
    "stop_gradient",
    "sharding_constraint",
    "mesh_cast",
    "reshard",
    "layout_constraint",
}

_ELEMENTWISE: dict[str, _Rule] = {
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _divide,
    "rem": _remainder,
    "max": np.maximum,
    "min": np.minimum,
    "neg": np.negative,
    "abs": np.abs,
    "sign": np.sign,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "shift_left": np.left_shift,
    "select_n": _select_n,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
}

_STRUCTURAL: dict[str, _Rule] = {
    "convert_element_type": lambda params, x: x,
    "reshape": lambda params, x: x,
    "squeeze": lambda params, x: x,
    "expand_dims": lambda params, x: x,
    "integer_pow": lambda params, x: x ** params["y"],
    "transpose": lambda params, x: np.transpose(x, params["permutation"]),
    "rev": lambda params, x: np.flip(x, params["dimensions"]),
    "concatenate": lambda params, *xs: np.concatenate(xs, params["dimension"]),
    "stack": lambda params, *xs: np.stack(xs, params["axis"]),
    "reduce_sum": lambda params, x: np.sum(x, params["axes"]),
    "reduce_max": lambda params, x: np.max(x, params["axes"]),
    "reduce_min": lambda params, x: np.min(x, params["axes"]),
    "reduce_and": lambda params, x: np.bitwise_and.reduce(x, params["axes"]),
    "reduce_or": lambda params, x: np.bitwise_or.reduce(x, params["axes"]),
    "argmax": lambda params, x: np.argmax(x, params["axes"][0]),
    "argmin": lambda params, x: np.argmin(x, params["axes"][0]),
    "iota": _iota,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "broadcast_in_dim": _broadcast_in_dim,
    "cumsum": _cumulative(np.add),
    "cummax": _cumulative(np.maximum),
    "cummin": _cumulative(np.minimum),
}

_BY_JAX = frozenset({"gather", "scatter", "scatter-add", "pad", "reduce_prod"})
