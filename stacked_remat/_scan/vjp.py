"""`fold_vjp` and `scan_vjp`: a fold, and the reverse sweep over its layers as a function."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
from haliax import Axis
from haliax.axis import AxisSelector

from .._activity import is_differentiable
from .._policy import ScanCheckpointPolicy, ScanCheckpointSpec, resolve_policy
from .._sweep.kinds import Pattern
from .._sweep.primitive import sweep_forward as keeping_sweep
from .._sweep.spec import SweepSpec
from .._sweep.trace import kinds_of
from .api import function_caller
from .arguments import Caller
from .checks import axis_or_name, check_reverse, check_unroll
from .layer_axis import split_tree
from .layers import Layers, trace_kinds
from .marks import IsScanned, check_unmarked, is_array, is_named_or_shaped_array
from .stacking import name_stacked
from .sweep_back import SweepBack
from .sweep_types import KindTypes, SweepTypes


def fold_vjp(
    f: Callable[..., Any],
    axis: AxisSelector | int,
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
        axis: as in `fold`.
        remat: what is kept for the reverse sweep. Policies that drop carries (`"recompute"`) are not
            supported.
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
    axis: AxisSelector | int,
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
    axis: AxisSelector | int,
    *,
    has_output: bool,
    remat: ScanCheckpointSpec,
    reverse: bool = False,
    unroll: int | bool = 1,
    is_scanned: IsScanned = is_named_or_shaped_array,
) -> Callable[..., tuple[Any, "SweepBack"]]:
    """`scan_vjp`, and `fold_vjp` without output, with error messages in the words of `caller`."""
    axis = axis_or_name(axis, caller.what)
    policy = resolve_policy(remat)
    reverse, unroll = check_reverse(reverse), check_unroll(unroll)

    def run(init: Any, arguments: tuple[Any, Any]) -> tuple[Any, SweepBack]:
        layout, arrays, shared = split_tree(arguments, axis, caller, is_scanned=is_scanned)
        return sweep_forward(
            [Layers(f, layout, arrays, shared)],
            init,
            layout.axis,
            policy,
            has_output=has_output,
            reverse=reverse,
            unroll=unroll,
            what=caller.what,
        )

    def vjp(init: Any, layers: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, SweepBack]:
        check_unmarked(init)
        return run(init, ((layers, *args), kwargs))

    # The name in Python's error for a call without layers.
    vjp.__qualname__ = f"{'scan' if has_output else 'fold'}_vjp(f, axis)"
    return vjp


def sweep_forward(
    kinds: Sequence[Layers],
    init: Any,
    axis: Axis,
    policy: ScanCheckpointPolicy,
    *,
    pattern: Pattern | None = None,
    names: Sequence[str] = (),
    has_output: bool,
    reverse: bool,
    unroll: int | bool,
    what: str,
) -> tuple[Any, SweepBack]:
    """The forward sweep of `vjp_for`, over layers of one or several kinds as in `scan_rolled`.

    The layers are the first of the arguments. Where there are several kinds, with `names` in alphabetical
    order, what the `SweepBack` returns of layers and arguments is a tuple with an entry for each, and outputs
    and their cotangents are dicts.
    """
    kinds = [kind.as_arrays() for kind in kinds]
    remat = policy.for_layers(axis.size)
    if remat.carries is None:
        raise ValueError(
            f"{policy!r} is not supported with a visitor. Keep the carry of each layer or segment, on "
            'the device or on the host (True, "offload", "nested", max_carries=k).'
        )
    traced = trace_kinds(kinds, init, remat.kept.names, whole=False, offloads=remat.offloads)
    of_kinds, shared = kinds_of(traced)
    unsliced = sum((kind.layout.unsliced for kind in kinds), ())
    spec = SweepSpec(
        of_kinds, remat.swept(), reverse=reverse, unroll=unroll, unsliced=unsliced, pattern=pattern
    )
    xs, first = [array for kind in kinds for array in kind.arrays], traced[0]
    closed_over = {
        place for own, layer in zip(of_kinds, traced, strict=True) for place in own.shared[: layer.constants]
    }
    perturbed = spec.perturbed(
        _differentiable(first.init),
        _differentiable(xs),
        [place not in closed_over and is_ for place, is_ in enumerate(_differentiable(shared))],
        ys=_differentiable([type_ for kind in of_kinds for type_ in kind.output_types]),
    )
    with jax.named_scope(f"scan({axis.name})"):
        carry, ys, checkpoints = keeping_sweep(spec, perturbed, first.init, xs, shared)
    carry = jtu.tree_unflatten(first.carry_tree, carry)
    parts = [
        name_stacked(layer.output(ys[own.ys]), kind.layout.axis, what)
        for kind, own, layer in zip(kinds, of_kinds, traced, strict=True)
    ]
    outputs = parts[0] if pattern is None else dict(zip(names, parts, strict=True))
    static = eqx.filter(init, eqx.is_array_like, inverse=True)
    own_types = tuple(
        KindTypes(own, name, kind.layout, layer.constants, layer.output_tree)
        for kind, own, name, layer in zip(kinds, of_kinds, names or [None], traced, strict=True)
    )
    of_outputs = jax.eval_shape(lambda: (carry, eqx.filter(outputs, is_array)))
    types = SweepTypes(spec, perturbed, own_types, axis, first.carry_tree, static, of_outputs, has_output)
    y = eqx.combine(carry, static)
    sweep_back = SweepBack(checkpoints, xs, shared, types)
    return (y, outputs) if has_output else y, sweep_back


def _differentiable(leaves: Any) -> list[bool]:
    return [is_differentiable(leaf.dtype) for leaf in leaves]
