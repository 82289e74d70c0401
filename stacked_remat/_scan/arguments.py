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
    """The operation that splits arguments over an axis, as the user writes it, and its
    names of leaves.
    """

    what: str
    name_of: Callable[[KeyPath], str] = jtu.keystr

    @property
    def part(self) -> str:
        """What the loop goes through: the layers of a stack, or steps."""
        return "step" if self.what.startswith(("fold", "scan", "map")) else "layer"


def argument_namer(
    fn: Callable, skip: int, first: tuple[str, ...] = ()
) -> Callable[[KeyPath], str]:
    """How to name a path into `(args, kwargs)` by the parameters of `fn`, from `first`
    on.
    """

    @functools.cache
    def parameters() -> tuple[list[str], str]:
        own = [*signature_of(fn).parameters.values()][skip:]
        named = [
            p.name
            for p in own
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        return [*first, *named], next(
            (p.name for p in own if p.kind is p.VAR_POSITIONAL), "args"
        )

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
    fn: Callable,
    what: str,
    first: Sequence[str],
    given: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> str | None:
    """What is wrong with the signature of `fn` for a call that begins with `first`;
    None if nothing.
    """
    signature = signature_of(fn)
    try:
        signature.bind(*given, **kwargs)
    except TypeError as error:
        name = getattr(fn, "__qualname__", type(fn).__name__)
        return (
            f"{what} calls {name}({', '.join([*first, '...'])}); its signature is"
            f" {signature}: {error}."
        )


def signature_of(fn: Callable) -> inspect.Signature:
    """The signature of a function; one that takes anything for a builtin without a
    signature.
    """
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):
        return inspect.signature(lambda *args, **kwargs: None)


def resolve_axis(axis: AxisSelector, split: Sequence[Entry], what: str) -> Axis:
    """The axis with its size, which the arguments tell where only its name is given."""
    if isinstance(axis, Axis):
        return axis
    named_first = sorted((leaf for _, leaf, _ in split), key=is_named, reverse=True)
    for size in (leaf_size(leaf, axis) for leaf in named_first):
        if size is not None:
            return Axis(axis, size)
    raise ValueError(
        f"{what} over {axis!r} was given nothing to split over that axis, so its size"
        f" is unknown. Pass an axis instead of a name: hax.Axis({axis!r}, size)."
    )


def check_keys(entries: Sequence[Entry], axis: Axis, caller: Caller) -> None:
    """Refuse a single unmarked random key, from which every layer would draw the same
    numbers.
    """
    for path, leaf, rule in entries:
        may_be_one = rule == "default" and _may_be_keys(raw_array(leaf))
        if may_be_one and is_unsplit_key(name := caller.name_of(path), leaf):
            given = f"{name}=" if name.isidentifier() else ""
            raise ValueError(
                f"{name} is a single random key, from which every {caller.part} of"
                f" `{axis.name}` would draw the same numbers. Give each its own,"
                f" {given}jax.random.split({name}, {axis.size}), or say that they share"
                f" it, {given}stacked_remat.shared({name})."
            )


def is_unsplit_key(name: str, leaf: Any) -> bool:
    """Whether an argument is a single random key. A pair of integers is one where its
    name says so.
    """
    leaf = raw_array(leaf)
    if not _may_be_keys(leaf) or leaf.dtype != jnp.uint32:
        return _may_be_keys(leaf) and leaf.ndim == 0
    words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)}
    return leaf.ndim == 1 and not words.isdisjoint(_NAMES_OF_KEYS)


def _may_be_keys(leaf: Any) -> bool:
    """Whether `leaf` is random keys, or could be one of JAX's old-style keys, or a
    stack of them.
    """
    if not is_array(leaf) or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return is_array(leaf)
    return leaf.dtype == jnp.uint32 and leaf.ndim in (1, 2) and leaf.shape[-1] == 2


def check_no_lists(arguments: PyTree, axis: Axis, caller: Caller) -> None:
    """Refuse a list with as many values as layers: each layer would be given the whole
    list.
    """

    def may_be_of_a_layer(value: Any) -> bool:
        is_value = isinstance(value, int | float | str)
        return is_value or (
            is_array(value) and leaf_size(value, axis) not in (None, axis.size)
        )

    nodes = jtu.tree_leaves_with_path(
        arguments, is_leaf=lambda node: isinstance(node, list | Marked)
    )
    for path, node in nodes:
        is_list = (
            isinstance(node, list) and len(path) == 2 and len(node) == axis.size > 1
        )
        if is_list and all(map(may_be_of_a_layer, node)):
            name, part = caller.name_of(path), caller.part
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
    shapes = [
        jnp.shape(raw_array(leaf)) for leaf in jtu.tree_leaves(init, is_leaf=is_named)
    ]
    if axis.size < 2 or not any(axis.size in shape for shape in shapes):
        return
    for path, leaf, rule in take_marks_off(arguments)[0]:
        is_whole = (
            len(path) == 2
            and rule == "default"
            and is_array(leaf)
            and not _may_be_keys(leaf)
        )
        if is_whole and leaf.shape[:1] == (axis.size,):
            name, part = caller.name_of(path), caller.part
            modules = [
                frame.f_globals.get("__name__", "").split(".")[0]
                for frame, *_ in inspect.stack(0)
            ]
            outside = next(
                (
                    level
                    for level, module in enumerate(modules, 1)
                    if module not in _OURS
                ),
                1,
            )
            warnings.warn(
                f"{caller.what} splits {name} over the {axis.size} {part}s of"
                f" `{axis.name}`, and a dimension of the carry has that size too. Write"
                f" per_layer({name}) if each {part} is to be given a part of it, or"
                f" shared({name}) if every {part} is to be given all of it.",
                stacklevel=outside,
            )


_OURS = (__name__.split(".")[0], "jax", "equinox", "contextlib")


def check_stacked(tree: PyTree, axis: Axis, caller: Caller) -> None:
    """Refuse a tree whose split leaves have another size than `axis`."""
    leaves = jtu.tree_leaves_with_path(tree, is_leaf=is_named)
    check_sizes(
        axis,
        [(*entry, "stored") for entry in leaves if is_split(entry[1], axis)],
        caller,
    )


def check_sizes(axis: Axis, split: Sequence[Entry], caller: Caller) -> None:
    """Refuse arguments whose size along `axis` is another; says how to mark one that is
    not to be split.
    """
    wrong = [entry for entry in split if leaf_size(entry[1], axis) != axis.size]
    if not wrong:
        return
    found = [
        f"{caller.name_of(path)} has {_size_text(leaf, axis)}"
        for path, leaf, _ in wrong
    ]
    path, leaf, rule = wrong[0]
    fix = _fix_of_size(caller.name_of(path), leaf, rule, axis, caller.part)
    raise ValueError(
        f"{caller.what} over `{axis.name}` (size {axis.size}) was given inputs of"
        f" different lengths: {shortened(found, '; ', most=3)}.{fix}"
    )


def _size_text(leaf: Any, axis: Axis) -> str:
    size = leaf_size(leaf, axis)
    if is_named(leaf):
        found = (
            f"no axis `{axis.name}`"
            if size is None
            else f"`{axis.name}` of size {size}"
        )
        return f"{found} (axes {axes_text(leaf.axes)})"
    return (
        "no dimension to split"
        if size is None
        else f"leading dimension {size} (shape {leaf.shape})"
    )


def _fix_of_size(name: str, leaf: Any, rule: Rule, axis: Axis, part: str) -> str:
    """What to write, with a space in front; nothing for a stack's own arrays."""
    if _may_be_keys(leaf):
        return (
            f" If {name} is a random key, give each {part} its own:"
            f" jax.random.split({name}, {axis.size})."
        )
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
    shares = f"to give every {part} the whole array write stacked_remat.shared({name})."
    return (
        f" Plain arrays are split along their first dimension; {shares}"
        if rule == "default"
        else ""
    )
