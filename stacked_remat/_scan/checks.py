"""Checks of a scan: its axis and options, and carries that change from layer to layer.

`api.py` and the classes of layers check the axis that a user gives; `step.py` and
`returned.py` check that what goes from layer to layer keeps its structure, axes,
shapes and dtypes, as a loop of JAX needs it. JAX would refuse such a carry too, with
the types of traced arrays; here errors name the path and the fix. `difference` finds
where two trees differ, and `describe` and `text` write values into all errors of the
library.
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
    # The number of layers decides the program: segments, slots, the shapes of stacks
    size = axis.size if isinstance(axis, Axis) else axis
    if isinstance(size, Tracer):
        raise TypeError(
            f"{what}: the number of layers is traced, and must be known where the"
            " program is compiled. Pass it to jax.jit as a static argument, or let the"
            " axis be as long as it can get."
        )
    if isinstance(axis, Axis):
        return axis
    is_number = isinstance(axis, int | np.integer) and not isinstance(axis, bool)
    if is_number and axis >= 0:
        return Axis("layers", int(axis))
    name = axis if isinstance(axis, str) else "layers"
    fix = f"Write hax.Axis({name!r}, size)."
    if isinstance(axis, str) and axis in ALIASES:
        # A policy in the place of the axis
        fix = f"Write remat={axis!r}."
    elif isinstance(axis, float) and axis.is_integer():
        fix = f"Write int({axis!r})."
    # `Stacked.of(first, second)`: the second layer is where the axis goes
    elif isinstance(axis, eqx.Module) and what.endswith(".of"):
        fix = "Give the layers in a list."
    raise TypeError(
        f"{what} takes the axis of the layers or their number; got {text(axis)}. {fix}"
    )


def axis_or_name(axis: Any, what: str) -> Axis | str:
    """An axis, as `layers_axis`, or the name of one."""
    is_name = isinstance(axis, str) and axis not in ALIASES
    return axis if is_name else layers_axis(axis, what)


def check_carry(
    before: PyTree, after: PyTree, what: str = "carry", *, output: PyTree = None
) -> None:
    """Refuse a loop state that changes; the function may have returned it in a pair
    with an output.

    `what` is the state's name in errors.
    """

    def stays(a: Any, b: Any) -> bool:
        if form(a) != form(b) or not eqx.is_array_like(raw_array(a)):
            return form(a) == form(b)
        old = jax.typeof(raw_array(a))
        new = jax.typeof(raw_array(b))
        # A Python number takes the dtype that it meets
        return old.weak_type or old.dtype == new.dtype

    if changed := difference(before, after, stays):
        path, old, new = changed
        is_swapped = output is not None and not difference(before, output, stays)
        fix = _fix_of_carry(what, path, old, new, is_swapped)
        raise ValueError(
            f"The {what}{path} goes in as {text(old)} and comes out as {text(new)}."
            f" {fix}"
        )


def _fix_of_carry(what: str, path: str, old: Any, new: Any, is_swapped: bool) -> str:
    are_arrays = all(eqx.is_array_like(raw_array(node)) for node in (old, new))
    if are_arrays and form(old) == form(new):
        where = what + path
        return f"Cast the result, y.astype({where}.dtype), or the initial {where}."
    # As of a function that returns (output, carry)
    if is_swapped:
        return "The pair that is returned is (carry, output), in this order."
    if is_named(old) and is_named(new) and {*old.axes} == {*new.axes}:
        return f"Rearrange it: {what}.rearrange(x.axes)."
    if is_named(old) and are_arrays and jnp.shape(old.array) == jnp.shape(new):
        return "Name its dimensions: hax.named(y, x.axes)."
    # A tuple came back as a list, or the reverse
    are_sequences = isinstance(old, tuple | list) and isinstance(new, tuple | list)
    if are_sequences and len(old) == len(new):
        return f"Return a {type(old).__name__}, as the carry is."
    if what == "carry" and not path and isinstance(new, tuple) and len(new) == 2:
        return "For a function that returns (carry, output) use scan."
    # A visitor that returns a state where `sweep_back` was given none
    if old is None and not path and what.endswith("state"):
        return f"Pass the first {what} to sweep_back."
    return "Keep its axes and shape." if are_arrays else "Keep it as it is."


def form(leaf: Any) -> Any:
    """What a leaf keeps from layer to layer: its axes or shape, or what is no array
    itself.
    """
    if is_named(leaf):
        return leaf.axes, eqx.is_array_like(leaf.array)
    if eqx.is_array_like(leaf):
        return jnp.shape(leaf)
    return leaf


def difference(
    a: Any, b: Any, are_alike: Callable[[Any, Any], bool], path: str = ""
) -> tuple[str, Any, Any] | None:
    """Where two trees first have other nodes, static fields or leaves, and what is
    there.

    `are_alike` compares leaves; `path` leads to the trees.
    """
    if jtu.all_leaves([a, b], is_leaf=is_named):
        if are_alike(a, b):
            return None
        return (path, a, b)
    # One level at a time: the structure of a whole tree does not tell where two differ
    children, tree = _level(a)
    others, other_tree = _level(b)
    if tree == other_tree:
        for (at, child), (_, other) in zip(children, others, strict=True):
            unlike = difference(child, other, are_alike, path + jtu.keystr(at))
            if unlike:
                return unlike
        return None
    # The nodes differ themselves: in a static field of a module, in keys, or in class
    is_same_class = type(a) is type(b) and dataclasses.is_dataclass(a)
    for field in dataclasses.fields(a) if is_same_class else ():
        values = getattr(a, field.name, None), getattr(b, field.name, None)
        if field.metadata.get("static") and values[0] != values[1]:
            return f"{path}.{field.name}", *values
    return path, a, b


def _level(tree: PyTree) -> tuple[Any, Any]:
    """A node's children with their paths, and its structure without theirs."""
    return jtu.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)


def describe(x: PyTree) -> str:
    """A value in an error message: its kind and shape."""
    if x is None:
        return "None"
    if is_named(x):
        dtype = getattr(x.array, "dtype", "no array")
        return f"NamedArray axes ({axes_text(x.axes)}) of {dtype}"
    if is_array(x):
        return f"{x.dtype}[{','.join(map(str, x.shape))}]"
    if isinstance(x, dict):
        return f"a dict with {shortened([*map(repr, x)], most=4)}"
    if isinstance(x, tuple | list):
        parts = ", ".join(map(describe, x[:4]))
        more = ", …" if len(x) > 4 else ""
        return f"a {type(x).__name__} of {len(x)} ({parts}{more})"
    return f"a value of type {type(x).__name__}"


def text(x: PyTree) -> str:
    """As `describe`, and the value of what is no array and no node."""
    is_leaf = jtu.all_leaves([x], is_leaf=is_named)
    is_value = is_leaf and not (is_named(x) or is_array(x))
    if is_value:
        return shown(x)
    return describe(x)
