"""Evaluates the small integers of a traced program, which decide how often its loops run.

Trip counts are often computed: a loop's counter reads the length of the inner loop from a table, say. Values
are NumPy arrays on the host; what is not known is None.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

MAX_SIZE = 4096  # elements; larger integer arrays are data, not schedules
_MAX_TABLE = 512 * 512  # the same for constants of one byte, such as the table of blocks that a kernel visits


def as_known(value: Any) -> np.ndarray | None:
    """Return `value` as a host array if it is a small integer or boolean one, else None."""
    dtype = getattr(value, "dtype", None)
    if isinstance(value, (bool, int)):
        return np.asarray(value)
    if dtype is None or not _is_integer(dtype) or isinstance(value, jax.core.Tracer):
        return None
    most = _MAX_TABLE if np.dtype(dtype) == np.int8 else MAX_SIZE
    return np.asarray(value) if np.size(value) <= most else None


def is_small_integer(aval: Any) -> bool:
    """Whether values of this abstract type are evaluated at all."""
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and _is_integer(dtype) and aval.size <= MAX_SIZE


def _is_integer(dtype: Any) -> bool:
    return not jnp.issubdtype(dtype, jax.dtypes.extended) and np.dtype(dtype).kind in "biu"


def can_evaluate(eqn: Any) -> bool:
    """Whether `evaluate` knows the operation."""
    name = eqn.primitive.name
    return name in _UFUNCS or name in _RELABELLING or name in _IDENTITIES or name in _BY_JAX


def evaluate(eqn: Any, values: Sequence[np.ndarray | None]) -> list[np.ndarray | None]:
    """Evaluate one equation that holds no jaxpr.

    Args:
        eqn: the equation.
        values: its inputs.

    Returns:
        Its outputs; unknown where an input is, and for operations that are not known here.
    """
    unknown: list[np.ndarray | None] = [None] * len(eqn.outvars)
    name = eqn.primitive.name
    if name in _IDENTITIES:
        return list(values) if len(values) == len(eqn.outvars) else unknown
    if any(value is None for value in values) or not all(is_small_integer(v.aval) for v in eqn.outvars):
        return unknown
    if name in _UFUNCS:
        result = _UFUNCS[name](*values)
    elif name in _RELABELLING:
        (result,) = values
    elif name in _BY_JAX:
        typed = [
            np.asarray(value).astype(var.aval.dtype) for value, var in zip(values, eqn.invars, strict=True)
        ]
        with jax.default_device(jax.local_devices(backend="cpu")[0]), jax.ensure_compile_time_eval():
            result = eqn.primitive.bind(*typed, **eqn.params)
    else:
        return unknown
    aval = eqn.outvars[0].aval
    return [np.asarray(result).astype(aval.dtype).reshape(aval.shape)]


_IDENTITIES = frozenset(
    "optimization_barrier device_put copy copy_p name pvary pcast stop_gradient sharding_constraint "
    "mesh_cast reshard layout_constraint".split()
)

# Where NumPy agrees with XLA it saves JAX's dispatch and compilation.
_UFUNCS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "neg": np.negative,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
}

_RELABELLING = frozenset({"convert_element_type", "reshape", "squeeze", "expand_dims"})

_BY_JAX = frozenset(
    "div rem abs sign integer_pow shift_left select_n clamp transpose rev concatenate stack iota slice "
    "dynamic_slice dynamic_update_slice broadcast_in_dim gather scatter scatter-add pad reduce_sum "
    "reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin cumsum cummax cummin".split()
)
