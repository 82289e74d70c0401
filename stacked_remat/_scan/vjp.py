"""`fold_vjp` and `scan_vjp`: a fold, and the reverse sweep over its layers as a function."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from haliax.axis import AxisSelector

from .._activity import is_differentiable
from .._placement import on_device
from .._policy import ScanCheckpointSpec, resolve_policy
from .._remat import Remat, for_length
from .._sweep.api import forward_rule
from .._sweep.gradient import Mask
from .._sweep.slots import Arrays
from .._sweep.spec import SweepSpec
from .._sweep.store import check_unsliced
from .._sweep.trace import TracedLayer, trace_layer
from .api import function_caller
from .arguments import Caller
from .checks import check_axis_or_name, check_reverse, check_unroll
from .eager import compiled_once
from .layer_axis import TreeLayout, split_tree
from .layers import array_step, sweep_options
from .marks import IsScanned, check_unmarked, is_named_or_shaped_array
from .stacking import name_stacked
from .sweep_back import SweepBack
from .sweep_types import SweepTypes


def fold_vjp(
    f: Callable[..., Any],
    axis: AxisSelector,
    *,
    remat: ScanCheckpointSpec = True,
    reverse: bool = False,
    unroll: int | bool = 1,
    is_scanned: IsScanned = is_named_or_shaped_array,
) -> Callable[..., tuple[Any, "SweepBack"]]:
    """Apply `f` along an axis, and return a function that sweeps back over the layers.

    ```python
    y, sweep_back = fold_vjp(f, axis, remat="nested")(init, layers, *args, **kwargs)
    ```

    `y` equals `fold(f, axis)(init, layers, *args, **kwargs)`. The forward sweep keeps what the policy says;
    `sweep_back(cotangent)` gives the gradients, and `sweep_back(cotangent, visitor, state)` calls `visitor`
    for every layer, from the last to the first. See `SweepBack`.

    Args:
        f: takes the carry, one layer, and the further arguments; returns the next carry.
        axis: an `Axis`, or the name of an axis that one of the arguments has.
        remat: what is kept for the reverse sweep. Policies that drop carries or inputs (`"recompute"`), or
            move internals to the host by name, are not supported.
        reverse: apply the layers from the last to the first. The reverse sweep then goes from the first.
        unroll: how many layers one iteration of the innermost loops runs.
        is_scanned: which of the arrays without a mark may be split: a bool or a predicate of a leaf.

    Returns:
        A function of the initial carry, the layers (a tree of stacked arrays) and the further arguments,
        which returns the last carry and a `SweepBack`.

    Raises:
        ValueError: as `fold`; and for a policy that is not supported.
    """
    return vjp_for(
        function_caller("fold", f),
        lambda carry, *args, **kwargs: (f(carry, *args, **kwargs), None),
        axis,
        has_output=False,
        remat=remat,
        reverse=reverse,
        unroll=unroll,
        is_scanned=is_scanned,
    )


def scan_vjp(
    f: Callable[..., tuple[Any, Any]],
    axis: AxisSelector,
    *,
    remat: ScanCheckpointSpec = True,
    reverse: bool = False,
    unroll: int | bool = 1,
    is_scanned: IsScanned = is_named_or_shaped_array,
) -> Callable[..., tuple[tuple[Any, Any], "SweepBack"]]:
    """As `fold_vjp`, for an `f` that returns `(carry, output)`, as `scan` takes it.

    The function that it returns gives `((carry, outputs), sweep_back)`, and `sweep_back` takes a pair of
    cotangents, of the carry and of the outputs.
    """
    return vjp_for(
        function_caller("scan", f),
        f,
        axis,
        has_output=True,
        remat=remat,
        reverse=reverse,
        unroll=unroll,
        is_scanned=is_scanned,
    )


def vjp_for(
    caller: Caller,
    f: Callable[..., tuple[Any, Any]],
    axis: AxisSelector,
    *,
    has_output: bool,
    remat: ScanCheckpointSpec,
    reverse: bool = False,
    unroll: int | bool = 1,
    is_scanned: IsScanned = is_named_or_shaped_array,
) -> Callable[..., tuple[Any, "SweepBack"]]:
    """`scan_vjp`, and `fold_vjp` without output, with error messages in the words of `caller`."""
    check_axis_or_name(axis, caller.what)
    policy = resolve_policy(remat)
    reverse, unroll = check_reverse(reverse), check_unroll(unroll)

    def run(init: Any, arguments: tuple[Any, Any]) -> tuple[Any, SweepBack]:
        split = split_tree(arguments, axis, caller, is_scanned=is_scanned)
        Layers = split[0].axis
        remat = for_length(policy.normalized(), Layers.size)
        found = sweep_options(remat, Layers, split[1], policy.host_segment_length)
        if found is None:
            raise ValueError(
                f"{policy!r} is not supported with a visitor. Keep the carry of each layer or segment, on "
                'the device or on the host (True, "offload", "nested", max_carries=k), and, with carries on '
                "the device, internals by name (save_block_internals=[names])."
            )
        options = {**found, "reverse": reverse, "unroll": unroll}
        return _forward(f, init, split, remat, options, has_output, caller.what)

    def vjp(init: Any, layers: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, SweepBack]:
        check_unmarked(init)
        return compiled_once(run, init, ((layers, *args), kwargs))

    # The name in Python's error for a call without layers.
    vjp.__qualname__ = f"{'scan' if has_output else 'fold'}_vjp(f, axis)"
    return vjp


def _forward(
    f: Callable[..., tuple[Any, Any]],
    init: Any,
    split: tuple[TreeLayout, Arrays, Arrays],
    remat: Remat,
    options: dict[str, Any],
    has_output: bool,
    what: str,
) -> tuple[Any, SweepBack]:
    layout, xs, shared = split[0], *jax.tree.map(jnp.asarray, split[1:])
    shared = on_device(shared)
    check_unsliced(xs, layout.unsliced)

    def trace(arguments: Callable[..., Any], unsliced: Mask) -> TracedLayer:
        def layer(carry: Any, inputs: tuple[Arrays, Arrays]) -> tuple[Any, Any]:
            args, kwargs = arguments(*inputs)
            return f(carry, *args, **kwargs)

        step, arrays = array_step(layer, init, remat), eqx.filter(init, eqx.is_array_like)
        offloads = options.get("boundaries") == "host"
        body = _shared_first(step)
        return trace_layer(body, shared, arrays, xs, unsliced=unsliced, offloads=offloads)

    traced = trace(layout.arguments, layout.unsliced)
    spec = SweepSpec(traced.jaxpr, len(traced.init), unsliced=layout.unsliced, **options)
    layer_of_slices, constants_of_slices = None, []
    if any(layout.unsliced):
        of_slices = trace(layout.arguments_of_one, (False,) * len(xs))
        layer_of_slices = dataclasses.replace(spec, jaxpr=of_slices.jaxpr).layer
        constants_of_slices = of_slices.shared[: len(of_slices.shared) - len(shared)]
    constants = len(traced.shared) - len(shared)
    perturbed = spec.perturbed(
        _differentiable(traced.init),
        _differentiable(xs),
        [False] * constants + _differentiable(shared),
        ys=_differentiable([out.aval for out in traced.jaxpr.outvars[len(traced.init) :]]),
    )
    with jax.named_scope(f"scan({layout.axis.name})"):
        carry, ys, checkpoints = forward_rule(spec, perturbed)(traced.init, xs, traced.shared)
    carry = jtu.tree_unflatten(traced.carry_tree, carry)
    ys = name_stacked(jtu.tree_unflatten(traced.y_tree, ys), layout.axis, what)
    static = eqx.filter(init, eqx.is_array_like, inverse=True)
    outputs = jax.eval_shape(lambda: (carry, ys))
    trees = (traced.carry_tree, static, traced.y_tree, outputs)
    types = SweepTypes(spec, perturbed, layout, constants, *trees, has_output, layer_of_slices)
    checkpoints = checkpoints.with_constant_boundaries()
    sweep_back = SweepBack(checkpoints, xs, traced.shared, constants_of_slices, types)
    y = eqx.combine(carry, static)
    return (y, ys) if has_output else y, sweep_back


def _shared_first(step: Callable[..., Any]) -> Callable[..., Any]:
    return lambda shared, carry, x: step(carry, (x, shared))


def _differentiable(leaves: Any) -> list[bool]:
    return [is_differentiable(leaf.dtype) for leaf in leaves]
