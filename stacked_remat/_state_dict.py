"""Converts layers to and from state dicts with keys like those of a torch `Sequential`:
`prefix.0.key`.

A state dict has the arrays of each layer apart, whether the layers are stacked or not,
so stacks of any depth read the files of models that are written as lists of layers.
Haliax's state dicts convert one layer; `layers_to_state_dict` and
`layers_from_state_dict` call them with a list of layers, and `stack_as` stacks what was
read. The methods of stacks are in `_block_foldable.py` and `_stacked.py`.
"""

import collections
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import equinox as eqx
import haliax.state_dict
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from haliax import Axis
from haliax.state_dict import StateDict
from jax.tree_util import KeyPath

from ._messages import entry_problems, shortened
from ._scan.checks import text
from ._scan.marks import is_array, is_named, is_split, raw_array
from ._scan.stacking import stack_trees
from ._static import PyTree, with_leaves

M = TypeVar("M", bound=eqx.Module)


def layers_to_state_dict(layers: Iterable[eqx.Module], prefix: str | None) -> StateDict:
    """The arrays of all layers, each under its index."""
    return haliax.state_dict.to_state_dict(
        _with_lists(eqx.filter([*layers], is_array)), prefix
    )


def layers_from_state_dict(
    templates: Sequence[M], state_dict: StateDict, prefix: str | None
) -> list[M]:
    """The layers, like the templates, with their arrays read from `state_dict`.

    They have the dtype of the state dict.

    Raises:
        ValueError: names every entry that is missing or of another shape, and those of
            further layers.
        TypeError: the state dict is no mapping.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            "from_state_dict takes a state dict and then the prefix of its keys; got"
            f" {text(state_dict)} first."
        )
    shapes = eqx.filter_eval_shape(layers_to_state_dict, templates, prefix)
    expected = {key: tuple(value.shape) for key, value in shapes.items()}
    _check_entries(expected, len(templates), state_dict, prefix)
    for key in expected:
        _check_dtype(key, state_dict[key])
    # Haliax can't read NumPy's arrays into named ones where there are several devices.
    of_layers = {key: jnp.asarray(state_dict[key]) for key in expected}
    entries: Any = collections.ChainMap(of_layers, state_dict)
    # Only arrays are in a state dict; what else a layer has is the template's
    arrays, rest = eqx.partition([*templates], is_array)
    filled = haliax.state_dict.from_state_dict(_with_lists(arrays), entries, prefix)
    # With the tuples that were made lists
    leaves = jtu.tree_leaves(filled)
    return eqx.combine(with_leaves(arrays, leaves), rest)


def stack_as(stacked: M, layers: Sequence[M], axis: Axis) -> M:
    """The layers as one stacked tree; arrays that all layers share in `stacked` are
    shared again.
    """

    def choose(path: KeyPath, old: PyTree, new: PyTree, *of_layers: Any) -> PyTree:
        if is_split(old, axis) or not (is_named(old) or is_array(old)):
            return new
        # A shared array is written once for each layer, and must be the same in all
        first = raw_array(of_layers[0])
        for index, leaf in enumerate(of_layers):
            if not np.array_equal(raw_array(leaf), first):
                raise ValueError(
                    f"All layers of the stack share {jtu.keystr(path)[1:]}, but in the"
                    f" state dict layer {index} differs from layer 0. Give the array"
                    f" the axis `{axis.name}` in the stack."
                )
        return of_layers[0]

    return jtu.tree_map_with_path(
        choose, stacked, stack_trees(layers, axis), *layers, is_leaf=is_named
    )


def _check_entries(
    expected: Mapping[str, tuple[int, ...]],
    count: int,
    state_dict: StateDict,
    prefix: str | None,
) -> None:
    """Refuse a state dict that does not fit so many layers."""
    # The state dict may hold a whole model: entries that are not of these layers, nor
    # of further ones under their prefix, are not theirs to refuse.
    start = "" if prefix is None else re.escape(f"{prefix}.")
    pattern = re.compile(start + r"(\d+)\.")

    def is_of_layers(key: str) -> bool:
        if key in expected:
            return True
        number = pattern.match(key)
        return number is not None and int(number[1]) >= count

    shapes = {}
    for key in filter(is_of_layers, state_dict):
        shapes[key] = np.shape(state_dict[key])
    # Most often the prefix is wrong, and a list of all entries would hide that
    if expected and state_dict and not shapes:
        raise ValueError(
            "The state dict has no array of these layers, such as"
            f" {next(iter(expected))!r}; one that it has is"
            f" {next(iter(state_dict))!r}. Give the prefix that it was written with, to"
            " layers of the same kinds."
        )
    # Others of these layers may have other names for what is missing.
    if any(key not in state_dict for key in expected):
        for key in state_dict:
            if pattern.match(key):
                shapes[key] = np.shape(state_dict[key])
    if problems := entry_problems(expected, shapes):
        raise ValueError(
            f"The state dict does not fit the stack of {count} layers at prefix"
            f" {prefix!r}:\n  " + shortened(problems, "\n  ", most=8)
        )


def _check_dtype(key: str, value: Any) -> None:
    """Refuse an array of bytes without a type, as NumPy reads bfloat16 from a file."""
    dtype = getattr(value, "dtype", None)
    if getattr(dtype, "type", None) in (np.void, np.object_):
        raise TypeError(
            f"{key!r} of the state dict is of the dtype {dtype}, as NumPy reads"
            " bfloat16 from its files. Write value.view(jnp.bfloat16) for such values,"
            " or save them as float32, or in safetensors."
        )


def _with_lists(tree: PyTree) -> PyTree:
    """The tree with tuples made lists: Haliax's state dicts support lists only."""

    def to_list(node: PyTree) -> PyTree:
        if isinstance(node, tuple):
            return [*map(_with_lists, node)]
        return node

    return jtu.tree_map(to_list, tree, is_leaf=lambda node: isinstance(node, tuple))
