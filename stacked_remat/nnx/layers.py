"""Layers of one kind: as one module, called one after the other, in host memory."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from .. import ScanCheckpointSpec
from .._static import PyTree
from ..streaming import is_on_host, moves_to_host
from .parts import is_node
from .scanning import remat_scan

M = TypeVar("M", bound=nnx.Module)

_UNNAMED: Mapping[str, Any] = MappingProxyType({nnx.PARTITION_NAME: None})
# What a layer may write to a module among its arguments goes from layer to layer; weights would be copied.
_ARGUMENT = nnx.StateAxes({nnx.Param: None, ...: nnx.Carry})


def stack(modules: Sequence[M], *, transform_metadata: Mapping[str, Any] = _UNNAMED) -> M:
    """Modules of one kind as one, with the arrays of each along a new first axis, as `nnx.vmap` makes it.

    Args:
        modules: at least one, all with the same structure, shapes and dtypes, and no variable in two of them.
        transform_metadata: as in `nnx.vmap`: `{nnx.PARTITION_NAME: name}` puts `name`, or `None`, first in
            the sharding metadata of the variables.

    Returns:
        A module of the same class, to split with axis 0.

    Raises:
        ValueError: names the variable or static attribute that is missing, that differs, or the variable that
            two modules share.

    Cost: a copy of all arrays.
    """
    if not modules:
        raise ValueError("There are no layers to stack. Give at least one module.")
    owners: dict[int, int] = {}
    for index, module in enumerate(modules):
        for path, variable in nnx.iter_graph(module):
            if isinstance(variable, nnx.Variable) and owners.setdefault(id(variable), index) != index:
                raise ValueError(
                    f"Layers {owners[id(variable)]} and {index} share {'.'.join(map(str, path))}. Give each "
                    "a variable of its own; for Rngs, rngs.fork()."
                )
    (graphdef, _), first, states = nnx.split(modules[0]), _described(modules[0]), []
    for index, module in enumerate(modules):
        other_graphdef, state = nnx.split(module)
        states.append(state)
        other = _described(module)
        for name in {**first, **other}:
            here, there = first.get(name), other.get(name)
            if here != there:
                raise ValueError(
                    f"{name} is {here!r} in layer 0 and {there!r} in layer {index}. Make them alike."
                )
        if other_graphdef != graphdef:
            raise ValueError(f"Layer {index} shares other parts among its own than layer 0. Make them alike.")
    state = jax.tree.map(lambda *parts: jnp.stack(parts), *states)
    stacked = nnx.merge(graphdef, state)
    nnx.spmd.add_axis(nnx.state(stacked), 0, transform_metadata)
    return stacked


def _type_of(leaf: Any) -> tuple[Any, Any]:
    return jnp.shape(leaf), jnp.result_type(leaf)


def _described(module: nnx.Module) -> dict[str, Any]:
    """Types of arrays, metadata of variables, and static attributes."""
    found: dict[str, Any] = {}
    for path, value in nnx.iter_graph(module):
        name = ".".join(map(str, path))
        if isinstance(value, nnx.Variable):
            found[f"the metadata of {name}"] = type(value), value.get_metadata()
            found[name] = jax.tree.map(_type_of, value.get_raw_value())
        elif hasattr(value, "shape") and not isinstance(value, type):  # such as the class of a variable
            found[name] = _type_of(value)
        elif "_pytree_" not in name and not is_node(value) and not isinstance(value, tuple | list | dict):
            found[name] = value
    return found


class Stacked(nnx.Module):
    """Layers of one kind, called one after the other.

    ```python
    layers = Stacked([Block(rngs=rngs) for _ in range(24)], remat="nested")
    y = layers(x, mask)  # for layer in layers: x = layer(x, mask)
    ```

    State that a layer changes in modules among the further arguments, such as shared `Rngs` or the statistics
    of a shared `BatchNorm`, goes from layer to layer as a part of the carry; their `Param`s do not.

    Attributes:
        layers: a module whose arrays have the layers as first axis.
        remat: what the backward pass keeps, as in `remat_scan`.
        length: the number of layers of a list, otherwise `None`.
        transform_metadata: as pairs.

    Args:
        layers: a list of modules, which are stacked, or a module made with `nnx.vmap`. A layer takes the
            carry and further arguments, and returns the next carry.
        remat: as in `remat_scan`.
        transform_metadata: of a list, as in `stack`; of a module, what `nnx.vmap` got, by default nothing.

    Raises:
        ValueError: as `stack`, and for an unknown policy.
        TypeError: for layers that are no modules or can't be called.
    """

    def __init__(
        self,
        layers: Sequence[PyTree] | nnx.Module,
        *,
        remat: ScanCheckpointSpec = "nested",
        transform_metadata: Mapping[str, Any] | None = None,
    ) -> None:
        remat_scan(remat=remat)  # refuses an unknown one
        is_list = isinstance(layers, Sequence | nnx.List)
        metadata = (_UNNAMED if is_list else {}) if transform_metadata is None else transform_metadata
        for layer in layers if is_list else [layers]:  # type: ignore[union-attr]
            if not isinstance(layer, nnx.Module) or not callable(layer):
                raise TypeError(
                    f"Stacked takes modules with a __call__, and got a {type(layer).__name__}. Give a list "
                    "of modules, or a module made with nnx.vmap."
                )
        self.layers = stack(layers, transform_metadata=metadata) if is_list else layers  # type: ignore[arg-type]
        self.length = len(layers) if is_list else None  # type: ignore[arg-type]
        self.remat: ScanCheckpointSpec = remat
        self.transform_metadata = tuple(metadata.items())

    def __call__(self, x: PyTree, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Apply the layers, from carry to carry.

        Args:
            x: the first carry.
            *args: what every layer gets unsplit, beside the carry.
            **kwargs: the same by keyword.

        Returns:
            The last carry.

        Raises:
            ValueError: a layer writes to a `Param` of a module among `args` and `kwargs`.
        """

        def apply(x: PyTree, layer: PyTree, args: PyTree, kwargs: PyTree) -> PyTree:
            before = _weights((args, kwargs))
            result = layer(x, *args, **kwargs)
            for name, value in _weights((args, kwargs)).items():
                if value is not before.get(name):
                    raise ValueError(
                        f"A layer writes to {name}, a Param of an argument, which all layers share. Make it "
                        "a variable of another type, whose value goes from layer to layer, or return it in "
                        "the carry."
                    )
            return result

        metadata = dict(self.transform_metadata)
        axes = (nnx.Carry, 0, *jax.tree.map(_argument_axis, (args, kwargs), is_leaf=is_node))
        options = {"length": self.length, "remat": self.remat, "transform_metadata": metadata}
        run = remat_scan(apply, in_axes=axes, out_axes=nnx.Carry, **options)
        return run(x, self.layers, args, kwargs)


def _argument_axis(leaf: Any) -> Any:
    """What becomes of a part of the arguments that all layers get."""
    return _ARGUMENT if is_node(leaf) else None


def _weights(arguments: tuple[Any, Mapping[str, Any]]) -> dict[str, Any]:
    """The values of the `Param`s in positional and keyword arguments."""
    found = {}
    for path, value in nnx.iter_graph(arguments):
        if isinstance(value, nnx.Param):
            names = ("args", *path[1:]) if path[0] == 0 else path[1:]
            found[".".join(map(str, names))] = value.get_raw_value()
    return found


def to_host(layers: M, where: Any = nnx.Param) -> M:
    """Put the weights of stacked layers in host memory; each layer's come to the device while it runs.

    `remat_scan` over them gives the results of layers on the device, and gradients that are on the host too.
    `nnx.Optimizer` computes on the device: let `where` leave there what it updates.

    Args:
        layers: a module, changed in place. If it is or contains `Stacked`s, their layers are moved and
            nothing else. Otherwise all of its arrays have the layers as first axis.
        where: a filter of NNX. Of these variables only matrices are moved, arrays with at least two
            dimensions above 1 in each layer, as in `streaming.to_host`.

    Returns:
        The same module.

    Raises:
        ValueError: there is nothing to move.

    Cost: one copy. Shardings stay as they are.
    """
    return _moved(layers, where, jax.memory.Space.Host)


def to_device(layers: M, where: Any = nnx.Param) -> M:
    """Put what `to_host` moved in device memory; arguments and result as there."""
    return _moved(layers, where, jax.memory.Space.Device)


def _moved(layers: M, where: Any, space: Any) -> M:
    count = 0

    def moved(leaf: Any) -> Any:
        nonlocal count
        if is_on_host(leaf) == (space is jax.memory.Space.Host) or not moves_to_host(
            leaf.shape[1:], leaf.dtype
        ):
            return leaf
        count += 1
        return jax.device_put(leaf, space)

    stacks = [module.layers for _, module in nnx.iter_graph(layers) if isinstance(module, Stacked)]
    for module in stacks or [layers]:
        nnx.update(module, jax.tree.map(moved, nnx.state(module, where)))
    if not count:
        raise ValueError(
            f"There is no matrix in the state of {type(layers).__name__} to move. Give a module whose arrays "
            "have the layers as first axis, or one with a Stacked, and check where=."
        )
    return layers
