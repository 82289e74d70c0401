"""Names of arguments for error messages, and checks of their sizes and keys."""

import functools
import inspect
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from haliax import Axis
from haliax.axis import AxisSelector
from jax.tree_util import KeyPath

from .._messages import axes_text, shortened
from .._static import PyTree
from .marks import Entry, Rule, is_array, is_named, is_split, leaf_size, raw_array, take_marks_off

_NAMES_OF_KEYS = ("key", "keys", "prng", "rng", "rngs", "seed", "seeds", "subkey", "subkeys")


class Caller(NamedTuple):
    """The operation that splits arguments over an axis, as the user writes it, and its names of leaves."""

    what: str
    name_of: Callable[[KeyPath], str] = jtu.keystr

    @property
    def part(self) -> str:
        """What the loop goes through: the layers of a stack, or steps."""
        return "step" if self.what.startswith(("fold", "scan", "map")) else "layer"


def argument_namer(fn: Callable, skip: int, first: tuple[str, ...] = ()) -> Callable[[KeyPath], str]:
    """How to name a path into `(args, kwargs)` by the parameters of `fn`, from `first` on."""

    @functools.cache
    def parameters() -> tuple[list[str], str]:
        own = [*parameters_of(fn).values()][skip:]
        named = [p.name for p in own if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        return [*first, *named], next((p.name for p in own if p.kind is p.VAR_POSITIONAL), "args")

    def name_of(path: KeyPath) -> str:
        (group, entry), (positional, variadic) = path[:2], parameters()
        if group.idx == 1:
            root = str(entry.key)
        elif entry.idx < len(positional):
            root = positional[entry.idx]
        else:
            root = f"{variadic}[{entry.idx - len(positional)}]"
        return root + jtu.keystr(path[2:])

    return name_of


def signature_error(
    fn: Callable, what: str, first: Sequence[str], given: Sequence[Any], kwargs: Mapping[str, Any]
) -> str | None:
    """What is wrong with the signature of `fn` for a call that begins with `first`; None if nothing."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*given, **kwargs)
    except TypeError as error:
        name = getattr(fn, "__qualname__", type(fn).__name__)
        others = len(given) - len(first)
        shown = [*first, *([f"{others} argument{'s' * (others > 1)}"] if others else [])]
        shown += [f"{key}=" for key in kwargs]
        called = f"{what} calls {name} with {', '.join(shown) or 'nothing'}"
        return f"{called}; its signature is {signature}: {error}."


def parameters_of(fn: Callable) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function by name; none for a builtin without a signature."""
    try:
        return inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return {}


def resolve_axis(axis: AxisSelector, split: Sequence[Entry], what: str) -> Axis:
    """The axis with its size, which the arguments tell where only its name is given."""
    if isinstance(axis, Axis):
        return axis
    for _, leaf, _ in sorted(split, key=lambda entry: not is_named(entry[1])):
        size = leaf_size(leaf, axis)
        if size is not None:
            return Axis(axis, size)
    raise ValueError(
        f"{what} over {axis!r} was given nothing to split over that axis, so its size is unknown. "
        f"Pass an axis instead of a name: hax.Axis({axis!r}, size)."
    )


def check_keys(entries: Sequence[Entry], axis: Axis, caller: Caller) -> None:
    """Refuse a single unmarked random key, from which every layer would draw the same numbers."""
    for path, leaf, rule in entries:
        array = raw_array(leaf)
        may_be_key = rule == "default" and (_is_typed_key(array) or _may_be_raw_key(array))
        if may_be_key and is_unsplit_key(name := caller.name_of(path), leaf):
            given = f"{name}=" if name.isidentifier() else ""
            raise ValueError(
                f"{name} is a single random key, from which every {caller.part} of `{axis.name}` would draw "
                f"the same numbers. Give each its own, {given}jax.random.split({name}, {axis.size}), or say "
                f"that they share it, {given}stacked_remat.shared({name})."
            )


def is_unsplit_key(name: str, leaf: Any) -> bool:
    """Whether an argument is a single random key. A pair of integers is one where its name says so."""
    leaf = raw_array(leaf)
    if _is_typed_key(leaf):
        return leaf.ndim == 0
    words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)}
    return _may_be_raw_key(leaf) and leaf.ndim == 1 and not words.isdisjoint(_NAMES_OF_KEYS)


def check_no_lists(args: tuple[PyTree, ...], kwargs: dict[str, PyTree], axis: Axis, caller: Caller) -> None:
    """Refuse a list of as many Python values as layers: each layer would be given the whole list."""
    paths_and_nodes = jtu.tree_leaves_with_path((args, kwargs), is_leaf=lambda node: isinstance(node, list))
    for path, node in paths_and_nodes:
        is_values = isinstance(node, list) and all(isinstance(value, int | float | str) for value in node)
        if len(path) == 2 and is_values and len(node) == axis.size > 1:
            name, part = caller.name_of(path), caller.part
            raise ValueError(
                f"{caller.what}: {name} is a list of {len(node)} Python values, one for each {part} of "
                f"`{axis.name}`? Write per_layer({name}) to give each {part} its number, or shared({name}) "
                f"to give every {part} the whole list."
            )


def check_ambiguous(
    init: PyTree, args: Sequence[PyTree], kwargs: dict[str, PyTree], axis: Axis, caller: Caller
) -> None:
    """Refuse unmarked lists of Python values; warn of a plain array that may be meant for every layer."""
    check_no_lists(tuple(args), kwargs, axis, caller)
    carry = jtu.tree_leaves(init, is_leaf=is_named)
    if axis.size < 2 or not any(axis.size in jnp.shape(raw_array(leaf)) for leaf in carry):
        return
    for path, leaf, rule in take_marks_off((tuple(args), kwargs))[0]:
        if (
            len(path) > 2
            or rule != "default"
            or not is_array(leaf)
            or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        ):
            continue
        if leaf.shape[:1] == (axis.size,) and not _may_be_raw_key(leaf):
            name, part = caller.name_of(path), caller.part
            warnings.warn(
                f"{caller.what} splits {name} over the {axis.size} {part}s of `{axis.name}`, and a dimension "
                f"of the carry has that size too. Write per_layer({name}) if each {part} is to be given a "
                f"part of it, or shared({name}) if every {part} is to be given all of it.",
                UserWarning,
                stacklevel=_outside(),
            )


def _outside() -> int:
    """The `stacklevel`, for a warning of the caller, of the code that calls this library."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in _OURS:
        frame, level = frame.f_back, level + 1
    return level


_OURS = (__name__.split(".")[0], "jax", "equinox", "contextlib")


def check_stacked(tree: PyTree, axis: Axis, caller: Caller) -> None:
    """Refuse a tree whose split leaves have another size than `axis`."""
    leaves = jtu.tree_leaves_with_path(tree, is_leaf=is_named)
    check_sizes(axis, [(*entry, "stored") for entry in leaves if is_split(entry[1], axis)], caller)


def check_sizes(axis: Axis, split: Sequence[Entry], caller: Caller) -> None:
    """Refuse arguments whose size along `axis` is another; says how to mark one that is not to be split."""
    wrong, agreeing = [], []
    for path, leaf, rule in split:
        (agreeing if leaf_size(leaf, axis) == axis.size else wrong).append((path, leaf, rule))
    if not wrong:
        return
    part, over = caller.part, f"{caller.what} over `{axis.name}` (size {axis.size})"
    lists = [path[:-1] for path, _, _ in wrong if _is_of_list(path)]
    if len(lists) == len(wrong) == axis.size and len({*lists}) == 1:
        name = caller.name_of(lists[0])
        raise ValueError(
            f"{over}: {name} is a list with an array for each {part}? Stack it: jnp.stack({name})."
        )
    agreeing = [caller.name_of(path) for path, _, _ in agreeing]
    wrong = [(caller.name_of(path), leaf, rule) for path, leaf, rule in wrong]
    found = [_describe_size(*entry, axis, caller.what) for entry in wrong[:3]]
    if len(wrong) > 3:
        found.append(f"and {len(wrong) - 3} more")
    if agreeing:
        shown = shortened(agreeing, most=2)
        found.append(f"{shown} {'has' if len(agreeing) == 1 else 'have'} the right size, {axis.size}")
    lines = [f"{over} was given inputs of different lengths: {'; '.join(found)}."]
    keys = [name for name, leaf, _ in wrong if _is_typed_key(leaf) or _may_be_raw_key(leaf)]
    for name in keys:
        lines.append(
            f"If {name} is a random key, give each {part} its own: jax.random.split({name}, {axis.size})."
        )
    plain = [name for name, leaf, rule in wrong if rule == "default" and not is_named(leaf)]
    if to_share := [name for name in plain if name not in keys]:
        lines.append(
            f"Plain arrays are split along their first dimension; to give every {part} the whole array write "
            f"stacked_remat.shared({to_share[0]})."
        )
    if marked := [name for name, leaf, rule in wrong if rule == "per_layer" and not is_named(leaf)]:
        lines.append(f"Give {marked[0]} {axis.size} parts along its first dimension, one for each {part}.")
    if named := [name for name, leaf, _ in wrong if is_named(leaf) and leaf_size(leaf, axis) is not None]:
        lines.append(
            f"Give {named[0]} `{axis.name}` of size {axis.size}, or rename that axis of it to share it."
        )
    raise ValueError("\n".join(lines))


def _is_of_list(path: KeyPath) -> bool:
    return len(path) > 2 and all(isinstance(key, jtu.SequenceKey) for key in (path[0], path[-1]))


def _describe_size(name: str, leaf: Any, rule: Rule, axis: Axis, what: str) -> str:
    size = leaf_size(leaf, axis)
    if is_named(leaf):
        found = f"no axis `{axis.name}`" if size is None else f"`{axis.name}` of size {size}"
        found += f" (axes {axes_text(leaf.axes)})"
    elif size is None:
        found = "no dimension to split"
    else:
        found = f"leading dimension {size} (shape {tuple(leaf.shape)})"
    is_marked = rule == "per_layer" and not what.startswith("sweep_back")  # which marks layer_state itself
    return f"{name}, marked per_layer, has {found}" if is_marked else f"{name} has {found}"


def _is_typed_key(leaf: Any) -> bool:
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _may_be_raw_key(leaf: Any) -> bool:
    """Whether `leaf` could be one of JAX's old-style keys, or a stack of them."""
    return is_array(leaf) and leaf.dtype == jnp.uint32 and leaf.ndim in (1, 2) and leaf.shape[-1] == 2
