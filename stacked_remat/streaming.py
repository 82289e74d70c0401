"""Layers whose arrays are in host memory or in files, and come to the device while they
run.

A *sweep*, the loop over layers, reads each layer of a *stack* on the host to the device
when it runs, and writes its gradient, or what updates it, back to the host
(`_sweep/store.py`). So streaming is a matter of where a stack's arrays are, and this
file only moves them: `to_host` and `to_device` for a model that exists, and `init` for
one that is larger than the device, whose layers are built one at a time. Frozen arrays
may be in files, which layers read themselves (`_in_files.py`): `from_files`.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from haliax import Axis
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding

from . import _memory_spaces
from ._in_files import (
    ArrayInFiles as ArrayInFiles,
    LinearInFiles as LinearInFiles,
    from_files as from_files,
    in_memory as in_memory,
    is_in_files as is_in_files,
)
from ._layer_checks import block_builder
from ._memory_spaces import is_on_host as is_on_host, moves_to_host as moves_to_host
from ._messages import axes_text
from ._policy import ScanCheckpointSpec
from ._scan.arguments import Caller, argument_namer
from ._scan.checks import layers_axis
from ._scan.layer_axis import split_tree
from ._scan.layer_state import arrays_in_indices
from ._scan.marks import changed, is_array, is_named, is_split, raw_array
from ._stacked import Stacked
from ._static import PyTree, with_leaves
from ._sweep.store import empty_stack, write

T = TypeVar("T")


def init(
    Layers: Axis | int, Block: Any, *, remat: ScanCheckpointSpec = True
) -> Callable[..., Stacked]:
    """Build layers in host memory, one after the other on the device: `Stacked.init`
    and `to_host` in one.

    Args:
        Layers: the axis to stack along; a number is an axis of this size named
            `layers`.
        Block: as `Stacked.init` takes it.
        remat: the checkpoint policy.

    Returns:
        A function of the block's arguments, split over the layers as `Stacked.init`
        splits them.

    Raises:
        ValueError, TypeError: as `Stacked.init`.

    Memory: one layer on the device.
    """
    Layers = layers_axis(Layers, "streaming.init")
    build = block_builder(Block, "streaming.init")
    make_on_device = Stacked.init(Layers, Block, remat=remat)
    caller = Caller("streaming.init", argument_namer(build, skip=0))

    def build_stack(*args: PyTree, **kwargs: PyTree) -> Stacked:
        # The stack with shapes for arrays: it checks the arguments, and computes
        # nothing
        template = eqx.filter_eval_shape(make_on_device, *args, **kwargs)
        layout, arrays, shared = split_tree((args, kwargs), Layers, caller)

        def layer(slices: PyTree) -> list[PyTree]:
            args, kwargs = layout.layer(slices, shared)
            # Python numbers of a block are in the template, the same for all layers
            block = arrays_in_indices(build(*args, **kwargs))
            block = eqx.filter(block, is_array)
            placed = []
            for leaf in map(jnp.asarray, jax.tree.leaves(block)):
                is_moved = moves_to_host(leaf.shape, leaf.dtype)
                placed.append(_memory_spaces.to_host(leaf) if is_moved else leaf)
            return placed

        shapes, rest = eqx.partition(template.stacked, is_array)
        leaves = _stacked_on_host(layer, arrays, Layers.size)
        made = with_leaves(shapes, leaves)
        return changed(template, stacked=eqx.combine(made, rest))

    return build_stack


def _stacked_on_host(
    layer: Callable[[Any], list[PyTree]], arrays: PyTree, length: int
) -> list[PyTree]:
    """What `layer` returns for each layer's slices of `arrays`, stacked."""
    first = layer([array[0] for array in arrays]) if length else []
    if not length or any(isinstance(leaf, Tracer) for leaf in first):
        # In a traced program a loop; it tells the types of no layers too.
        _, stacks = lax.scan(
            lambda _, slices: (None, layer(slices)), None, arrays, length=length
        )
        return stacks
    stacks = [empty_stack(leaf, length) for leaf in first]
    # Not compiled as one program, whose products XLA may reorder: the bits are those of
    # Stacked.init.
    for index in range(length):
        leaves = first
        if index:
            leaves = layer([array[index] for array in arrays])
        stacks = _write(stacks, index, leaves)
    return stacks


# Donated, so that a layer is written in place and there is one copy of the stacks
_write = jax.jit(write, donate_argnums=0)


def to_host(model: T, *, where: Callable[[Any], Any] = lambda leaf: True) -> T:
    """A model with the arrays of its stacks' layers in host memory.

    ```python
    model = streaming.to_host(model)
    frozen = streaming.to_host(model, where=lambda leaf: leaf.dtype == jnp.bfloat16)
    ```

    Its results and gradients are those of the model on the device. The gradient of an
    array on the host is on the host too.

    Args:
        model: a `Stacked`, a `StackedPattern`, or any tree with some. Shapes
            (`jax.ShapeDtypeStruct`) get shardings in host memory, as `memory.report`
            takes them.
        where: whether to move an array, a matrix of each layer: one with at least two
            dimensions above 1 there. Others are small (and XLA for TPUs reads no
            bfloat16 vector out of a stack on the host), and stay, as does what all
            layers share.

    Returns:
        The model.

    Raises:
        ValueError: for a model without such arrays; for an array whose layers are not
            its first axis (names the path); for shapes on devices that are not
            attached, whose compiler knows no host memory.

    Cost: one copy. Shardings stay as they are.
    """
    on_host = _of_stacks(functools.partial(_stack_to_host, where), model)
    # An error if nothing is moved: the model would take the memory of the device
    if not _memory_spaces.has_host_arrays(on_host):
        raise ValueError(
            "The model has no Stacked with an array for to_host to move. Let its layers"
            " be a Stacked, and check where=."
        )
    return on_host


def _stack_to_host(where: Callable[[Any], Any], name: str, stack: Stacked) -> Stacked:
    """A stack with the matrices of its layers on the host, of those that `where`
    chooses.
    """
    layers = stack.Layers.name

    def moved(path: Any, leaf: Any) -> Any:
        if not is_split(leaf, stack.Layers):
            return leaf
        if is_named(leaf) and leaf.axes[0].name != layers:
            raise ValueError(
                f"{name}.stacked{jtu.keystr(path)} ({axes_text(leaf.axes)}) has its"
                " layers not in front, so that a layer can't be moved by itself."
                f" Rearrange it: array.rearrange(({layers!r}, ...))."
            )
        array = raw_array(leaf)
        if array is None or not moves_to_host(array.shape[1:], array.dtype):
            return leaf
        return jax.tree.map(_to_host, leaf) if where(array) else leaf

    stacked = jtu.tree_map_with_path(moved, stack.stacked, is_leaf=is_named)
    return changed(stack, stacked=stacked)


def _to_host(array: Any) -> Any:
    """An array in host memory; of a shape, one with a sharding there."""
    if not isinstance(array, jax.ShapeDtypeStruct):
        return _memory_spaces.to_host(array)
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
        sharding = _memory_spaces.on_one_device(jax.local_devices()[0])
    sharding = sharding.with_memory_kind("pinned_host")
    if sharding.memory_kind is None:
        raise ValueError(
            f"Arrays on the host cannot be sized for {sharding.mesh.size} devices that"
            " are not attached: their compiler knows no host memory. Size one device,"
            " or use a TPU target."
        )
    return array.update(sharding=sharding)


def to_device(model: T) -> T:
    """The model with the arrays of its stacks in device memory: the inverse of
    `to_host`.
    """

    def moved(_: str, stack: Stacked) -> Stacked:
        return changed(stack, stacked=_memory_spaces.on_device(stack.stacked))

    return _of_stacks(moved, model)


def _of_stacks(fn: Callable[[str, Stacked], Stacked], model: T) -> T:
    """The model with `fn(name, stack)` in the place of each stack."""

    def is_stack(node: PyTree) -> bool:
        return isinstance(node, Stacked)

    def replaced(path: Any, node: PyTree) -> PyTree:
        if not is_stack(node):
            return node
        return fn(f"model{jtu.keystr(path)}", node)

    return jtu.tree_map_with_path(replaced, model, is_leaf=is_stack)
