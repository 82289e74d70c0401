"""How trees of named and plain arrays are split over an axis, one layer at a time, and put together again.

A named array is split when it has the axis, wherever the axis stands. A plain array has no names, so it is
split along its first dimension. Everything else (named arrays without the axis, scalars, functions, Python
values) is shared by all layers.
"""

import dataclasses
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from haliax import Axis, NamedArray, axis_name
from haliax.axis import AxisSelector

T = TypeVar("T")
IsScanned: TypeAlias = bool | Callable[[Any], bool]

_NAMES_OF_KEYS = ("key", "keys", "prng", "rng", "rngs", "seed", "seeds")

# Inside scan and vmap a NamedArray may have fewer dimensions than axes: JAX rebuilds trees without a check.


def is_named(leaf: Any) -> bool:
    return isinstance(leaf, NamedArray)


def is_array(leaf: Any) -> bool:
    """Whether `leaf` is an array of any library, a tracer or a `ShapeDtypeStruct`, and not a `NamedArray`."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not is_named(leaf)


def is_named_or_shaped_array(leaf: Any) -> bool:
    """The default of `is_scanned`: named arrays, and plain arrays of at least one dimension."""
    return is_named(leaf) or (is_array(leaf) and leaf.ndim >= 1)


def has_axis(leaf: NamedArray, axis: AxisSelector) -> bool:
    return axis_name(axis) in [own.name for own in leaf.axes]


def is_split(leaf: Any, axis: AxisSelector, is_scanned: IsScanned = is_named_or_shaped_array) -> bool:
    wanted = is_scanned if isinstance(is_scanned, bool) else is_scanned(leaf)
    if is_named(leaf):
        return wanted and has_axis(leaf, axis)
    return wanted and is_array(leaf)


def leaf_size(leaf: Any, axis: AxisSelector) -> int | None:
    """The number of layers that a split leaf holds, or None for a plain array without dimensions."""
    if is_named(leaf):
        return next(own.size for own in leaf.axes if own.name == axis_name(axis))
    return leaf.shape[0] if leaf.ndim else None


class Caller(NamedTuple):
    """Who splits arguments over an axis, for error messages.

    Attributes:
        what: the operation, as the user writes it.
        name_of: how to call the leaf at a tree path.
        sharing: ways to give a plain array whole to every layer, beside passing it with names.
    """

    what: str
    name_of: Callable[[tuple[Any, ...]], str] = jtu.keystr
    sharing: tuple[str, ...] = ()


def check_axis(axis: Any, what: str) -> None:
    """Refuse what is not an `Axis`.

    Raises:
        TypeError: says how to write one.
    """
    if not isinstance(axis, Axis):
        name = repr(axis) if isinstance(axis, str) else "'layers'"
        size = axis if isinstance(axis, int) else "size"
        raise TypeError(
            f"{what} takes the axis of the layers; got {axis!r} ({type(axis).__name__}). "
            f"Write hax.Axis({name}, {size})."
        )


@dataclasses.dataclass(frozen=True)
class SplitTree:
    """A tree cut in two: the arrays that are split over `axis`, and all the rest.

    Attributes:
        axis: the axis, with its size.
        arrays: the split leaves as raw arrays, the axis first.
        rebuild: makes the tree of one layer from a slice of each of `arrays`.
    """

    axis: Axis
    arrays: list[Any]
    rebuild: Callable[[Sequence[Any]], Any]

    def layer(self, index: int) -> Any:
        """The tree of one layer. The index is not checked."""
        return self.rebuild([array[index] for array in self.arrays])


def split_tree(
    tree: Any,
    axis: AxisSelector,
    *,
    is_scanned: IsScanned = is_named_or_shaped_array,
    name_of: Callable[[tuple[Any, ...]], str] = jtu.keystr,
    what: str = "scan",
    sharing: tuple[str, ...] = (),
) -> SplitTree:
    """Cut `tree` into the arrays that are split over `axis` and the rest.

    Args:
        tree: named arrays, plain arrays and anything else.
        axis: an `Axis`, or its name: the size is then read off the arrays.
        is_scanned: which arrays may be split, as a bool or a predicate of a leaf.
        name_of: how error messages call the leaf at a tree path.
        what: the operation, for error messages.
        sharing: what error messages advise who wants to share a plain array; see `Caller`.

    Raises:
        ValueError: where sizes differ, naming each path and size, or where nothing tells the size of a named
            axis.
    """
    paths_and_leaves, treedef = jtu.tree_flatten_with_path(tree, is_leaf=is_named)
    leaves = [leaf for _, leaf in paths_and_leaves]
    split = [i for i, leaf in enumerate(leaves) if is_split(leaf, axis, is_scanned)]
    sized = [(name_of(paths_and_leaves[i][0]), leaves[i]) for i in split]
    axis = _resolve_axis(axis, sized, what)
    _check_sizes(axis, sized, Caller(what, name_of, sharing))

    def rebuild(slices: Sequence[Any]) -> Any:
        layer = list(leaves)
        for i, part in zip(split, slices, strict=True):
            layer[i] = _name_slice(leaves[i], part, axis)
        return jtu.tree_unflatten(treedef, layer)

    return SplitTree(axis, [_axis_first(leaves[i], axis) for i in split], rebuild)


def check_stacked(tree: Any, axis: Axis, caller: Caller) -> None:
    """Refuse a tree whose split leaves have another size than `axis`.

    Raises:
        ValueError: names each path and size.
    """
    paths_and_leaves = jtu.tree_flatten_with_path(tree, is_leaf=is_named)[0]
    sized = [(caller.name_of(path), leaf) for path, leaf in paths_and_leaves if is_split(leaf, axis)]
    _check_sizes(axis, sized, caller)


def stack_trees(trees: Sequence[T], axis: Axis) -> T:
    """One tree with the arrays stacked along a new leading `axis`, and the first tree's other leaves."""

    def stack(*leaves: Any) -> Any:
        if is_named(leaves[0]):
            first = leaves[0]
            return NamedArray(
                jnp.stack([leaf.rearrange(first.axes).array for leaf in leaves]), (axis, *first.axes)
            )
        return (
            jnp.stack(leaves)
            if is_array(leaves[0]) or isinstance(leaves[0], bool | int | float | complex)
            else leaves[0]
        )

    return jtu.tree_map(stack, *trees, is_leaf=is_named)


def stack_outputs(outputs: Sequence[Any], axis: Axis, what: str) -> Any:
    """What layers that may differ put out, stacked along a new leading `axis`; None for no layers.

    Raises:
        ValueError: where the layers' outputs differ in structure, axes or shape, or have the axis already.
    """
    if not outputs:
        return None
    (first, treedef), *rest = (jtu.tree_flatten_with_path(output, is_leaf=is_named) for output in outputs)
    for i, (leaves, other) in enumerate(rest, start=1):
        if other != treedef:
            raise ValueError(
                f"The outputs of {what} over `{axis.name}` cannot be stacked: layer 0 puts out {treedef}, "
                f"layer {i} {other}. Let all layers put out the same."
            )
        for (path, a), (_, b) in zip(first, leaves, strict=True):
            if _form(a) != _form(b):
                raise ValueError(
                    f"The output{jtu.keystr(path)} of {what} over `{axis.name}` cannot be stacked: it has "
                    f"{_form(a)} in layer 0 and {_form(b)} in layer {i}. Let all layers put out the same."
                )
    for path, leaf in first:
        _check_is_new(leaf, axis, path, what)
    return stack_trees(outputs, axis)


def _form(leaf: Any) -> str:
    """The axes or the shape of an output. Named axes may stand in any order."""
    if is_named(leaf):
        return f"axes {', '.join(sorted(f'{own.name}={own.size}' for own in leaf.axes)) or '()'}"
    return f"shape {jnp.shape(leaf)}" if is_array(leaf) or isinstance(leaf, int | float | complex) else ""


def name_stacked(tree: T, axis: Axis, what: str) -> T:
    """Give `axis` back to named arrays whose raw arrays have gained a leading dimension.

    Raises:
        ValueError: where a named array already has an axis of that name.
    """

    def prepend(path: tuple[Any, ...], leaf: Any) -> Any:
        _check_is_new(leaf, axis, path, what)
        return NamedArray(leaf.array, (axis, *leaf.axes)) if is_named(leaf) else leaf

    return jtu.tree_map_with_path(prepend, tree, is_leaf=is_named)


def _check_is_new(leaf: Any, axis: Axis, path: tuple[Any, ...], what: str) -> None:
    if is_named(leaf) and has_axis(leaf, axis):
        raise ValueError(
            f"The output{jtu.keystr(path)} of {what} over `{axis.name}` already has an axis of that "
            f"name: {[own.name for own in leaf.axes]}. Rename it: y.rename({{{axis.name!r}: ...}})."
        )


def argument_namer(fn: Callable, skip: int, first: tuple[str, ...] = ()) -> Callable[[tuple[Any, ...]], str]:
    """How to name a path into `(args, kwargs)` by the parameters of `fn`.

    Args:
        fn: what takes the arguments.
        skip: how many of its first parameters are not among them.
        first: names of the first of the arguments, which stand for no parameters of `fn`.
    """
    try:
        parameters = list(inspect.signature(fn).parameters.values())[skip:]
    except (TypeError, ValueError):  # builtins have no signature
        parameters = []
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    positional = [*first, *named]
    variadic = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")

    def name_of(path: tuple[Any, ...]) -> str:
        group, entry = path[0].idx, path[1]
        if group == 1:
            root = str(entry.key)
        elif entry.idx < len(positional):
            root = positional[entry.idx]
        else:
            root = f"{variadic}[{entry.idx - len(positional)}]"
        return root + jtu.keystr(path[2:])

    return name_of


def is_unsplit_key(name: str, leaf: Any) -> bool:
    """Whether an argument is a single random key. A pair of integers is one where its name says so."""
    if _is_typed_key(leaf):
        return leaf.ndim == 0
    words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)}
    return _may_be_raw_key(leaf) and leaf.ndim == 1 and not words.isdisjoint(_NAMES_OF_KEYS)


def _axis_first(leaf: Any, axis: Axis) -> Any:
    if not is_named(leaf):
        return leaf
    position = [own.name for own in leaf.axes].index(axis.name)
    if position == 0:
        return leaf.array
    return jnp.moveaxis(leaf.array, position, 0)


def _name_slice(template: Any, part: Any, axis: Axis) -> Any:
    if not is_named(template):
        return part
    return NamedArray(part, tuple(own for own in template.axes if own.name != axis.name))


def _resolve_axis(axis: AxisSelector, sized: list[tuple[str, Any]], what: str) -> Axis:
    if isinstance(axis, Axis):
        return axis
    named = [leaf for _, leaf in sized if is_named(leaf)]
    for leaf in [*named, *(leaf for _, leaf in sized)]:
        size = leaf_size(leaf, axis)
        if size is not None:
            return Axis(axis, size)
    raise ValueError(
        f"{what} over {axis!r} was given nothing to split over that axis, so its size is unknown. "
        f"Pass an axis instead of a name: hax.Axis({axis!r}, size)."
    )


def _check_sizes(axis: Axis, sized: list[tuple[str, Any]], caller: Caller) -> None:
    sizes = [(path, leaf, leaf_size(leaf, axis)) for path, leaf in sized]
    wrong = [entry for entry in sizes if entry[2] != axis.size]
    if not wrong:
        return
    agreeing = [path for path, _, size in sizes if size == axis.size]
    lines = [f"{caller.what} over `{axis.name}` (size {axis.size}) was given inputs of different lengths:"]
    lines += [f"  {path} has {_describe_size(leaf, axis, size)}" for path, leaf, size in wrong]
    if agreeing:
        shown = ", ".join(agreeing[:4]) + (f" and {len(agreeing) - 4} more" if len(agreeing) > 4 else "")
        lines.append(f"  {shown} {'has' if len(agreeing) == 1 else 'have'} {axis.size}, as it should be")
    keys = [path for path, leaf, _ in wrong if _is_typed_key(leaf) or _may_be_raw_key(leaf)]
    for path in keys:
        lines.append(
            f"If {path} is a random key, give each layer its own: jax.random.split({path}, {axis.size})."
        )
    if any(not is_named(leaf) and path not in keys for path, leaf, _ in wrong):
        lines.append(_how_to_share(axis, caller))
    raise ValueError("\n".join(lines))


def _how_to_share(axis: Axis, caller: Caller) -> str:
    ways = [*caller.sharing, f"pass it as a NamedArray without the axis `{axis.name}`"]
    return (
        "A plain array has no axis names, so it is split along its first dimension, one part for each of "
        f"the {axis.size} layers. To give every layer the whole array instead, {', or '.join(ways)}."
    )


def _describe_size(leaf: Any, axis: Axis, size: int | None) -> str:
    if is_named(leaf):
        return (
            f"`{axis.name}` of size {size} (axes {', '.join(f'{own.name}={own.size}' for own in leaf.axes)})"
        )
    return f"leading dimension {size} (shape {tuple(leaf.shape)})" if leaf.ndim else "no dimension to split"


def _is_typed_key(leaf: Any) -> bool:
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _may_be_raw_key(leaf: Any) -> bool:
    """Whether `leaf` could be one of JAX's old-style keys, or a stack of them."""
    return is_array(leaf) and leaf.dtype == jnp.uint32 and leaf.ndim in (1, 2) and leaf.shape[-1] == 2
