"""Scans that are called outside of `jit`: one compiled program for all calls that are alike.

`lax.scan` recognises a function that it has compiled by its identity, and a step over layers is made anew by
every call. Here a call is recognised by what it was given.
"""

import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import equinox as eqx
import haliax.partitioning
import jax
import numpy as np

from ._compat import is_concrete


@jax.tree_util.register_static
class Static:
    """A tree without arrays, passed out of a transformation untouched."""

    def __init__(self, value: Any):
        self.value = value


def compiled_once(
    run: Callable[..., Any], f: Callable[..., Any], settings: Hashable, init: Any, arguments: Any
) -> Any:
    """`run(f, settings, init, arguments)`, compiled as a whole where no argument is traced.

    Calls share a program where `f` is the same function, the settings are equal, and the trees have the same
    structure, the same types of arrays and equal leaves of other kinds. The program lives as long as `f`. As
    with `lax.scan`, globals of `f` are what they were when it was traced.

    Args:
        run: a function of the module that calls this.
        f: what is applied to each layer; only plain functions that close over no array are recognised again.
        settings: what else `run` depends on.
        init: a tree whose arrays and numbers are arguments of the program.
        arguments: a tree whose arrays are.
    """
    leaves, structure = jax.tree.flatten((init, arguments))
    numbers = len(jax.tree.leaves(init))
    is_argument = [
        eqx.is_array_like(leaf) if i < numbers else isinstance(leaf, jax.Array | np.ndarray)
        for i, leaf in enumerate(leaves)
    ]
    arrays = [leaf for leaf, is_ in zip(leaves, is_argument, strict=True) if is_]
    rest = tuple(None if is_ else _Equal(leaf) for leaf, is_ in zip(leaves, is_argument, strict=True))
    call = _Call(run, settings, structure, rest)
    if _is_recognised(f) and call.is_hashable() and all(map(is_concrete, arrays)):
        # Haliax keeps its axis mapping where JAX's caches do not look.
        if haliax.partitioning.current_thread_local_mapping() is None:
            found, static = _program(f)(call, arrays)
            return eqx.combine(found, static.value)
    return run(f, settings, init, arguments)


def _is_recognised(f: Callable[..., Any]) -> bool:
    # An array that is closed over would become a constant of the program.
    return isinstance(f, types.FunctionType) and not any(
        isinstance(leaf, jax.Array | np.ndarray)
        for leaf in jax.tree.leaves([_contents(cell) for cell in f.__closure__ or ()])
    )


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


class _Equal:
    """A leaf that equals only its like: `True` is not `1` here, nor `0.0` `-0.0`."""

    def __init__(self, leaf: Any):
        self.leaf = leaf
        self._key = (type(leaf), leaf, repr(leaf) if isinstance(leaf, float | complex) else "")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Equal) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


class _Call(tuple):
    """What a program depends on beside `f` and the types of its arguments."""

    def __new__(cls, run: Callable[..., Any], settings: Hashable, structure: Any, rest: tuple[Any, ...]):
        return super().__new__(cls, (run, settings, structure, rest))

    def is_hashable(self) -> bool:
        try:
            hash(self)
        except TypeError:
            return False
        return True

    def apply(self, f: Callable[..., Any], arrays: list[Any]) -> tuple[Any, Static]:
        run, settings, structure, rest = self
        remaining = iter(arrays)
        leaves = [next(remaining) if leaf is None else leaf.leaf for leaf in rest]
        found, static = eqx.partition(run(f, settings, *jax.tree.unflatten(structure, leaves)), eqx.is_array)
        return found, Static(static)


_programs: weakref.WeakKeyDictionary[Any, Callable[..., Any]] = weakref.WeakKeyDictionary()


def _program(f: Callable[..., Any]) -> Callable[[_Call, list[Any]], tuple[Any, Static]]:
    if f not in _programs:
        function = weakref.ref(f)  # what the dictionary holds must not hold its key

        def apply(call: _Call, arrays: list[Any]) -> tuple[Any, Static]:
            alive = function()
            assert alive is not None
            return call.apply(alive, arrays)

        _programs[f] = jax.jit(apply, static_argnums=0)
    return _programs[f]
