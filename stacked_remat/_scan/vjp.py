"""`fold_vjp` and `scan_vjp`: a fold, and the reverse sweep over its layers as a function."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
from haliax.axis import AxisSelector

from .._policy import ScanCheckpointSpec
from .._static import PyTree
from .._sweep.primitive import sweep_forward as keeping_sweep
from .._sweep.rules import floats
from .._sweep.spec import SweepSpec
from .._sweep.trace import kinds_of, trace_layers
from .layers import Loop
from .marks import IsScanned, check_unmarked, is_array, is_named_or_shaped_array
from .step import Call
from .sweep_back import SweepBack
from .visitor import KindTypes, SweepTypes


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

    Cost: the forward pass keeps what the policy says. `sweep_back` replays as the policy says, and holds the
    gradients of all layers only where it is given no visitor.
    """
    loop = Loop.of(Call.of("fold", f), axis, remat, reverse=reverse, unroll=unroll, is_scanned=is_scanned)
    return _vjp(loop)


def _vjp(loop: Loop) -> Callable[..., tuple[PyTree, SweepBack]]:
    def vjp(init: PyTree, layers: PyTree, /, *args: PyTree, **kwargs: PyTree) -> tuple[PyTree, SweepBack]:
        check_unmarked(init)
        return sweep_forward(loop, init, ((layers, *args), kwargs))

    return vjp


def scan_vjp(
    f: Callable[..., tuple[PyTree, PyTree]],
    axis: AxisSelector | int,
    *,
    remat: ScanCheckpointSpec = True,
    reverse: bool = False,
    unroll: int | bool = 1,
    is_scanned: IsScanned = is_named_or_shaped_array,
) -> Callable[..., tuple[tuple[PyTree, PyTree], "SweepBack"]]:
    """As `fold_vjp`, for an `f` that returns `(carry, output)`, as `scan` takes it.

    The function that it returns gives `((carry, outputs), sweep_back)`, and `sweep_back` takes a pair of
    cotangents, of the carry and of the outputs.
    """
    loop = Loop.of(Call.of("scan", f), axis, remat, reverse=reverse, unroll=unroll, is_scanned=is_scanned)
    return _vjp(loop)


def sweep_forward(loop: Loop, init: PyTree, arguments: PyTree) -> tuple[PyTree, SweepBack]:
    """The forward sweep of `fold_vjp` and `scan_vjp`; the layers are the first of the arguments."""
    kinds, join = loop.split(arguments)
    axis = loop.axis_of(kinds)
    remat = loop.policy.for_layers(axis.size)
    if remat.carries is None:
        raise ValueError(
            f"{loop.policy!r} is not supported with a visitor. Keep the carry of each layer or segment, on "
            'the device or on the host (True, "offload", "nested", max_carries=k).'
        )
    arrays, static = eqx.partition(init, eqx.is_array_like)
    untraced = [kind.untraced(static, remat.kept.names, whole=False) for kind in kinds]
    traced = trace_layers(untraced, arrays, offloads=remat.offloads)
    xs, shared = [kind.arrays for kind in kinds], [layer.shared for layer in traced]
    of_kinds = kinds_of(traced, [[False] * len(own) for own in xs])
    parts, first = [*zip(kinds, of_kinds, traced, strict=True)], traced[0]
    options: Any = {"reverse": loop.reverse, "unroll": loop.unroll, "pattern": loop.pattern}
    spec = SweepSpec(of_kinds, remat.swept(), **options)
    of_shared = [[False] * layer.constants + [*floats(layer.shared[layer.constants :])] for layer in traced]
    of_ys = [floats(kind.output_types) for kind in of_kinds]
    perturbed = spec.perturbed(floats(first.init), [*map(floats, xs)], of_shared, of_ys)
    with jax.named_scope(f"scan({axis.name})"):
        carry, ys, checkpoints = keeping_sweep(spec, perturbed, first.init, xs, shared)
    carry = jtu.tree_unflatten(first.carry_tree, carry)
    outputs = [kind.named(layer.output(own)) for kind, layer, own in zip(kinds, traced, ys, strict=True)]
    outputs = loop.outputs(outputs)
    types = SweepTypes(
        loop,
        spec,
        perturbed,
        kinds=tuple(
            KindTypes(own, layer.constants, kind.name, kind.layout, layer.output_tree)
            for kind, own, layer in parts
        ),
        axis=axis,
        join=join,
        carry_tree=first.carry_tree,
        carry_static=static,
        outputs=jax.eval_shape(lambda: (carry, eqx.filter(outputs, is_array))),
    )
    y = eqx.combine(carry, static)
    sweep_back = SweepBack(checkpoints, xs, shared, types)
    return (y, outputs) if types.has_output else y, sweep_back
