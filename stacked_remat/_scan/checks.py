"""Checks of a scan: its axis and options, carries that change, outputs that cannot be
stacked.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from haliax import Axis
from jax.core import Tracer

from .._messages import axes_text, shortened, shown
from .._policy import ALIASES
from .._static import PyTree
from .marks import is_array, is_named, raw_array


def layers_axis(axis: Any, what: str = "A stack") -> Axis:
    """The axis of layers; a number is an axis of this size with the name `layers`."""
    size = axis.size if isinstance(axis, Axis) else axis
    if isinstance(size, Tracer):
        raise TypeError(
            f"{what}: the number of layers is traced, and must be known where the"
            " program is compiled. Pass it to jax.jit as a static argument, or let the"
            " axis be as long as it can get."
        )
    if isinstance(axis, Axis):
        return axis
    if isinstance(axis, int | np.integer) and not isinstance(axis, bool) and axis >= 0:
        return Axis("layers", int(axis))
    fix = (
        f"Write hax.Axis({repr(axis) if isinstance(axis, str) else repr('layers')},"
        " size)."
    )
    if isinstance(axis, str) and axis in ALIASES:
        fix = f"Write remat={axis!r}."
    elif isinstance(axis, eqx.Module) and what.endswith(".of"):
        fix = "Give the layers in a list."
    raise TypeError(
        f"{what} takes the axis of the layers or their number; got {text(axis)}. {fix}"
    )


def axis_or_name(axis: Any, what: str) -> Axis | str:
    """An axis, as `layers_axis`, or the name of one."""
    return (
        axis
        if isinstance(axis, str) and axis not in ALIASES
        else layers_axis(axis, what)
    )


def check_carry(
    before: PyTree, after: PyTree, what: str = "carry", *, of_pair: bool = False
) -> None:
    """Refuse a loop state that changes; with `of_pair` the function returned it in a
    pair, with an output.
    """

    def stays(a: Any, b: Any) -> bool:
        if form(a) != form(b) or not eqx.is_array_like(raw_array(a)):
            return form(a) == form(b)
        old, new = jax.typeof(raw_array(a)), jax.typeof(raw_array(b))
        # A Python number takes the dtype that it meets
        return old.weak_type or old.dtype == new.dtype

    if found := difference(before, after, stays):
        path, old, new = found
        where, are_arrays = (
            what + path,
            all(eqx.is_array_like(raw_array(node)) for node in (old, new)),
        )
        fix = "Keep its axes and shape." if are_arrays else "Keep it as it is."
        if are_arrays and form(old) == form(new):
            fix = f"Cast the result, y.astype({where}.dtype), or the initial {where}."
        elif is_named(old) and is_named(new) and {*old.axes} == {*new.axes}:
            fix = f"Rearrange it: {what}.rearrange(x.axes)."
        elif (
            isinstance(old, tuple | list)
            and isinstance(new, tuple | list)
            and len(old) == len(new)
        ):
            fix = f"Return a {type(old).__name__}, as the carry is."
        elif of_pair and not are_arrays:
            fix = "The pair that is returned is (carry, output), in this order."
        elif what == "carry" and not path and isinstance(new, tuple) and len(new) == 2:
            fix = "For a function that returns (carry, output) use scan."
        elif before is None and what.endswith("state"):
            fix = f"Pass the first {what} to sweep_back."
        raise ValueError(
            f"The {where} goes in as {text(old)} and comes out as {text(new)}. {fix}"
        )


def form(leaf: Any) -> Any:
    """What a leaf keeps from layer to layer: its axes or shape, or what is no array
    itself.
    """
    if is_named(leaf):
        return leaf.axes, eqx.is_array_like(leaf.array)
    return jnp.shape(leaf) if eqx.is_array_like(leaf) else leaf


def difference(
    a: Any, b: Any, are_alike: Callable[[Any, Any], bool], path: str = ""
) -> tuple[str, Any, Any] | None:
    """Where two trees first have other nodes, static fields or leaves, and what is
    there.
    """
    if jtu.all_leaves([a, b], is_leaf=is_named):
        return None if are_alike(a, b) else (path, a, b)
    (old, tree), (new, other) = (
        jtu.tree_flatten_with_path(x, is_leaf=lambda node, x=x: node is not x)
        for x in (a, b)
    )
    if tree == other:  # of these nodes alone
        pairs = zip(old, new, strict=True)
        unlike = (
            difference(x, y, are_alike, path + jtu.keystr(at))
            for (at, x), (_, y) in pairs
        )
        return next(filter(None, unlike), None)
    for field in (
        dataclasses.fields(a)
        if type(a) is type(b) and dataclasses.is_dataclass(a)
        else ()
    ):
        values = getattr(a, field.name, None), getattr(b, field.name, None)
        if field.metadata.get("static") and values[0] != values[1]:
            return f"{path}.{field.name}", *values
    return path, a, b


def describe(x: PyTree) -> str:
    """A value in an error message: its kind and shape."""
    if x is None:
        return "None"
    if is_named(x):
        return (
            f"NamedArray axes ({axes_text(x.axes)}) of"
            f" {getattr(x.array, 'dtype', 'no array')}"
        )
    if is_array(x):
        return f"{x.dtype}[{','.join(str(size) for size in x.shape)}]"
    if isinstance(x, dict):
        return f"a dict with {shortened([*map(repr, x)], most=4)}"
    if isinstance(x, tuple | list):
        parts = ", ".join(describe(part) for part in x[:4]) + (
            ", …" if len(x) > 4 else ""
        )
        return f"a {type(x).__name__} of {len(x)} ({parts})"
    return f"a value of type {type(x).__name__}"


def text(x: PyTree) -> str:
    """As `describe`, and the value of what is no array and no node."""
    is_value = jtu.all_leaves([x], is_leaf=is_named) and not (
        is_named(x) or is_array(x)
    )
    return shown(x) if is_value else describe(x)
