"""What a visitor returned for a layer: checked, and written to the stacks of layers.

`sweep_back.py` calls `checked_result` with the trees of a `LayerResult`; the lists of
arrays that it makes of them are `Returned`. `cotangent_leaves` does the same for a
cotangent alone, the one that a user gives to a reverse sweep too. Errors name the path.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._activity import is_differentiable
from .._static import PyTree
from .._sweep.kinds import Kind
from .._sweep.slots import Arrays, Mask
from .._sweep.store import Index, axes_beyond, varying_as, write
from .checks import check_carry, describe
from .layer_axis import Leaf, TreeLayout
from .marks import is_array, is_named, raw_array
from .visitor import LayerResult, LayerVisit, SweepTypes


class Returned(NamedTuple):
    """What a visitor returns for one layer, or, stacked, for the layers of a kind.

    An entry is None for what the visitor leaves as it is: no stack is carried for it.
    """

    # The arrays of the layers and, as None, of their split arguments, in the order of
    # the sweep's stacks
    layers: list[PyTree]
    # The split arrays of the layers' state
    layer_state: list[PyTree]
    # The cotangents of split arguments, in the order of the sweep's stacks
    split_ct: list[PyTree]
    # Those of what the layers share, summed over the layers
    shared_ct: list[PyTree]

    def with_layer(self, row: Index, new: "Returned") -> "Returned":
        """The stacks with what is new of the layer at a row, and the sums with its
        cotangents.
        """

        def written(stack: Any, entry: Any) -> PyTree:
            return stack if entry is None else write(stack, row, entry)

        def added(total: Any, ct: Any) -> PyTree:
            return total if ct is None else total + ct

        sums = jax.tree.map(added, self.shared_ct, new.shared_ct, is_leaf=is_none)
        layers, layer_state, split_ct = jax.tree.map(
            written, self[:3], new[:3], is_leaf=is_none
        )
        return Returned(layers, layer_state, split_ct, sums)


def is_none(node: Any) -> bool:
    return node is None


def checked_result(
    types: SweepTypes,
    kind: Kind,
    visit: LayerVisit,
    state: PyTree,
    state_layout: TreeLayout,
    result: Any,
) -> tuple[Arrays, Returned, PyTree]:
    """The cotangent of a layer's input, and what a visitor returned for the layer and
    as its state.

    `state` is the visitor's before, and `state_layout` that of the layers' state.
    """
    if not isinstance(result, LayerResult):
        raise TypeError(
            f"A visitor returns a LayerResult; got {describe(result)}. Its first field"
            " is the cotangent of the layer's input: return"
            " LayerResult(visit.vjp().carry)."
        )
    carry, _ = types.outputs
    perturbed = types.perturbed
    carry_ct = cotangent_leaves(
        result.carry, carry, perturbed.carry, "the carry", _BY_VISITOR
    )
    layout = types.layouts[kind.number]
    # Paths into the arguments begin with their group and place, here those of the layer
    layer = _new_entries(result.layer, visit.layer, "layer", layout.leaves, root=2)
    layer_state = _new_entries(
        result.layer_state, visit.layer_state, "layer_state", state_layout.leaves
    )
    new_state = eqx.filter(_filled(result.state, state, "state"), eqx.is_array_like)
    args, kwargs = _argument_cotangents(visit, result)
    # The cotangents in the order of all arguments, of which the layer comes first
    no_layer = eqx.filter(visit.layer, False)  # its structure, with None for all
    of_split, of_shared = layout.arrays(((no_layer, *args), kwargs))
    # Nothing is returned for split arguments, nor for what layers close over
    closed_over = len(perturbed.shared[kind.number]) - len(of_shared)
    returned = Returned(
        layer + [None] * (len(of_split) - len(layer)),
        layer_state,
        of_split,
        [None] * closed_over + of_shared,
    )
    return carry_ct, returned, jax.tree.map(jnp.asarray, new_state)


_BY_VISITOR = "returned by the visitor"


def _new_entries(
    new: PyTree, before: PyTree, what: str, leaves: Iterable[Leaf], root: int = 0
) -> list[PyTree]:
    """A tree's new entries of what is split, None where they stay; refuses changes of
    what is not.

    `leaves` are those of the tree, and maybe others after them. Errors name their paths
    from the entry `root` on.
    """
    filled = jtu.tree_leaves(_filled(new, before, what), is_leaf=is_named)
    old_leaves = jtu.tree_leaves(before, is_leaf=is_named)
    parts = []
    for leaf, changed, old in zip(leaves, filled, old_leaves, strict=False):
        # What `eqx.combine` took from the old tree is the same object: it is unchanged
        changed = raw_array(changed)
        old = raw_array(old)
        is_shared = leaf.role == "shared"
        if leaf.role == "split":
            if what == "layer":
                _check_same_on_devices(
                    f"layer{jtu.keystr(leaf.path[root:])}", changed, old
                )
            parts.append(None if changed is old else changed)
        elif changed is not old and (is_shared or is_array(changed) or changed != old):
            of_all = (
                "is shared by all layers"
                if is_shared
                else f"is {old!r}, the same for all layers"
            )
            raise ValueError(
                f"The {what}{jtu.keystr(leaf.path[root:])} {of_all}, so a visitor"
                " cannot replace it at one. Return it unchanged, or None for it"
                " (eqx.filter), and keep what is summed over the layers in the"
                " visitor's state."
            )
    return parts


def _check_same_on_devices(where: str, new: Any, old: Any) -> None:
    """Refuse an array of a layer that varies over axes of a `jax.shard_map` over which
    those of the stack, which the sweep still reads, do not.
    """
    axes = axes_beyond(new, jax.typeof(old))
    if axes:
        raise ValueError(
            f"The {where} that the visitor returned differs over {sorted(axes)}, over"
            " which the layers are the same in this jax.shard_map. Sum what it depends"
            " on over them (jax.lax.psum), or divide the layers over them."
        )


def _argument_cotangents(
    visit: LayerVisit, result: LayerResult
) -> tuple[list[PyTree], dict[str, PyTree]]:
    # None for all, or keywords that are left out, are zeros that cost nothing
    args = (None,) * len(visit.args) if result.args is None else result.args
    kwargs = {**dict.fromkeys(visit.kwargs), **(result.kwargs or {})}
    if (
        not isinstance(args, tuple | list)
        or len(args) != len(visit.args)
        or len(kwargs) > len(visit.kwargs)
    ):
        raise TypeError(
            f"args of a LayerResult is a tuple of {len(visit.args)} cotangents, one for"
            " each further argument (None for one without), and kwargs a dict with"
            f" keys among {sorted(visit.kwargs)}; got {describe(args)}, and the keys"
            f" {sorted(kwargs)}."
        )
    of_args = []
    of_kwargs = {}
    arrays = eqx.filter((visit.args, visit.kwargs), is_array)
    for i, like in enumerate(arrays[0]):
        of_args.append(_checked_tree(args[i], like, f"args[{i}]"))
    for name, like in arrays[1].items():
        of_kwargs[name] = _checked_tree(kwargs[name], like, f"kwargs[{name!r}]")
    return of_args, of_kwargs


def _checked_tree(cotangent: PyTree, like: PyTree, what: str) -> PyTree:
    leaves, structure = _checked_leaves(cotangent, like, what, _BY_VISITOR)
    return jtu.tree_unflatten(structure, leaves)


def _filled(new: PyTree, before: PyTree, what: str) -> PyTree:
    """What a visitor returned, with the old leaves where it is None."""
    try:
        filled = eqx.combine(new, before)
    except ValueError:
        # Another structure, which the check names
        filled = new
    check_carry(before, filled, what)
    return filled


def cotangent_leaves(
    cotangent: PyTree, like: PyTree, mask: Mask, what: str, source: str
) -> Arrays:
    """The leaves of a cotangent that are in the mask, zeros for missing ones; checked
    as below.
    """
    types = map(raw_array, jtu.tree_leaves(like, is_leaf=is_named))
    checked, _ = _checked_leaves(cotangent, like, what, source)
    leaves = []
    for leaf, type_, is_perturbed in zip(checked, types, mask, strict=True):
        # A sweep takes no cotangents of leaves that depend on nothing differentiated
        if is_perturbed:
            zeros = leaf is None
            leaf = jnp.zeros(type_.shape, type_.dtype) if zeros else leaf
            leaves.append(varying_as(leaf, jax.typeof(type_)))
    return leaves


def _checked_leaves(
    cotangent: PyTree, like: PyTree, what: str, source: str
) -> tuple[list[PyTree], Any]:
    """The raw arrays of a cotangent of `like`, None for missing ones, and the structure
    of which these are the leaves.

    `what` says in errors what it is the cotangent of, and `source` where it is from.
    """
    paths_and_types, structure = jtu.tree_flatten_with_path(like, is_leaf=is_named)
    try:
        leaves = (
            [None] * len(paths_and_types)
            if cotangent is None
            else structure.flatten_up_to(cotangent)
        )
    except ValueError as error:
        raise ValueError(
            f"The cotangent of {what} {source} has another structure than {what}:"
            f" {error}"
        ) from None
    checked = []
    for (path, type_), leaf in zip(paths_and_types, leaves, strict=True):
        where = f"{what}{jtu.keystr(path)}"
        checked.append(_checked_leaf(where, type_, leaf, source))
    return checked, structure


def _checked_leaf(where: str, type_: Any, leaf: Any, source: str) -> Any:
    array = raw_array(leaf)
    expected = raw_array(type_)
    # Integers and keys have no cotangent; JAX gives zeros of dtype float0 as theirs.
    if array is None or not is_differentiable(expected.dtype):
        return None
    if not eqx.is_array_like(array):
        problem = f"The cotangent of {where} {source} is {describe(leaf)}"
        raise TypeError(f"{problem}. Give an array, or None for zeros.")
    array = jnp.asarray(array)
    same_axes = getattr(leaf, "axes", None) == getattr(type_, "axes", None)
    # With the same axes the error is about the arrays: their shapes or dtypes
    pair = (array, expected) if same_axes else (leaf, type_)
    actual, wanted = map(describe, pair)
    if actual != wanted:
        raise ValueError(
            f"The cotangent of {where} {source} is {actual}, and {where} is"
            f" {wanted}. Give it the same axes in the same order, and the same"
            " shape and dtype."
        )
    return array
