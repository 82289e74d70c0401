"""What to do about an operation after which examples, or layers, are not apart, for errors."""


def fix_of(mixed: str) -> str:
    """What to do where an operation mixes examples, changes their order, or can't be followed.

    Args:
        mixed: the operation, as `_rows.where` writes it.
    """
    return _fix(mixed, _OF_EXAMPLES) or (
        "Return losses in the order of the batch that each depend on one example, or return what examples "
        "share apart, with coupled=True."
    )


def fix_of_layers(mixed: str) -> str:
    """What to do where an operation combines the layers of a stack or changes their order."""
    return _fix(mixed, _OF_LAYERS) or "Change weights layer by layer."


def _fix(mixed: str, fixes: dict[str, str]) -> str:
    if mixed.startswith("the derivative rule"):
        name = "custom_vjp_call"
    else:
        name = mixed.partition("`")[2].partition("`")[0]
    return next((fix for names, fix in fixes.items() if _matches(name, names)), "")


def _matches(name: str, names: str) -> bool:
    own = names.split()
    return name in own or any(one.endswith("*") and name.startswith(one[:-1]) for one in own)


_SHARED = (
    "an array of the batch that all examples share, whose first dimension has their number by chance, is "
    "marked stacked_remat.shared(array)."
)

_OF_EXAMPLES = {
    "gather": (
        "A read by index is followed where the index of the examples is an arange of their number, "
        "x[jnp.arange(len(x)), y]; or use jnp.take_along_axis(x, y[:, None], 1), or a product with "
        "jax.nn.one_hot(y, size)."
    ),
    "scatter*": (
        "An update by index is followed where the index of the examples is an arange of their number, "
        "x.at[jnp.arange(len(x)), y].add(...); or use a sum with values * jax.nn.one_hot(y, size)."
    ),
    "sort top_k": "Return the losses in the order of the batch, and sort or rank them after grad_dot.",
    "rev": "Return the losses in the order of the batch, and reverse data before, in the batch.",
    "slice dynamic_* concatenate pad split unstack": (
        "Taking some of the examples, or moving them (jnp.roll), mixes them: shift or choose data before, in "
        "the batch, and give what an example is compared with as an array of its own. Concatenated batches "
        "are split into the same parts again."
    ),
    "dot_general": (
        "A product of examples with each other, as in contrastive losses, mixes them: give what an example "
        f"is compared with as an array of its own; {_SHARED}"
    ),
    "ragged_dot*": "For rows that are sorted by expert use stacked_remat.ops.grouped_experts.",
    "reduce_* arg* cum*": (
        "Normalise within an example (layer, group or RMS norm, not batch norm), use stored statistics, or "
        "put jax.lax.stop_gradient around statistics of the batch, which then count as constants; return a "
        "penalty of the batch apart, with coupled=True."
    ),
    "reshape transpose": (
        "Keep the axis of examples the first or apart: the same factors are merged and split in one order. "
        "Losses with time first are returned transposed, [batch, time]."
    ),
    "scan while": (
        "A loop over the axis of examples hands on what depends on those before: call the loss on the whole "
        "batch, or use jax.vmap. Where the loop is over time, that is not the first axis of the losses: "
        "return them as [batch, time]."
    ),
    "custom_vjp_call custom_jvp_call": (
        "A derivative rule is followed where it keeps examples apart and is linear in the cotangent: clip "
        "gradients, or add noise or decay to them, after grad_dot."
    ),
    "add sub mul div max min pow atan2 eq ne lt le gt ge select_n": (
        "Rows of two examples meet, as where [batch] and [batch, 1] become [batch, batch]: give both the "
        f"same shape; {_SHARED}"
    ),
}
"""By the names of primitives, where a `*` is for any ending."""

_OF_LAYERS = {
    "rev": (
        "To go through layers from the last to the first, use reverse=True of fold, scan or jax.lax.scan, "
        "and do not flip the weights."
    ),
    "gather dynamic_* slice concatenate": (
        "To take layers in another order, or some twice, take them one by one with numbers that are known "
        "before, `for at in order: x = stack[at](x)`, in place of rolling, permuting, repeating, or an index "
        "that is computed."
    ),
    "reduce_*": (
        "Leave a penalty on all weights out of per_example_loss (its gradient is the same for all examples), "
        "and take norms and means layer by layer."
    ),
}
"""The same of layers."""
