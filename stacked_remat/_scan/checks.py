"""Checks of a scan: its axis and options, carries that change, outputs that cannot be stacked."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from haliax import Axis
from jax.core import Tracer

from .._activity import CALLS, CHECKPOINTS, program_of
from .._messages import axes_text
from .._policy import ALIASES
from .._schedule import whole_number
from .._static import PyTree
from .marks import is_array, is_named, raw_array


def layers_axis(axis: Any, what: str = "A stack") -> Axis:
    """The axis of layers; a number is an axis of this size with the name `layers`."""
    size = axis.size if isinstance(axis, Axis) else axis
    if isinstance(size, Tracer):
        raise TypeError(
            f"{what}: the number of layers is traced, and must be known where the program is compiled. Pass "
            "it to jax.jit as a static argument, or let the axis be as long as it can get."
        )
    if isinstance(axis, Axis):
        return axis
    if isinstance(axis, bool | np.bool_) or not isinstance(axis, int | np.integer):
        if isinstance(axis, str) and axis in ALIASES:
            raise TypeError(
                f"{what} takes the axis of the layers here; got the policy {axis!r}. Write remat={axis!r}."
            )
        takes = f"{what} takes the axis of the layers or their number"
        if isinstance(axis, eqx.Module):
            fix = "Give the layers in a list." if what.endswith(".of") else "The axis is its Layers."
            raise TypeError(f"{takes}; got {describe(axis)}. {fix}")
        name = repr(axis) if isinstance(axis, str) else "'layers'"
        raise TypeError(f"{takes}; got {axis!r} ({type(axis).__name__}). Write hax.Axis({name}, size).")
    if axis < 0:
        raise ValueError(f"{what} takes the number of layers; got {axis}.")
    return Axis("layers", int(axis))


def axis_or_name(axis: Any, what: str) -> Axis | str:
    """An axis, as `layers_axis`, or the name of one."""
    return axis if isinstance(axis, str) and axis not in ALIASES else layers_axis(axis, what)


def check_unroll(unroll: int | bool) -> int | bool:
    """The number of layers that one iteration of the loop runs; `True` for all."""
    if isinstance(unroll, bool):
        return unroll or 1
    return whole_number("unroll", unroll, "a bool or a number of layers")


def check_reverse(reverse: bool) -> bool:
    """Whether a scan goes from the last layer to the first."""
    if not isinstance(reverse, bool | np.bool_):
        raise TypeError(f"reverse is True or False; got {reverse!r}.")
    return bool(reverse)


def check_carry(before: PyTree, after: PyTree, what: str = "carry", *, of_pair: bool = False) -> None:
    """Refuse a loop state that changes; with `of_pair` the function returned it in a pair, with an output."""
    old, old_tree = jtu.tree_flatten_with_path(before, is_leaf=is_named)
    new, new_tree = jtu.tree_flatten_with_path(after, is_leaf=is_named)
    if old_tree != new_tree:
        fix = "Keep its structure."
        if of_pair:
            fix = "The pair that is returned is (carry, output), in this order."
        elif what == "carry" and isinstance(after, tuple) and len(after) == 2 and type(before) is not list:
            fix = "For a function that returns (carry, output) use scan."
        elif what == "layer" and isinstance(after, tuple):
            fix = 'Unpack it: visit.vjp returns a tuple, (layer_ct,) = visit.vjp("layer").'
        elif before is None and what in _FIRST_STATES:
            fix = _FIRST_STATES[what]
        raise ValueError(f"{_structural_change(what, before, after)}. {fix}")
    for (path, a), (_, b) in zip(old, new, strict=True):
        where = f"The {what}{jtu.keystr(path)}"
        is_array_like = eqx.is_array_like(raw_array(a))
        is_alike = is_named(a) == is_named(b) and is_array_like == eqx.is_array_like(raw_array(b))
        if is_alike and is_named(a):
            is_alike = a.axes == b.axes
        elif is_alike and is_array_like:
            is_alike = jnp.shape(a) == jnp.shape(b)
        if not is_alike:
            is_order = is_named(a) and is_named(b) and set(a.axes) == set(b.axes)
            fix = f"Rearrange it: {what}.rearrange(x.axes)." if is_order else "Keep its axes and shape."
            raise ValueError(f"{where} goes in as {describe(a)} and comes out as {describe(b)}. {fix}")
        if is_array_like:
            _check_dtype(f"{what}{jtu.keystr(path)}", raw_array(a), raw_array(b))
        elif not is_named(a) and a != b:
            raise ValueError(
                f"{where} is not an array, so it must stay as it is; {a!r} goes in and {b!r} comes out."
            )


_FIRST_STATES = {
    "state": "Pass the first one: sweep_back(cotangent, visitor, state=jnp.zeros(())).",
    "layer_state": "Pass the first of all layers, stacked: layer_state=jnp.zeros(Layers.size).",
}


def _structural_change(what: str, before: PyTree, after: PyTree) -> str:
    path, old, new = structural_difference(before, after) or ("", before, after)
    where, keys = what + path, [children(node).keys() for node in (old, new)]
    change = f"{describe(old)} goes in, {describe(new)} comes out"
    if type(old) is type(new) and not isinstance(old, tuple | list) and keys[0] != keys[1]:
        gone = [f"{where}{key} goes in and does not come out" for key in keys[0] - keys[1]]
        come = [f"{where}{key} comes out and did not go in" for key in keys[1] - keys[0]]
        change = ", ".join(sorted(gone) + sorted(come))
    return f"The {where} changes structure: {change}"


def structural_difference(a: Any, b: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """The path at which two trees have other nodes or static fields, and what is there."""
    if jtu.tree_structure(a, is_leaf=is_named) == jtu.tree_structure(b, is_leaf=is_named):
        return None
    entries = [children(a), children(b)]
    if type(a) is not type(b) or entries[0].keys() != entries[1].keys():
        return path, a, b
    for key, node in entries[0].items():
        if found := structural_difference(node, entries[1][key], path + key):
            return found
    for field in dataclasses.fields(a) if dataclasses.is_dataclass(a) else ():
        values = getattr(a, field.name, None), getattr(b, field.name, None)
        if field.metadata.get("static") and values[0] != values[1]:
            return f"{path}.{field.name}", *values
    return path, a, b


def children(tree: PyTree) -> dict[str, PyTree]:
    """The entries of a node by key, written as in a path."""
    paths_and_nodes = jtu.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)[0]
    return {jtu.keystr(path): node for path, node in paths_and_nodes}


def _check_dtype(where: str, before: PyTree, after: PyTree) -> None:
    old, new = jax.typeof(before), jax.typeof(after)
    if old.weak_type or old.dtype == new.dtype:  # a Python number takes the dtype that it meets
        return
    raise ValueError(
        f"The {where} goes in as {old.dtype} and comes out as {new.dtype}. Cast the result, "
        f"y.astype({where}.dtype), or the initial {where}."
    )


def check_offloaded(carry: Sequence[PyTree], jaxpr: Any, names: Sequence[str]) -> None:
    """Refuse to offload the carry that a layer returns: it is kept as the next layer's input, not moved."""
    found = {_name_of_output(jaxpr, output) for output in carry}
    if name := next((name for name in names if name in found), None):
        raise ValueError(
            f"offload_block_internals={list(names)}: {name!r} is the carry that a layer returns, which is "
            "kept as the next layer's input and not as an internal, so nothing would be moved. Write "
            'save_carries="offload" for the carries, or name a value that the layer computes from.'
        )


def _name_of_output(jaxpr: Any, output: Any) -> str | None:
    """The checkpoint name of an output that nothing else in the jaxpr reads."""
    if any(output is read for equation in jaxpr.eqns for read in equation.invars):
        return None
    for equation in jaxpr.eqns:
        places = [i for i, var in enumerate(equation.outvars) if var is output]
        named = equation.params.get("_prim")  # with JAX_REMAT3=1
        if places and (equation.primitive.name == "name" or type(named).__name__ == "CheckpointName"):
            return getattr(named, "params", equation.params)["name"]
        if places and equation.primitive.name in (*CALLS, *CHECKPOINTS, "custom_jvp_call", "custom_vjp_call"):
            inner = program_of(equation)
            inner = getattr(inner, "jaxpr", inner)
            return _name_of_output(inner, inner.outvars[places[0]])
    return None


def describe(x: PyTree) -> str:
    """A value in an error message: its kind and shape."""
    if x is None:
        return "None"
    if is_named(x):
        return f"NamedArray axes ({axes_text(x.axes)}){', without its array' if x.array is None else ''}"
    if is_array(x):
        return f"{x.dtype}[{','.join(str(size) for size in x.shape)}]"
    if isinstance(x, tuple | list):
        parts = ", ".join(describe(part) for part in x[:4]) + (", …" if len(x) > 4 else "")
        return f"a {type(x).__name__} of {len(x)} ({parts})"
    return f"a value of type {type(x).__name__}"
