"""`remat_scan`: the calling conventions of `flax.nnx.scan`, on the scan of this library."""

import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from flax import nnx
from flax.nnx import scan as nnx_scan
from haliax import Axis

from .. import ScanCheckpointSpec, per_layer, scan, shared
from .._static import PyTree
from .parts import TAG, change_metadata, is_node, merged, named_leaves, split

_NO_METADATA: Mapping[str, Any] = MappingProxyType({})


def remat_scan(
    f: Callable[..., Any] | None = None,
    *,
    remat: ScanCheckpointSpec = "nested",
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    in_axes: Any = (nnx.Carry, 0),
    out_axes: Any = (nnx.Carry, 0),
    transform_metadata: Mapping[str, Any] = _NO_METADATA,
) -> PyTree:
    """`flax.nnx.scan`, with a choice of what the backward pass keeps.

    ```python
    @remat_scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def forward(x, layer):
        return layer(x)

    y = forward(x, layers)
    ```

    Results, gradients and the state of modules after the call are those of `nnx.scan` with the same
    arguments and `graph_updates=True`, its default; docs/nnx.md lists what differs. State that a layer
    changes (`BatchStat`, `RngCount`, new `Intermediate`s) is an output of the scan, written once to the
    caller's modules. A layer that runs again for the backward pass reads what it read the first time: its
    dropout draws the same numbers.

    Args:
        f: a function, or a method in the body of a class. Without it, `remat_scan` is a decorator.
        remat: as in `stacked_remat.scan`; by default `"nested"`, about √(2N) carries of N layers.
            `lengths=(a, b)` of Linen's `remat_scan` is `ScanCheckpointPolicy(nested=a)`.
        length: the number of layers, where nothing is split that tells it.
        reverse: from the last layer to the first.
        unroll: how many layers one iteration of the loop runs.
        in_axes: for each argument, or a tree of it: an axis to split over the layers, `None` to give all of
            it to every layer, `nnx.Carry` for one argument, `nnx.StateAxes` for a module. What a layer writes
            to state under `None` is dropped.
        out_axes: where the layers' axis goes in each result, and `nnx.Carry` for the carry.
        transform_metadata: `{nnx.PARTITION_NAME: name}` removes that axis from the sharding metadata of the
            variables that a layer gets, and puts it back.

    Returns:
        A function of the arguments of `f`, or a decorator.

    Raises:
        ValueError: for axes that contradict each other, arguments of different lengths, a negative length, a
            carry that changes, a bound method, and where `stacked_remat.scan` does.
        TypeError: for a keyword-only argument, and axes of another kind.

    Cost: as `stacked_remat.scan`. What a layer does not change is not copied, but all of a carried module is
    a carry. `f` is traced at each call.
    """
    options: dict[str, Any] = {"remat": remat, "reverse": reverse, "unroll": unroll}
    scan(_split_results, Axis("layers", 1), **options)  # refuses an unknown policy
    axes = _Axes(in_axes, out_axes, transform_metadata)
    if length is not None and length < 0:
        raise ValueError(f"length={length} is negative. Give the number of layers.")

    def decorated(f: Callable[..., Any]) -> Callable[..., Any]:
        if not callable(f):
            raise TypeError(f"remat_scan takes a function; got a {type(f).__name__}.")
        # Refuses axes that contradict each other, and bound methods.
        nnx_scan(f, in_axes=in_axes, out_axes=out_axes, graph=True, graph_updates=True)

        @functools.wraps(f)
        def scanned(*args: PyTree, **kwargs: PyTree) -> PyTree:
            names, given = _positional(f, args, kwargs, in_axes)
            with nnx.update_context(TAG):
                return _run(f, names, given, axes, length, options)

        return scanned

    return decorated if f is None else decorated(f)


class _Axes:
    """What becomes of arguments and of results, of which one each may be the carry."""

    def __init__(self, in_axes: Any, out_axes: Any, metadata: Mapping[str, Any]):
        self.has_one_result = not isinstance(out_axes, tuple)
        self.in_axes, self.metadata = in_axes, metadata
        self.out_axes = (out_axes,) if self.has_one_result else out_axes
        self.carry_in, self.carry_out = _carry_of(in_axes), _carry_of(out_axes)

    @property
    def name(self) -> str:
        return str(self.metadata.get(nnx.PARTITION_NAME) or "layers")

    def take_carry(self, result: PyTree) -> tuple[Any, tuple[PyTree, ...]]:
        """The carry, and what `f` returns, as a tuple, without it."""
        results = (result,) if self.has_one_result else result
        if not isinstance(results, tuple) or len(results) != len(self.out_axes):
            is_tuple = isinstance(result, tuple)
            found = f"{len(result)} results" if is_tuple else type(result).__name__
            alone = "" if is_tuple else ", or write out_axes=nnx.Carry for a carry alone"
            raise ValueError(
                f"out_axes has {len(self.out_axes)} entries, {self.out_axes!r}, and the function returned "
                f"{found}. Return a tuple with one for each{alone}."
            )
        if self.carry_out is None:
            return None, results
        return results[self.carry_out], _replaced(results, self.carry_out, None)

    def put_carry(self, carry: PyTree, results: tuple[PyTree, ...]) -> PyTree:
        """What `nnx.scan` returns: the inverse of `take_carry`."""
        results = results if self.carry_out is None else _replaced(results, self.carry_out, carry)
        return results[0] if self.has_one_result else results


def _carry_of(axes: Any) -> int | None:
    entries = axes if isinstance(axes, tuple) else (axes,)
    return next((number for number, axis in enumerate(entries) if axis is nnx.Carry), None)


def _replaced(values: tuple[PyTree, ...], index: int, value: PyTree) -> tuple[PyTree, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _positional(
    f: Callable[..., Any], args: tuple[PyTree, ...], kwargs: Mapping[str, Any], in_axes: Any
) -> tuple[list[str], tuple[PyTree, ...]]:
    """Names and values of the arguments."""
    bound = inspect.signature(f).bind(*args, **kwargs)
    if isinstance(in_axes, tuple) and len(bound.args) < len(in_axes):
        bound.apply_defaults()
    if bound.kwargs:
        raise TypeError(
            f"remat_scan can't pass {', '.join(bound.kwargs)} by keyword, since in_axes goes by position. "
            "Let the function take it by position, or close over it."
        )
    names: list[str] = []
    for name, value in bound.arguments.items():
        is_variadic = bound.signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
        names += [f"{name}[{i}]" for i in range(len(value))] if is_variadic else [name]
    if in_axes is nnx.Carry and len(bound.args) != 1:
        raise ValueError(
            "When in_axes=Carry, the function must take exactly one argument; it was given "
            f"{', '.join(names) or 'none'}. Write a tuple with an entry for each."
        )
    if isinstance(in_axes, tuple) and len(in_axes) != len(bound.args):
        raise ValueError(
            f"in_axes has {len(in_axes)} entries, {in_axes!r}, and the function was given {len(bound.args)} "
            f"arguments: {', '.join(names)}. Write one for each."
        )
    return names, bound.args


def _run(
    f: Callable[..., Any],
    names: list[str],
    args: tuple[PyTree, ...],
    axes: _Axes,
    length: int | None,
    options: Mapping[str, Any],
) -> PyTree:
    tree = split(args, axes.in_axes, "args")
    structure, entries = jax.tree.structure(tree), list(named_leaves(names, tree))
    given = {name: leaf for name, leaf, _ in entries}
    carry = {name: leaf for name, leaf, axis in entries if axis is nnx.Carry}
    sliced = {name: _layers_first(name, leaf, axis) for name, leaf, axis in entries if isinstance(axis, int)}
    marked = {name: shared(leaf) for name, leaf, axis in entries if axis is None}
    marked |= {name: per_layer(leaf) for name, leaf in sliced.items()}
    found: PyTree = None

    def step(carry: dict[str, PyTree], /, **arrays: PyTree) -> tuple[dict[str, PyTree], dict[str, PyTree]]:
        nonlocal found
        inputs = carry | arrays
        layer = jax.tree.unflatten(structure, [inputs[name] for name in given])
        layer = merged(change_metadata(layer, nnx.spmd.remove_axis, axes.metadata), is_inner=True)
        results = _split_results(layer, _called(f, layer, names), axes)
        outputs = list(named_leaves([*names, "the output"], (*results[0], results[1])))
        found = jax.tree.structure(results), [(name, axis) for name, _, axis in outputs]
        new = [(name, leaf) for name, leaf, axis in outputs if isinstance(axis, int)]
        changed = {name: leaf for name, leaf in new if leaf is not inputs.get(name)}
        return {name: leaf for name, leaf, axis in outputs if axis is nnx.Carry}, changed

    carry, stacked = scan(step, Axis(axes.name, _size(sliced, length)), **options)(carry, **marked)

    def leaf(name: str, axis: Any) -> PyTree:
        if axis is nnx.Carry:
            return carry[name]
        if name in stacked:
            return jnp.moveaxis(stacked[name], 0, axis)
        if name not in given:
            raise ValueError(
                f"The function adds {name}, and what a layer writes under axis None is dropped. Give it an "
                "axis of its own in nnx.StateAxes."
            )
        return given[name]

    treedef, outputs = found
    args_out, result = merged(
        jax.tree.unflatten(treedef, [leaf(*output) for output in outputs]), is_inner=False
    )
    return axes.put_carry(None if axes.carry_in is None else args_out[axes.carry_in], result)


def _called(f: Callable[..., Any], args: tuple[PyTree, ...], names: list[str]) -> PyTree:
    """What the function returns; an error notes that an argument is a list, of layers perhaps."""
    try:
        return f(*args)
    except (AttributeError, TypeError) as error:
        for name, arg in zip(names, args, strict=True):
            if isinstance(arg, list | tuple | nnx.List) and any(isinstance(part, nnx.Module) for part in arg):
                error.add_note(f"{name} is a list of modules. To scan over them stack their nnx.state.")
        raise


def _split_results(args: tuple[PyTree, ...], result: PyTree, axes: _Axes) -> tuple[PyTree, PyTree]:
    """The arguments after a layer, with the new carry and without arrays, and the rest of the result."""
    carry, rest = axes.take_carry(result)
    left = jax.tree.map(lambda leaf: leaf if is_node(leaf) else None, args, is_leaf=is_node)
    if axes.carry_in is not None:
        if axes.has_one_result and isinstance(carry, tuple) and not isinstance(args[axes.carry_in], tuple):
            raise ValueError(
                f"out_axes=nnx.Carry is for a carry alone, and the function returned {len(carry)} results. "
                "Write an entry for each: out_axes=(nnx.Carry, 0)."
            )
        _check_references(args[axes.carry_in], carry)
        left = _replaced(left, axes.carry_in, carry)
    found = split((left, rest), (axes.in_axes, axes.out_axes), "(args, results)")
    return change_metadata(found, nnx.spmd.add_axis, axes.metadata)


def _check_references(before: PyTree, after: PyTree) -> None:
    """Refuse a carry with other modules or variables than went in."""
    old, new = (
        {path: leaf for path, leaf in jtu.tree_leaves_with_path(tree, is_leaf=is_node) if is_node(leaf)}
        for tree in (before, after)
    )
    for path in {**old, **new}:
        if old.get(path) is not new.get(path):
            raise ValueError(
                f"Carry references must be the same between iterations: carry{jtu.keystr(path)} is another "
                "object than went in. Change the values of its variables instead."
            )


def _layers_first(name: str, leaf: Any, axis: int) -> Any:
    if not isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        raise ValueError(
            f"Expected an array to split along axis {axis}: {name} is a {type(leaf).__name__}. Give it axis "
            "None."
        )
    if not -leaf.ndim <= axis < leaf.ndim:
        raise ValueError(
            f"{name} has {leaf.ndim} dimensions and can't be split along axis {axis}. Give it axis None, or "
            "a dimension of the layers (for Rngs, nnx.split_rngs)."
        )
    return jnp.moveaxis(leaf, axis, 0) if axis % leaf.ndim else leaf  # type: ignore[arg-type]


def _size(sliced: Mapping[str, Any], length: int | None) -> int:
    if length is not None:
        other = next(((name, leaf) for name, leaf in sliced.items() if leaf.shape[0] != length), None)
        if other is not None:
            raise ValueError(
                f"length={length}, and {other[0]} has {other[1].shape[0]} layers. Leave length out, or give "
                "that number."
            )
        return length
    if not sliced:
        raise ValueError(
            "remat_scan was given nothing to split, so the number of layers is unknown. Pass length=, or an "
            "int in in_axes."
        )
    return next(iter(sliced.values())).shape[0]
