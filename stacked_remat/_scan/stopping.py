"""Steps of loops that stop before their bound: their carry says whether it is done."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .checks import check_carry, describe
from .marks import raw_array

Until = Callable[[Any], Any]  # of a carry: whether to stop


def is_done(until: Until, carry: Any) -> Any:
    """Whether to stop at this carry.

    Raises:
        TypeError: `until` returns anything but one bool.
    """
    done = raw_array(until(carry))
    if not eqx.is_array_like(done) or jnp.shape(done) or jnp.result_type(done) != "bool":
        raise TypeError(
            f"until returns one bool for the whole carry; it returned {describe(done)}. Write jnp.all(...) "
            "or jnp.any(...) around it."
        )
    return jnp.asarray(done)


def stopping(f: Callable[..., tuple[Any, Any]], until: Until) -> Callable[..., Any]:
    """A step on `(is it done, carry)`. Once it is, the carry stays as it is, and outputs are zeros."""

    def step(state: tuple[Any, Any], /, *args: Any, **kwargs: Any) -> Any:
        done, carry = state

        def unless_done(new: Any, old: Any) -> Any:
            return jnp.where(done, old, new) if eqx.is_array_like(new) else new

        result = f(carry, *args, **kwargs)
        if not isinstance(result, tuple | list) or len(result) != 2:
            return result  # which is refused
        check_carry(carry, result[0])
        carry = jax.tree.map(unless_done, result[0], carry)
        y = jax.tree.map(lambda leaf: unless_done(leaf, jnp.zeros_like(leaf)), result[1])
        return (done | is_done(until, carry), carry), y

    return step
