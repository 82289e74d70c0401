"""Fold, scan and map over a named axis.

The arguments are divided into arrays that are split over the axis and arrays that all layers share. That
leaves a step on raw arrays, which `layers.py` runs under the checkpoint policy. `Stacked` uses this too.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import Axis
from haliax.axis import AxisSelector

from .._policy import ScanCheckpointSpec, resolve_policy
from .._static import Static
from .arguments import Caller, argument_namer
from .checks import axis_or_name, check_reverse, check_unroll
from .layer_axis import split_tree
from .layers import Layers, scan_rolled
from .marks import IsScanned, check_unmarked, is_array, is_named_or_shaped_array, per_layer
from .stacking import name_stacked
from .stopping import Until, is_done, stopping

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
        carry, output = f(carry, *[arg[axis, i] for arg in args], **{k: kwargs[k][axis, i] for k in kwargs})
        outputs.append(output)
    return carry, hax.stack(axis, outputs)
    ```

    where only named arrays with the axis and plain arrays of at least one dimension are indexed (plain arrays
    along their first dimension); everything else is passed to every layer unchanged. `shared(x)` and
    `per_layer(x)` choose for one argument, or for a part of one. Compile time does not grow with the axis.

    Args:
        f: takes the carry and one layer of the arguments; returns the next carry and an output, both trees.
        axis: an `Axis`, the name of an axis that one of the arguments has, or a number: an axis of this size
            named `layers`.
        remat: what the backward pass keeps, offloads and recomputes; see `ScanCheckpointPolicy` for the
            costs.
        reverse: go from the last layer to the first. Outputs keep the order of the axis.
        unroll: how many layers one iteration of the loop runs; `True` for all.
        is_scanned: which of the arrays without a mark may be split: a bool or a predicate of a leaf.
        until: takes a carry and returns one bool; the scan stops at the first carry for which it is True.
            Outputs of layers that did not run are zeros. Memory is that of all layers. Time is that of those
            that ran, backward too; within `jax.vmap`, until all examples are done, while finished ones stay
            as they are. Reverse mode of reverse mode goes through all layers.

    Returns:
        A function of the initial carry and the arguments, which returns the final carry, with the shapes of
        `init`, and the outputs, with the axis in front.

    Raises:
        ValueError: for inputs of different lengths (each path and size is named), an axis of unknown size, an
            `f` that returns no pair, a carry that changes its structure, axes, shape or dtype, a single
            random key that is not marked as shared, or `until` under a policy that offloads or that drops
            carries.
        TypeError: for an axis that is none of these, for marks in the carry, and for an `until` that does not
            return one bool.
    """
    return scan_for(
        function_caller("scan", f),
        f,
        axis,
        remat=remat,
        reverse=reverse,
        unroll=unroll,
        is_scanned=is_scanned,
        until=until,
    )


def scan_for(
    caller: Caller,
    f: Callable[..., tuple[Any, Any]],
    axis: AxisSelector | int,
    *,
    remat: ScanCheckpointSpec,
    reverse: bool = False,
    unroll: int | bool = 1,
    is_scanned: IsScanned = is_named_or_shaped_array,
    owner: Any = None,
    until: Until | None = None,
) -> Callable[..., tuple[Any, Any]]:
    """`scan`, with error messages in the words of `caller`; `owner` is the user's function that `f` calls."""
    axis = axis_or_name(axis, caller.what)
    policy = resolve_policy(remat)
    reverse, unroll = check_reverse(reverse), check_unroll(unroll)

    def scanned(init: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        check_unmarked(init)
        layout, arrays, shared = split_tree((args, kwargs), axis, caller, is_scanned=is_scanned)
        step, call, first = f, caller.what, init
        if until is not None:
            step, call, first = stopping(f, until), (call, until), (is_done(until, init), init)
        carry, (ys,) = scan_rolled(
            [Layers(step, layout, arrays, shared, f if owner is None else owner, call)],
            first,
            layout.axis,
            policy,
            reverse=reverse,
            unroll=unroll,
            what=caller.what,
            stops=until is not None,
        )
        return (carry if until is None else carry[1]), ys

    return scanned


def lax_scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    remat: ScanCheckpointSpec = False,
) -> tuple[Any, Any]:
    """`jax.lax.scan` with a checkpoint policy, for code that takes a `scan_fn`.

    ```python
    simulate(scan_fn=functools.partial(stacked_remat.lax_scan, remat="nested"))
    ```

    Args:
        f: takes the carry and a slice of `xs`; returns the next carry and an output.
        init: the first carry.
        xs: arrays that are split along their first dimension.
        length: how many steps to run, where `xs` has no array.
        reverse: go from the last step to the first.
        unroll: how many steps one iteration of the loop runs; `True` for all.
        remat: as in `scan`, with its costs.

    Returns:
        The final carry and the stacked outputs.

    Raises:
        ValueError: there is neither an array in `xs` nor a `length`; and as `scan`.
    """
    sizes = [jnp.shape(leaf)[0] for leaf in jax.tree.leaves(xs) if jnp.ndim(leaf)]
    if length is None and not sizes:
        raise ValueError(
            "lax_scan: xs has no array that could be split, so pass length=, how many steps to run."
        )
    axis = Axis("steps", sizes[0] if length is None else length)
    inputs = jax.tree.map(per_layer, xs)
    return scan(f, axis, remat=remat, reverse=reverse, unroll=unroll)(init, inputs)


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
        carry = f(carry, *[arg[axis, i] for arg in args], **{k: kwargs[k][axis, i] for k in kwargs})
    return carry
    ```

    with arguments, costs and errors as in `scan`.
    """

    def step(carry: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, None]:
        return f(carry, *args, **kwargs), None

    caller = function_caller("fold", f)
    options: Any = {"remat": remat, "reverse": reverse, "unroll": unroll, "is_scanned": is_scanned}
    scanned = scan_for(caller, step, axis, owner=f, until=until, **options)

    def folded(init: Any, /, *args: Any, **kwargs: Any) -> Any:
        return scanned(init, *args, **kwargs)[0]

    return folded


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

    `map(f, axis)(*args, **kwargs)` equals
    `hax.stack(axis, [f(*(arg[axis, i] for arg in args), ...) for i in range(axis.size)])`.
    It holds one part's internals at a time, where `haliax.vmap` holds all and is faster. Arguments and errors
    as in `scan`.
    """

    def step(_: None, /, *args: Any, **kwargs: Any) -> tuple[None, Any]:
        return None, f(*args, **kwargs)

    caller = function_caller("map", f)
    options: Any = {"remat": remat, "reverse": reverse, "unroll": unroll, "is_scanned": is_mapped}
    scanned = scan_for(caller, step, axis, owner=f, **options)

    def mapped(*args: Any, **kwargs: Any) -> Any:
        return scanned(None, *args, **kwargs)[1]

    return mapped


def function_caller(what: Literal["fold", "scan", "map"], f: Callable[..., Any]) -> Caller:
    """One of this module's functions, for error messages about its arguments."""
    return Caller(what, argument_namer(f, skip=0 if what == "map" else 1))


def vmap_layers(f: Callable[..., Any], axis: Axis, caller: Caller) -> Callable[..., Any]:
    """Apply `f` to every layer's part of its arguments at once; the outputs get `axis` in front.

    Splits and shares arguments exactly as `scan` does. Costs the memory of all layers together.
    """

    def mapped(*args: Any, **kwargs: Any) -> Any:
        layout, arrays, shared = split_tree((args, kwargs), axis, caller)

        def one_layer(slices: Sequence[Any]) -> tuple[Any, Static]:
            layer_args, layer_kwargs = layout.layer(slices, shared)
            found, static = eqx.partition(f(*layer_args, **layer_kwargs), is_array)
            return found, Static(static)

        found, static = jax.vmap(one_layer, axis_size=axis.size)(arrays)
        return name_stacked(eqx.combine(found, static.value), axis, caller.what)

    return mapped
