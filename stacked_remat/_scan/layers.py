"""Loops over layers under a checkpoint policy, rolled and unrolled."""

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
    """Layers of one kind, with their arguments: the arrays that are split and those
    that all layers share.
    """

    call: Call
    layout: TreeLayout
    arrays: Arrays
    shared: Arrays
    name: str | None = None

    def untraced(self, static: PyTree, names: Names, *, whole: bool) -> UntracedLayer:
        """A layer on arrays; where `whole`, unsliced fields are a `LayerStack`."""
        layout = self.layout
        unpack = layout.arguments if whole else layout.layer
        body = array_step(self.call, static, names, unpack)
        unsliced = layout.unsliced if whole else [False] * len(self.arrays)
        return UntracedLayer(body, self.shared, self.arrays, unsliced)

    def inputs(self, index: int, *, whole: bool) -> list[Array | None]:
        """What is split, for the layer at an index; None for what a layer takes the
        whole of.
        """
        unsliced = self.layout.unsliced if whole else [False] * len(self.arrays)
        pairs = zip(self.arrays, unsliced, strict=True)
        return [
            None if is_ else read(at_least_one(stack), index) for stack, is_ in pairs
        ]

    def named(self, stacked: PyTree) -> PyTree:
        """Their stacked outputs, with the axis of the layers."""
        return name_stacked(stacked, self.layout.axis, self.call.caller.what)


def map_layers(
    f: Callable, layout: TreeLayout, arrays: Arrays, shared: Arrays, what: str
) -> PyTree:
    """What `f` returns for all layers' arguments at once, with the axis in front."""

    def one_layer(slices: Arrays) -> tuple[PyTree, Static]:
        args, kwargs = layout.layer(slices, shared)
        found, static = eqx.partition(f(*args, **kwargs), is_array)
        return found, Static(static)

    found, static = jax.vmap(one_layer, axis_size=layout.axis.size)(arrays)
    return name_stacked(eqx.combine(found, static.value), layout.axis, what)


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop over layers; build one with `of`. `pattern` tells the kinds of layers, if
    there are several.
    """

    call: Call
    axis: Axis | str
    policy: ScanCheckpointPolicy
    pattern: Pattern | None = None
    reverse: bool = False
    unroll: int | bool = 1
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
        given = {name: option for name, option in options.items() if option is not None}
        return cls(
            call,
            axis_or_name(axis, call.caller.what),
            resolve_policy(remat),
            pattern,
            **given,
        )

    def unroll_of(self, length: int) -> int:
        """How many of so many layers one iteration runs."""
        return max(1, length if self.unroll is True else int(self.unroll))

    def is_rolled(self, length: int) -> bool:
        """Whether the loop over so many layers stays one; over a symbolic number
        (`jax.export`) it does.
        """
        return (
            not isinstance(length, int | np.integer) or self.unroll_of(length) < length
        )

    def split(self, arguments: PyTree) -> tuple[list[Layers], Join, Axis]:
        """The layers of each kind with their parts of the arguments, as of
        `split_kinds`, and their axis.
        """
        caller = self.call.caller
        split, join = split_kinds(
            arguments, self.axis, self.pattern, caller, self.is_scanned
        )
        names = (None,) if self.pattern is None else self.pattern.names
        kinds = []
        for (layout, *arrays), name in zip(split, names, strict=True):
            arrays, shared = jax.tree.map(jnp.asarray, arrays)
            kinds.append(Layers(self.call, layout, arrays, on_device(shared), name))
        return (
            kinds,
            join,
            self.axis if isinstance(self.axis, Axis) else kinds[0].layout.axis,
        )

    def first(self, init: PyTree, kinds: Sequence[Layers], *, whole: bool) -> PyTree:
        """What goes into the first layer, from the first carry."""
        if self.call.until is None:
            return init
        (layers,) = kinds  # a pattern of kinds has no `until`
        index = max(0, layers.layout.axis.size - 1) if self.reverse else 0
        return self.call.first(init, layers.inputs(index, whole=whole))

    def outputs(self, of_kinds: Sequence[PyTree]) -> PyTree:
        """The outputs of each kind by name, or of the only one."""
        return (
            dict(zip(self.pattern.names, of_kinds, strict=True))
            if self.pattern
            else of_kinds[0]
        )


def scan_unrolled(
    loop: Loop,
    init: PyTree,
    inputs: Sequence[PyTree],
    arguments_of: Callable[[PyTree], tuple[Sequence[PyTree], dict[str, PyTree]]],
    axis: Axis,
) -> tuple[PyTree, list[PyTree]]:
    """Run layers that may differ, one for each of the inputs, from any carry to any
    other.
    """
    backwards = -1 if loop.reverse else 1
    inputs = inputs[::backwards]
    # Without jit the values are known in a layer, which jax.checkpoint would trace.
    remat = (
        Remat(axis.size, EVERYTHING)
        if _without_jit()
        else loop.policy.for_layers(axis.size)
    )
    count = remat.first_layers
    parts = range(axis.size - count) if remat.schedule is None else remat.schedule.tree
    if all(isinstance(part, int) for part in parts):
        remat = dataclasses.replace(remat, schedule=None)
    first = _unrolled_step(loop.call, arguments_of, Remat(count, EVERYTHING), axis)
    layer = _unrolled_step(loop.call, arguments_of, remat, axis)

    def run(parts: Iterable[Tree], carry: PyTree) -> tuple[PyTree, list[PyTree]]:
        outputs = []
        for part in parts:
            if isinstance(part, int):
                carry, y = (first if part < 0 else layer)(carry, inputs[count + part])
                outputs.append(y)
            else:
                carry, ys = _checkpoint_segment(
                    functools.partial(run, part), remat, axis
                )(carry)
                outputs += ys
        return carry, outputs

    with jax.named_scope(f"scan({axis.name})"):
        every = functools.partial(run, [*range(-count, 0), *parts])
        carry, outputs = _replayed_whole(every, remat)(init)
    return carry, outputs[::backwards]


def _without_jit() -> bool:
    return bool(getattr(jax.config, "jax_disable_jit", False))


def _carry_name(remat: Remat, axis: Axis) -> str:
    """The name of the carries that are moved to the host one by one; empty if none
    are.
    """
    return (
        f"scan({axis.name}) carry"
        if remat.carries == "host" and remat.schedule is None
        else ""
    )


def scan_layers(loop: Loop, init: PyTree, arguments: PyTree) -> tuple[PyTree, PyTree]:
    """Run a loop from a first carry; returns the last carry, and the outputs."""
    kinds, _, axis = loop.split(arguments)
    call, pattern = loop.call, loop.pattern
    if _without_jit():
        if all(kind.layout.axis.size for kind in kinds):
            return _scan_kinds_unrolled(
                loop, kinds, axis, loop.first(init, kinds, whole=False)
            )
        # Only a traced layer tells the types of outputs that there are none of.
        with jax.disable_jit(False):
            return scan_layers(loop, init, arguments)
    remat, plain, stops = (
        loop.policy.for_layers(axis.size),
        None,
        call.until is not None,
    )
    arrays, static = eqx.partition(
        loop.first(init, kinds, whole=True), eqx.is_array_like
    )
    xs = [kind.arrays for kind in kinds]
    # A plain scan would keep what it reads from the host, and read nothing ahead.
    is_swept = (
        pattern
        or stops
        or (axis.size and (remat.schedule is not None or has_host_arrays(xs)))
    )
    if not is_swept or (remat.carries is None and not pattern):
        options = remat.kept, _carry_name(remat, axis), loop.is_rolled(axis.size)
        plain = Bound("checkpointed", _checkpointed, options)
    if stops and (remat.offloads or plain is not None):
        raise ValueError(
            "With until=, a policy can neither offload nor drop what it keeps of the"
            ' steps that run. Let remat be False, True or "nested", or use max_carries,'
            " first_layers or save_block_internals."
        )
    with jax.named_scope(f"scan({axis.name})"):
        untraced = [
            kind.untraced(static, remat.kept.names, whole=True) for kind in kinds
        ]
        traced = trace_layers(
            untraced, arrays, offloads=remat.offloads, replays=plain is None
        )
        is_primitive = is_eager() and not has_refs([layer.shared for layer in traced])
        if is_primitive and remat.carries and axis.size:
            plain = None
        run = functools.partial(
            run_layers,
            traced,
            [kind.layout.unsliced for kind in kinds],
            plain=plain,
            remat=remat.swept() if plain is None else remat,
            pattern=pattern,
            reverse=loop.reverse,
            unroll=loop.unroll_of(axis.size),
            stops=stops,
        )
        # In eager mode a plain scan is a primitive, which keeps its arguments alone.
        replayed = (
            run if is_primitive and plain is not None else _replayed_whole(run, remat)
        )
        carry, ys = replayed(traced[0].init, xs)
    last = call.last(eqx.combine(carry, static))
    return last, loop.outputs(
        [kind.named(y) for kind, y in zip(kinds, ys, strict=True)]
    )


def layers_at_once(loop: Loop, init: None, arguments: PyTree) -> tuple[None, PyTree]:
    """Map the layers of a loop over its arguments, as `scan_layers` runs them; costs
    the memory of all.
    """
    kinds, _, _ = loop.split(arguments)

    def run(*args: PyTree, **kwargs: PyTree) -> PyTree:
        return numbers_to_arrays(loop.call.applied(init, args, kwargs))

    what, parts = (
        loop.call.caller.what,
        [(kind.layout, kind.arrays, kind.shared) for kind in kinds],
    )
    return init, loop.outputs([map_layers(run, *part, what) for part in parts])


def _checkpointed(
    kept: Kept, carry_name: str, is_rolled: bool, layer: Callable
) -> Callable:
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
    """`scan_layers` without `jax.jit`."""
    pattern = loop.pattern or Pattern((0,) * axis.size, ("",))
    carry, static = eqx.partition(init, eqx.is_array_like)
    untraced = [kind.untraced(static, True, whole=False) for kind in kinds]
    outputs: list[list[PyTree]] = [[] for _ in kinds]
    backwards = -1 if loop.reverse else 1
    with jax.named_scope(f"scan({axis.name})"):
        for index in range(axis.size)[::backwards]:
            number = pattern.kinds[index]
            layer, row = untraced[number], pattern.before[index, number]
            x = on_device([stack[row] for stack in layer.stacks])
            if loop.call.is_done(carry) and outputs[number]:
                outputs[number].append(
                    jax.tree.map(jnp.zeros_like, outputs[number][-1])
                )
                continue
            carry, (y, rest) = layer.body(layer.shared, carry, x)
            outputs[number].append(eqx.combine(y, rest.value))
    what = loop.call.caller.what
    pairs = zip(outputs, kinds, strict=True)
    ys = [
        stack_outputs(of_kind[::backwards], kind.layout.axis, what)
        for of_kind, kind in pairs
    ]
    return loop.call.last(eqx.combine(carry, static)), loop.outputs(ys)


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
    return (
        run
        if remat.carries
        else recomputed(run, remat.kept.policy(), offloads=remat.offloads)
    )


def _checkpoint_segment(run: Callable, remat: Remat, axis: Axis) -> Callable:
    if remat.carries != "host":
        return recomputed(run, None)  # its carry is kept, as all arguments are
    boundary = f"scan({axis.name}) carry at a segment's start"
    policy = NOTHING.policy(boundary)
    return recomputed(
        lambda carry: run(checkpoint_name(carry, boundary)), policy, offloads=True
    )
