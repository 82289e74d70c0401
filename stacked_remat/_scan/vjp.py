"""`fold_vjp` and `scan_vjp`: a fold, and the reverse sweep over its layers as a function."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from haliax.axis import AxisSelector

from .._policy import ScanCheckpointPolicy, ScanCheckpointSpec, resolve_policy
from .._remat import PerLayer, Remat, SaveAll, Swept, checkpoint_of, for_length
from .._schedule import Schedule, equal
from .._sweep.activity import is_differentiable
from .._sweep.api import forward_rule
from .._sweep.gradient import Mask
from .._sweep.slots import Arrays
from .._sweep.spec import FirstLayers, SweepSpec
from .._sweep.store import check_unsliced
from .._sweep.trace import TracedLayer, trace_layer
from .api import function_caller
from .checks import check_axis_or_name, check_reverse, check_unroll
from .eager import compiled_once
from .layer_axis import Caller, SplitTree, name_stacked, split_tree
from .layers import array_step
from .marks import IsScanned, check_unmarked, is_named_or_shaped_array
from .sweep_back import SweepBack, SweepTypes


def fold_vjp(
    f: Callable[..., Any],
    axis: AxisSelector,
    *,
    remat: ScanCheckpointSpec = True,
    reverse: bool = False,
    unroll: int | bool = 1,
    is_scanned: IsScanned = is_named_or_shaped_array,
) -> Callable[..., tuple[Any, "SweepBack"]]:
    """Apply `f` along an axis, and return what sweeps back over the layers.

    ```python
    y, sweep_back = fold_vjp(f, axis, remat="nested")(init, layers, *args, **kwargs)
    ```

    `y` is that of `fold(f, axis)(init, layers, *args, **kwargs)`. The forward sweep keeps what the policy
    says; `sweep_back(cotangent)` gives the gradients, and `sweep_back(cotangent, visitor, state)` calls
    `visitor` for every layer, from the last to the first. See `SweepBack`.

    Args:
        f: takes the carry, one layer, and the further arguments; returns the next carry.
        axis: an `Axis`, or the name of an axis that one of the arguments has.
        remat: what is kept for the reverse sweep. Policies that drop carries or inputs (`"recompute"`), or
            move internals to the host by name, cannot be followed here.
        reverse: apply the layers from the last to the first. The reverse sweep then goes from the first.
        unroll: how many layers one iteration of the innermost loops holds.
        is_scanned: which of the arrays without a mark may be split: a bool or a predicate of a leaf.

    Returns:
        A function of the initial carry, the layers (a tree of stacked arrays) and the further arguments,
        which returns the last carry and a `SweepBack`.

    Raises:
        ValueError: as `fold`; and for a policy that cannot be followed.
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
        split = split_tree(arguments, axis, is_scanned=is_scanned, **caller._asdict())
        form = for_length(policy.normalized(), split.axis.size)
        plan = _sweep_plan(form, split.axis.size, policy)
        return _forward(f, init, split, form, plan, reverse, unroll, has_output, caller.what)

    def vjp(init: Any, layers: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, SweepBack]:
        check_unmarked(init)
        return compiled_once(run, init, ((layers, *args), kwargs))

    return vjp


class _SweepPlan(NamedTuple):
    """A policy as the sweep obeys it; see `SweepSpec`."""

    schedule: Schedule | None
    checkpoint: Callable[[Callable], Callable] = jax.checkpoint
    on_host: bool = False
    first_layers: FirstLayers | None = None

    def spec(self, traced: TracedLayer, reverse: bool, unroll: int | bool, unsliced: Mask) -> SweepSpec:
        """The sweep over layers that are traced."""
        return SweepSpec(
            traced.jaxpr,
            len(traced.init),
            self.schedule,
            reverse,
            unroll,
            self.checkpoint,
            self.on_host,
            self.first_layers,
            unsliced,
        )


def _sweep_plan(remat: Remat, length: int, policy: ScanCheckpointPolicy) -> _SweepPlan:
    """How the sweep keeps what a policy says, those included that a plain scan obeys under `jax.grad`.

    Raises:
        ValueError: it cannot.
    """
    match remat:
        case _ if length == 0:
            return _SweepPlan(None)
        case Swept(first_layers=count):
            first = FirstLayers(count, checkpoint_of(remat.first)) if count else None
            on_host = remat.carries == "offload"
            return _SweepPlan(remat.cut(length - count), checkpoint_of(remat.internals), on_host, first)
        case PerLayer(carries="keep" | "offload", inputs="keep", internals=(), offloaded=()):
            return _SweepPlan(equal(length, length), on_host=remat.carries == "offload")
        case SaveAll() | PerLayer(carries="keep", inputs="keep", offloaded=()):
            return _SweepPlan(None, first_layers=FirstLayers(length, checkpoint_of(remat)))
    raise ValueError(
        f"A sweep over layers with a visitor cannot follow {policy!r}. It keeps the carry of each layer or "
        'segment, on the device or on the host (True, "offload", "nested", max_carries=k), and, with carries '
        "on the device, internals by name (save_block_internals=[names]). Use one of these."
    )


def _forward(
    f: Callable[..., tuple[Any, Any]],
    init: Any,
    split: SplitTree,
    remat: Remat,
    plan: _SweepPlan,
    reverse: bool,
    unroll: int | bool,
    has_output: bool,
    what: str,
) -> tuple[Any, SweepBack]:
    layout, unsliced = split.layout, tuple(split.unsliced)
    arrays, static = eqx.partition(init, eqx.is_array_like)
    xs = [jnp.asarray(leaf) for leaf in split.arrays]
    shared = [jnp.asarray(leaf) for leaf in split.shared]
    check_unsliced(xs, unsliced)

    def trace(arguments: Callable[..., Any], xs: Arrays, unsliced: Mask) -> TracedLayer:
        step = array_step(_layer_of(f, arguments), init, remat)
        body = _shared_first(step)
        return trace_layer(body, shared, arrays, xs, unsliced=unsliced, offloads=plan.on_host)

    traced = trace(layout.arguments, xs, unsliced)
    spec = plan.spec(traced, reverse, unroll, unsliced)
    own = own_spec = None
    if any(unsliced):  # for the gradient of one layer alone
        sliced = (False,) * (len(xs) - 1)
        own = trace(layout.arguments_of_one, xs[:-1], sliced)
        own_spec = plan.spec(own, reverse, unroll, sliced)
    constants = len(traced.shared) - len(shared)
    perturbed = spec.perturbed(
        _differentiable(traced.init),
        _differentiable(xs),
        [False] * constants + _differentiable(shared),
        ys=_differentiable([out.aval for out in traced.jaxpr.outvars[len(traced.init) :]]),
    )
    with jax.named_scope(f"scan({split.axis.name})"):
        carry, ys, checkpoints = forward_rule(spec, perturbed)(traced.init, xs, traced.shared)
    carry = jtu.tree_unflatten(traced.carry_tree, carry)
    ys = name_stacked(jtu.tree_unflatten(traced.y_tree, ys), split.axis, what)
    info = SweepTypes(
        spec,
        perturbed,
        layout,
        constants,
        traced.carry_tree,
        static,
        traced.y_tree,
        jax.eval_shape(lambda: (carry, ys)),
        has_output,
        own_spec,
    )
    y = eqx.combine(carry, static)
    checkpoints = checkpoints.with_constant_boundaries()
    sweep_back = SweepBack(checkpoints, xs, traced.shared, own and own.shared, info)
    return (y, ys) if has_output else y, sweep_back


def _shared_first(step: Callable[..., Any]) -> Callable[..., Any]:
    return lambda shared, carry, x: step(carry, (x, shared))


def _layer_of(f: Callable[..., tuple[Any, Any]], arguments: Callable[..., Any]) -> Callable[..., Any]:
    def layer(carry: Any, inputs: tuple[Arrays, Arrays]) -> tuple[Any, Any]:
        args, kwargs = arguments(*inputs)
        return f(carry, *args, **kwargs)

    return layer


def _differentiable(leaves: Any) -> list[bool]:
    return [is_differentiable(leaf.dtype) for leaf in leaves]
