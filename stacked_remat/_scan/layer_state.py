"""An `eqx.nn.State` through a stack: each layer is given its own part, and the whole
comes back.
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
    nodes = jtu.tree_leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in nodes if isinstance(node, kind)]


def _map_nodes(fn: Callable[[Any], Any], tree: T, kind: type) -> T:
    def mapped(node: PyTree) -> PyTree:
        return fn(node) if isinstance(node, kind) else node

    return jtu.tree_map(mapped, tree, is_leaf=lambda node: isinstance(node, kind))


def _markers(module: PyTree) -> list[Any]:
    return [node.marker for node in _nodes(module, StateIndex)]


def _entries(state: State) -> dict[Any, Any]:
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
    """
    if any(
        marker in _entries(state)
        for state in _nodes(init, State)
        for marker in _markers(stack)
    ):
        raise ValueError(
            f"The carry of {what} has the state of its layers, of which each needs its"
            " own part. Pass the state as an argument: fold(x, state)."
        )
    if any(
        _nodes(marked, State)
        for mark in (Marked, PerKind)
        for marked in _nodes(arguments, mark)
    ):
        raise TypeError(
            f"{what} gives each layer its own part of a State, whatever its mark. Pass"
            " it without shared, per_layer or per_kind."
        )
    whole, *others = [*_nodes(arguments, State), None]
    if len(others) > 1:
        raise ValueError(
            f"{what} was given {len(others)} States. Pass one, of the whole model or of"
            " the stack, state.substate(blocks)."
        )
    if whole is None:
        return None, arguments
    part = own_part(whole, what)
    return whole, _map_nodes(lambda _: part, arguments, State)


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
    entries, own = _entries(whole), _markers(stack)
    for state in _nodes(outputs, State):
        if foreign := [marker for marker in _entries(state) if marker not in own]:
            raise ValueError(
                f"A layer of {what} returns the state {foreign[0]!r}, which is not its"
                " own. Let it return the one that it was given, with what it sets."
            )
        entries |= _entries(state)
    return _state_of(entries), _map_nodes(lambda _: _state_of(entries), outputs, State)


def part_of(
    state: State, module: PyTree, what: str, *, whole: Collection[Any] = ()
) -> State:
    """What layers keep in a state, marked to be divided, but for the markers of one
    layer, `whole`.
    """
    entries = _entries(state)
    for path, node in jtu.tree_leaves_with_path(
        module, is_leaf=lambda node: isinstance(node, StateIndex)
    ):
        if isinstance(node, StateIndex) and node.marker not in entries:
            raise ValueError(
                f"{what} was given a State without that of layer{jtu.keystr(path)}."
                " Pass the one that eqx.nn.make_with_state returns with this model."
            )
    return _state_of(
        {
            own: Marked(entries[own], "shared" if own in whole else "per_layer")
            for own in _markers(module)
        }
    )


def of_one_layer(modules: Sequence[PyTree]) -> set[Any]:
    """The markers that one of the modules has and no other."""
    counts = collections.Counter(
        marker for module in modules for marker in {*_markers(module)}
    )
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
    found = collections.defaultdict(list)
    for output in outputs:
        for state in _nodes(output, State)[:1]:
            for marker, value in _entries(state).items():
                found[marker].append(value)
    joint = {
        marker: stack_trees(own, axis) if own[1:] else own[0]
        for marker, own in found.items()
    }
    others = [_map_nodes(lambda _: _state_of({}), output, State) for output in outputs]
    return _map_nodes(
        lambda _: _state_of(joint), stack_outputs(others, axis, what), State
    )


def carry_and_state(
    found: PyTree, arguments: PyTree, what: str
) -> tuple[PyTree, PyTree]:
    """What a layer of a fold returns as a pair: the carry, and the state where the
    layer is given one.
    """
    if not _nodes(arguments, State):
        return found, None
    if what.endswith("_vjp"):
        raise ValueError(
            f"{what} takes no State. Write scan_vjp(x, state.substate(blocks)), or scan"
            " in the loss of a fused update: its outputs are the new state."
        )
    if not (
        isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], State)
    ):
        raise ValueError(
            f"{what} was given a State, so that its layers return (carry, state); one"
            f" returned {describe(found)}. Let it return the state that it was given"
            " too."
        )
    return found


def arrays_in_indices(module: T, shape: tuple[int, ...] = ()) -> T:
    """A module with an array of this shape for each Python number that it keeps in a
    state.
    """

    def array(leaf: Any) -> Any:
        return (
            jnp.broadcast_to(jnp.asarray(leaf), shape)
            if isinstance(leaf, NUMBER)
            else leaf
        )

    return _map_nodes(
        lambda node: changed(node, init=jtu.tree_map(array, node.init)),
        module,
        StateIndex,
    )


def marked_alike(layers: Sequence[T]) -> list[T]:
    """Layers with the first one's markers, unless `eqx.nn.make_with_state` has made
    theirs.
    """
    first = _markers(layers[0])

    def alike(layer: T) -> T:
        own = _markers(layer)
        is_made = any(isinstance(marker, str) for marker in own)
        if is_made or [*map(own.index, own)] != [*map(first.index, first)]:
            return layer
        new = dict(zip(own, first, strict=True))
        return _map_nodes(
            lambda node: changed(node, marker=new[node.marker]), layer, StateIndex
        )

    return [alike(arrays_in_indices(layer)) for layer in layers]
