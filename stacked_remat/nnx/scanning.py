"""`remat_scan`: the calling conventions of `flax.nnx.scan`, on the scan of this
library.

`stacked_remat.scan` takes a function of arrays; a function of NNX modules reads and
writes variables of objects that the caller shares. `_run` translates:

1. `parts.split` turns the arguments into a tree of arrays, each with the axis that
   `in_axes` gives it. An array with `nnx.Carry` is in the carry of the scan, one with
   an int is split over the layers, and one with None is shared by all of them.
2. In the step, `parts.merged` makes modules of the layer's arrays, `f` runs on them,
   and `_split_results` takes the arrays out of its results and of the modules again.
   An array that is another than went in was changed by the layer; only these are
   stacked.
3. After the scan `parts.merged` makes the results, and writes the new state into the
   caller's own modules, which the `nnx.update_context` around all of it remembers.
"""

import dataclasses
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
from .parts import TAG, is_node, merged, named_leaves, split


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
        f: a function, or a method in the body of a class; a decorator without it.
        remat: as in `stacked_remat.scan`; by default about √(2N) carries of N layers.
            `lengths=(a, b)` of Linen's `remat_scan` is
            `ScanCheckpointPolicy(nested=a)`.
        length: the number of layers, where nothing is split that tells it.
        reverse: from the last layer to the first.
        unroll: how many layers one iteration of the loop runs.
        in_axes: for each argument, or a tree of it: an axis to split over the layers,
            `None` to give all of it to every layer, `nnx.Carry` for one argument,
            `nnx.StateAxes` for a module. What a layer writes under `None` is dropped.
        out_axes: where the layers' axis goes in each result, and `nnx.Carry`.
        transform_metadata: `{nnx.PARTITION_NAME: name}` removes that axis from the
            sharding metadata of a layer's variables, and puts it back.

    Raises:
        ValueError, TypeError: as `stacked_remat.scan`; for axes that contradict each
            other, a carry that changes, a bound method and a keyword-only argument.

    Cost: as `stacked_remat.scan`. What a layer does not change is not copied, but all
    of a carried module is a carry. `f` is traced at each call.
    """
    options: dict[str, Any] = {"remat": remat, "reverse": reverse, "unroll": unroll}
    # Refuses an unknown policy, before there is a function.
    scan(_split_results, Axis("layers", 1), **options)
    if length is not None and length < 0:
        raise ValueError(f"length={length} is negative. Give the number of layers.")
    is_single = not isinstance(out_axes, tuple)
    of_results = (out_axes,) if is_single else out_axes
    axes = _Axes(in_axes, of_results, is_single, transform_metadata or {})
    decorate = functools.partial(_decorated, axes, length, options)
    return decorate if f is None else decorate(f)


class _Axes(NamedTuple):
    """The axes of arguments and of results; one of each may be the carry."""

    # `in_axes`: a tuple with an entry for each argument, or one entry for all.
    of_args: Any
    # `out_axes`, always a tuple.
    of_results: tuple[Any, ...]
    # Whether `out_axes` was no tuple, so that the function returns its one result.
    is_single: bool
    # `transform_metadata`; empty if not given.
    metadata: Mapping[str, Any]

    @property
    def carries(self) -> tuple[int, int] | None:
        """The indices of the argument and of the result that are the carry; None if
        there is no carry.
        """
        if nnx.Carry not in self.of_results:
            return None
        of_args = self.of_args
        entries = of_args if isinstance(of_args, tuple) else (of_args,)
        return entries.index(nnx.Carry), self.of_results.index(nnx.Carry)

    def result_names(self, names: list[str]) -> list[str]:
        """Names of the results; that of the carry is the argument's, by `names`."""
        result_names = _numbered("the output", len(self.of_results))
        if self.carries is not None:
            of_args, of_results = self.carries
            result_names[of_results] = names[of_args]
        return result_names


def _numbered(name: str, count: int) -> list[str]:
    return [f"{name}[{number}]" for number in range(count)]


def _decorated(
    axes: _Axes, length: int | None, options: Mapping[str, Any], f: Callable[..., Any]
) -> Callable[..., PyTree]:
    signature = inspect.signature(f)
    # Flax's own scan is built for its checks alone: it refuses axes that contradict
    # each other, and bound methods.
    out_axes = axes.of_results[0] if axes.is_single else axes.of_results
    nnx_scan(f, in_axes=axes.of_args, out_axes=out_axes, graph=True, graph_updates=True)

    @functools.wraps(f)
    def scanned(*args: PyTree, **kwargs: PyTree) -> PyTree:
        names, values = _positional(signature, args, kwargs, axes.of_args)
        # Within it Flax remembers which modules of the caller the results stand for.
        with nnx.update_context(TAG):
            results = _run(f, names, values, axes, length, options)
        return results[0] if axes.is_single else results

    return scanned


@dataclasses.dataclass
class _Traced:
    """What the trace of a layer tells, set when the scan traces its step."""

    # The structure of the split (arguments, results) after a layer.
    structure: Any = None
    # Name and axis of each array in it, in order.
    leaves: list[tuple[str, Any]] = dataclasses.field(default_factory=list)


def _positional(
    signature: inspect.Signature,
    args: tuple[PyTree, ...],
    kwargs: Mapping[str, Any],
    in_axes: Any,
) -> tuple[list[str], tuple[PyTree, ...]]:
    """Names and values of the arguments, all of them by position, as `in_axes` goes.

    Defaults count where `in_axes` has an entry for them.
    """
    bound = signature.bind(*args, **kwargs)
    entries = (in_axes,) if in_axes is nnx.Carry else in_axes
    is_one_for_all = not isinstance(entries, tuple)
    if not is_one_for_all and len(bound.args) < len(entries):
        bound.apply_defaults()
    if bound.kwargs:
        raise TypeError(
            f"remat_scan can't pass {', '.join(bound.kwargs)} by keyword, since in_axes"
            " goes by position. Let the function take it by position, or close"
            " over it."
        )
    names: list[str] = []
    for name, value in bound.arguments.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
            names += _numbered(name, len(value))
        else:
            names.append(name)
    if not is_one_for_all and len(entries) != len(names):
        shown = "Carry" if in_axes is nnx.Carry else repr(in_axes)
        count = f"{len(entries)} arguments"
        if len(entries) == 1:
            count = "one argument"
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
    """Scan `f` over the layers, return its results and update the caller's modules."""
    tree = split(args, axes.of_args, "args")
    # Arrays go to the scan by name, so that its errors say which one is wrong.
    inputs: dict[str, PyTree] = {}
    carry: dict[str, PyTree] = {}
    marked: dict[str, PyTree] = {}
    for name, leaf, axis in named_leaves(names, tree):
        inputs[name] = leaf
        if axis is nnx.Carry:
            carry[name] = leaf
        elif axis is None:
            marked[name] = shared(leaf)
        else:
            leaf = _layers_first(name, leaf, axis)
            marked[name] = per_layer(leaf)
            length = leaf.shape[0] if length is None else length
    if length is None:
        raise ValueError(
            "remat_scan was given nothing to split, so the number of layers is unknown."
            " Pass length=, or an int in in_axes."
        )
    layers = str(axes.metadata.get(nnx.PARTITION_NAME) or "layers")
    traced = _Traced()
    structure = jax.tree.structure(tree)
    step = _step(f, names, [*inputs], structure, axes, traced)
    scanned = scan(step, Axis(layers, length), **options)
    # From here the carry is the last one; outputs have the layers in front.
    carry, stacked = scanned(carry, **marked)
    # An array that no layer changes is the one that went in.
    values = inputs | carry
    leaves = []
    for name, axis in traced.leaves:
        if name in stacked:
            values[name] = jnp.moveaxis(stacked[name], 0, axis)
        if name not in values:
            raise ValueError(
                f"The function adds {name}, and what a layer writes under axis None is"
                " dropped. Give it an axis of its own in nnx.StateAxes."
            )
        leaves.append(values[name])
    after = jax.tree.unflatten(traced.structure, leaves)
    _, results = merged(after, is_inner=False)
    return results


def _step(
    f: Callable[..., Any],
    names: list[str],
    leaf_names: list[str],
    structure: Any,
    axes: _Axes,
    traced: _Traced,
) -> Callable[..., tuple[dict[str, PyTree], dict[str, PyTree]]]:
    """The step of the scan, a function of one layer's arrays by name.

    Args:
        f: the user's function.
        names: of the arguments.
        leaf_names: of the arrays in the split arguments, in order.
        structure: of the split arguments.
        axes: of arguments and results.
        traced: filled when the step runs.
    """

    def step(
        carry: dict[str, PyTree], /, **arrays: PyTree
    ) -> tuple[dict[str, PyTree], dict[str, PyTree]]:
        inputs = carry | arrays
        leaves = [inputs[name] for name in leaf_names]
        layer = jax.tree.unflatten(structure, leaves)
        layer = merged(layer, is_inner=True, metadata=axes.metadata)
        left, results = _split_results(layer, f(*layer), axes)
        traced.structure = jax.tree.structure((left, results))
        traced.leaves = []
        carry = {}
        changed = {}
        all_names = [*names, *axes.result_names(names)]
        for name, leaf, axis in named_leaves(all_names, (*left, *results)):
            traced.leaves.append((name, axis))
            if axis is nnx.Carry:
                carry[name] = leaf
            # A variable that the layer did not write has the very array that went in.
            elif axis is not None and leaf is not inputs.get(name):
                changed[name] = leaf
        return carry, changed

    return step


def _split_results(
    args: tuple[PyTree, ...], results: PyTree, axes: _Axes
) -> tuple[PyTree, PyTree]:
    """What is left after a layer, split: its arguments, and its results.

    Of the arguments modules and variables alone remain, whose state may have changed,
    without the carry, which is among the results.
    """
    if axes.is_single:
        results = (results,)
    count = len(axes.of_results)
    is_tuple = isinstance(results, tuple)
    if not is_tuple or len(results) != count:
        returned = f"{len(results)} results" if is_tuple else type(results).__name__
        raise ValueError(
            f"out_axes has {count} entries, {axes.of_results!r}, and the"
            f" function returned {returned}. Return a tuple with one for each, or write"
            " out_axes=nnx.Carry for a carry alone."
        )
    left = jax.tree.map(
        lambda leaf: leaf if is_node(leaf) else None, args, is_leaf=is_node
    )
    if axes.carries is not None:
        of_args, of_results = axes.carries
        _check_references(args[of_args], results[of_results])
        # Else it would be twice in the carry of the scan.
        without_carry = [*left]
        without_carry[of_args] = None
        left = tuple(without_carry)
    # One call, so that a module that is in both stays one object.
    axes_of_both = axes.of_args, axes.of_results
    return split((left, results), axes_of_both, "(args, results)", axes.metadata)


def _check_references(before: PyTree, after: PyTree) -> None:
    """Refuse a carry with other modules or variables than went in, as `nnx.scan`."""

    def nodes(tree: PyTree) -> dict[str, int]:
        identities = {}
        for path, leaf in jtu.tree_leaves_with_path(tree, is_leaf=is_node):
            if is_node(leaf):
                identities[jtu.keystr(path)] = id(leaf)
        return identities

    # Paths whose object is another, or that only one of both has.
    differences = nodes(before).items() ^ nodes(after).items()
    for path, _ in sorted(differences):
        raise ValueError(
            f"Carry references must be the same between iterations: carry{path} is"
            " another object than went in. Change the values of its variables instead."
        )


def _layers_first(name: str, leaf: Any, axis: int) -> Any:
    """An array with the axis of the layers moved to the front."""
    # A Python number in a tree of arrays has no dimension.
    rank = getattr(leaf, "ndim", 0)
    if not -rank <= axis < rank:
        raise ValueError(
            f"Expected an array to split along axis {axis}: {name} is a"
            f" {type(leaf).__name__} of {rank} dimensions. Give it axis None, or a"
            " dimension of the layers (for Rngs, nnx.split_rngs)."
        )
    return jnp.moveaxis(leaf, axis, 0) if axis % rank else leaf
