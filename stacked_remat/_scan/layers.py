"""Loops over layers under a checkpoint policy, rolled and unrolled.

A *step* is the function that a user gives to `fold`, `scan` or `map`, or a block. A
*layer* is that step traced on arrays, and a *stack* holds the arrays of all layers. The
*policy* is what the user writes about memory; for a number of layers it becomes a
`Remat`: which layers run, which carries stay, what runs again.

`api.py` and `_block_foldable.py` make a `FoldCall`. `split_arguments` divides its
arguments into stacks and shared arrays (`layer_axis.py`; `_block_seq.py` divides those
of a `BlockSeq`), and one of these runs them, or `sweep_back.forward_for_visitor` for a
visitor:

- `scan_layers`: layers of one trace, as a plain scan of JAX or as a *sweep*, the loop
  of `_sweep/` that keeps some carries and replays layers from them;
- `scan_unrolled`: a Python loop, for layers that may differ (`BlockSeq`);
- `layers_at_once`: all layers in parallel, by `jax.vmap`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import Axis

from .._checkpoint import checkpoint_name, recomputed, saving_internals
from .._compat import is_eager
from .._memory_spaces import has_host_arrays, on_device
from .._places import Places
from .._remat import EVERYTHING, NOTHING, Kept, Remat
from .._schedule import Tree
from .._static import PyTree, Static
from .._sweep import disk
from .._sweep.kinds import Pattern
from .._sweep.primitive import run_layers
from .._sweep.reverse_spec import with_rules_as_arguments
from .._sweep.slots import Carry, OfKinds
from .._sweep.spec import Stops, SweepSpec
from .._sweep.store import at_least_one, read
from .._sweep.trace import TracedLayers, check_offloaded, has_refs, trace_layers
from .layer_axis import Join, Split, split_kinds
from .marks import is_array
from .stacking import name_stacked, numbers_to_arrays, stack_outputs
from .step import FoldCall, array_step
from .until import CountedCarry, Until, UntilCarry


def split_arguments(
    call: FoldCall, arguments: PyTree
) -> tuple[list[Split], Join, Axis]:
    """The arguments of the layers of each kind, as of `split_kinds`, on the device, and
    the axis of all layers.
    """
    parts, join = split_kinds(
        arguments, call.axis, call.pattern, call.caller, call.is_scanned
    )
    splits = []
    for split in map(Split.in_jax, parts):
        # What layers share is moved to the device once, and not by each layer.
        splits.append(split._replace(shared=on_device(split.shared)))
    axis = call.axis if isinstance(call.axis, Axis) else splits[0].layout.axis
    return splits, join, axis


def trace_kinds(
    call: FoldCall,
    splits: Sequence[Split],
    first: PyTree,
    remat: Remat,
    *,
    replays: bool = True,
) -> tuple[TracedLayers, PyTree]:
    """A traced layer of each kind, and what is no array in the carry `first`, which
    goes into the first layer.
    """
    # It is the same from layer to layer (`check_carry`)
    arrays, static = eqx.partition(first, eqx.is_array_like)
    names = remat.kept.names
    places = Places(names)
    bodies = []
    for split in splits:
        step = array_step(call, static, names, split.layout.arguments)
        bodies.append(places.named_in(step))
    traced = trace_layers(
        bodies,
        arrays,
        [split.stacks for split in splits],
        [split.shared for split in splits],
        [split.layout.unsliced for split in splits],
        offloads=remat.offloads,
        replays=replays,
    )
    places.check()
    return traced, static


def checked_inputs(
    traced: TracedLayers, splits: Sequence[Split], remat: Remat
) -> tuple[Carry, OfKinds]:
    """The first carry of traced layers, and their stacks; see `check_offloaded`, and
    `disk.check` for carries on disk.
    """
    offloaded = *remat.kept.offloaded, *remat.first_kept.offloaded
    stacks = [split.stacks for split in splits]
    if remat.carries == "disk":
        disk.check(remat.folder, (traced.init, traced.shared, stacks))
    return check_offloaded(traced.kinds, offloaded, (traced.init, stacks))


def sweep_spec(
    call: FoldCall, traced: TracedLayers, remat: Remat, axis: Axis, first: PyTree
) -> SweepSpec:
    """The loop or the sweep over traced layers, as the call and the first carry say."""
    return SweepSpec(
        traced.kinds,
        remat,
        reverse=call.reverse,
        unroll=call.unroll_of(axis.size),
        pattern=call.pattern,
        stops=_stops(call, first),
        carry_name=_carry_name(remat, axis) if remat.form == "loop" else "",
    )


def _stops(call: FoldCall, first: PyTree) -> Stops:
    """By what layers may stop, given the carry that goes into the first one."""
    if isinstance(first, CountedCarry):
        return "count"
    return "" if call.until is None else "until"


def named_outputs(
    call: FoldCall, splits: Sequence[Split], stacked: Sequence[PyTree]
) -> PyTree:
    """The stacked outputs of each kind with the axis of its layers: by the kinds' names
    if there are several.
    """
    outputs = []
    for split, of_kind in zip(splits, stacked, strict=True):
        outputs.append(name_stacked(of_kind, split.layout.axis, call.caller.what))
    if not call.pattern:
        return outputs[0]
    return dict(zip(call.pattern.names, outputs, strict=True))


def scan_layers(call: FoldCall, init: PyTree, arguments: PyTree) -> Any:
    """Run the steps of a call from a first carry; returns the last carry, and the
    outputs.
    """
    splits, _, axis = split_arguments(call, arguments)
    first = init if call.until is None else _first_carry(call.until, call, splits, init)
    if _without_jit():
        if all(split.layout.axis.size for split in splits):
            return _scan_without_jit(call, splits, axis, first)
        # Only a traced layer tells the types of outputs that there are none of.
        with jax.disable_jit(False):
            return scan_layers(call, init, arguments)
    remat = call.policy.for_layers(axis.size)
    is_off_device = remat.offloads or remat.carries in (None, "disk")
    if call.until is not None and is_off_device:
        raise ValueError(
            "With until=, a policy can neither offload nor drop what it keeps of the"
            " steps that run, nor write it to disk. Let remat be False, True or"
            ' "nested", or use max_carries, first_layers or save_block_internals.'
        )
    with jax.named_scope(f"scan({axis.name})"):
        # A sweep runs layers again in loops of its own, in which a `jax.Ref` that they
        # close over has no derivative: that is an error. In a loop of JAX it has one.
        is_swept = _needs_sweep(call, splits, remat) or bool(_stops(call, first))
        traced, static = trace_kinds(call, splits, first, remat, replays=is_swept)
        is_swept = is_swept or _gathers_ahead(traced, remat)
        # Whether a loop would be a primitive here. Within a trace it is one of JAX, and
        # so it is with a `jax.Ref`, which a primitive does not take.
        is_primitive = is_eager() and not has_refs(traced.shared)
        if remat.carries is None:
            traced = with_rules_as_arguments(traced)
        # Cut layers are swept. Others are a loop: within a trace one of JAX; outside of
        # one a primitive, whose backward pass has its arguments alone and runs the
        # layers again. So where carries are kept there, it is a sweep too.
        executed = remat
        if is_swept or (is_primitive and remat.carries is not None):
            executed = remat.swept()
        spec = sweep_spec(call, traced, executed, axis, first)
        run = functools.partial(run_layers, traced, spec)
        # A primitive of a loop keeps its arguments alone.
        if executed.form == "sweep" or not is_primitive:
            run = _replayed_whole(run, remat)
        carry, ys = run(*checked_inputs(traced, splits, remat))
    carry = eqx.combine(carry, static)
    if call.until is not None:
        carry = carry.carry
    return carry, named_outputs(call, splits, ys)


def _first_carry(
    until: Until, call: FoldCall, splits: Sequence[Split], init: PyTree
) -> UntilCarry:
    """What goes into the first layer of a loop that may stop."""
    (split,) = splits  # a pattern of kinds has no `until`
    # Where there are no layers, the inputs are zeros of the first one's types
    index = max(0, split.layout.axis.size - 1) if call.reverse else 0
    inputs = []
    for stack, is_whole in zip(split.stacks, split.layout.unsliced, strict=True):
        inputs.append(None if is_whole else read(at_least_one(stack), index))
    return UntilCarry.of(until, init, inputs)


def _needs_sweep(call: FoldCall, splits: Sequence[Split], remat: Remat) -> bool:
    """Whether layers are swept, also where the policy does not cut them."""
    # Layers of several kinds have no loop that does not copy their stacks.
    if call.pattern:
        return True
    # A policy that keeps no carry runs the layers twice as a loop, the second time with
    # their carries kept.
    if remat.carries is None:
        return False
    # A loop would keep what it reads from the host, and read nothing ahead.
    on_host = has_host_arrays([split.stacks for split in splits])
    return remat.form == "sweep" or on_host


def _gathers_ahead(traced: TracedLayers, remat: Remat) -> bool:
    """Whether layers are swept because they gather: in a loop they would wait."""
    # What `_needs_sweep` says of these, and what a sweep can't have.
    if remat.carries is None or has_refs(traced.shared):
        return False
    # A number of layers that is not known (`jax.export`) has no schedule.
    if not isinstance(remat.length, int):
        return False
    return any(kind.gathers_apart().gathers for kind in traced.kinds)


def layers_at_once(
    call: FoldCall, init: None, arguments: PyTree
) -> tuple[None, PyTree]:
    """Map the layers over their arguments, as `scan_layers` runs them; costs the memory
    of all.
    """
    splits, _, _ = split_arguments(call, arguments)

    # A scan stacks Python numbers among the outputs; `map_layers` would return one
    def run(*args: PyTree, **kwargs: PyTree) -> PyTree:
        return numbers_to_arrays(call.applied(init, args, kwargs))

    stacked = [map_layers(run, split) for split in splits]
    return init, named_outputs(call, splits, stacked)


def map_layers(f: Callable, split: Split) -> PyTree:
    """What `f` returns for all layers' arguments at once, stacked; the axis of layers
    has no name yet in named arrays.
    """

    def one_layer(entries: PyTree) -> tuple[PyTree, Static]:
        args, kwargs = split.layout.layer(entries, split.shared)
        outputs, static = eqx.partition(f(*args, **kwargs), is_array)
        return outputs, Static(static)

    # The size is given, since there may be no array to map.
    size = split.layout.axis.size
    stacked, static = jax.vmap(one_layer, axis_size=size)(split.stacks)
    return eqx.combine(stacked, static.value)


def _without_jit() -> bool:
    return bool(getattr(jax.config, "jax_disable_jit", False))


def _scan_without_jit(
    call: FoldCall, splits: Sequence[Split], axis: Axis, first: PyTree
) -> tuple[PyTree, PyTree]:
    """`scan_layers` under `jax.disable_jit`: a Python loop, where values are known."""
    # One kind is a pattern of one
    pattern = call.pattern or Pattern((0,) * axis.size, ("",))
    carry, static = eqx.partition(first, eqx.is_array_like)
    bodies = []
    for split in splits:
        bodies.append(array_step(call, static, True, split.layout.layer))
    outputs: list[list[PyTree]] = [[] for _ in splits]

    def step(carry: PyTree, index: int) -> tuple[PyTree, None]:
        kind = pattern.kinds[index]
        is_done = call.until is not None and carry.surely_done
        if is_done and outputs[kind]:
            # A first output tells the types of the zeros
            y = jax.tree.map(jnp.zeros_like, outputs[kind][-1])
        else:
            split = splits[kind]
            x = read(split.stacks, int(pattern.rows[index]))
            carry, (y, rest) = bodies[kind](split.shared, carry, x)
            y = eqx.combine(y, rest.value)
        outputs[kind].append(y)
        return carry, None

    carry, _ = scan_unrolled(call, carry, range(axis.size), step, axis)
    stacked = []
    for split, of_kind in zip(splits, outputs, strict=True):
        in_order = of_kind[::-1] if call.reverse else of_kind
        stacked.append(stack_outputs(in_order, split.layout.axis, call.caller.what))
    carry = eqx.combine(carry, static)
    if call.until is not None:
        carry = carry.carry
    return carry, named_outputs(call, splits, stacked)


def scan_unrolled(
    call: FoldCall,
    init: PyTree,
    inputs: Sequence[PyTree],
    step: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    axis: Axis,
) -> tuple[PyTree, list[PyTree]]:
    """Run layers that may differ, `step(carry, inputs of a layer) -> (carry, y)`, from
    any carry to any other.

    The schedule is followed by nesting: each of its segments is a `jax.checkpoint`,
    with the layers, or shorter segments, inside it.
    """
    backwards = -1 if call.reverse else 1
    inputs = inputs[::backwards]
    remat = _remat_unrolled(call, axis)
    count = remat.first_layers
    places = Places(remat.kept.names)
    parts = range(count, axis.size)
    if remat.schedule is not None:
        parts = remat.schedule.tree
    first = _checkpointed_step(step, Remat(count, EVERYTHING), axis)
    layer = _checkpointed_step(step, remat, axis, places=places)
    alone = layer
    if remat.schedule is not None and remat.schedule.segments:
        # A segment of one layer: until it is reversed only its carry is kept, which is
        # moved to the host if those of segments are. When it is reversed all of its
        # internals are there, so that it is told of those that the policy keeps.
        of_one = dataclasses.replace(remat, kept=NOTHING, schedule=None)
        alone = _checkpointed_step(step, of_one, axis, told=remat.kept)

    def run(
        parts: Iterable[Tree], one_layer: Callable, carry: PyTree
    ) -> tuple[PyTree, list[PyTree]]:
        outputs = []
        for part in parts:
            if isinstance(part, int):
                step = first if part < count else one_layer
                carry, y = step(carry, inputs[part])
                outputs.append(y)
            else:
                segment = functools.partial(run, part, layer)
                carry, ys = _checkpointed_segment(segment, remat, axis)(carry)
                outputs += ys
        return carry, outputs

    # A profile shows the loop by the name of its axis
    with jax.named_scope(f"scan({axis.name})"):
        run_all = functools.partial(run, [*range(count), *parts], alone)
        carry, outputs = _replayed_whole(run_all, remat)(init)
    places.check()
    return carry, outputs[::backwards]


def _remat_unrolled(call: FoldCall, axis: Axis) -> Remat:
    """What a policy executes in a Python loop over layers; refuses what it can't."""
    remat = call.policy.for_layers(axis.size)
    if _without_jit():
        # The values are known in a layer then, which jax.checkpoint would trace.
        return Remat(axis.size, EVERYTHING)
    if remat.carries == "disk":
        raise ValueError(
            f"{call.policy!r} is not supported for layers that are compiled one by one"
            ' (BlockSeq). Use save_carries="offload", or let the layers be a Stacked.'
        )
    if remat.schedule is not None and remat.schedule.has_two_levels:
        raise ValueError(
            f"{call.policy!r} is not supported for layers that are compiled one by one"
            " (BlockSeq), where all carries of a segment are on the device while it is"
            " reversed. Leave out max_carries, or let the layers be a Stacked."
        )
    return remat


def _checkpointed_step(
    step: Callable,
    remat: Remat,
    axis: Axis,
    told: Kept | None = None,
    places: Places | None = None,
) -> Callable:
    """A step of a Python loop, which knows what is kept of its internals: `told`, by
    default what `remat` says; its operations get the names of `places`.
    """
    known = remat.kept if told is None else told

    def run(carry: PyTree, inputs: PyTree) -> tuple[PyTree, PyTree]:
        with saving_internals(known.names):
            return step(carry, inputs)

    carry_name = _carry_name(remat, axis)
    named = _with_named_carry(run, carry_name) if carry_name else run
    if remat.kept == EVERYTHING:
        return named
    policy = remat.kept.policy(carry_name)
    return recomputed(named, policy, offloads=remat.offloads, places=places)


def _carry_name(remat: Remat, axis: Axis) -> str:
    """The name of the carries that are moved to the host one by one; empty if none
    are.
    """
    each_offloaded = remat.carries == "host" and remat.schedule is None
    return f"scan({axis.name}) carry" if each_offloaded else ""


def _checkpointed_segment(run: Callable, remat: Remat, axis: Axis) -> Callable:
    """The layers of a segment, of which only the carry at its start is kept."""
    if remat.carries != "host":
        return recomputed(run, None)  # its carry is kept, as all arguments are
    boundary = f"scan({axis.name}) carry at a segment's start"
    named = _with_named_carry(run, boundary)
    return recomputed(named, NOTHING.policy(boundary), offloads=True)


def _with_named_carry(run: Callable, name: str) -> Callable:
    """A function of a carry and inputs, with a name by which a policy finds the
    carry.
    """

    def named(carry: PyTree, *inputs: PyTree) -> PyTree:
        return run(checkpoint_name(carry, name), *inputs)

    return named


def _replayed_whole(run: Callable, remat: Remat) -> Callable:
    """All layers; where the policy keeps no carry they run again for the backward
    pass.
    """
    if remat.carries is not None:
        return run
    return recomputed(run, remat.kept.policy(), offloads=remat.offloads)
