"""Loops over layers under a checkpoint policy, rolled and unrolled.

A *step* is the function that a user gives to `fold`, `scan` or `map`, or a block. A
*layer* is that step traced on arrays, and a *stack* holds the arrays of all layers. The
*policy* is what the user writes about memory; for a number of layers it becomes a
`Remat`, the *program*: which layers run, which carries stay, what runs again.

`Loop` is built by `api.py` and `_block_foldable.py`. `Loop.split` divides the arguments
into stacks and shared arrays (`layer_axis.py`; `_block_seq.py` divides those of a
`BlockSeq`), and one of these runs them, or `sweep_back.fold_forward` for a visitor:

- `scan_layers`: layers of one trace, as a plain scan of JAX or as a *sweep*, the loop
  of `_sweep/` that keeps some carries and replays layers from them;
- `scan_unrolled`: layers that may differ, for a `BlockSeq`;
- `layers_at_once`: all layers in parallel, by `jax.vmap`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis
from jaxtyping import Array

from .._checkpoint import checkpoint_name, recomputed, saving_internals
from .._compat import is_eager
from .._placement import has_host_arrays, on_device, platform
from .._policy import ScanCheckpointPolicy, resolve_policy
from .._remat import EVERYTHING, NOTHING, Kept, Remat
from .._schedule import Tree, whole_number
from .._static import PyTree, Static
from .._sweep.kinds import Pattern
from .._sweep.primitive import run_layers
from .._sweep.rules import Bound
from .._sweep.slots import Arrays
from .._sweep.store import at_least_one, read
from .._sweep.trace import UntracedLayer, has_refs, trace_layers
from .checks import axis_or_name
from .layer_axis import Join, TreeLayout, split_kinds
from .marks import IsScanned, is_array, is_named_or_shaped_array
from .stacking import name_stacked, numbers_to_arrays, stack_outputs
from .step import Call, Names, array_step


@dataclasses.dataclass(frozen=True)
class Layers:
    """Layers of one kind, with their parts of the arguments."""

    # How a layer calls the user's function
    call: Call
    # Puts one layer's arguments together from arrays
    layout: TreeLayout
    # The stacks, with the layers' axis in front
    arrays: Arrays
    # What every layer is given whole, on the device
    shared: Arrays
    # Of the kind; None where the layers are of one kind
    name: str | None = None

    def untraced(self, static: PyTree, names: Names, *, whole: bool) -> UntracedLayer:
        """A layer on arrays; where `whole`, unsliced fields are a `LayerStack`."""
        unpack = self.layout.arguments if whole else self.layout.layer
        body = array_step(self.call, static, names, unpack)
        return UntracedLayer(body, self.shared, self.arrays, self._unsliced(whole))

    def inputs(self, index: int, *, whole: bool) -> list[Array | None]:
        """A layer's entry of each stack; None for a stack that it takes whole."""
        pairs = zip(self.arrays, self._unsliced(whole), strict=True)
        return [
            None if takes_whole else read(at_least_one(stack), index)
            for stack, takes_whole in pairs
        ]

    def _unsliced(self, whole: bool) -> Sequence[bool]:
        if whole:
            return self.layout.unsliced
        return [False] * len(self.arrays)

    def named(self, stacked: PyTree) -> PyTree:
        """Their stacked outputs, with the axis of the layers."""
        return name_stacked(stacked, self.layout.axis, self.call.caller.what)


def map_layers(
    f: Callable, layout: TreeLayout, arrays: Arrays, shared: Arrays, what: str
) -> PyTree:
    """What `f` returns for all layers' arguments at once, with the axis in front."""

    def one_layer(slices: Arrays) -> tuple[PyTree, Static]:
        args, kwargs = layout.layer(slices, shared)
        outputs, static = eqx.partition(f(*args, **kwargs), is_array)
        return outputs, Static(static)

    # `jax.vmap` puts a dimension in front that named arrays have no axis for. Its size
    # is given, since there may be no array to map.
    stacked, static = jax.vmap(one_layer, axis_size=layout.axis.size)(arrays)
    return name_stacked(eqx.combine(stacked, static.value), layout.axis, what)


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop over layers; build one with `of`."""

    # How each layer calls the user's function
    call: Call
    # The layers' axis; its name if only the arguments tell the size
    axis: Axis | str
    # What the backward pass keeps, offloads and recomputes
    policy: ScanCheckpointPolicy
    # Which layer is of which kind; None for one kind
    pattern: Pattern | None = None
    # Whether the last layer runs first
    reverse: bool = False
    # How many layers one iteration of the loop runs; True for all
    unroll: int | bool = 1
    # Which arrays without a mark may be split over the layers
    is_scanned: IsScanned = is_named_or_shaped_array

    def __post_init__(self):
        if not isinstance(self.reverse, bool | np.bool_):
            raise TypeError(f"reverse is True or False; got {self.reverse!r}.")
        if not isinstance(self.unroll, bool):
            whole_number("unroll", self.unroll, "a bool or a number of layers")

    @classmethod
    def of(
        cls,
        call: Call,
        axis: Any,
        remat: Any,
        pattern: Pattern | None = None,
        **options: Any,
    ) -> "Loop":
        """A loop with these options, and with the defaults for those that are None."""
        # Methods pass on their options as they were given, and None where they were not
        passed = {name: value for name, value in options.items() if value is not None}
        resolved = axis_or_name(axis, call.caller.what)
        return cls(call, resolved, resolve_policy(remat), pattern, **passed)

    def unroll_of(self, length: int) -> int:
        """How many layers one iteration runs, of `length`."""
        return max(1, length if self.unroll is True else int(self.unroll))

    def is_rolled(self, length: int) -> bool:
        """Whether the loop over so many layers stays one; over a symbolic number
        (`jax.export`) it does.
        """
        is_symbolic = not isinstance(length, int | np.integer)
        return is_symbolic or self.unroll_of(length) < length

    def split(self, arguments: PyTree) -> tuple[list[Layers], Join, Axis]:
        """The layers of each kind with their parts of the arguments, as of
        `split_kinds`, and their axis.
        """
        parts, join = split_kinds(
            arguments, self.axis, self.pattern, self.call.caller, self.is_scanned
        )
        names = (None,) if self.pattern is None else self.pattern.names
        kinds = []
        for part, name in zip(parts, names, strict=True):
            # What layers share is moved to the device once, and not by each layer.
            layout, *arrays = part
            stacks, shared = jax.tree.map(jnp.asarray, arrays)
            kinds.append(Layers(self.call, layout, stacks, on_device(shared), name))
        axis = self.axis if isinstance(self.axis, Axis) else kinds[0].layout.axis
        return kinds, join, axis

    def first(self, init: PyTree, kinds: Sequence[Layers], *, whole: bool) -> PyTree:
        """What goes into the first layer, from the first carry."""
        if self.call.until is None:
            return init
        (layers,) = kinds  # a pattern of kinds has no `until`
        # Where there are no layers, the inputs are zeros of the first one's types
        index = max(0, layers.layout.axis.size - 1) if self.reverse else 0
        return self.call.first(init, layers.inputs(index, whole=whole))

    def outputs(self, of_kinds: Sequence[PyTree]) -> PyTree:
        """The outputs of each kind by name, or of the only one."""
        if not self.pattern:
            return of_kinds[0]
        return dict(zip(self.pattern.names, of_kinds, strict=True))


def scan_unrolled(
    loop: Loop,
    init: PyTree,
    inputs: Sequence[PyTree],
    arguments_of: Callable[[PyTree], tuple[Sequence[PyTree], dict[str, PyTree]]],
    axis: Axis,
) -> tuple[PyTree, list[PyTree]]:
    """Run layers that may differ, one for each of the inputs, from any carry to any
    other.

    The schedule is followed by nesting: each of its segments is a `jax.checkpoint`,
    with the layers, or shorter segments, inside it.
    """
    backwards = -1 if loop.reverse else 1
    inputs = inputs[::backwards]
    remat = loop.policy.for_layers(axis.size)
    if _without_jit():
        # The values are known in a layer then, which jax.checkpoint would trace.
        remat = Remat(axis.size, EVERYTHING)
    count = remat.first_layers
    parts = range(count, axis.size)
    if remat.schedule is not None:
        parts = remat.schedule.tree
    if all(isinstance(part, int) for part in parts):
        # No two layers share a segment, so each is checkpointed by itself.
        remat = dataclasses.replace(remat, schedule=None)
    first = _unrolled_step(loop.call, arguments_of, Remat(count, EVERYTHING), axis)
    layer = _unrolled_step(loop.call, arguments_of, remat, axis)

    def run(parts: Iterable[Tree], carry: PyTree) -> tuple[PyTree, list[PyTree]]:
        outputs = []
        for part in parts:
            if isinstance(part, int):
                step = first if part < count else layer
                carry, y = step(carry, inputs[part])
                outputs.append(y)
            else:
                segment = functools.partial(run, part)
                carry, ys = _checkpoint_segment(segment, remat, axis)(carry)
                outputs += ys
        return carry, outputs

    # A profile shows the loop by the name of its axis
    with jax.named_scope(f"scan({axis.name})"):
        run_all = functools.partial(run, [*range(count), *parts])
        carry, outputs = _replayed_whole(run_all, remat)(init)
    return carry, outputs[::backwards]


def _without_jit() -> bool:
    return bool(getattr(jax.config, "jax_disable_jit", False))


def _carry_name(remat: Remat, axis: Axis) -> str:
    """The name of the carries that are moved to the host one by one; empty if none
    are.
    """
    each_offloaded = remat.carries == "host" and remat.schedule is None
    return f"scan({axis.name}) carry" if each_offloaded else ""


def scan_layers(loop: Loop, init: PyTree, arguments: PyTree) -> tuple[PyTree, PyTree]:
    """Run a loop from a first carry; returns the last carry, and the outputs."""
    kinds, _, axis = loop.split(arguments)
    if _without_jit():
        if all(kind.layout.axis.size for kind in kinds):
            first = loop.first(init, kinds, whole=False)
            return _scan_kinds_unrolled(loop, kinds, axis, first)
        # Only a traced layer tells the types of outputs that there are none of.
        with jax.disable_jit(False):
            return scan_layers(loop, init, arguments)
    remat = loop.policy.for_layers(axis.size)
    plain = _plain_checkpoint(loop, kinds, axis, remat)
    first = loop.first(init, kinds, whole=True)
    if loop.call.until is not None and (remat.offloads or plain is not None):
        raise ValueError(
            "With until=, a policy can neither offload nor drop what it keeps of the"
            ' steps that run. Let remat be False, True or "nested", or use max_carries,'
            " first_layers or save_block_internals."
        )
    with jax.named_scope(f"scan({axis.name})"):
        carry, ys = _run_traced(loop, kinds, axis, remat, plain, first)
    return loop.call.last(carry), loop.outputs([*map(Layers.named, kinds, ys)])


def _plain_checkpoint(
    loop: Loop, kinds: Sequence[Layers], axis: Axis, remat: Remat
) -> Bound | None:
    """What checkpoints each layer of a plain scan; None for a sweep."""
    # A plain scan would keep what it reads from the host, and read nothing ahead.
    on_host = has_host_arrays([kind.arrays for kind in kinds])
    needs_sweep = axis.size and (remat.schedule is not None or on_host)
    is_swept = loop.pattern or loop.call.until is not None or needs_sweep
    # A policy that keeps no carry runs the layers twice as a plain scan, the second
    # time with their carries kept. Layers of several kinds have no plain scan that does
    # not copy their stacks.
    if is_swept and (remat.carries is not None or loop.pattern):
        return None
    carry_name = _carry_name(remat, axis)
    options = remat.kept, carry_name, loop.is_rolled(axis.size)
    return Bound("checkpointed", _checkpointed, options)


def _run_traced(
    loop: Loop,
    kinds: Sequence[Layers],
    axis: Axis,
    remat: Remat,
    plain: Bound | None,
    first: PyTree,
) -> tuple[PyTree, list[PyTree]]:
    """Trace a layer of each kind and run the loop from the first carry; the outputs are
    those of each kind.
    """
    # A carry may hold what is no array, the same from layer to layer (`check_carry`)
    arrays, static = eqx.partition(first, eqx.is_array_like)
    names = remat.kept.names
    untraced = [kind.untraced(static, names, whole=True) for kind in kinds]
    # A sweep runs layers again in loops of its own, in which a `jax.Ref` that they
    # close over has no derivative: that is an error here. In a plain scan it has one.
    traced = trace_layers(
        untraced, arrays, offloads=remat.offloads, replays=plain is None
    )
    # Whether a plain scan would be a primitive here. Within a trace it is one of JAX,
    # and so it is with a `jax.Ref`, which a primitive does not take.
    is_primitive = is_eager() and not has_refs([layer.shared for layer in traced])
    if is_primitive and remat.carries and axis.size:
        # Outside of a trace the backward pass of a plain scan has its arguments alone
        # and runs the layers again; a sweep keeps the carries that the policy says.
        plain = None
    run = functools.partial(
        run_layers,
        traced,
        [kind.layout.unsliced for kind in kinds],
        plain=plain,
        remat=remat.swept() if plain is None else remat,
        pattern=loop.pattern,
        reverse=loop.reverse,
        unroll=loop.unroll_of(axis.size),
        stops=loop.call.until is not None,
    )
    if plain is None or not is_primitive:  # such a plain scan keeps its arguments alone
        run = _replayed_whole(run, remat)
    carry, ys = run(traced[0].init, [kind.arrays for kind in kinds])
    return eqx.combine(carry, static), ys


def layers_at_once(loop: Loop, init: None, arguments: PyTree) -> tuple[None, PyTree]:
    """Map the layers of a loop over its arguments, as `scan_layers` runs them; costs
    the memory of all.
    """
    kinds, _, _ = loop.split(arguments)
    what = loop.call.caller.what

    # A scan stacks Python numbers among the outputs; `map_layers` would return one
    def run(*args: PyTree, **kwargs: PyTree) -> PyTree:
        return numbers_to_arrays(loop.call.applied(init, args, kwargs))

    outputs = []
    for kind in kinds:
        outputs.append(map_layers(run, kind.layout, kind.arrays, kind.shared, what))
    return init, loop.outputs(outputs)


def _checkpointed(
    kept: Kept, carry_name: str, is_rolled: bool, layer: Callable
) -> Callable:
    """A layer of a plain scan under `jax.checkpoint`; its carry goes to the host if it
    has a name.
    """
    if kept == EVERYTHING:
        return layer

    def named(shared: PyTree, carry: PyTree, x: PyTree) -> PyTree:
        return layer(shared, checkpoint_name(carry, carry_name), x)

    # GPUs need the barriers also where carries come from the host, for which see
    # `_sweep.reverse`. They are a parameter of JAX's checkpoint, the same for all
    # platforms. A program that is traced on a CPU has them, to no effect there, since
    # it may be exported. One for TPUs does not: 814 MB for 805 (v5p, `offload`).
    prevent_cse = not is_rolled or bool(carry_name and platform() != "tpu")
    run = named if carry_name else layer
    return jax.checkpoint(run, policy=kept.policy(carry_name), prevent_cse=prevent_cse)


def _scan_kinds_unrolled(
    loop: Loop, kinds: Sequence[Layers], axis: Axis, init: PyTree
) -> tuple[PyTree, PyTree]:
    """`scan_layers` under `jax.disable_jit`: a Python loop, where values are known."""
    # One kind is a pattern of one
    pattern = loop.pattern or Pattern((0,) * axis.size, ("",))
    carry, static = eqx.partition(init, eqx.is_array_like)
    untraced = [kind.untraced(static, True, whole=False) for kind in kinds]
    outputs: list[list[PyTree]] = [[] for _ in kinds]
    backwards = -1 if loop.reverse else 1
    with jax.named_scope(f"scan({axis.name})"):
        for index in range(axis.size)[::backwards]:
            number = pattern.kinds[index]
            if loop.call.is_done(carry) and outputs[number]:
                # A first output tells the types of the zeros
                zeros = jax.tree.map(jnp.zeros_like, outputs[number][-1])
                outputs[number].append(zeros)
                continue
            layer = untraced[number]
            row = pattern.before[index, number]
            x = on_device([stack[row] for stack in layer.stacks])
            carry, (y, rest) = layer.body(layer.shared, carry, x)
            outputs[number].append(eqx.combine(y, rest.value))
    what = loop.call.caller.what
    stacked = []
    for of_kind, kind in zip(outputs, kinds, strict=True):
        stacked.append(stack_outputs(of_kind[::backwards], kind.layout.axis, what))
    return loop.call.last(eqx.combine(carry, static)), loop.outputs(stacked)


def _unrolled_step(
    call: Call, arguments_of: Callable, remat: Remat, axis: Axis
) -> Callable:
    """A layer from carry to carry, checkpointed, its inputs read to the device."""
    carry_name = _carry_name(remat, axis)

    def step(carry: PyTree, inputs: PyTree) -> tuple[PyTree, PyTree]:
        carry = checkpoint_name(carry, carry_name) if carry_name else carry
        with saving_internals(remat.kept.names):
            args, kwargs = arguments_of(on_device(inputs))
            return call.outputs(call.applied(carry, args, kwargs), (args, kwargs))

    if remat.kept == EVERYTHING:
        return step
    return recomputed(step, remat.kept.policy(carry_name), offloads=remat.offloads)


def _replayed_whole(run: Callable, remat: Remat) -> Callable:
    """All layers; where the policy keeps no carry they run again for the backward
    pass.
    """
    if remat.carries:
        return run
    return recomputed(run, remat.kept.policy(), offloads=remat.offloads)


def _checkpoint_segment(run: Callable, remat: Remat, axis: Axis) -> Callable:
    """The layers of a segment, of which only the carry at its start is kept."""
    if remat.carries != "host":
        return recomputed(run, None)  # its carry is kept, as all arguments are
    boundary = f"scan({axis.name}) carry at a segment's start"
    policy = NOTHING.policy(boundary)

    def named(carry: PyTree) -> PyTree:
        return run(checkpoint_name(carry, boundary))

    return recomputed(named, policy, offloads=True)
