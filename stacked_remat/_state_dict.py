"""Converts layers to and from state dicts with keys like those of a torch `Sequential`: `prefix.0.key`."""

import collections
import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import equinox as eqx
import haliax.state_dict
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from haliax import Axis
from haliax.state_dict import StateDict, with_prefix
from jax.tree_util import KeyPath

from ._messages import entry_problems, shortened
from ._scan.marks import is_array, is_named, is_split, raw_array
from ._scan.stacking import stack_trees
from ._static import PyTree

M = TypeVar("M", bound=eqx.Module)


def layers_to_state_dict(layers: Sequence[eqx.Module], prefix: str | None) -> StateDict:
    """The arrays of all layers, each under its index."""
    state_dict: StateDict = {}
    for index, layer in enumerate(layers):
        arrays = _with_lists(eqx.filter(layer, is_array))
        state_dict.update(haliax.state_dict.to_state_dict(arrays, with_prefix(prefix, str(index))))
    return state_dict


def layers_from_state_dict(templates: Sequence[M], state_dict: StateDict, prefix: str | None) -> list[M]:
    """The layers, like the templates, with their arrays read from `state_dict`."""
    keys = _check_layers(templates, state_dict, prefix)
    # Haliax can't read NumPy's arrays into named ones where there are several devices.
    found: Any = collections.ChainMap({key: jnp.asarray(state_dict[key]) for key in keys}, state_dict)
    layers = []
    for index, template in enumerate(templates):
        arrays, rest = eqx.partition(template, is_array)
        filled = haliax.state_dict.from_state_dict(
            _with_lists(arrays), found, with_prefix(prefix, str(index))
        )
        filled = jtu.tree_unflatten(jtu.tree_structure(arrays), jtu.tree_leaves(filled))
        layers.append(eqx.combine(filled, rest))
    return layers


def stack_as(stacked: M, layers: Sequence[M], axis: Axis) -> M:
    """The layers as one stacked tree; arrays that all layers share in `stacked` are shared again."""

    def choose(path: KeyPath, old: PyTree, new: PyTree, *of_layers: Any) -> PyTree:
        if is_split(old, axis) or not (is_named(old) or is_array(old)):
            return new
        arrays = [raw_array(leaf) for leaf in of_layers]
        for index, array in enumerate(arrays):
            if not np.array_equal(array, arrays[0]):
                raise ValueError(
                    f"All layers of the stack share {jtu.keystr(path)[1:]}, but in the state dict layer "
                    f"{index} differs from layer 0. Give the array the axis `{axis.name}` in the stack."
                )
        return of_layers[0]

    return jtu.tree_map_with_path(choose, stacked, stack_trees(layers, axis), *layers, is_leaf=is_named)


def _check_layers(
    templates: Sequence[eqx.Module], state_dict: StateDict, prefix: str | None
) -> Iterable[str]:
    """Refuse a state dict that does not fit; returns the keys of all layers."""
    problems, expected = [], dict[str, tuple[int, ...]]()
    for index, template in enumerate(templates):
        layer_prefix = with_prefix(prefix, str(index))
        shapes = _shapes(template, layer_prefix)
        if shapes and not any(key in state_dict for key in shapes):
            problems.append(f"missing: layer {index} (no key starts with {layer_prefix!r})")
        else:
            expected |= shapes
    found = {key: np.shape(state_dict[key]) for key in expected if key in state_dict}
    problems += entry_problems(expected, found)
    if problems and not expected and state_dict:
        raise ValueError(
            f"No key of the state dict starts with {with_prefix(prefix, '0')!r}; one is "
            f"{next(iter(state_dict))!r}. Give the prefix that it was written with."
        )
    count = len(templates)
    too_many = sorted({index for index in _layer_indices(state_dict, prefix) if index >= count})
    problems += [f"unknown: layer {index} (the stack has {count} layers)" for index in too_many]
    if problems:
        raise ValueError(
            f"The state dict does not fit the stack at prefix {prefix!r}:\n  "
            + shortened(problems, "\n  ", most=8)
        )
    return expected


def _shapes(template: eqx.Module, prefix: str | None) -> dict[str, tuple[int, ...]]:
    def to_arrays(arrays: PyTree) -> StateDict:
        return haliax.state_dict.to_state_dict(arrays, prefix)

    shapes = eqx.filter_eval_shape(to_arrays, _with_lists(eqx.filter(template, is_array)))
    return {key: tuple(value.shape) for key, value in shapes.items()}


def _with_lists(tree: PyTree) -> PyTree:
    """The tree with tuples made lists: Haliax's state dicts support lists only."""

    def to_list(node: PyTree) -> PyTree:
        return [_with_lists(child) for child in node] if isinstance(node, tuple) else node

    return jtu.tree_map(to_list, tree, is_leaf=lambda node: isinstance(node, tuple))


def _layer_indices(state_dict: StateDict, prefix: str | None) -> list[int]:
    pattern = re.compile(re.escape(f"{prefix}." if prefix is not None else "") + r"(\d+)\.")
    return [int(match.group(1)) for key in state_dict if (match := pattern.match(key))]
