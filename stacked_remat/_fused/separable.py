"""Whether an optimizer updates each part of a model by what belongs to that part alone."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.tree_util as jtu
from jaxtyping import DTypeLike

from .._activity import active_variables
from .._messages import shortened
from .._static import PyTree


def check_separable(optimizer: Any, params: PyTree, owners: Sequence[int], dtype: DTypeLike | None) -> None:
    """Refuse an optimizer that updates one part by the gradient of another, or changes its state's types.

    Traces its update of all parts at once and follows the data, through the state to later steps too. Nothing
    is computed. `params` are types, and `owners` the part that each of them belongs to.
    """
    gradients = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype or leaf.dtype), params)
    state = jax.eval_shape(optimizer.init, params)
    trace = jax.make_jaxpr(optimizer.update, return_shape=True)
    closed, (updates, after) = trace(gradients, state, params)
    _check_types(state, after)
    jaxpr = closed.jaxpr
    count, states = len(owners), len(jax.tree.leaves(state))
    invars, outvars = list(jaxpr.invars), list(jaxpr.outvars)
    state_in, state_out = invars[count : count + states], outvars[-states:] if states else []
    paths = [jtu.keystr(path) for path, _ in jtu.tree_leaves_with_path(params)]
    if len(jax.tree.leaves(updates)) != count:
        return  # optax has the error message for it
    for owner in sorted(set(owners)):
        own = [i for i in range(count) if owners[i] == owner]
        reached = {invars[i] for i in own} | {invars[count + states + i] for i in own}
        while True:
            found = active_variables(jaxpr, reached, counts=lambda _: True)
            later = {before for before, after in zip(state_in, state_out, strict=True) if after in found}
            if later <= reached:
                break
            reached |= later
        coupled = [i for i in range(count) if owners[i] != owner and outvars[i] in found]
        if coupled:
            raise ValueError(
                f"The optimizer's update of {paths[coupled[0]]} depends on the gradient of {paths[own[0]]}, "
                "and a fused update has no two layers' gradients at once. Of the transformations of optax, "
                "clip_by_global_norm, apply_if_finite and MultiSteps do this. For clipping give fused_update "
                "max_grad_norm=...; leave the others out. Its arrays are "
                f"{shortened(paths, most=8)}."
            )


def _check_types(before: PyTree, after: PyTree) -> None:
    pairs = zip(jtu.tree_leaves_with_path(before), jtu.tree_leaves_with_path(after), strict=False)
    for (path, old), (new_path, new) in pairs:
        if path != new_path or (old.shape, old.dtype) != (new.shape, new.dtype):
            raise ValueError(
                f"The optimizer's state at {jtu.keystr(path)} is {old.dtype}{list(old.shape)} before an "
                f"update and {new.dtype}{list(new.shape)} after it, and a loop over layers keeps its types. "
                "Give the gradients the dtype of the state (gradient_dtype), or the optimizer a dtype for it."
            )
