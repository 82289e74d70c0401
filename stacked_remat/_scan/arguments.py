"""Names of arguments for error messages, and checks of their sizes and keys.

A loop over layers splits its arguments without being told which ones, so this file
refuses what is probably a mistake: sizes that differ, one random key for all layers, a
list with a value for each layer. Errors name an argument as the user's function does
(`mask`, `mask.bias`, `args[2]`), by a `Caller`, and say what to write instead.

`layer_axis.py` calls the checks while it splits a tree. An `Entry` is a leaf of that
tree with its path and the rule by which it is split, as in `marks.py`.
"""

import difflib
import functools
import inspect
import itertools
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

from .._messages import axes_text, did_you_mean, shortened
from .._static import PyTree
from .marks import (
    Entry,
    Marked,
    Rule,
    is_array,
    is_named,
    is_split,
    leaf_size,
    raw_array,
    take_marks_off,
)

# An array of two integers (uint32) may be a key of JAX's old style or just two numbers.
# It counts as a key if a word of the argument's name is one of these.
_NAMES_OF_KEYS = (
    "key",
    "keys",
    "prng",
    "rng",
    "rngs",
    "seed",
    "seeds",
    "subkey",
    "subkeys",
)


class Caller(NamedTuple):
    """The operation that splits arguments over an axis, for its errors."""

    # As the user writes it: `"scan"`, `"Stacked.fold"`
    what: str
    # From the path of a leaf in the arguments to its name
    name_of: Callable[[KeyPath], str] = jtu.keystr

    @property
    def part(self) -> str:
        """What the loop goes through: the layers of a stack, or steps."""
        if self.what.startswith(("fold", "scan", "map")):
            return "step"
        return "layer"


def argument_namer(
    fn: Callable, skip: int, first: tuple[str, ...] = ()
) -> Callable[[KeyPath], str]:
    """How to name a path into `(args, kwargs)` by the parameters of `fn`.

    The first positional arguments are named by `first`, and the next ones by the
    parameters after as many as `skip`: those take a block and a carry.
    """

    # Cached, and found when a name is first needed: most calls have no error.
    @functools.cache
    def parameters() -> tuple[list[str], str]:
        positional = [*first]
        variadic = "args"
        for parameter in [*signature_of(fn).parameters.values()][skip:]:
            if parameter.kind is parameter.VAR_POSITIONAL:
                variadic = parameter.name
            elif parameter.kind <= parameter.POSITIONAL_OR_KEYWORD:
                positional.append(parameter.name)
        return positional, variadic

    def name_of(path: KeyPath) -> str:
        group, entry = path[:2]
        positional, variadic = parameters()
        if group.idx == 1:
            root = str(entry.key)
        elif entry.idx < len(positional):
            root = positional[entry.idx]
        else:
            root = f"{variadic}[{entry.idx - len(positional)}]"
        return root + jtu.keystr(path[2:])

    return name_of


# What loops take beside their function, in one call with it
_OPTIONS = ("remat", "reverse", "unroll", "until")


def signature_error(
    fn: Callable,
    what: str,
    first: Sequence[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> str | None:
    """What is wrong with the signature of `fn` for a call that begins with `first`;
    None if nothing.
    """
    signature = signature_of(fn)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(fn, "__qualname__", type(fn).__name__)
        fix = ""
        for option in _OPTIONS:
            is_unknown = option in kwargs and option not in signature.parameters
            if is_unknown and first != ["block"]:  # of `vmap`, which has none
                # Of a stack `fold` takes them beside its arguments, `fold_via` before
                call = f"{what}_via(f" if "." in what else f"{what}(f, axis"
                fix = f" Options go to the first call: {call}, {option}=...)(...)."
        return (
            f"{what} calls {name}({', '.join([*first, '...'])}); its signature is"
            f" {signature}: {error}.{fix}"
        )


def signature_of(fn: Callable) -> inspect.Signature:
    """The signature of a function; one that takes anything for a builtin without a
    signature.
    """
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):
        return inspect.signature(lambda *args, **kwargs: None)


def resolve_axis(
    axis: AxisSelector,
    entries: Sequence[Entry],
    split: Sequence[Entry],
    caller: Caller,
) -> Axis:
    """The axis with its size, which the arguments tell where only its name is given."""
    if isinstance(axis, Axis):
        if not split:
            _warn_of_similar_name(axis, entries, caller)
        return axis
    # A named array has the axis by its name, so its size counts before that of a plain
    # array, whose first dimension may be meant for something else.
    leaves = [leaf for _, leaf, _ in split]
    for leaf in sorted(leaves, key=is_named, reverse=True):
        size = leaf_size(leaf, axis)
        if size is not None:
            return Axis(axis, size)
    # In their order, each once
    names: dict[str, None] = {}
    for _, leaf, _ in entries:
        names |= dict.fromkeys(other.name for other in _axes_of(leaf))
    found = ""
    if names:
        found = f" The inputs have `{'`, `'.join(names)}`.{did_you_mean(axis, names)}"
    raise ValueError(
        f"{caller.what} over {axis!r} was given nothing to split over that axis, so its"
        f" size is unknown.{found} Pass an axis instead of a name:"
        f" hax.Axis({axis!r}, size)."
    )


def _axes_of(leaf: Any) -> tuple[Axis, ...]:
    return leaf.axes if is_named(leaf) else ()


def _warn_of_similar_name(axis: Axis, entries: Sequence[Entry], caller: Caller) -> None:
    """Warn where no argument has the axis, and one has another of its size and nearly
    its name.
    """
    for path, leaf, rule in entries:
        names = [other.name for other in _axes_of(leaf) if other.size == axis.size]
        close = difflib.get_close_matches(axis.name, names, n=1)
        # The axis itself is there where `is_scanned` says that it is not split
        if rule == "default" and close and close[0] != axis.name:
            name = caller.name_of(path)
            _warn_outside(
                f"{caller.what} over `{axis.name}`: no argument has this axis, and"
                f" {name} has `{close[0]}`, so every {caller.part} is given all of"
                f" {name}. Loop over `{close[0]}`, or write shared({name}) if that is"
                " meant."
            )
            return


def check_keys(entries: Sequence[Entry], axis: Axis, caller: Caller) -> None:
    """Refuse a single unmarked random key, from which every layer would draw the same
    numbers.
    """
    for path, leaf, rule in entries:
        # Names are found by the function's signature, so only for what may be keys
        may_be_keys = rule == "default" and _may_be_keys(raw_array(leaf))
        if may_be_keys and is_unsplit_key(name := caller.name_of(path), leaf):
            keyword = f"{name}=" if name.isidentifier() else ""
            raise ValueError(
                f"{name} is a single random key, from which every {caller.part} of"
                f" `{axis.name}` would draw the same numbers. Give each its own,"
                f" {keyword}jax.random.split({name}, {axis.size}), or say that they"
                f" share it, {keyword}stacked_remat.shared({name})."
            )


def is_unsplit_key(name: str, leaf: Any) -> bool:
    """Whether an argument is a single random key. A pair of integers is one where its
    name says so.
    """
    leaf = raw_array(leaf)
    if not _may_be_keys(leaf) or leaf.dtype != jnp.uint32:
        return _may_be_keys(leaf) and leaf.ndim == 0
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)
    return leaf.ndim == 1 and any(word.lower() in _NAMES_OF_KEYS for word in words)


def _may_be_keys(leaf: Any) -> bool:
    """Whether `leaf` is random keys, or could be one of JAX's old-style keys, or a
    stack of them.
    """
    # Keys of `jax.random.key` have a dtype of their own, those of `jax.random.PRNGKey`
    # are pairs of integers.
    if not is_array(leaf) or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return is_array(leaf)
    return leaf.dtype == jnp.uint32 and leaf.ndim in (1, 2) and leaf.shape[-1] == 2


def check_no_lists(arguments: PyTree, axis: Axis, caller: Caller) -> None:
    """Refuse a list with as many values as layers: each layer would be given the whole
    list.
    """

    def is_value_or_layer(value: Any) -> bool:
        if isinstance(value, int | float | str):
            return True
        if is_array(value) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return value.ndim == 0
        # An array of the axis's size is split itself, so its list may be meant
        return is_array(value) and leaf_size(value, axis) not in (None, axis.size)

    nodes = jtu.tree_leaves_with_path(
        arguments, is_leaf=lambda node: isinstance(node, list | Marked)
    )
    for path, node in nodes:
        # A path of two entries is that of a whole argument
        is_argument = isinstance(node, list) and len(path) == 2
        if not is_argument or not len(node) == axis.size > 1:
            continue
        if all(map(is_value_or_layer, node)):
            name = caller.name_of(path)
            part = caller.part
            raise ValueError(
                f"{caller.what}: {name} is a list of {len(node)} values, one for each"
                f" {part} of `{axis.name}`? Write jnp.stack({name}) to give each {part}"
                f" its own, or shared({name}) to give every {part} the whole list."
            )


def warn_of_ambiguous(
    init: PyTree, arguments: PyTree, axis: Axis, caller: Caller
) -> None:
    """Warn of an unmarked plain array that may be meant for every layer, as the carry
    has its size too.
    """
    sizes = itertools.chain(*map(jnp.shape, jtu.tree_leaves(init)))
    # The carry has no axis for the layers, so a dimension of their number is another
    # one, say of heads, and an argument with that as its first may go with it.
    if axis.size < 2 or axis.size not in sizes:
        return
    for path, leaf, rule in take_marks_off(arguments)[0]:
        is_argument = len(path) == 2 and rule == "default"
        if not is_argument or not is_array(leaf) or _may_be_keys(leaf):
            continue
        if leaf.shape[:1] == (axis.size,):
            name = caller.name_of(path)
            part = caller.part
            _warn_outside(
                f"{caller.what} splits {name} over the {axis.size} {part}s of"
                f" `{axis.name}`, and a dimension of the carry has that size too. Write"
                f" per_layer({name}) if each {part} is to be given a part of it, or"
                f" shared({name}) if every {part} is to be given all of it."
            )


def _warn_outside(message: str) -> None:
    """Warn with the line of the user's program that called into the library."""
    stacklevel = 1
    for level, (frame, *_) in enumerate(inspect.stack(0), 1):
        package = frame.f_globals.get("__name__", "").split(".")[0]
        if package not in _OURS:
            stacklevel = level
            break
    warnings.warn(message, stacklevel=stacklevel)


# Packages whose frames are between a user's call and a warning
_OURS = (__name__.split(".")[0], "jax", "equinox", "contextlib")


def check_stacked(tree: PyTree, axis: Axis, caller: Caller) -> None:
    """Refuse a tree whose split leaves have another size than `axis`."""
    split: list[Entry] = []
    for path, leaf in jtu.tree_leaves_with_path(tree, is_leaf=is_named):
        if is_split(leaf, axis):
            split.append((path, leaf, "stored"))
    check_sizes(axis, split, caller)


def check_sizes(axis: Axis, split: Sequence[Entry], caller: Caller) -> None:
    """Refuse arguments whose size along `axis` is another; says how to mark one that is
    not to be split.
    """
    wrong = []
    fixes = []
    for path, leaf, rule in split:
        if leaf_size(leaf, axis) != axis.size or _size_of_array(leaf, axis) is not None:
            name = caller.name_of(path)
            wrong.append(f"{name} has {_size_text(leaf, axis)}")
            fixes.append(_fix_of_size(name, leaf, rule, axis, caller.part))
    if wrong:
        raise ValueError(
            f"{caller.what} over `{axis.name}` (size {axis.size}) was given inputs of"
            f" different lengths: {shortened(wrong, '; ', most=3)}.{fixes[0]}"
        )


def _size_text(leaf: Any, axis: Axis) -> str:
    size = leaf_size(leaf, axis)
    if not is_named(leaf):
        if size is None:
            return "no dimension to split"
        return f"leading dimension {size} (shape {leaf.shape})"
    along = f"`{axis.name}`"
    if (of_array := _size_of_array(leaf, axis)) is not None:
        return f"an array of {of_array} along {along} (axes {axes_text(leaf.axes)})"
    of_axis = f"no axis {along}" if size is None else f"{along} of size {size}"
    return f"{of_axis} (axes {axes_text(leaf.axes)})"


def _size_of_array(leaf: Any, axis: Axis) -> Any:
    """The size of a named array's own array along an axis, if its axes say another;
    else None.
    """
    if not is_named(leaf):
        return None
    # `jax.tree.map` changes the array of a named array and leaves its axes
    sizes = getattr(raw_array(leaf), "shape", ())
    position = leaf.axis_indices(axis.name)
    if position is None or len(sizes) != len(leaf.axes):
        return None
    if sizes[position] == leaf.axes[position].size:
        return None
    return sizes[position]


def _fix_of_size(name: str, leaf: Any, rule: Rule, axis: Axis, part: str) -> str:
    """What to write, with a space in front; nothing for a stack's own arrays."""
    if _may_be_keys(leaf):
        return (
            f" If {name} is a random key, give each {part} its own:"
            f" jax.random.split({name}, {axis.size})."
        )
    if rule == "stored" and _size_of_array(leaf, axis) is not None:
        return " A stack of other layers is Stacked.of([blocks[i] for i in indices])."
    if is_named(leaf):
        return (
            f" Give {name} `{axis.name}` of size {axis.size}, or rename that axis of it"
            " to share it."
        )
    if rule == "per_layer":
        return (
            f" Give {name} {axis.size} parts along its first dimension, one for each"
            f" {part}."
        )
    if rule == "stored" and axis.size in leaf.shape[1:]:
        # Made by `eqx.filter_vmap`, whose axis is in front of the layers'
        return (
            " If this is an ensemble of stacks, map over it:"
            " eqx.filter_vmap(lambda stack: stack.fold(x))(stacks)."
        )
    if rule == "stored":
        size = leaf_size(leaf, axis)
        return f" If these are {size} layers, write Stacked.of(blocks.stacked, {size})."
    if rule != "default":
        return ""
    return (
        " Plain arrays are split along their first dimension; to give every"
        f" {part} the whole array write stacked_remat.shared({name})."
    )
