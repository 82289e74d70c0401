"""Layers of one kind: as one module, called one after the other, in host memory."""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from flax import nnx

from .. import ScanCheckpointSpec
from ..streaming import is_on_host, moves_to_host
from .scanning import remat_scan

M = TypeVar("M", bound=nnx.Module)


def stack(modules: Sequence[M]) -> M:
    """Modules of one kind as one, with the arrays of each along a new first axis, as `nnx.vmap` makes it.

    Args:
        modules: at least one, all with the same structure, shapes and dtypes, and no variable in two of them.

    Returns:
        A module of the same class, to split with axis 0.

    Raises:
        ValueError: names the variable that is missing, that differs or that two modules share.

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
    graphdef, first = nnx.split(modules[0])
    states = [nnx.split(module) for module in modules]
    leaves = {jtu.keystr(path): leaf for path, leaf in jtu.tree_leaves_with_path(first)}
    for index, (other_graphdef, state) in enumerate(states):
        others = {jtu.keystr(path): leaf for path, leaf in jtu.tree_leaves_with_path(state)}
        for path in {**leaves, **others}:
            here, there = (
                None if path not in found else (jnp.shape(found[path]), jnp.result_type(found[path]))
                for found in (leaves, others)
            )
            if here != there:
                raise ValueError(
                    f"{path} is {here} in layer 0 and {there} in layer {index}. Make them alike."
                )
        if other_graphdef != graphdef:
            raise ValueError(f"Layer {index} has other static attributes than layer 0. Make them alike.")
    return nnx.merge(graphdef, jax.tree.map(lambda *parts: jnp.stack(parts), *(state for _, state in states)))


class Stacked(nnx.Module):
    """Layers of one kind, called one after the other.

    ```python
    layers = Stacked([Block(rngs=rngs) for _ in range(24)], policy="nested")
    y = layers(x, mask)  # for layer in layers: x = layer(x, mask)
    ```

    Attributes:
        layers: a module whose arrays have the layers as first axis.
        policy: what the backward pass keeps, as in `remat_scan`.

    Args:
        layers: a list of modules, which are stacked, or a module made with `nnx.vmap`. A layer takes the
            carry and further arguments, and returns the next carry.
        policy: as in `remat_scan`.

    Raises:
        ValueError: as `stack`.
    """

    def __init__(self, layers: Sequence[Any] | nnx.Module, *, policy: ScanCheckpointSpec = "nested") -> None:
        self.layers = stack(layers) if isinstance(layers, Sequence | nnx.List) else layers
        self.policy: ScanCheckpointSpec = policy

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply the layers, from carry to carry.

        Args:
            x: the first carry.
            *args: what every layer gets unsplit, beside the carry.
            **kwargs: the same by keyword.

        Returns:
            The last carry.
        """

        def apply(x: Any, layer: Any, args: Any, kwargs: Any) -> Any:
            return layer(x, *args, **kwargs)

        axes = (nnx.Carry, 0, None, None)
        return remat_scan(apply, policy=self.policy, in_axes=axes, out_axes=nnx.Carry)(
            x, self.layers, args, kwargs
        )


def to_host(layers: M, where: Any = nnx.Param) -> M:
    """Put the weights of stacked layers in host memory; each layer's come to the device while it runs.

    `remat_scan` over them gives the results of layers on the device, and gradients that are on the host too.
    `nnx.Optimizer` computes on the device: let `where` leave there what it updates.

    Args:
        layers: a module whose arrays have the layers as first axis, or a `Stacked`. It is changed in place.
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

    state = jax.tree.map(moved, nnx.state(layers, where))
    if not count:
        raise ValueError(
            f"There is no matrix in the state of {type(layers).__name__} to move. Give a module whose arrays "
            "have the layers as first axis, and check where=."
        )
    nnx.update(layers, state)
    return layers
