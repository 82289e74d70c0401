"""Loops over layers under a checkpoint policy, rolled and unrolled."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import Axis
from haliax.axis import AxisSelector

from .._checkpoint import checkpoint_name, recomputed, run_tree
from .._placement import has_host_arrays, on_device, platform
from .._policy import ScanCheckpointPolicy, ScanCheckpointSpec, resolve_policy
from .._remat import Internals, PerLayer, Remat, SaveAll, Swept, checkpoint_of, for_length
from .._schedule import Tree, equal
from .._static import Static
from .._sweep.api import run_layers
from .._sweep.kinds import Pattern
from .._sweep.spec import FirstLayers
from .._sweep.store import at_least_one, empty_stack
from .._sweep.trace import UntracedLayer, trace_layers
from .checks import axis_or_name, check_offloaded, check_reverse, check_unroll
from .layer_axis import TreeLayout, split_tree
from .marks import IsScanned, is_array, is_named_or_shaped_array
from .pattern import DividedArguments, NamedPattern, divide
from .stacking import name_stacked, numbers_to_arrays, stack_outputs
from .step import Call, Names, Unpack, array_step, arrays_and_rest


def from_arguments(run: Callable, remat: Remat, axis: AxisSelector) -> Callable:
    """`run(init, arguments)`, which keeps nothing derived from the arguments if inputs are dropped."""
    if isinstance(remat, PerLayer) and remat.inputs == "drop":
        return recomputed(run, remat.jax_policy(*Names.over(axis)), offloads=remat.offloads)
    return run


@dataclasses.dataclass(frozen=True)
class Layers:
    """Layers of one kind, with their arguments.

    Attributes:
        call: of a layer.
        layout: of the arguments, over the axis of these layers.
        arrays: those that are split.
        shared: those that all layers share.
        name: of the kind, if there are several.
    """

    call: Call
    layout: TreeLayout
    arrays: list[Any]
    shared: list[Any]
    name: str | None = None

    def as_arrays(self) -> "Layers":
        """The same with JAX's arrays, those that are shared on the device."""
        arrays, shared = jax.tree.map(jnp.asarray, (self.arrays, self.shared))
        return dataclasses.replace(self, arrays=arrays, shared=on_device(shared))

    def arguments_at(self, row: int) -> tuple[Any, Any]:
        """What the layer at a row is given."""
        return self.layout.layer(on_device([array[row] for array in self.arrays]), self.shared)

    def untraced(self, static: Any, remat: Remat, *, whole: bool) -> UntracedLayer:
        """A layer on arrays. `whole` layers take a `LayerStack` for each field that is unsliced."""
        layout = self.layout
        unpack = layout.arguments if whole else layout.layer
        body = functools.partial(array_step, self.call, static, remat, None, unpack, arrays_and_rest)
        leaves, tree = jax.tree.flatten(static)
        return UntracedLayer(
            body,
            self.shared,
            self.arrays,
            layout.unsliced if whole else [False] * len(self.arrays),
            (*self.call.key, self.name, layout.key, tree, *leaves, remat),
        )

    def at_once(self) -> Any:
        """The outputs of all layers on the same arguments, with the axis of the layers in front."""

        def run(*args: Any, **kwargs: Any) -> Any:
            return numbers_to_arrays(self.call.fn(*args, **kwargs))

        return map_layers(run, self.layout, self.arrays, self.shared, self.call.caller.what)

    def no_outputs(self, carry: Any) -> Any:
        """The outputs of no layers, from a carry of the right types."""
        one = dataclasses.replace(self, arrays=[*map(at_least_one, self.arrays)])

        def output() -> Any:
            args, kwargs = one.arguments_at(0)
            result = self.call.fn(*self.call.inputs(carry, args), **kwargs)
            return numbers_to_arrays(self.call.outputs(result, (args, kwargs))[1])

        arrays, rest = eqx.partition(eqx.filter_eval_shape(output), is_array)
        return self.named(eqx.combine(empty_stack(arrays, 0), rest))

    def named(self, stacked: Any) -> Any:
        """Their stacked outputs, with the axis of the layers."""
        return name_stacked(stacked, self.layout.axis, self.call.caller.what)


def map_layers(
    f: Callable[..., Any], layout: TreeLayout, arrays: Sequence[Any], shared: Sequence[Any], what: str
) -> Any:
    """What `f` returns for every layer's part of the arguments at once; the outputs get the axis in front.

    Costs the memory of all layers together.
    """

    def one_layer(slices: Sequence[Any]) -> tuple[Any, Static]:
        args, kwargs = layout.layer(slices, shared)
        found, static = eqx.partition(f(*args, **kwargs), is_array)
        return found, Static(static)

    found, static = jax.vmap(one_layer, axis_size=layout.axis.size)(arrays)
    return name_stacked(eqx.combine(found, static.value), layout.axis, what)


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop over layers; build one with `of`.

    Attributes:
        call: of a layer.
        axis: of all layers, or its name.
        policy: for the backward pass.
        remat: what the policy means.
        reverse: whether it goes from the last layer to the first.
        unroll: how many layers one iteration runs; `True` for all.
        pattern: which layer is of which kind, if there are several.
        is_scanned: which of the arrays without a mark may be split.
    """

    call: Call
    axis: Axis | str
    policy: ScanCheckpointPolicy
    remat: Remat
    reverse: bool
    unroll: int | bool
    pattern: NamedPattern | None
    is_scanned: IsScanned

    @classmethod
    def of(
        cls,
        call: Call,
        axis: Any,
        remat: ScanCheckpointSpec = False,
        pattern: NamedPattern | None = None,
        *,
        reverse: bool | None = None,
        unroll: int | bool | None = None,
        is_scanned: IsScanned = is_named_or_shaped_array,
    ) -> "Loop":
        """A loop with these options, checked, and with the defaults for those not given.

        Raises:
            ValueError, TypeError: for options that are none.
        """
        policy = resolve_policy(remat)
        if pattern is not None and policy.host_segment_length != 1:
            raise ValueError(
                f"Layers of several kinds are read from the host one at a time, and the policy says "
                f"host_segment_length={policy.host_segment_length}. Leave it at 1."
            )
        return cls(
            call,
            axis_or_name(axis, call.caller.what),
            policy,
            policy.normalized(),
            check_reverse(False if reverse is None else reverse),
            check_unroll(1 if unroll is None else unroll),
            pattern,
            is_scanned,
        )

    def split(self, arguments: Any) -> tuple[list[Layers], DividedArguments | None]:
        """The layers of each kind with their parts of the arguments; these divided, if there are several."""
        if self.pattern is None:
            split = split_tree(arguments, self.axis, self.call.caller, is_scanned=self.is_scanned)
            return [Layers(self.call, *split)], None
        assert isinstance(self.axis, Axis)
        divided = divide(arguments, self.axis, self.pattern, self.call.caller)
        kinds = []
        for number, name in enumerate(self.pattern.names):
            axis = self.axis.resize(len(self.pattern.order.layers_of(number)))
            split = split_tree(divided.of(number), axis, self.call.caller)
            kinds.append(Layers(self.call, *split, name=name))
        return kinds, divided

    def axis_of(self, kinds: Sequence[Layers]) -> Axis:
        """The axis of all layers, with its size."""
        return self.axis if isinstance(self.axis, Axis) else kinds[0].layout.axis

    def outputs(self, of_kinds: Sequence[Any]) -> Any:
        """The outputs of each kind by name, or of the only one."""
        if self.pattern is None:
            return of_kinds[0]
        return dict(zip(self.pattern.names, of_kinds, strict=True))

    @property
    def order(self) -> Pattern | None:
        """The number of each layer's kind, if there are several kinds."""
        return None if self.pattern is None else self.pattern.order


def scan_unrolled(
    call: Call, unpack: Unpack, init: Any, inputs: Sequence[Any], axis: Axis, remat: Remat, reverse: bool
) -> tuple[Any, list[Any]]:
    """Call layers that need not be alike, one after the other, under the same policies as `scan_layers`.

    Args:
        call: of a layer.
        unpack: from the inputs of a layer to its arguments.
        init: the initial carry.
        inputs: for each layer of the axis, what it takes beside the carry.
        axis: the axis of the layers.
        remat: what the policy means. Program size grows with the number of layers.
        reverse: go from the last layer to the first.

    Returns:
        The final carry and the output of each layer.
    """
    order = range(axis.size)[:: -1 if reverse else 1]
    # Without jit the values are known in a layer, which jax.checkpoint would trace.
    remat = SaveAll() if getattr(jax.config, "jax_disable_jit", False) else for_length(remat, axis.size)
    parts = [(remat, order)]
    if isinstance(remat, Swept) and remat.first_layers:
        parts = [(remat.first, order[: remat.first_layers]), (remat, order[remat.first_layers :])]
    carry, outputs = init, []
    with jax.named_scope(f"scan({axis.name})"):
        for part, layers in parts:
            of_part = [inputs[i] for i in layers]
            carry, ys = _run_unrolled(call, unpack, carry, of_part, part, Names.over(axis))
            outputs += ys
    return carry, outputs[:: -1 if reverse else 1]


def scan_layers(loop: Loop, init: Any, arguments: Any) -> tuple[Any, Any]:
    """Run a loop from a first carry; returns the last carry, and the outputs."""
    kinds, _ = loop.split(arguments)
    axis, call = loop.axis_of(kinds), loop.call
    init, remat, options = call.first(init), for_length(loop.remat, axis.size), None
    if getattr(jax.config, "jax_disable_jit", False):
        return _scan_kinds_unrolled(loop, kinds, init, SaveAll())
    kinds = [kind.as_arrays() for kind in kinds]
    xs = [kind.arrays for kind in kinds]
    # A plain scan would keep what it reads from the host, and read nothing ahead.
    stops = call.until is not None
    if loop.pattern or stops or (axis.size and (isinstance(remat, Swept) or has_host_arrays(xs))):
        options = sweep_options(remat, axis, xs, loop.policy.host_segment_length)
    if loop.pattern is not None and options is None:
        return _scan_kinds_unrolled(loop, kinds, init, remat)
    names = Names.over(axis)
    if options is None:
        assert not isinstance(remat, Swept)
        is_rolled = loop.unroll is not True and loop.unroll < axis.size
        plain = _LayerCheckpoint(remat, names, is_rolled)
        options = {"schedule": None, "plain": plain}
    offloads = (isinstance(remat, PerLayer) and remat.offloads) or options.get("boundaries") == "host"
    if stops and (offloads or "plain" in options):
        raise ValueError(
            "With until=, a policy can neither offload nor drop what it keeps of the steps that run. Let "
            'remat be False, True or "nested", or use max_carries, first_layers or save_block_internals.'
        )
    arrays, static = eqx.partition(init, eqx.is_array_like)
    with jax.named_scope(f"scan({axis.name})"):
        untraced = [kind.untraced(static, remat, whole=True) for kind in kinds]
        traced = trace_layers(untraced, arrays, offloads=offloads, replays="plain" not in options)
        if isinstance(remat, PerLayer) and remat.offloaded:
            for layer in traced:
                check_offloaded(layer.jaxpr.outvars[: len(layer.init)], layer.jaxpr, remat.offloaded)
        fields = {"pattern": loop.order, "reverse": loop.reverse, "unroll": loop.unroll, "stops": stops}
        run = functools.partial(
            run_layers, traced, [kind.layout.unsliced for kind in kinds], axis.size, **fields, **options
        )
        carry, ys = _replayed_whole(run, remat, names)(traced[0].init, xs)
    last = call.last(eqx.combine(carry, static))
    return last, loop.outputs([kind.named(y) for kind, y in zip(kinds, ys, strict=True)])


def layers_at_once(loop: Loop, init: None, arguments: Any) -> tuple[None, Any]:
    """Map the layers of a loop over its arguments, as `scan_layers` runs them; costs the memory of all."""
    kinds, _ = loop.split(arguments)
    return init, loop.outputs([kind.at_once() for kind in kinds])


@dataclasses.dataclass(frozen=True)
class _LayerCheckpoint:
    """How the layers of a plain scan are checkpointed."""

    remat: Internals
    names: Names
    is_rolled: bool

    def __call__(self, layer: Callable[..., Any]) -> Callable[..., Any]:
        remat, names = self.remat, self.names
        if isinstance(remat, SaveAll):
            return layer

        def named(shared: Any, carry: Any, x: Any) -> Any:
            if remat.named:
                carry, x = checkpoint_name(carry, names.carry), checkpoint_name(x, names.inputs)
            return layer(shared, carry, x)

        prevent_cse = remat.prevent_cse or _reads_carries_on_gpus(remat) or not self.is_rolled
        return jax.checkpoint(named, policy=remat.jax_policy(*names), prevent_cse=prevent_cse)


def _reads_carries_on_gpus(remat: PerLayer) -> bool:
    """Whether carries come from the host of a GPU, for which see `_sweep.back`."""
    return remat.carries == "offload" and platform() == "cuda"


def _scan_kinds_unrolled(loop: Loop, kinds: Sequence[Layers], init: Any, remat: Remat) -> tuple[Any, Any]:
    """`scan_layers` under a policy that no sweep obeys."""
    axis = loop.axis_of(kinds)
    pattern = loop.order or Pattern((0,) * axis.size, 1)

    def unpack(place: Static, _: Any) -> Any:
        kind, row = place.value
        return kinds[kind].arguments_at(row)

    rows = pattern.before
    places = [Static((kind, int(rows[index, kind]))) for index, kind in enumerate(pattern.kinds)]
    carry, ys = scan_unrolled(loop.call, unpack, init, places, axis, remat, loop.reverse)

    def outputs(number: int, kind: Layers) -> Any:
        of_kind = [ys[index] for index in pattern.layers_of(number)]
        if not of_kind:
            return kind.no_outputs(loop.call.last(init))
        return stack_outputs(of_kind, kind.layout.axis, loop.call.caller.what)

    return loop.call.last(carry), loop.outputs([outputs(*entry) for entry in enumerate(kinds)])


def check_host_segments(axis: Axis, length: int) -> None:
    """Refuse a length of segments that does not divide the layers.

    Raises:
        ValueError: names the axis, and the lengths that do.
    """
    if axis.size % length:
        divisors = [str(k) for k in range(1, axis.size + 1) if axis.size % k == 0]
        raise ValueError(
            f"The {axis.size} layers of axis {axis.name!r} can't be read from the host {length} at a time. "
            f"Let the length of the segments be one of {', '.join(divisors)}."
        )


def sweep_options(
    remat: Remat, axis: Axis, xs: Sequence[Any], host_segment_length: int
) -> dict[str, Any] | None:
    """The fields of a `SweepSpec` that say what a policy means for these stacks.

    None for a policy that only a plain scan obeys.

    Raises:
        ValueError: stacks on the host can't be read `host_segment_length` layers at a time.
    """
    read_length = host_segment_length if has_host_arrays(xs) else 1
    check_host_segments(axis, read_length)
    length = axis.size // read_length
    found = _sweep_options(for_length(remat, length), length)
    if read_length == 1:
        return found
    keeps_more = found and (
        found.get("first_layers") or found.get("checkpoint", jax.checkpoint) is not jax.checkpoint
    )
    if found is None or keeps_more:
        raise ValueError(
            f"With host_segment_length={read_length} the layers of a segment are run again one by one, from "
            "the carry that is kept of it, and the policy says otherwise. Let it keep carries alone (True, "
            '"offload", "nested", max_carries=k), or leave host_segment_length at 1.'
        )
    return {**found, "read_length": read_length, "keeps_in_segments": isinstance(remat, PerLayer)}


def _sweep_options(remat: Remat, length: int) -> dict[str, Any] | None:
    match remat:
        case _ if length == 0:
            return {"schedule": None}
        case Swept():
            first = remat.first_layers
            return {
                "schedule": remat.cut(length - first),
                "checkpoint": checkpoint_of(remat.internals),
                "boundaries": "host" if remat.carries == "offload" else "device",
                "first_layers": FirstLayers(first, checkpoint_of(remat.first)) if first else None,
            }
        case PerLayer(carries="keep" | "offload", inputs="keep", internals=(), offloaded=()):
            boundaries = "host" if remat.carries == "offload" else "device"
            return {"schedule": equal(length, length), "boundaries": boundaries}
        case SaveAll() | PerLayer(carries="keep" | "offload", inputs="keep"):
            on_host = isinstance(remat, PerLayer) and remat.carries == "offload"
            return {"schedule": None, "first_layers": FirstLayers(length, checkpoint_of(remat), on_host)}
    return None


def _run_unrolled(
    call: Call, unpack: Unpack, init: Any, inputs: Sequence[Any], remat: Remat, names: Names
) -> tuple[Any, list[Any]]:
    """Call a layer for each of the inputs, and checkpoint the parts of the policy's schedule."""
    tree: Tree = tuple(range(len(inputs)))
    each = remat.internals if isinstance(remat, Swept) else remat
    if isinstance(remat, Swept) and inputs:
        tree = remat.cut(len(inputs)).tree
        if isinstance(tree, int) or all(isinstance(part, int) for part in tree):
            remat = each = remat.of_one_layer

    def layer(number: int, carry: Any) -> tuple[Any, Any]:
        arrays, static = eqx.partition(carry, eqx.is_array_like)
        step = functools.partial(array_step, call, static, remat, names, unpack, lambda y: y, None)
        arrays, y = _checkpointed(step, each, names)(arrays, inputs[number])
        return eqx.combine(arrays, static), y

    def segment(run: Callable) -> Callable:
        return _checkpoint_segment(run, remat, names)

    return _replayed_whole(functools.partial(run_tree, tree, layer, segment), remat, names)(init)


def _checkpointed(step: Callable, remat: Internals, names: Names) -> Callable:
    if isinstance(remat, SaveAll):
        return step
    return recomputed(step, remat.jax_policy(*names), offloads=remat.offloads)


def _replayed_whole(run: Callable, remat: Remat, names: Names) -> Callable:
    """Checkpoint the whole scan if carries are dropped."""
    if isinstance(remat, PerLayer) and remat.carries == "drop" and remat.inputs != "drop":
        return recomputed(run, remat.jax_policy(*names), offloads=remat.offloads)
    return run


def _checkpoint_segment(run: Callable, remat: Remat, names: Names) -> Callable:
    if not (isinstance(remat, Swept) and remat.carries == "offload"):
        return recomputed(run, None)  # its carry is kept, as all arguments are
    keep = PerLayer(carries="offload")

    def named_run(carry: Any) -> Any:
        return run(checkpoint_name(carry, names.boundary))

    return recomputed(named_run, keep.jax_policy(names.boundary, names.inputs), offloads=True)
