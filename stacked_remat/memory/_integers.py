"""Evaluates the small integers of a traced program, which decide how often its loops run.

Trip counts are often computed: a loop's counter reads the length of the inner loop from a table, say. Values
are NumPy arrays on the host; what is not known is None.
"""

from collections.abc import Sequence
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


def evaluate(eqn: Any, values: Sequence[np.ndarray | None]) -> list[np.ndarray | None]:
    """Evaluate one equation that holds no jaxpr, with JAX on the host.

    Args:
        eqn: the equation.
        values: its inputs.

    Returns:
        Its outputs; unknown where an input is, and for operations that are not named here.
    """
    name = eqn.primitive.name
    if name in _IDENTITIES and len(values) == len(eqn.outvars):
        return list(values)
    known = [value for value in values if value is not None]
    if name not in _EVALUATED or len(known) < len(values) or not is_small_integer(eqn.outvars[0].aval):
        return [None] * len(eqn.outvars)
    typed = [np.asarray(value, var.aval.dtype) for value, var in zip(known, eqn.invars, strict=True)]
    # On one device, whatever mesh it was traced for.
    params = eqn.params | dict.fromkeys(eqn.params.keys() & {"sharding", "out_sharding"})
    with jax.default_device(jax.local_devices(backend="cpu")[0]), jax.ensure_compile_time_eval():
        return [np.asarray(eqn.primitive.bind(*typed, **params))]


_IDENTITIES = frozenset(
    "optimization_barrier device_put copy copy_p name pvary pcast stop_gradient sharding_constraint "
    "mesh_cast reshard layout_constraint with_zeros_in_place".split()
)

_EVALUATED = frozenset(
    "add add_any sub mul div rem max min neg abs sign integer_pow lt le gt ge eq ne and or xor not "
    "shift_left convert_element_type reshape squeeze expand_dims transpose broadcast_in_dim rev pad iota "
    "concatenate stack select_n clamp slice dynamic_slice dynamic_update_slice gather scatter scatter-add "
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin cumsum cummax "
    "cummin".split()
)
