"""Fold, scan and map over a named axis.

These take a function, the *step*, which is given a part of the arguments at each place
of the axis. `_called` makes a `FoldCall` of it and of the options; `scan_layers` in
`layers.py` divides the arguments into arrays that are split over the axis and arrays
that all steps share, and runs the step on them under the checkpoint *policy*. Methods
of stacks (`Stacked.fold`) do the same in `_block_foldable.py`.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from haliax import Axis
from haliax.axis import AxisSelector

from .._policy import ScanCheckpointSpec, resolve_policy
from .._static import PyTree
from .arguments import Caller, argument_namer
from .checks import axis_or_name, describe
from .lax_arguments import check_arrays, check_steps, number_of_steps, unroll_of_jax
from .layers import scan_layers
from .marks import IsScanned, check_unmarked, is_named_or_shaped_array, per_layer
from .step import FoldCall, Verb
from .until import Until, check_until

T = TypeVar("T")
Y = TypeVar("Y")


def scan(
    f: Callable[..., tuple[T, Y]],
    axis: AxisSelector | int,
    *,
    remat: ScanCheckpointSpec = False,
    reverse: bool = False,
    unroll: int | bool = 1,
    is_scanned: IsScanned = is_named_or_shaped_array,
    until: Until | None = None,
) -> Callable[..., tuple[T, Y]]:
    """Apply `f` along an axis, from carry to carry, and stack its outputs.

    `scan(f, axis)(init, *args, **kwargs)` equals

    ```python
    carry, outputs = init, []
    for i in range(axis.size):
        args_i = [arg[axis, i] for arg in args]
        kwargs_i = {name: kwargs[name][axis, i] for name in kwargs}
        carry, output = f(carry, *args_i, **kwargs_i)
        outputs.append(output)
    return carry, hax.stack(axis, outputs)
    ```

    where only named arrays with the axis and plain arrays of at least one dimension are
    indexed (plain arrays along their first dimension); everything else is passed to
    every layer unchanged. `shared(x)` and `per_layer(x)` choose for one argument, or
    for a part of one.

    Args:
        f: takes the carry and one layer of the arguments; returns the next carry and an
            output, both trees.
        axis: an `Axis`, the name of an axis that one of the arguments has, or a number:
            an axis of this size named `layers`.
        remat: what the backward pass keeps, offloads and recomputes;
            `ScanCheckpointPolicy` says the costs.
        reverse: go from the last layer to the first. Outputs keep the order of the
            axis.
        unroll: how many layers one iteration runs; `True` for all, which alone counts
            where layers are cut.
        is_scanned: which of the arrays without a mark may be split: a bool or a
            predicate of a leaf.
        until: takes a carry and returns one bool; the scan stops at the first carry for
            which it is True. Outputs of layers that did not run are zeros. Memory is
            that of all layers. Time is that of those that ran, backward too; within
            `jax.vmap`, until all examples are done: steps of finished ones are given
            the first carry and the first step's inputs, to no effect, so each example
            has a copy of a step's inputs. Reverse mode of reverse mode goes through all
            layers.

    Returns:
        A function of the initial carry and the arguments, which returns the final
        carry, with the shapes of `init`, and the outputs, with the axis in front.

    Raises:
        ValueError: for inputs of different lengths (each path and size is named), an
            axis of unknown size, an `f` that returns no pair, a carry that changes its
            structure, axes, shape or dtype, a single random key that is not marked as
            shared, or `until` under a policy that offloads or that drops carries.
        TypeError: for an axis that is none of these, for marks in the carry, and for an
            `until` that does not return one bool.

    Cost: `f` once for each step, and again as the policy says. The program does not
    grow with the axis.
    """
    return _called("scan", f, axis, remat, until, reverse, unroll, is_scanned)


def _check_function(f: Any, loop: str) -> None:
    if not callable(f):
        raise TypeError(f"{loop} takes a function first; got {describe(f)}.")


def _called(
    verb: Verb,
    f: Callable,
    axis: Any,
    remat: ScanCheckpointSpec,
    until: Until | None,
    reverse: bool,
    unroll: int | bool,
    is_scanned: IsScanned,
) -> Callable[..., Any]:
    """The function `(init, *args, **kwargs)` that runs the loop; `init` of a `map` is
    None.
    """
    _check_function(f, verb)
    if until is not None:
        check_until(until)
    # The first parameter of a fold or scan takes the carry, which is no argument here
    caller = Caller(verb, argument_namer(f, skip=0 if verb == "map" else 1))
    call = FoldCall(
        caller,
        verb,
        fn=f,
        owner=f,
        axis=axis_or_name(axis, verb),
        policy=resolve_policy(remat),
        until=until,
        reverse=reverse,
        unroll=unroll,
        is_scanned=is_scanned,
    )

    # `init` is positional, so that an argument of the step may have this name
    def run(init: PyTree, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        check_unmarked(init)
        return call.result(*scan_layers(call, init, (args, kwargs)))

    return run


def lax_scan(
    f: Callable[[Any, Any], tuple[PyTree, PyTree]],
    init: PyTree,
    xs: PyTree = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    _split_transpose: bool = False,
    *,
    remat: ScanCheckpointSpec = False,
) -> tuple[PyTree, PyTree]:
    """`jax.lax.scan` with a checkpoint policy, for code that takes a `scan_fn`.

    ```python
    simulate(scan_fn=functools.partial(stacked_remat.lax_scan, remat="nested"))
    ```

    Args:
        remat: as in `scan`, with its costs. Other arguments are those of
            `jax.lax.scan`; `_split_transpose` has no effect. A length that is
            symbolic (`jax.export.symbolic_shape`) can't be cut into segments.

    Returns:
        The final carry and the stacked outputs, of the dtypes and weak types of
        `jax.lax.scan`.

    Raises:
        ValueError: `xs` has no array and there is no `length`; they disagree; a leaf of
            `xs` has no leading axis; `unroll` is negative; `remat` cuts a symbolic
            length; or as `scan`.
        TypeError: `length` or `unroll` is no number, or a leaf of the carry or of the
            outputs is no array.
    """
    _check_function(f, "lax_scan")
    check_steps(xs, length)
    # Without a length there is only the axis's name: the arrays in `xs` tell its size
    axis = "steps" if length is None else Axis("steps", number_of_steps(length))
    options: Any = {"reverse": bool(reverse), "unroll": unroll_of_jax(unroll)}
    run = scan(f, axis, remat=remat, **options)
    check_arrays(init, "The carry")
    carry, ys = run(init, per_layer(xs))
    check_arrays(ys, "The output")
    return carry, ys


def fold(
    f: Callable[..., T],
    axis: AxisSelector | int,
    *,
    remat: ScanCheckpointSpec = False,
    reverse: bool = False,
    unroll: int | bool = 1,
    is_scanned: IsScanned = is_named_or_shaped_array,
    until: Until | None = None,
) -> Callable[..., T]:
    """Apply `f` along an axis, from carry to carry.

    `fold(f, axis)(init, *args, **kwargs)` equals

    ```python
    carry = init
    for i in range(axis.size):
        if until is not None and until(carry):
            break
        args_i = [arg[axis, i] for arg in args]
        kwargs_i = {name: kwargs[name][axis, i] for name in kwargs}
        carry = f(carry, *args_i, **kwargs_i)
    return carry
    ```

    with arguments, costs and errors as in `scan`.
    """
    return _called("fold", f, axis, remat, until, reverse, unroll, is_scanned)


def map(
    f: Callable[..., Y],
    axis: AxisSelector | int,
    *,
    remat: ScanCheckpointSpec = False,
    reverse: bool = False,
    unroll: int | bool = 1,
    is_mapped: IsScanned = is_named_or_shaped_array,
) -> Callable[..., Y]:
    """Apply `f` to each part of its arguments along an axis, one after the other.

    `map(f, axis)(*args, **kwargs)` equals `hax.stack(axis, [f(*(arg[axis, i] for arg in
    args), ...) for i in range(axis.size)])`. It holds one part's internals at a time,
    where `haliax.vmap` holds all and is faster. Arguments and errors as in `scan`.
    """
    run = _called("map", f, axis, remat, None, reverse, unroll, is_mapped)
    return functools.partial(run, None)
