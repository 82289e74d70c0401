"""A step on raw arrays, applied to one layer after the other under a checkpoint policy."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import Axis
from haliax.axis import AxisSelector
from jax.core import eval_jaxpr

from ._checkpoint import checkpoint_name
from ._derivative_errors import not_transposable
from ._eager import Static
from ._effects import check_effects
from ._layer_axis import is_array, name_stacked, stack_outputs
from ._placement import platform
from ._policy import OFFLOAD, ScanCheckpointPolicy, ScanCheckpointSpec, resolve_policy
from ._scan_checks import check_carry, check_output, describe
from ._schedule import Tree
from ._sweep import sweep
from ._sweep_problem import Head

Layer = Callable[[Any, Any], tuple[Any, Any]]  # (carry, inputs of the layer) -> (carry, output)


def from_arguments(run: Callable, policy: ScanCheckpointPolicy, axis: AxisSelector) -> Callable:
    """`run(init, arguments)`, which keeps nothing of what it derives from them if the policy drops inputs."""
    if policy.spans_scan and policy.save_inputs is False:
        return _checkpoint_whole(run, policy, _names_of(axis))
    return run


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
    rest = dataclasses.replace(policy, first_layers=0, first_policy=False)
    parts = [(rest, order[policy.first_layers :])]
    if policy.first_layers:
        parts.insert(0, (resolve_policy(policy.first_policy), order[: policy.first_layers]))
    carry, outputs = init, []
    with jax.named_scope(f"scan({axis.name})"):
        for own, layers in parts:
            carry, ys = _walk_unrolled(layer, carry, [inputs[i] for i in layers], own, _names_of(axis))
            outputs += ys
    stacked = stack_outputs(outputs[:: -1 if reverse else 1], axis, what)
    return _not_transposable((carry, stacked), policy)


_internals_are_saved = jax.make_user_context(default_value=True)


def internals_are_saved() -> bool:
    """Whether the scans around a layer keep its internals for the backward pass; called while it is traced.

    A block may then choose what it computes: where its layers are recomputed, an intermediate result that
    would spare the backward pass some work is lost all the same. `True` outside of scans. A `jax.checkpoint`
    around a scan is not seen.
    """
    return _internals_are_saved.value


def _not_transposable(results: Any, policy: ScanCheckpointPolicy) -> Any:
    """The results of a scan, with an error for `jax.linear_transpose` under policies that refuse it."""
    if not policy.sweeps and (policy.saves_everything or policy.simple):
        return results

    def mark(leaf: Any) -> Any:
        return not_transposable(leaf) if is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf

    return jax.tree.map(mark, results)


class _Names(NamedTuple):
    """The checkpoint names of what goes into a layer."""

    carry: str
    inputs: str

    @property
    def boundary(self) -> str:
        return f"{self.carry} at a segment's start"


def _names_of(axis: AxisSelector) -> _Names:
    name = axis if isinstance(axis, str) else axis.name
    return _Names(f"scan({name}) carry", f"scan({name}) inputs")


def scan_rolled(
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
    carry, ys = _not_transposable((carry, ys), policy)
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
    if policy.saves_some_internals or policy.prevent_cse:
        return functools.partial(
            jax.checkpoint, policy=policy.internals_policy(), prevent_cse=policy.prevent_cse
        )
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
        with _internals_are_saved(internals_are_saved() and policy.saves_everything):
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
    # For GPUs XLA keeps a layer's internals twice where its carry comes from the host, without a barrier.
    from_host = policy.save_carries == OFFLOAD and platform() == "cuda"
    return _checkpoint(
        step,
        policy.residual_policy(*names),
        prevent_cse=policy.prevent_cse or from_host or not rolled,
        offloads=policy.offloads,
    )


def _checkpoint_whole(run: Callable, policy: ScanCheckpointPolicy, names: _Names) -> Callable:
    return _checkpoint(run, policy.residual_policy(*names), offloads=policy.offloads)


def _checkpoint_segment(walk: Callable, policy: ScanCheckpointPolicy, names: _Names) -> Callable:
    if policy.save_carries != OFFLOAD:
        return _checkpoint(walk, None)  # its carry is held, like all that goes in

    def named_walk(carry: Any) -> Any:
        return walk(checkpoint_name(carry, names.boundary))

    keep = ScanCheckpointPolicy(save_carries=OFFLOAD)
    return _checkpoint(named_walk, keep.residual_policy(names.boundary, names.inputs), offloads=True)


def _checkpoint(
    fn: Callable[..., Any],
    policy: Callable[..., Any] | None,
    *,
    prevent_cse: bool = True,
    offloads: bool = False,
) -> Callable[..., Any]:
    """`jax.checkpoint` of a function of trees with leaves of all kinds; holds none of them after a call."""

    def checkpointed(*args: Any) -> Any:
        arrays, static = eqx.partition(args, eqx.is_array)

        def of_arrays(arrays: Any) -> tuple[Any, Static]:
            found, rest = eqx.partition(fn(*eqx.combine(arrays, static)), eqx.is_array)
            return found, Static(rest)

        run = _without_ordered_effects(of_arrays, arrays) if offloads else of_arrays
        found, rest = jax.checkpoint(run, policy=policy, prevent_cse=prevent_cse)(arrays)
        return eqx.combine(found, rest.value)

    return checkpointed


def _without_ordered_effects(fn: Callable[[Any], Any], arrays: Any) -> Callable[[Any], Any]:
    """`fn` for arguments like `arrays`, which is traced here."""
    closed, found = jax.make_jaxpr(fn, return_shape=True)(arrays)
    check_effects(closed.jaxpr, (), offloads=True)
    structure = jax.tree.structure(found)

    def evaluate(arrays: Any) -> Any:
        leaves = eval_jaxpr(closed.jaxpr, closed.consts, *jax.tree.leaves(arrays))
        return jax.tree.unflatten(structure, leaves)

    return evaluate
