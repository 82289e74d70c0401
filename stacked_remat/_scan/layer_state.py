"""An `eqx.nn.State` through a stack: each layer has its own part of it.

A `State` is a dict of values by *marker*, and a `StateIndex` in a module holds a
marker: `eqx.nn.BatchNorm` reads `state.get(index)`. A stack has one marker for all its
layers, and the value under it is stacked, as its arrays are. So before a loop the whole
state among the arguments is replaced by the entries that the layers have markers of,
marked to be split over them (`divide_state`, `part_of`). Each layer returns its state
as an output; these are stacked, and put back into the whole (`with_whole_state`).
`_block_foldable.py` does both around every loop.

The layers of a `BlockSeq` may have markers of their own, whose values are not stacked
(`of_one_layer`).
"""

import collections
import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
import jax.tree_util as jtu
from equinox.nn import State, StateIndex
from haliax import Axis

from .._static import PyTree
from .checks import describe
from .marks import NUMBER, Marked, PerKind, changed
from .stacking import stack_outputs, stack_trees

T = TypeVar("T")
N = TypeVar("N")


def _nodes(tree: PyTree, kind: type[N]) -> list[N]:
    """The nodes of a class in a tree, but for those within another of them."""
    nodes = jtu.tree_leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in nodes if isinstance(node, kind)]


def _map_nodes(fn: Callable[[Any], Any], tree: T, kind: type) -> T:
    """The tree with `fn` applied to each node of a class."""

    def mapped(node: PyTree) -> PyTree:
        if isinstance(node, kind):
            return fn(node)
        return node

    return jtu.tree_map(mapped, tree, is_leaf=lambda node: isinstance(node, kind))


def _markers(module: PyTree) -> list[Any]:
    """The markers of the states that a module's layers keep, in the tree's order."""
    return [node.marker for node in _nodes(module, StateIndex)]


# By its methods Equinox gives one entry of a state, for a `StateIndex`. Flattened, as a
# PyTree, it has all values, and the markers as its structure.
def _entries(state: State) -> dict[Any, Any]:
    """The values of a state by marker."""
    values, markers = state.tree_flatten()
    return dict(zip(markers, values, strict=True))


def _state_of(entries: dict[Any, Any]) -> State:
    return State.tree_unflatten(tuple(entries), tuple(entries.values()))


def divide_state(
    init: PyTree,
    arguments: T,
    stack: PyTree,
    own_part: Callable[[State, str], Any],
    what: str,
) -> tuple[State | None, T]:
    """The one state among the arguments, if there is one, and the arguments with the
    layers' parts of it.

    `stack` has the layers, and `own_part` finds what is theirs in a state.
    """
    # A state of something else may be in the carry: the layers update it in turn
    for state in _nodes(init, State):
        if not _entries(state).keys().isdisjoint(_markers(stack)):
            raise ValueError(
                f"The carry of {what} has the state of its layers, of which each needs"
                " its own part. Pass the state as an argument: fold(x, state)."
            )
    if _nodes([*_nodes(arguments, Marked), *_nodes(arguments, PerKind)], State):
        raise TypeError(
            f"{what} gives each layer its own part of a State, whatever its mark. Pass"
            " it without shared, per_layer or per_kind."
        )
    states = _nodes(arguments, State)
    if len(states) > 1:
        raise ValueError(
            f"{what} was given {len(states)} States. Pass one, of the whole model or of"
            " the stack, state.substate(blocks)."
        )
    if not states:
        return None, arguments
    part = own_part(states[0], what)
    return states[0], _map_nodes(lambda _: part, arguments, State)


@contextlib.contextmanager
def only_own_state(whole: State | None, what: str) -> Iterator[None]:
    """Where layers run: refuse that one reads of the whole state what is not its
    own.
    """
    try:
        yield
    except KeyError as error:  # of the dict in an Equinox state
        marker = error.args[0] if error.args else None
        if whole is None or marker not in _entries(whole):
            raise
        raise ValueError(
            f"A layer of {what} uses the state {marker!r}, which is not its own. Pass"
            " it what it reads as an argument; a state that layers update in turn can"
            " be in the carry."
        ) from error


def with_whole_state(
    outputs: PyTree, whole: State, stack: PyTree, what: str
) -> tuple[State, PyTree]:
    """The whole state with what layers return of their own, and the outputs with it in
    place of theirs.
    """
    entries = _entries(whole)
    of_stack = _markers(stack)
    for state in _nodes(outputs, State):
        for marker, value in _entries(state).items():
            if marker not in of_stack:
                raise ValueError(
                    f"A layer of {what} returns the state {marker!r}, which is not its"
                    " own. Let it return the one that it was given, with what it sets."
                )
            entries[marker] = value
    # A new state for each place: `State.set` makes the one it is called on unusable.
    return _state_of(entries), _map_nodes(lambda _: _state_of(entries), outputs, State)


def part_of(
    state: State, module: PyTree, what: str, *, whole: Collection[Any] = ()
) -> State:
    """What layers keep in a state, marked to be divided.

    The markers in `whole` are of one layer each, and have the value of that layer.
    """
    entries = _entries(state)
    # For an error that says which layer's state is missing
    for path, node in jtu.tree_leaves_with_path(
        module, is_leaf=lambda node: isinstance(node, StateIndex)
    ):
        if isinstance(node, StateIndex) and node.marker not in entries:
            raise ValueError(
                f"{what} was given a State without that of layer{jtu.keystr(path)}."
                " Pass the one that eqx.nn.make_with_state returns with this model."
            )
    part = {}
    for marker in _markers(module):
        rule = "shared" if marker in whole else "per_layer"
        part[marker] = Marked(entries[marker], rule)
    return _state_of(part)


def of_one_layer(modules: Sequence[PyTree]) -> set[Any]:
    """The markers that one of the modules has and no other."""
    counts = collections.Counter()
    for module in modules:
        counts.update({*_markers(module)})
    return {marker for marker, count in counts.items() if count == 1}


def for_layer(arguments: T, module: PyTree) -> T:
    """The arguments of a layer, which has all of its own state, from those with the
    states of all layers.
    """
    return _map_nodes(lambda state: state.substate(module), arguments, State)


def stack_outputs_and_states(
    outputs: Sequence[PyTree], axis: Axis, what: str
) -> PyTree:
    """`stack_outputs`, with one state of all layers; what several have under one marker
    is stacked.
    """
    by_marker = collections.defaultdict(list)
    without_values = []
    for output in outputs:
        states = _nodes(output, State)
        if len(states) > 1:
            raise ValueError(
                f"{what}: a layer returned {len(states)} States in one output. Let it"
                " return one, with all that it has set."
            )
        for state in states:
            for marker, value in _entries(state).items():
                by_marker[marker].append(value)
        without_values.append(_map_nodes(lambda _: _state_of({}), output, State))
    joint = {}
    for marker, values in by_marker.items():
        # A marker of one layer alone has its value as it is, as `part_of` expects it
        joint[marker] = values[0] if len(values) == 1 else stack_trees(values, axis)
    stacked = stack_outputs(without_values, axis, what)
    return _map_nodes(lambda _: _state_of(joint), stacked, State)


def carry_and_state(
    result: PyTree, arguments: PyTree, what: str
) -> tuple[PyTree, PyTree]:
    """What a layer of a fold returns as a pair: the carry, and the state where the
    layer is given one.
    """
    if not _nodes(arguments, State):
        return result, None
    if what.endswith("_vjp"):
        raise ValueError(
            f"{what} takes no State. Write scan_vjp(x, state.substate(blocks)), or scan"
            " in the loss of a fused update: its outputs are the new state."
        )
    is_pair = isinstance(result, tuple) and len(result) == 2
    if not is_pair or not isinstance(result[1], State):
        raise ValueError(
            f"{what} was given a State, so that its layers return (carry, state); one"
            f" returned {describe(result)}. Let it return the state that it was given"
            " too."
        )
    return result


def arrays_in_indices(module: T, shape: tuple[int, ...] = ()) -> T:
    """A module with an array of this shape for each Python number that it keeps in a
    state.
    """

    def array(leaf: Any) -> Any:
        if not isinstance(leaf, NUMBER):
            return leaf
        return jnp.broadcast_to(jnp.asarray(leaf), shape)

    def with_arrays(index: Any) -> Any:
        return changed(index, init=jtu.tree_map(array, index.init))

    return _map_nodes(with_arrays, module, StateIndex)


def marked_alike(layers: Sequence[T]) -> list[T]:
    """Layers with the first one's markers, unless `eqx.nn.make_with_state` has made
    theirs.
    """
    first = _markers(layers[0])

    def alike(layer: T) -> T:
        markers = _markers(layer)
        # `make_with_state` makes strings of the markers, which are objects before
        is_made = any(isinstance(marker, str) for marker in markers)
        # Equal where the same places of both layers share a marker
        pattern = [*map(markers.index, markers)]
        if is_made or pattern != [*map(first.index, first)]:
            return layer
        new = dict(zip(markers, first, strict=True))
        return _map_nodes(
            lambda node: changed(node, marker=new[node.marker]), layer, StateIndex
        )

    return [alike(arrays_in_indices(layer)) for layer in layers]
