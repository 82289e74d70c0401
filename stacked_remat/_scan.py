"""Fold, scan and map over a named axis.

The arguments are cut in two: what is split over the axis and what all layers share. What remains is a step on
raw arrays, which runs under the checkpoint policy. `Stacked` and `BlockSeq` come here too: nothing else knows
how a scan behaves.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
from haliax import Axis
from haliax.axis import AxisSelector

from ._checkpoint import checkpoint_name
from ._layer_axis import (
    Caller,
    IsScanned,
    argument_namer,
    is_array,
    is_named_or_shaped_array,
    name_stacked,
    split_tree,
    stack_outputs,
)
from ._layer_axis_rules import check_unmarked
from ._policy import OFFLOAD, ScanCheckpointPolicy, ScanCheckpointSpec, resolve_policy
from ._scan_checks import (
    check_axis_or_name,
    check_carry,
    check_output,
    check_reverse,
    check_unroll,
    describe,
    refuse_linear_transpose,
)
from ._schedule import Tree
from ._sweep import sweep
from ._sweep_problem import Head

Layer = Callable[[Any, Any], tuple[Any, Any]]  # (carry, inputs of the layer) -> (carry, output)


def scan(
    f: Callable[..., tuple[Any, Any]],
    axis: AxisSelector,
    *,
    remat: ScanCheckpointSpec = False,
    reverse: bool = False,
    unroll: int | bool = 1,
    is_scanned: IsScanned = is_named_or_shaped_array,
) -> Callable[..., tuple[Any, Any]]:
    """Apply `f` along an axis, from carry to carry, and stack what it puts out.

    `scan(f, axis)(init, *args, **kwargs)` equals

    ```python
    carry, outputs = init, []
    for i in range(axis.size):
        carry, output = f(carry, *[arg[axis, i] for arg in args], **{k: kwargs[k][axis, i] for k in kwargs})
        outputs.append(output)
    return carry, hax.stack(axis, outputs)
    ```

    where only named arrays with the axis and plain arrays of at least one dimension are indexed (plain arrays
    along their first dimension); everything else goes to every layer whole. `shared(x)` and `per_layer(x)`
    say it of one argument, or of a part of one. Compile time does not grow with the axis.

    Args:
        f: takes the carry and one layer of the arguments; returns the next carry and an output, both trees.
        axis: an `Axis`, or the name of an axis that one of the arguments has.
        remat: what the backward pass keeps, offloads and recomputes; see `ScanCheckpointPolicy` for the
            costs.
        reverse: go from the last layer to the first. Outputs keep the order of the axis.
        unroll: how many layers one turn of the loop holds; `True` for all.
        is_scanned: which of the arrays without a mark may be split: a bool or a predicate of a leaf.

    Returns:
        A function of the initial carry and the arguments, which returns the final carry, with the shapes of
        `init`, and the outputs, with the axis in front.

    Raises:
        ValueError: for inputs of different lengths (each path and size is named), an axis of unknown size, an
            `f` that returns no pair, a carry that changes its structure, axes, shape or dtype, or a single
            random key that is not marked as shared.
        TypeError: for an axis that is neither an `Axis` nor a name, and for marks in the carry.
    """
    return scan_for(
        function_caller("scan", f),
        f,
        axis,
        remat=remat,
        reverse=reverse,
        unroll=unroll,
        is_scanned=is_scanned,
    )


def scan_for(
    caller: Caller,
    f: Callable[..., tuple[Any, Any]],
    axis: AxisSelector,
    *,
    remat: ScanCheckpointSpec,
    reverse: bool = False,
    unroll: int | bool = 1,
    is_scanned: IsScanned = is_named_or_shaped_array,
) -> Callable[..., tuple[Any, Any]]:
    """`scan`, with error messages in the words of `caller`."""
    check_axis_or_name(axis, caller.what)
    policy = resolve_policy(remat)
    reverse, unroll = check_reverse(reverse), check_unroll(unroll)

    def scanned(init: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        check_unmarked(init)

        def run(init: Any, inputs: tuple[Any, Any]) -> tuple[Any, Any]:
            split = split_tree(inputs, axis, is_scanned=is_scanned, **caller._asdict())

            def layer(carry: Any, slices: Sequence[Any]) -> tuple[Any, Any]:
                layer_args, layer_kwargs = split.rebuild(slices)
                return f(carry, *layer_args, **layer_kwargs)

            result = _scan_rolled(
                layer,
                init,
                split.arrays,
                split.axis,
                policy,
                reverse=reverse,
                unroll=unroll,
                what=caller.what,
            )
            return refuse_linear_transpose(result, policy.for_length(split.axis.size))

        return from_arguments(run, policy, axis)(init, (args, kwargs))

    return scanned


def from_arguments(run: Callable, policy: ScanCheckpointPolicy, axis: AxisSelector) -> Callable:
    """`run(init, arguments)`, which keeps nothing of what it derives from them if the policy drops inputs."""
    if policy.spans_scan and policy.save_inputs is False:
        return _checkpoint_whole(run, policy, _names_of(axis))
    return run


def fold(
    f: Callable[..., Any],
    axis: AxisSelector,
    *,
    remat: ScanCheckpointSpec = False,
    reverse: bool = False,
    unroll: int | bool = 1,
    is_scanned: IsScanned = is_named_or_shaped_array,
) -> Callable[..., Any]:
    """Apply `f` along an axis, from carry to carry.

    `fold(f, axis)(init, *args, **kwargs)` equals

    ```python
    carry = init
    for i in range(axis.size):
        carry = f(carry, *[arg[axis, i] for arg in args], **{k: kwargs[k][axis, i] for k in kwargs})
    return carry
    ```

    with arguments, costs and errors as in `scan`.
    """
    return fold_for(
        function_caller("fold", f),
        f,
        axis,
        remat=remat,
        reverse=reverse,
        unroll=unroll,
        is_scanned=is_scanned,
    )


def fold_for(
    caller: Caller,
    f: Callable[..., Any],
    axis: AxisSelector,
    *,
    remat: ScanCheckpointSpec,
    reverse: bool = False,
    unroll: int | bool = 1,
    is_scanned: IsScanned = is_named_or_shaped_array,
) -> Callable[..., Any]:
    """`fold`, with error messages in the words of `caller`."""

    def step(carry: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, None]:
        return f(carry, *args, **kwargs), None

    scanned = scan_for(caller, step, axis, remat=remat, reverse=reverse, unroll=unroll, is_scanned=is_scanned)

    def folded(init: Any, /, *args: Any, **kwargs: Any) -> Any:
        return scanned(init, *args, **kwargs)[0]

    return folded


def map(
    f: Callable[..., Any],
    axis: AxisSelector,
    *,
    remat: ScanCheckpointSpec = False,
    reverse: bool = False,
    unroll: int | bool = 1,
    is_mapped: IsScanned = is_named_or_shaped_array,
) -> Callable[..., Any]:
    """Apply `f` to each part of its arguments along an axis, one after the other.

    `map(f, axis)(*args, **kwargs)` equals
    `hax.stack(axis, [f(*(arg[axis, i] for arg in args), ...) for i in range(axis.size)])`.
    It holds one part's internals at a time, where `haliax.vmap` holds all and is faster. Arguments and errors
    as in `scan`.
    """

    def step(_: None, /, *args: Any, **kwargs: Any) -> tuple[None, Any]:
        return None, f(*args, **kwargs)

    caller = function_caller("map", f)
    scanned = scan_for(caller, step, axis, remat=remat, reverse=reverse, unroll=unroll, is_scanned=is_mapped)

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
        split = split_tree((args, kwargs), axis, **caller._asdict())

        def one_layer(slices: Sequence[Any]) -> tuple[Any, "_Static"]:
            layer_args, layer_kwargs = split.rebuild(slices)
            arrays, static = eqx.partition(f(*layer_args, **layer_kwargs), is_array)
            return arrays, _Static(static)

        arrays, static = jax.vmap(one_layer, axis_size=split.axis.size)(split.arrays)
        return name_stacked(eqx.combine(arrays, static.value), split.axis, caller.what)

    return mapped


def scan_unrolled(
    layer: Layer,
    init: Any,
    inputs: Sequence[Any],
    axis: Axis,
    remat: ScanCheckpointSpec,
    what: str,
    *,
    reverse: bool = False,
) -> tuple[Any, Any]:
    """Apply `layer` to inputs that need not be alike, one after the other, under the same policies as `scan`.

    Args:
        layer: takes the carry and the inputs of one layer; returns the next carry and an output.
        init: the initial carry.
        inputs: what each of the `axis.size` layers takes beside the carry: any tree, its module included.
        axis: the axis of the stacked outputs.
        remat: as in `scan`. Program size grows with the number of layers.
        what: the operation, for error messages.
        reverse: as in `scan`.

    Returns:
        The final carry and the outputs, with the axis in front.
    """
    order = range(axis.size)[:: -1 if reverse else 1]
    policy = resolve_policy(remat).for_length(axis.size)
    parts = [(policy, order[policy.first_layers :])]
    if policy.first_layers:
        parts.insert(0, (resolve_policy(policy.first_policy), order[: policy.first_layers]))
    carry, outputs = init, []
    with jax.named_scope(f"scan({axis.name})"):
        for own, layers in parts:
            carry, ys = _walk_unrolled(layer, carry, [inputs[i] for i in layers], own, _names_of(axis))
            outputs += ys
    stacked = stack_outputs(outputs[:: -1 if reverse else 1], axis, what)
    return refuse_linear_transpose((carry, stacked), policy)


class _Names(NamedTuple):
    """The checkpoint names of what goes into a layer."""

    carry: str
    inputs: str

    @property
    def boundary(self) -> str:
        return f"{self.carry} at a segment's start"


@jax.tree_util.register_static
class _Static:
    """A tree without arrays, passed out of a transformation untouched."""

    def __init__(self, value: Any):
        self.value = value


def _names_of(axis: AxisSelector) -> _Names:
    name = axis if isinstance(axis, str) else axis.name
    return _Names(f"scan({name}) carry", f"scan({name}) inputs")


def _scan_rolled(
    layer: Layer,
    init: Any,
    xs: Sequence[Any],
    axis: Axis,
    policy: ScanCheckpointPolicy,
    *,
    reverse: bool,
    unroll: int | bool,
    what: str,
) -> tuple[Any, Any]:
    policy = policy.for_length(axis.size)
    names = _names_of(axis)
    arrays, static = eqx.partition(init, eqx.is_array_like)
    step = _array_step(layer, init, policy, names)

    def run(carry: Any, xs: Sequence[Any]) -> tuple[Any, Any]:
        if policy.sweeps and axis.size > 0:
            return _sweep_layers(step, carry, xs, axis.size, policy, reverse=reverse, unroll=unroll)
        rolled = unroll is not True and unroll < axis.size
        body = _checkpointed(step, policy, names, rolled=rolled)
        return jax.lax.scan(body, carry, xs, length=axis.size, reverse=reverse, unroll=unroll)

    if policy.spans_scan and policy.save_inputs is not False:
        run = _checkpoint_whole(run, policy, names)
    with jax.named_scope(f"scan({axis.name})"):
        carry, ys = run(arrays, xs)
    return eqx.combine(carry, static), name_stacked(ys, axis, what)


def _sweep_layers(
    step: Layer,
    carry: Any,
    xs: Sequence[Any],
    length: int,
    policy: ScanCheckpointPolicy,
    *,
    reverse: bool,
    unroll: int | bool,
) -> tuple[Any, Any]:
    first = policy.first_layers
    return sweep(
        step,
        carry,
        xs,
        length=length,
        schedule=policy.schedule(length - first),
        reverse=reverse,
        unroll=unroll,
        checkpoint=_segment_checkpoint(policy),
        boundaries="host" if policy.save_carries == OFFLOAD else "device",
        head=Head(first, _segment_checkpoint(resolve_policy(policy.first_policy))) if first else None,
    )


def _segment_checkpoint(policy: ScanCheckpointPolicy) -> Callable[[Callable], Callable]:
    """How the internals of a layer are kept while its segment is walked."""
    if policy.saves_everything:
        return lambda layer: layer
    if policy.saved_names or policy.prevent_cse:
        keep = jax.checkpoint_policies.save_only_these_names(*policy.saved_names)
        return functools.partial(jax.checkpoint, policy=keep, prevent_cse=policy.prevent_cse)
    return jax.checkpoint


def _walk_unrolled(
    layer: Layer, init: Any, inputs: Sequence[Any], policy: ScanCheckpointPolicy, names: _Names
) -> tuple[Any, list[Any]]:
    """Apply `layer` to each of the inputs, and checkpoint the parts that the policy's schedule makes."""

    def walk(part: Tree, carry: Any) -> tuple[Any, list[Any]]:
        if isinstance(part, int):
            step = _checkpointed(_array_step(layer, carry, policy, names), policy, names, rolled=False)
            arrays, y = step(eqx.filter(carry, eqx.is_array_like), inputs[part])
            return eqx.combine(arrays, eqx.filter(carry, eqx.is_array_like, inverse=True)), [y]
        outputs = []
        for inner in part:
            walk_inner = functools.partial(walk, inner)
            # A layer checkpoints itself.
            if not isinstance(inner, int):
                walk_inner = _checkpoint_segment(walk_inner, policy, names)
            carry, ys = walk_inner(carry)
            outputs += ys
        return carry, outputs

    def run(carry: Any) -> tuple[Any, list[Any]]:
        length = len(inputs)
        return walk(
            policy.schedule(length).tree if policy.is_nested and length else tuple(range(length)), carry
        )

    if policy.spans_scan and policy.save_inputs is not False:
        run = _checkpoint_whole(run, policy, names)
    return run(init)


def _array_step(layer: Layer, init: Any, policy: ScanCheckpointPolicy, names: _Names) -> Layer:
    """The layer on the arrays of the carry, its results checked and what goes in named for the policy."""
    static = eqx.filter(init, eqx.is_array_like, inverse=True)
    names_what_goes_in = not (policy.simple or policy.saves_everything or policy.sweeps)

    def step(arrays: Any, inputs: Any) -> tuple[Any, Any]:
        if names_what_goes_in:
            arrays = checkpoint_name(arrays, names.carry)
            inputs = checkpoint_name(inputs, names.inputs)
        carry = eqx.combine(arrays, static)
        result = layer(carry, inputs)
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise ValueError(
                "scan takes a function (or a block) that returns a pair (carry, output); it returned "
                f"{describe(result)}. For one that returns only the carry use fold."
            )
        new_carry, y = result
        check_carry(carry, new_carry)
        check_output(y)
        return eqx.filter(new_carry, eqx.is_array_like), y

    return step


def _checkpointed(step: Layer, policy: ScanCheckpointPolicy, names: _Names, *, rolled: bool) -> Layer:
    if policy.saves_everything:
        return step
    return eqx.filter_checkpoint(
        step, policy=policy.residual_policy(*names), prevent_cse=policy.prevent_cse or not rolled
    )


def _checkpoint_whole(run: Callable, policy: ScanCheckpointPolicy, names: _Names) -> Callable:
    return eqx.filter_checkpoint(run, policy=policy.residual_policy(*names), prevent_cse=True)


def _checkpoint_segment(walk: Callable, policy: ScanCheckpointPolicy, names: _Names) -> Callable:
    if policy.save_carries != OFFLOAD:
        return eqx.filter_checkpoint(walk, prevent_cse=True)  # its carry is held, like all that goes in

    def named_walk(carry: Any) -> Any:
        return walk(checkpoint_name(carry, names.boundary))

    keep = ScanCheckpointPolicy(save_carries=OFFLOAD)
    return eqx.filter_checkpoint(
        named_walk, policy=keep.residual_policy(names.boundary, names.inputs), prevent_cse=True
    )
