"""Operations that are left to a kernel give what JAX's own give."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Literal

from stacked_remat.ops._pending_rows import _of_elements


@pytest.mark.parametrize(
    ("fn", "of_triton"),
    [
        (lax.max, jnp.fmax),
        (lax.min, jnp.fmin),
        (functools.partial(lax.clamp, -1.0), lambda low, x, high: jnp.fmin(jnp.fmax(low, x), high)),
    ],
)
def test_what_is_not_a_number_stays_so_where_a_kernel_takes_the_other_operand(fn, of_triton):
    operands = jnp.array([jnp.nan, 1.0, 2.0, jnp.nan]), jnp.array([1.0, jnp.nan, 1.0, jnp.nan])
    (equation,) = jax.make_jaxpr(fn)(*operands).eqns
    primitive = types.SimpleNamespace(
        name=equation.primitive.name, bind=lambda *operands, **_: of_triton(*operands)
    )
    values = types.SimpleNamespace(
        primitive=primitive, params={}, invars=equation.invars, outvars=equation.outvars
    )
    literals = [atom.val for atom in equation.invars if isinstance(atom, Literal)]
    found = _of_elements(values, *literals, *operands)
    np.testing.assert_array_equal(found, fn(*operands))
    assert np.isnan(found).sum() == 3
