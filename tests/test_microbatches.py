"""Tests of stacked_remat/_microbatches.py."""

import haliax as hax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from stacked_remat._microbatches import in_microbatches

Rows, Microbatches, Width = Axis("rows", 6), Axis("microbatches", 2), Axis("width", 3)


def test_every_microbatch_has_rows_of_the_whole_batch():
    """Rows next to each other go to several microbatches, in all arrays alike."""
    array = np.arange(18).reshape(6, 3)
    named = hax.named(jnp.asarray(array.T), (Width, Rows))
    batch = {"plain": array, "named": named, "other": hax.ones(Width)}
    divided = in_microbatches(batch, Rows, Microbatches)
    of_rows = divided["named"].rearrange((Microbatches, Rows.resize(3), Width)).array
    for number in range(2):
        np.testing.assert_array_equal(divided["plain"][number], array[number::2])
        np.testing.assert_array_equal(of_rows[number], array[number::2])
    assert divided["named"].axes[0] == Microbatches
    assert divided["other"].axes == (Width,)


def test_rows_that_do_not_divide():
    with pytest.raises(ValueError, match="of 6 examples has no 4 equal microbatches"):
        in_microbatches(jnp.ones(6), Rows, Axis("microbatches", 4))
