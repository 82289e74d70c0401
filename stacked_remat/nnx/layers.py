"""Lists of Flax NNX layers: stacked for `remat_scan`, or as a pattern of several kinds
of layers.

`stack` makes one module of all layers, whose variables have the layers in front, as
`nnx.vmap` of a constructor would. `pattern` makes a `StackedPattern` of Equinox modules
(`ModuleBlock`) instead, since a module of NNX can hold layers of one kind only.

Both run all layers of a kind with the attributes of the first. So both compare layers
by all that `nnx.merge` takes from one (`_difference`), and refuse, or keep apart, what
differs in more than the values of variables.
"""

import functools
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from flax import nnx

from .. import ScanCheckpointSpec, Stacked, StackedPattern
from .._static import PyTree


def stack(layers: Sequence[nnx.Module], axis_name: str = "layers") -> Any:
    """One module whose variables hold those of all layers, with the layers in front.

    ```python
    stacked = stack([Layer(16, rngs=nnx.Rngs(seed)) for seed in range(6)])
    apply = remat_scan(
        lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
    )
    y = apply(x, stacked)
    ```

    It equals what `nnx.vmap` of the constructor makes. Variables with sharding metadata
    get the name of the axis in front of theirs: give `remat_scan`
    `transform_metadata={nnx.PARTITION_NAME: axis_name}`.

    Args:
        layers: modules of one class, with equal attributes beside their variables.
        axis_name: of the layers, in sharding metadata.

    Raises:
        ValueError: there are no layers, two share a variable, or two differ in an
            attribute or in the shape or dtype of a variable; names its path and both
            values. `pattern` takes such layers.
        TypeError: `layers` is no list, or a layer is no module.

    Cost: a copy of all variables.
    """
    _check(layers)
    for number, layer in enumerate(layers):
        if difference := _difference(layers[0], layer):
            raise ValueError(
                f"Layers 0 and {number} differ in {difference}. A stack runs all layers"
                " with the attributes of one. Use stacked_remat.nnx.pattern(layers) for"
                " layers of several kinds."
            )
    # The graph of the first stands for all; their variables are stacked leaf by leaf.
    states = map(nnx.state, layers)
    states = jax.tree.map(_stacked, *states)
    states = nnx.spmd.add_axis(states, 0, {nnx.PARTITION_NAME: axis_name})
    return nnx.merge(nnx.graphdef(layers[0]), states)


def _stacked(*leaves: Any) -> jax.Array:
    return jnp.stack(leaves)


def pattern(
    layers: Sequence[nnx.Module], *, remat: ScanCheckpointSpec = "nested"
) -> "StackedPattern[ModuleBlock]":
    """A `StackedPattern` of layers of several kinds: those that `stack` can stack are
    of one kind.

    ```python
    blocks = pattern([Layer(window=None if i % 6 == 5 else 512) for i in range(26)])
    y = blocks.fold(x, shared(mask))
    ```

    It runs the layers in the order of the list, in one loop, each kind with its own
    attributes. Arrays are split over the layers and shared as in `fold`.
    `blocks[i].module` is a layer.

    Args:
        layers: modules, in the order in which they run.
        remat: the checkpoint policy.

    Raises:
        ValueError: there are no layers; when it runs, a layer that writes to its
            variables (statistics, counts of random numbers), which only `remat_scan`
            keeps.
        TypeError: `layers` is no list, or a layer is no module.

    Cost: a copy of all variables.
    """
    _check(layers)
    kinds: dict[str, list[nnx.Module]] = {}
    order = []
    for layer in layers:
        name = _kind_of(layer, kinds)
        kinds.setdefault(name, []).append(layer)
        order.append(name)
    stacks = {}
    for name, kind in kinds.items():
        # The static half of the first stands for all, which equal it.
        graphdef = nnx.graphdef(kind[0])
        blocks = [ModuleBlock(graphdef, nnx.state(layer)) for layer in kind]
        stacks[name] = Stacked.of(blocks)
    return StackedPattern(stacks, order, len(layers), remat)


def _kind_of(layer: nnx.Module, kinds: dict[str, list[nnx.Module]]) -> str:
    """The name of the kind that a layer is of, or of a new one: `Layer_0`."""
    for name, kind in kinds.items():
        if not _difference(kind[0], layer):
            return name
    return f"{type(layer).__name__}_{len(kinds)}"


class ModuleBlock(eqx.Module):
    """A layer of Flax NNX as a block: its variables are arrays of the block, all else
    is static.
    """

    # The two halves of `nnx.split`: structure and attributes, and the variables.
    graphdef: Any = eqx.field(static=True)
    state: Any

    @property
    def module(self) -> Any:
        """The layer, with variables of its own."""
        return nnx.merge(self.graphdef, self.state)

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """What the layer returns; a `ValueError` if it writes to its variables."""
        module = self.module
        before = _variables(nnx.state(module))
        result = module(*args, **kwargs)
        after = _variables(nnx.state(module))
        # A variable that was not written holds the very array that it held before.
        for path, value in after.items():
            if before.get(path) is not value:
                raise ValueError(
                    f"The layer writes to {path}, and a pattern keeps no state. Call"
                    " layer.eval() first, or use remat_scan, which returns the new"
                    " state."
                )
        return result


def _variables(state: PyTree) -> dict[str, Any]:
    """The arrays of a state by path."""
    leaves = jtu.tree_leaves_with_path(state)
    return {jtu.keystr(path): leaf for path, leaf in leaves}


def _check(layers: Sequence[nnx.Module]) -> None:
    """Refuse what is no list of modules, and layers that share a variable, of which
    each would train its own copy.
    """
    if not isinstance(layers, Sequence):
        raise TypeError(
            f"Layers are a list of nnx.Modules; got a {type(layers).__name__}. Write"
            " [Layer(rngs=nnx.Rngs(seed)) for seed in range(6)]."
        )
    if not layers:
        raise ValueError("There are no layers. Give a list of modules.")
    # The layer that has a variable, by the variable's identity.
    owners: dict[int, int] = {}
    for number, layer in enumerate(layers):
        if not isinstance(layer, nnx.Module):
            raise TypeError(
                f"Layer {number} is a {type(layer).__name__}. Give a list of"
                " nnx.Modules."
            )
        for path, node in nnx.iter_graph(layer):
            if not isinstance(node, nnx.Variable):
                continue
            owner = owners.setdefault(id(node), number)
            if owner != number:
                name = ".".join(map(str, path))
                raise ValueError(
                    f"Layers {owner} and {number} share the variable {name}, of which"
                    " each would train its own copy. Pass what layers share as an"
                    " argument of the function."
                )


def _difference(first: nnx.Module, second: nnx.Module) -> str | None:
    """The first attribute or variable in which two layers differ, with both values;
    None if they stack.
    """
    if type(first) is not type(second):
        return f"their class: {type(first).__name__} and {type(second).__name__}"
    parts = _parts(first)
    second_parts = _parts(second)
    for path in parts | second_parts:
        # An attribute that is None has no path, so one that is missing is None.
        value = parts.get(path)
        second_value = second_parts.get(path)
        if not _is_equal(value, second_value):
            return f"{path}: {value!r} and {second_value!r}"
    # What has no value to show: which variables are shared within a layer, and objects
    # that are compared by identity.
    if not _is_same_graph(nnx.graphdef(first), nnx.graphdef(second)):
        return (
            "their structure: variables that one of them shares, or an attribute that"
            " is no value"
        )
    return None


def _is_same_graph(first: nnx.GraphDef, second: nnx.GraphDef) -> bool:
    """Whether two modules have one structure; attributes are compared by
    `_is_equal`.
    """
    return first.nodes == second.nodes and _is_equal(
        _attributes(first), _attributes(second)
    )


def _attributes(graph: nnx.GraphDef) -> list[tuple[Any, Any]]:
    """The attributes of a module and of those within it, each with its key."""
    attributes = []
    for key, attribute in graph.attributes:
        # `nnx.graphlib.Static` has the value of an attribute that is no node.
        attributes.append((key, getattr(attribute, "value", attribute)))
    return attributes


def _is_equal(first: Any, second: Any) -> bool:
    """Whether two attributes are equal, as `==`, but NaN equals NaN, True is not 1, and
    partials are equal by their parts.
    """
    if first is second:
        return True
    # True == 1, and a layer may compute another thing with it.
    if type(first) is not type(second):
        return False
    if isinstance(first, jax.Array | np.ndarray):
        if first.shape != second.shape or first.dtype != second.dtype:
            return False
        return bool((first == second).all())
    if isinstance(first, functools.partial):
        parts = first.func, first.args, first.keywords
        second_parts = second.func, second.args, second.keywords
        return _is_equal(parts, second_parts)
    if isinstance(first, dict):
        if first.keys() != second.keys():
            return False
        second = [second[key] for key in first]
        first = [*first.values()]
    if isinstance(first, list | tuple):
        is_same_length = len(first) == len(second)
        return is_same_length and all(map(_is_equal, first, second))
    if isinstance(first, float) and first != first:
        return second != second  # both are NaN
    return bool(first == second)


def _parts(layer: nnx.Module) -> dict[str, Any]:
    """What `nnx.merge` takes from one layer, by path: attributes, and in place of
    variables and arrays their types, as text.
    """
    parts = {}
    for path, node in nnx.iter_graph(layer):
        # Attributes in which Flax keeps what is its own.
        if any(str(key).startswith("_pytree__") for key in path):
            continue
        name = ".".join(map(str, path))
        if isinstance(node, nnx.Variable):
            leaves = jax.tree.leaves(node)
            types = ", ".join(jax.typeof(leaf).str_short() for leaf in leaves)
            parts[name] = f"{type(node).__name__} of {types}"
        elif nnx.graphlib.is_graph_node(node):
            parts[name] = type(node)
        elif isinstance(node, jax.Array | np.ndarray):
            parts[name] = jax.typeof(node).str_short()
        else:
            parts[name] = node
    return parts
