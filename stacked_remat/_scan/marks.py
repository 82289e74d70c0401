"""Which parts of an argument are split over the layers, and the marks that say so.

A named array is split if it has the axis, in any position. A plain array has no names,
so it is split along its first dimension. Everything else (named arrays without the
axis, scalars, functions, Python values) is shared by all layers. `shared` and
`per_layer` override this for an argument.

A mark is a node around a part of the arguments, a `Marked` or a `PerKind`, which the
loop takes off again (`take_marks_off`) before it calls the user's step. A stack's own
arrays are marked too (`applied`): for a field of the block that is declared `unsliced`
each layer is given a `LayerStack`, with the arrays of all layers.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from haliax import Axis, axis_name
from haliax.axis import AxisSelector
from jax import lax
from jax.tree_util import KeyPath

from .._memory_spaces import has_host_arrays, on_several_devices
from .._noted import noting
from .._static import PyTree, is_array, is_named, raw_array, with_axes

T = TypeVar("T")
NUMBER = int | float | complex  # and bool
# For leaves without a mark, or for each leaf: whether it may be split
IsScanned: TypeAlias = bool | Callable[[Any], bool]
# By what a leaf is split: without a mark, by the mark of the user around it, or, of a
# stack's own arrays, as an unmarked one (stored) or given whole to layers (unsliced)
Rule: TypeAlias = Literal["default", "shared", "per_layer", "stored", "unsliced"]
Entry: TypeAlias = tuple[KeyPath, Any, Rule]  # path, leaf, and its rule


def is_named_or_shaped_array(leaf: Any) -> bool:
    """The default of `is_scanned`: named arrays, and plain arrays of at least one
    dimension.
    """
    return is_named(leaf) or (is_array(leaf) and leaf.ndim >= 1)


def is_split(
    leaf: Any,
    axis: AxisSelector,
    is_scanned: IsScanned = is_named_or_shaped_array,
    rule: Rule = "default",
) -> bool:
    """Whether a leaf is split. Its size along the axis is checked later, by
    `check_sizes`.
    """
    if rule == "shared":
        return False
    if rule == "per_layer":
        return is_named(leaf) or is_array(leaf)
    if not (is_scanned if isinstance(is_scanned, bool) else is_scanned(leaf)):
        return False
    if is_named(leaf):
        return leaf_size(leaf, axis) is not None
    return is_array(leaf)


def leaf_size(leaf: Any, axis: AxisSelector) -> int | None:
    """The number of layers that a leaf holds, or None for one that has no dimension to
    split.
    """
    if not is_named(leaf):
        if leaf.ndim:
            return leaf.shape[0]
        return None
    for other in leaf.axes:
        if other.name == axis_name(axis):
            return other.size
    return None


class Marked(eqx.Module):
    """A tree and how it is split."""

    value: PyTree  # any tree; a mark within it counts for what is in that
    rule: Rule = eqx.field(static=True)


def applied(blocks: PyTree) -> Marked:
    """The arrays of a stack for `fold` and `scan`, with fields marked that are not to
    be sliced.

    Not those in host memory, nor on several devices, where the compiler would gather
    the whole stack, nor for gradient dot products.
    """

    # Within `noting` a program is traced for gradient dot products.
    def mark(field: PyTree) -> PyTree:
        is_sliced = has_host_arrays(field) or on_several_devices(field) or noting.value
        return field if is_sliced else Marked(field, "unsliced")

    return Marked(map_unsliced(mark, blocks), "stored")


def shared(x: T) -> T:
    """Mark an argument, or a part of one, to be passed to every layer unsplit.

    ```python
    y = blocks.fold(x, mask=shared(mask))
    ```

    Without it a plain array is split along its first dimension, and a single random key
    is refused. A named array that has the layers' axis keeps it. Gradients are summed
    over the layers. For `fold`, `scan`, `map`, and `init`, `fold`, `scan` and `vmap` of
    stacks.

    Args:
        x: any tree. A mark inside it takes precedence.

    Returns:
        The tree in a PyTree node that a scan removes.
    """
    mark: Any = Marked(x, "shared")
    return mark


def per_layer(x: PyTree) -> PyTree:
    """Mark an argument, or a part of one, to be split over the layers, with an error
    where it can't be.

    ```python
    y = blocks.fold(x, per_layer(drop_rates))
    ```

    Plain arrays are split along their first dimension, named arrays along the layers'
    axis. Without the mark arrays that have neither are shared by all layers; with it
    they are an error of the scan.

    Args:
        x: a tree with at least one array, a list of numbers, which becomes an array, or
            None. Other leaves are passed to every layer unchanged.

    Returns:
        The tree in a PyTree node that a scan removes.

    Raises:
        TypeError: there is no array in `x`.
    """
    # A list of numbers is one value for each layer, which can only be meant as an array
    is_list = isinstance(x, list | tuple) and x
    if is_list and all(isinstance(value, NUMBER) for value in x):
        # Stacked, where `jnp.asarray` of a list is not of a weak type, as numbers are
        x = jnp.stack([*map(jnp.asarray, x)])
    leaves = jtu.tree_leaves(x, is_leaf=_is_named_or_marked)
    has_arrays = any(is_array(leaf) or _is_named_or_marked(leaf) for leaf in leaves)
    if leaves and not has_arrays:
        raise TypeError(
            f"per_layer splits arrays over the layers; {x!r} ({type(x).__name__}) holds"
            " none. Write per_layer(jnp.asarray(x)), or pass it without per_layer to"
            " give every layer all of it."
        )
    return Marked(x, "per_layer")


class PerKind(eqx.Module):
    """Values that belong to layers of one kind each, by the name of the kind."""

    values: dict[str, PyTree]  # of every kind, which may hold other marks
    rule: ClassVar[str] = "per_kind"  # what it is called in errors, as of a `Marked`


def per_kind(values: Mapping[str, Any]) -> PyTree:
    """Mark an argument of a `StackedPattern` that differs between the kinds of layers.

    ```python
    y = blocks.fold(x, per_kind({"local": local_caches, "global": global_caches}))
    ```

    Args:
        values: for the name of each kind, what its layers are given: arrays with an
            entry for each layer of this kind are split over these, as other arguments
            are over all; `shared` and `per_layer` choose.

    Returns:
        A PyTree node that the fold replaces, for each layer, by the layer's part of the
        value for its kind.

    Raises:
        TypeError: for anything but a dict with names as keys.
    """
    if not isinstance(values, Mapping) or not all(
        isinstance(name, str) for name in values
    ):
        raise TypeError(
            'per_kind takes a dict, {"name of the kind": value, ...}; got'
            f" {values!r}."
        )
    return PerKind(dict(values))


class LayerStack(eqx.Module):
    """What a layer is given for a field that is `unsliced`: the stack of all layers,
    and its own index.

    Attributes:
        stack: the field of all layers, named arrays with the layers' axis in front,
            plain arrays with it as first dimension.
        layer_index: this layer's place on the axis, a traced integer.
        axis_name: of the layers' axis. Named arrays without it are shared by all
            layers.
        own: what `layer` gives, where it is set: `dataclasses.replace(weights,
            own=cast(weights.layer))`. `grouped_experts` takes from it what has another
            dtype.
    """

    stack: PyTree
    layer_index: Any
    axis_name: str = eqx.field(static=True, default="layers")
    own: PyTree = None

    @property
    def layer(self) -> PyTree:
        """The field of this layer alone: a copy of its part of the stack, for each use
        of this property.
        """

        # Named arrays of the stack have the layers' axis in front, as plain ones do
        def entry(leaf: Any) -> Any:
            if not is_split(leaf, self.axis_name):
                return leaf
            array = lax.dynamic_index_in_dim(
                raw_array(leaf), self.layer_index, keepdims=False
            )
            return with_axes(array, leaf.axes[1:] if is_named(leaf) else None)

        if self.own is not None:
            return self.own
        return jtu.tree_map(entry, self.stack, is_leaf=is_named)

    @staticmethod
    def of(field: PyTree, axis_name: str = "layers") -> "LayerStack":
        """An `unsliced` field as a fold gives it; of one layer, a stack of one over an
        axis of this name.
        """
        if isinstance(field, LayerStack):
            return field

        def of_one(leaf: Any) -> Any:
            if not is_array(raw_array(leaf)):
                return leaf
            axes = (Axis(axis_name, 1), *leaf.axes) if is_named(leaf) else None
            return with_axes(raw_array(leaf)[None], axes)

        stack = jtu.tree_map(of_one, field, is_leaf=is_named)
        return LayerStack(stack, jnp.int32(0), axis_name)


def unsliced(**kwargs: Any) -> Any:
    """Declare a field of a block that a stack of such blocks does not slice.

    ```python
    class Experts(eqx.Module):
        weights: jax.Array = unsliced()  # [expert, embed, inner]

        def __call__(self, x):
            weights = LayerStack.of(self.weights)
            weight = weights.stack[weights.layer_index, self.choose(x)]
    ```

    In `fold` and `scan` of a `Stacked` the field is a `LayerStack`: a block that needs
    a part of its weights reads it from the stack, and no copy of the layer's weights is
    made. It is a layer's own, as any other field, in `blocks[i]` and `vmap`, with a
    visitor, for gradient dot products, from a stack in host memory, and on several
    devices, whose compiler would gather the stack. That there are several is known by
    the mesh (`jax.set_mesh`), or outside of `jax.jit` by where arrays are.
    `LayerStack.of` takes both.

    Gradients are added in place to the gradient of the stack where the block indexes it
    by traced integers; other slices cost a stack of temporaries. A block may only read
    its own layer's entry.

    Args:
        **kwargs: as in `equinox.field`.
    """
    metadata = {**kwargs.pop("metadata", {}), _UNSLICED: True}
    return eqx.field(metadata=metadata, **kwargs)


_UNSLICED = "stacked_remat.unsliced"  # a key of the field's metadata


def map_unsliced(fn: Callable[[PyTree], PyTree], tree: T) -> T:
    """The tree with `fn` applied to fields that are declared `unsliced`, except in
    inner stacks.
    """
    is_module = isinstance(tree, eqx.Module)
    # A `Stacked` within a layer: its own loop decides about its fields
    is_inner = getattr(tree, "_slices_its_own_layers", False)
    if is_inner or not (is_module or isinstance(tree, tuple | list | dict)):
        return tree
    fields = dataclasses.fields(tree) if is_module else ()
    names = [field.name for field in fields if field.metadata.get(_UNSLICED)]
    children, treedef = jtu.tree_flatten_with_path(
        tree, is_leaf=lambda node: node is not tree
    )
    mapped = []
    for path, child in children:
        is_unsliced = getattr(path[0], "name", None) in names
        mapped.append(fn(child) if is_unsliced else map_unsliced(fn, child))
    return jtu.tree_unflatten(treedef, mapped)


def changed(module: T, **fields: Any) -> T:
    """A copy with other fields. A subclass may have another constructor, so none is
    called.
    """
    # Not `copy.copy`: Equinox (0.13) takes what its `Module.__new__` makes for a module
    # whose constructor still runs, which it keeps alive and lets be changed.
    copied = object.__new__(type(module))
    vars(copied).update(vars(module), **fields)
    return copied


def check_unmarked(carry: PyTree) -> None:
    """Refuse marks in a carry."""
    # `take_marks_off` is not called for carries, so a mark would reach the user's step
    for path, leaf in jtu.tree_flatten_with_path(carry, is_leaf=_is_named_or_marked)[0]:
        if isinstance(leaf, Marked | PerKind):
            raise TypeError(
                f"The carry{jtu.keystr(path)} is marked {leaf.rule}(...), but a carry"
                " goes from layer to layer: it is neither split nor shared. Pass it"
                f" without {leaf.rule}."
            )


def take_marks_off(
    tree: PyTree, rule: Rule = "default", path: KeyPath = ()
) -> tuple[list[Entry], Any]:
    """Path, leaf and rule of every leaf, `per_kind`s among them, and the tree. The
    innermost mark counts.

    `rule` and `path` are those of the marks around the tree, and to it.
    """
    entries = []
    nodes = []
    paths_and_nodes, treedef = jtu.tree_flatten_with_path(
        tree, is_leaf=_is_named_or_marked
    )
    for below, node in paths_and_nodes:
        whole_path = *path, *below
        inside = [(whole_path, node, rule)]
        if isinstance(node, Marked):
            inside, node = take_marks_off(node.value, node.rule, whole_path)
        entries += inside
        nodes.append(node)
    return entries, jtu.tree_unflatten(treedef, nodes)


def _is_named_or_marked(leaf: Any) -> bool:
    return is_named(leaf) or isinstance(leaf, Marked | PerKind)
