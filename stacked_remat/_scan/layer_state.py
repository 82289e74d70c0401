"""An `eqx.nn.State` through a stack: each layer is given its own part, and the whole comes back."""

import collections
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from equinox.nn import State, StateIndex
from haliax import Axis

from .._static import PyTree
from .arguments import Caller, check_sizes
from .checks import describe
from .marks import Entry, Marked, PerKind, changed
from .stacking import stack_outputs, stack_trees

T = TypeVar("T")


def _is_state(node: PyTree) -> bool:
    return isinstance(node, State)


def _is_index(node: PyTree) -> bool:
    return isinstance(node, StateIndex)


def _states(tree: PyTree) -> list[State]:
    return [node for node in jtu.tree_leaves(tree, is_leaf=_is_state) if _is_state(node)]


def _markers(module: PyTree) -> list[Any]:
    return [node.marker for node in jtu.tree_leaves(module, is_leaf=_is_index) if _is_index(node)]


def _entries(state: State) -> dict[Any, Any]:
    values, markers = state.tree_flatten()
    return dict(zip(markers, values, strict=True))


def _state_of(entries: dict[Any, Any]) -> State:
    return State.tree_unflatten(tuple(entries), tuple(entries.values()))


def _map_states(fn: Callable[[State], Any], tree: T) -> T:
    return jtu.tree_map(lambda node: fn(node) if _is_state(node) else node, tree, is_leaf=_is_state)


def divide_state(
    init: PyTree, arguments: T, stack: PyTree, own_part: Callable[[State, str], Any], what: str
) -> tuple[State | None, T]:
    """The one state among the arguments, if there is one, and the arguments with the layers' parts of it."""
    for state in _states(init):
        if own := [marker for marker in _markers(stack) if marker in _entries(state)]:
            raise ValueError(
                f"The carry of {what} has the state {own[0]!r} of its layers, of which each needs its own "
                "part. Pass the state as an argument: fold(x, state)."
            )
    nodes = jtu.tree_leaves(
        arguments, is_leaf=lambda node: _is_state(node) or isinstance(node, Marked | PerKind)
    )
    if any(isinstance(node, Marked | PerKind) and _states(node) for node in nodes):
        raise TypeError(
            f"{what} gives each layer its own part of a State, whatever its mark. Pass it without shared, "
            "per_layer or per_kind."
        )
    states = [node for node in nodes if _is_state(node)]
    if len(states) > 1:
        raise ValueError(
            f"{what} was given {len(states)} States. Pass one, of the whole model or of the stack, "
            "state.substate(blocks)."
        )
    if not states:
        return None, arguments
    part = own_part(states[0], what)
    return states[0], _map_states(lambda _: part, arguments)


@contextlib.contextmanager
def only_own_state(whole: State | None, what: str) -> Iterator[None]:
    """Where layers run: refuse that one reads of the whole state what is not its own."""
    try:
        yield
    except KeyError as error:  # of the dict in an Equinox state
        marker = error.args[0] if error.args else None
        if whole is None or marker not in _entries(whole):
            raise
        raise ValueError(
            f"A layer of {what} uses the state {marker!r}, which is not its own. Pass it what it reads "
            "as an argument; a state that layers update in turn can be in the carry."
        ) from error


def with_whole_state(outputs: PyTree, whole: State, stack: PyTree, what: str) -> tuple[State, PyTree]:
    """The whole state with what layers return of their own, and the outputs with it in place of theirs."""
    entries, own = _entries(whole), set(_markers(stack))
    for state in _states(outputs):
        if foreign := [marker for marker in _entries(state) if marker not in own]:
            raise ValueError(
                f"A layer of {what} returns the state {foreign[0]!r}, which is not its own. Let it return "
                "the one that it was given, with what it sets."
            )
        entries |= _entries(state)
    return _state_of(entries), _map_states(lambda _: _state_of(entries), outputs)


def part_of(
    state: State, module: PyTree, axis: Axis, what: str, *, whole: Iterable[Any] = frozenset()
) -> State:
    """What layers keep in a state, marked to be divided, but for the markers of one layer, `whole`."""
    entries, marked = _entries(state), {}
    for marker in _markers(module):
        if marker not in entries:
            raise ValueError(
                f"{what} was given a State without {marker!r}, which its layers use. Pass the one that "
                "eqx.nn.make_with_state returns with this model."
            )
        rule = "shared" if marker in whole else "per_layer"
        if rule == "per_layer":
            leaves = jtu.tree_leaves_with_path(entries[marker])
            stored: list[Entry] = [(path, leaf, "stored") for path, leaf in leaves]
            caller = Caller(what, lambda path, marker=marker: f"state {marker!r}{jtu.keystr(path)}")
            check_sizes(axis, stored, caller)
        marked[marker] = Marked(entries[marker], rule)
    return _state_of(marked)


def of_one_layer(modules: Sequence[PyTree]) -> set[Any]:
    """The markers that one of the modules has and no other."""
    counts = collections.Counter(marker for module in modules for marker in {*_markers(module)})
    return {marker for marker, count in counts.items() if count == 1}


def for_layer(arguments: T, module: PyTree) -> T:
    """The arguments of a layer, which has all of its own state, from those with the states of all layers."""
    return _map_states(lambda state: state.substate(module), arguments)


def stack_outputs_and_states(outputs: Sequence[PyTree], axis: Axis, what: str) -> PyTree:
    """`stack_outputs`, with one state of all layers; what several have under one marker is stacked."""
    if not any(map(_states, outputs)):
        return stack_outputs(outputs, axis, what)
    found = collections.defaultdict(list)
    for output in outputs:
        for state in _states(output)[:1]:
            for marker, value in _entries(state).items():
                found[marker].append(value)
    joint = {marker: stack_trees(own, axis) if own[1:] else own[0] for marker, own in found.items()}
    states, others = eqx.partition(outputs[0], _is_state, is_leaf=_is_state)
    others = [eqx.filter(output, _is_state, inverse=True, is_leaf=_is_state) for output in outputs]
    stacked = stack_outputs(others, axis, what)
    return eqx.combine(_map_states(lambda _: _state_of(joint), states), stacked, is_leaf=_is_state)


def carry_and_state(found: PyTree, arguments: PyTree, what: str) -> tuple[PyTree, PyTree]:
    """What a layer of a fold returns as a pair: the carry, and the state where the layer is given one."""
    if not _states(arguments):
        return found, None
    if not (isinstance(found, tuple) and len(found) == 2 and _is_state(found[1])):
        raise ValueError(
            f"{what} was given a State, so that its layers return (carry, state); one returned "
            f"{describe(found)}. Let it return the state that it was given too."
        )
    return found


def check_no_state(arguments: PyTree, what: str) -> None:
    """Refuse a state where layers return their carry alone."""
    if _states(arguments):
        raise ValueError(
            f"{what} takes no State. Write scan_vjp(x, state.substate(blocks)), whose outputs are "
            "the new state."
        )


def arrays_in_indices(module: T, shape: tuple[int, ...] = ()) -> T:
    """A module with an array of this shape for each Python number that it keeps in a state."""

    def array(leaf: Any) -> Any:
        is_number = isinstance(leaf, bool | int | float | complex)
        return jnp.broadcast_to(jnp.asarray(leaf), shape) if is_number else leaf

    def with_arrays(node: PyTree) -> PyTree:
        return changed(node, init=jtu.tree_map(array, node.init)) if _is_index(node) else node

    return jtu.tree_map(with_arrays, module, is_leaf=_is_index) if _markers(module) else module


def marked_alike(layers: Sequence[T]) -> list[T]:
    """Layers with the first one's markers, unless `eqx.nn.make_with_state` has made theirs."""
    first = _markers(layers[0])

    def alike(layer: T) -> T:
        own = _markers(layer)
        is_new = not any(isinstance(marker, str) for marker in own)
        if not own or not is_new or [*map(own.index, own)] != [*map(first.index, first)]:
            return layer

        def with_marker(node: PyTree) -> PyTree:
            return changed(node, marker=first[own.index(node.marker)]) if _is_index(node) else node

        return jtu.tree_map(with_marker, layer, is_leaf=_is_index)

    return [alike(arrays_in_indices(layer)) for layer in layers]
