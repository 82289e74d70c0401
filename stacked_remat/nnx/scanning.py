"""`remat_scan`: the calling conventions of `flax.nnx.scan`, on the scan of this
library.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from flax import nnx
from flax.nnx import scan as nnx_scan
from haliax import Axis

from .. import ScanCheckpointSpec, per_layer, scan, shared
from .._static import PyTree
from .parts import TAG, change_metadata, is_node, merged, named_leaves, split


def remat_scan(
    f: Callable[..., Any] | None = None,
    *,
    remat: ScanCheckpointSpec = "nested",
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    in_axes: Any = (nnx.Carry, 0),
    out_axes: Any = (nnx.Carry, 0),
    transform_metadata: Mapping[str, Any] | None = None,
) -> PyTree:
    """`flax.nnx.scan`, with a choice of what the backward pass keeps.

    ```python
    @remat_scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def forward(x, layer):
        return layer(x)

    y = forward(x, layers)
    ```

    Results, gradients and the state of modules after the call are those of `nnx.scan`
    with the same arguments and `graph_updates=True`, its default; docs/nnx.md lists
    what differs. State that a layer changes (`BatchStat`, `RngCount`, new
    `Intermediate`s) is an output of the scan, written once to the caller's modules. A
    layer that runs again for the backward pass reads what it read the first time: its
    dropout draws the same numbers.

    Args:
        f: a function, or a method in the body of a class. Without it, `remat_scan` is a
            decorator.
        remat: as in `stacked_remat.scan`; by default `"nested"`, about √(2N) carries of
            N layers. `lengths=(a, b)` of Linen's `remat_scan` is
            `ScanCheckpointPolicy(nested=a)`.
        length: the number of layers, where nothing is split that tells it.
        reverse: from the last layer to the first.
        unroll: how many layers one iteration of the loop runs.
        in_axes: for each argument, or a tree of it: an axis to split over the layers,
            `None` to give all of it to every layer, `nnx.Carry` for one argument,
            `nnx.StateAxes` for a module. What a layer writes to state under `None` is
            dropped.
        out_axes: where the layers' axis goes in each result, and `nnx.Carry` for the
            carry.
        transform_metadata: `{nnx.PARTITION_NAME: name}` removes that axis from the
            sharding metadata of the variables that a layer gets, and puts it back.

    Returns:
        A function of the arguments of `f`, or a decorator.

    Raises:
        ValueError: for axes that contradict each other, arguments of different lengths,
            a negative length, a carry that changes, a bound method, and where
            `stacked_remat.scan` does.
        TypeError: for a keyword-only argument, and axes of another kind.

    Cost: as `stacked_remat.scan`. What a layer does not change is not copied, but all
    of a carried module is a carry. `f` is traced at each call.
    """
    options: dict[str, Any] = {"remat": remat, "reverse": reverse, "unroll": unroll}
    scan(_split_results, Axis("layers", 1), **options)  # refuses an unknown policy
    axes = _Axes(
        in_axes,
        out_axes if isinstance(out_axes, tuple) else (out_axes,),
        transform_metadata or {},
    )
    if length is not None and length < 0:
        raise ValueError(f"length={length} is negative. Give the number of layers.")

    def decorated(f: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(f)
        # Refuses axes that contradict each other, and bound methods.
        nnx_scan(f, in_axes=in_axes, out_axes=out_axes, graph=True, graph_updates=True)

        @functools.wraps(f)
        def scanned(*args: PyTree, **kwargs: PyTree) -> PyTree:
            names, given = _positional(signature, args, kwargs, in_axes)
            run = f if isinstance(out_axes, tuple) else lambda *args: (f(*args),)
            with nnx.update_context(TAG):
                results = _run(run, names, given, axes, length, options)
            return results if isinstance(out_axes, tuple) else results[0]

        return scanned

    return decorated if f is None else decorated(f)


class _Axes(NamedTuple):
    """What becomes of arguments and of results, of which one each may be the carry."""

    of_args: Any
    of_results: tuple[Any, ...]
    metadata: Mapping[str, Any]

    @property
    def carries(self) -> tuple[int, int] | None:
        """The numbers of the argument and of the result that are the carry."""
        if nnx.Carry not in self.of_results:
            return None
        entries = self.of_args if isinstance(self.of_args, tuple) else (self.of_args,)
        return entries.index(nnx.Carry), self.of_results.index(nnx.Carry)


def _replaced(
    values: tuple[PyTree, ...], index: int, value: PyTree
) -> tuple[PyTree, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _positional(
    signature: inspect.Signature,
    args: tuple[PyTree, ...],
    kwargs: Mapping[str, Any],
    in_axes: Any,
) -> tuple[list[str], tuple[PyTree, ...]]:
    """Names and values of the arguments."""
    bound = signature.bind(*args, **kwargs)
    entries = (in_axes,) if in_axes is nnx.Carry else in_axes
    if isinstance(entries, tuple) and len(bound.args) < len(entries):
        bound.apply_defaults()
    if bound.kwargs:
        raise TypeError(
            f"remat_scan can't pass {', '.join(bound.kwargs)} by keyword, since in_axes"
            " goes by position. Let the function take it by position, or close"
            " over it."
        )
    names: list[str] = []
    for name, value in bound.arguments.items():
        is_variadic = (
            bound.signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
        )
        names += [f"{name}[{i}]" for i in range(len(value))] if is_variadic else [name]
    if isinstance(entries, tuple) and len(entries) != len(names):
        shown = "Carry" if in_axes is nnx.Carry else repr(in_axes)
        count = "one argument" if len(entries) == 1 else f"{len(entries)} arguments"
        raise ValueError(
            f"When in_axes={shown}, the function must take exactly {count}; it was"
            f" given {', '.join(names) or 'none'}. Write a tuple with an entry for"
            " each."
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
    tree = split(args, axes.of_args, "args")
    structure, entries = jax.tree.structure(tree), list(named_leaves(names, tree))
    given = {name: leaf for name, leaf, _ in entries}
    carry = {name: leaf for name, leaf, axis in entries if axis is nnx.Carry}
    sliced = {
        name: _layers_first(name, leaf, axis)
        for name, leaf, axis in entries
        if isinstance(axis, int)
    }
    marked = {name: shared(leaf) for name, leaf, axis in entries if axis is None}
    marked |= {name: per_layer(leaf) for name, leaf in sliced.items()}
    found: PyTree = None

    def step(
        carry: dict[str, PyTree], /, **arrays: PyTree
    ) -> tuple[dict[str, PyTree], dict[str, PyTree]]:
        nonlocal found
        inputs = carry | arrays
        layer = jax.tree.unflatten(structure, [inputs[name] for name in given])
        layer = merged(
            change_metadata(layer, nnx.spmd.remove_axis, axes.metadata), is_inner=True
        )
        results = _split_results(layer, f(*layer), axes)
        outputs = list(named_leaves([*names, "the output"], (*results[0], results[1])))
        found = jax.tree.structure(results), [(name, axis) for name, _, axis in outputs]
        new = [(name, leaf) for name, leaf, axis in outputs if isinstance(axis, int)]
        changed = {name: leaf for name, leaf in new if leaf is not inputs.get(name)}
        return {
            name: leaf for name, leaf, axis in outputs if axis is nnx.Carry
        }, changed

    if length is None and not sliced:
        raise ValueError(
            "remat_scan was given nothing to split, so the number of layers is unknown."
            " Pass length=, or an int in in_axes."
        )
    size = next(iter(sliced.values())).shape[0] if length is None else length
    name = str(axes.metadata.get(nnx.PARTITION_NAME) or "layers")
    carry, stacked = scan(step, Axis(name, size), **options)(carry, **marked)

    def leaf(name: str, axis: Any) -> PyTree:
        if axis is nnx.Carry:
            return carry[name]
        if name in stacked:
            return jnp.moveaxis(stacked[name], 0, axis)
        if name not in given:
            raise ValueError(
                f"The function adds {name}, and what a layer writes under axis None is"
                " dropped. Give it an axis of its own in nnx.StateAxes."
            )
        return given[name]

    treedef, outputs = found
    args_out, results = merged(
        jax.tree.unflatten(treedef, [leaf(*output) for output in outputs]),
        is_inner=False,
    )
    if axes.carries is None:
        return results
    of_args, of_results = axes.carries
    return _replaced(results, of_results, args_out[of_args])


def _split_results(
    args: tuple[PyTree, ...], results: PyTree, axes: _Axes
) -> tuple[PyTree, PyTree]:
    """The arguments after a layer, with the new carry and without arrays, and the rest
    of the results.
    """
    if not isinstance(results, tuple) or len(results) != len(axes.of_results):
        found = (
            f"{len(results)} results"
            if isinstance(results, tuple)
            else type(results).__name__
        )
        raise ValueError(
            f"out_axes has {len(axes.of_results)} entries, {axes.of_results!r}, and the"
            f" function returned {found}. Return a tuple with one for each, or write"
            " out_axes=nnx.Carry for a carry alone."
        )
    left = jax.tree.map(
        lambda leaf: leaf if is_node(leaf) else None, args, is_leaf=is_node
    )
    if axes.carries is not None:
        of_args, of_results = axes.carries
        _check_references(args[of_args], results[of_results])
        left = _replaced(left, of_args, results[of_results])
        results = _replaced(results, of_results, None)
    found = split((left, results), (axes.of_args, axes.of_results), "(args, results)")
    return change_metadata(found, nnx.spmd.add_axis, axes.metadata)


def _check_references(before: PyTree, after: PyTree) -> None:
    """Refuse a carry with other modules or variables than went in."""

    def nodes(tree: PyTree) -> dict[str, int]:
        leaves = jtu.tree_leaves_with_path(tree, is_leaf=is_node)
        return {jtu.keystr(path): id(leaf) for path, leaf in leaves if is_node(leaf)}

    for path, _ in sorted(nodes(before).items() ^ nodes(after).items()):
        raise ValueError(
            f"Carry references must be the same between iterations: carry{path} is"
            " another object than went in. Change the values of its variables instead."
        )


def _layers_first(name: str, leaf: Any, axis: int) -> Any:
    rank = getattr(leaf, "ndim", 0)
    if not -rank <= axis < rank:
        raise ValueError(
            f"Expected an array to split along axis {axis}: {name} is a"
            f" {type(leaf).__name__} of {rank} dimensions. Give it axis None, or a"
            " dimension of the layers (for Rngs, nnx.split_rngs)."
        )
    return jnp.moveaxis(leaf, axis, 0) if axis % rank else leaf
