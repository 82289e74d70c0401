"""A step on raw arrays, applied to one layer after the other under a checkpoint policy."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import Axis

from .._checkpoint import checkpoint_name, recomputed, saving_internals
from .._placement import has_host_arrays, on_device, platform
from .._policy import ScanCheckpointPolicy
from .._remat import EVERYTHING, NOTHING, Remat
from .._schedule import Tree
from .._static import Static
from .._sweep.api import run_layers
from .._sweep.kinds import Pattern
from .._sweep.store import at_least_one, empty_stack
from .._sweep.trace import TracedLayer, trace_layers
from .checks import check_carry, check_offloaded, describe
from .layer_axis import TreeLayout
from .marks import is_array
from .stacking import name_stacked, numbers_to_arrays, stack_outputs

Step = Callable[[Any, Any], tuple[Any, Any]]  # (carry, inputs of the layer) -> (carry, output)
Names = tuple[str, ...] | Literal[True]  # of internals that are kept; True for all


@dataclasses.dataclass(frozen=True)
class Layers:
    """Layers of one kind, with their arguments.

    Attributes:
        f: a layer, `(carry, *args, **kwargs) -> (carry, output)`.
        layout: of the arguments, over the axis of these layers.
        arrays: those that are split.
        shared: those that all layers share.
        owner: the user's function that `f` calls.
        call: how `f` calls it.
    """

    f: Callable[..., tuple[Any, Any]]
    layout: TreeLayout
    arrays: list[Any]
    shared: list[Any]
    owner: Any = None
    call: Any = None

    def as_arrays(self) -> "Layers":
        """The same with JAX's arrays, those that are shared on the device."""
        arrays, shared = jax.tree.map(jnp.asarray, (self.arrays, self.shared))
        return dataclasses.replace(self, arrays=arrays, shared=on_device(shared))

    def step_at(self, carry: Any, row: int) -> tuple[Any, Any]:
        """Run the layer at a row."""
        args, kwargs = self.layout.layer(on_device([array[row] for array in self.arrays]), self.shared)
        return self.f(carry, *args, **kwargs)

    def no_outputs(self, carry: Any, what: str) -> Any:
        """The outputs of no layers, from a carry of the right types."""
        one = dataclasses.replace(self, arrays=[*map(at_least_one, self.arrays)])
        types = eqx.filter_eval_shape(lambda: numbers_to_arrays(one.step_at(carry, 0)[1]))
        arrays, rest = eqx.partition(types, is_array)
        return name_stacked(eqx.combine(empty_stack(arrays, 0), rest), self.layout.axis, what)


def trace_kinds(
    kinds: Sequence[Layers], init: Any, names: Names, *, whole: bool, **checks: bool
) -> list[TracedLayer]:
    """A layer of each kind on arrays, with the names of the internals that are kept.

    `whole` layers take a `LayerStack` for each field that is unsliced.
    """
    arrays, static = eqx.partition(init, eqx.is_array_like)

    def body(kind: Layers) -> Callable[..., Any]:
        def layer(carry: Any, inputs: tuple[Any, Any]) -> tuple[Any, Any]:
            args, kwargs = (kind.layout.arguments if whole else kind.layout.layer)(*inputs)
            return kind.f(carry, *args, **kwargs)

        step = array_step(layer, init, names)

        def with_static(shared: Any, carry: Any, x: Any) -> tuple[Any, tuple[Any, Static]]:
            carry, y = step(carry, (x, shared))
            of_arrays, rest = eqx.partition(y, eqx.is_array_like)
            return carry, (of_arrays, Static(rest))

        return with_static

    leaves, tree = jax.tree.flatten(static)
    return trace_layers(
        [body(kind) for kind in kinds],
        [kind.shared for kind in kinds],
        arrays,
        [kind.arrays for kind in kinds],
        unsliced=[kind.layout.unsliced if whole else [False] * len(kind.arrays) for kind in kinds],
        **checks,
        keys=[(kind.owner, kind.call, kind.layout.key, tree, *leaves, names) for kind in kinds],
    )


def scan_unrolled(
    layer: Step,
    init: Any,
    inputs: Sequence[Any],
    axis: Axis,
    remat: Remat,
    *,
    reverse: bool = False,
) -> tuple[Any, list[Any]]:
    """Apply `layer` to inputs that need not be alike, one after the other, under the same policies as `scan`.

    Args:
        layer: takes the carry and the inputs of one layer; returns the next carry and an output.
        init: the initial carry.
        inputs: for each of the `axis.size` layers, what it takes beside the carry: any tree, with its module.
        axis: the axis of the layers.
        remat: of a policy, by `resolved`. Program size grows with the number of layers.
        reverse: as in `scan`.

    Returns:
        The final carry and the output of each layer.
    """
    order = range(axis.size)[:: -1 if reverse else 1]
    first, rest = order[: remat.first_layers], order[remat.first_layers :]
    carry, outputs = init, []
    with jax.named_scope(f"scan({axis.name})"):
        for part, layers in ((Remat(len(first), remat.first_kept), first), (remat, rest)):
            carry, ys = _run_unrolled(layer, carry, [inputs[i] for i in layers], part, _carry_name(axis))
            outputs += ys
    return carry, outputs[:: -1 if reverse else 1]


def resolved(policy: ScanCheckpointPolicy, length: int) -> Remat:
    """What a policy means for so many layers."""
    # Without jit the values are known in a layer, which jax.checkpoint would trace.
    return Remat(length, EVERYTHING) if _without_jit() else policy.for_layers(length)


def _without_jit() -> bool:
    return bool(getattr(jax.config, "jax_disable_jit", False))


def _carry_name(axis: Axis) -> str:
    """The checkpoint name of the carries between layers."""
    return f"scan({axis.name}) carry"


def scan_rolled(
    kinds: Sequence[Layers],
    init: Any,
    axis: Axis,
    policy: ScanCheckpointPolicy,
    *,
    pattern: Pattern | None = None,
    reverse: bool,
    unroll: int | bool,
    what: str,
    stops: bool = False,
) -> tuple[Any, list[Any]]:
    """Apply layers one after the other, in a loop; returns the carry, and the outputs of each kind.

    `pattern` says which layer of `axis` is of which kind; None for layers of one kind. `stops` as in
    `SweepSpec`.
    """
    remat, plain = resolved(policy, axis.size), None
    if _without_jit() or (pattern is not None and remat.carries is None):
        of_one = Pattern((0,) * axis.size, 1) if pattern is None else pattern
        return _unrolled_kinds(kinds, init, axis, remat, of_one, reverse, what)
    kinds = [kind.as_arrays() for kind in kinds]
    xs = [kind.arrays for kind in kinds]
    # A plain scan would keep what it reads from the host, and read nothing ahead.
    is_swept = pattern or stops or (axis.size and (remat.schedule is not None or has_host_arrays(xs)))
    if not is_swept or remat.carries is None:
        is_rolled = unroll is not True and unroll < axis.size
        plain = _LayerCheckpoint(remat, _carry_name(axis), is_rolled)
    if stops and (remat.offloads or plain is not None):
        raise ValueError(
            "With until=, a policy can neither offload nor drop what it keeps of the steps that run. Let "
            'remat be False, True or "nested", or use max_carries, first_layers or save_block_internals.'
        )
    arrays, static = eqx.partition(init, eqx.is_array_like)

    def run(carry: Any, xs: Sequence[Sequence[Any]]) -> tuple[Any, list[Any]]:
        of_xs = [dataclasses.replace(kind, arrays=[*own]) for kind, own in zip(kinds, xs, strict=True)]
        checks = {"offloads": remat.offloads, "replays": plain is None}
        traced = trace_kinds(of_xs, eqx.combine(carry, static), remat.kept.names, whole=True, **checks)
        for layer in traced:
            check_offloaded(layer.jaxpr.outvars[: len(layer.init)], layer.jaxpr, remat.kept.offloaded)
        return run_layers(
            traced,
            [kind.arrays for kind in of_xs],
            [kind.layout.unsliced for kind in kinds],
            plain=plain,
            remat=remat.swept() if plain is None else remat,
            pattern=pattern,
            reverse=reverse,
            unroll=unroll,
            stops=stops,
        )

    with jax.named_scope(f"scan({axis.name})"):
        carry, ys = _replayed_whole(run, remat)(arrays, xs)
    stacked = [name_stacked(y, kind.layout.axis, what) for y, kind in zip(ys, kinds, strict=True)]
    return eqx.combine(carry, static), stacked


@dataclasses.dataclass(frozen=True)
class _LayerCheckpoint:
    """How the layers of a plain scan are checkpointed."""

    remat: Remat
    carry_name: str
    is_rolled: bool

    def __call__(self, layer: Callable[..., Any]) -> Callable[..., Any]:
        remat = self.remat
        if remat.kept == EVERYTHING:
            return layer

        def named(shared: Any, carry: Any, x: Any) -> Any:
            return layer(shared, checkpoint_name(carry, self.carry_name), x)

        # For GPUs also where carries come from the host, for which see `_sweep.back`.
        prevent_cse = not self.is_rolled or (remat.carries == "host" and platform() == "cuda")
        return jax.checkpoint(named, policy=remat.layer_policy(self.carry_name), prevent_cse=prevent_cse)


def _unrolled_kinds(
    kinds: Sequence[Layers],
    init: Any,
    axis: Axis,
    remat: Remat,
    pattern: Pattern,
    reverse: bool,
    what: str,
) -> tuple[Any, list[Any]]:
    """`scan_rolled` over layers of several kinds under a policy that no sweep obeys."""

    def layer(carry: Any, place: Static) -> tuple[Any, Any]:
        kind, row = place.value
        return kinds[kind].step_at(carry, row)

    rows = pattern.before
    places = [Static((kind, int(rows[index, kind]))) for index, kind in enumerate(pattern.kinds)]
    carry, ys = scan_unrolled(layer, init, places, axis, remat, reverse=reverse)

    def outputs(number: int, kind: Layers) -> Any:
        of_kind = [ys[index] for index in pattern.layers_of(number)]
        return stack_outputs(of_kind, kind.layout.axis, what) if of_kind else kind.no_outputs(init, what)

    return carry, [outputs(number, kind) for number, kind in enumerate(kinds)]


def _run_unrolled(
    layer: Step, init: Any, inputs: Sequence[Any], remat: Remat, carry_name: str
) -> tuple[Any, list[Any]]:
    """Apply `layer` to each of the inputs, and checkpoint the parts of the policy's schedule."""
    tree: Tree = tuple(range(len(inputs)))
    if remat.schedule is not None:
        tree = remat.schedule.tree
        if isinstance(tree, int) or all(isinstance(part, int) for part in tree):
            remat = dataclasses.replace(remat, schedule=None)

    def apply(part: Tree, carry: Any) -> tuple[Any, list[Any]]:
        if isinstance(part, int):
            step = _unrolled_step(layer, carry, remat, carry_name)
            arrays, y = step(eqx.filter(carry, eqx.is_array_like), inputs[part])
            return eqx.combine(arrays, eqx.filter(carry, eqx.is_array_like, inverse=True)), [y]
        outputs = []
        for inner in part:
            apply_inner = functools.partial(apply, inner)
            # A layer checkpoints itself.
            if not isinstance(inner, int):
                apply_inner = _checkpoint_segment(apply_inner, remat, carry_name)
            carry, ys = apply_inner(carry)
            outputs += ys
        return carry, outputs

    return _replayed_whole(functools.partial(apply, tree), remat)(init)


def array_step(layer: Step, init: Any, names: Names) -> Step:
    """The layer on the arrays of the carry, its results checked; the internals of these names are kept."""
    static = eqx.filter(init, eqx.is_array_like, inverse=True)

    def step(arrays: Any, inputs: Any) -> tuple[Any, Any]:
        with saving_internals(names):
            result = layer(eqx.combine(arrays, static), inputs)
        carry = eqx.combine(arrays, static)  # a state of Equinox that was updated can't be read
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise ValueError(
                "scan and scan_vjp take a function (or a block) that returns a pair (carry, output); it "
                f"returned {describe(result)}. For one that returns only the carry use fold or fold_vjp."
            )
        new_carry, y = result
        check_carry(carry, new_carry)
        return eqx.filter(new_carry, eqx.is_array_like), y

    return step


def _unrolled_step(layer: Step, init: Any, remat: Remat, carry_name: str) -> Step:
    """The layer on the arrays of the carry, checkpointed, its inputs read to the device."""
    step = array_step(layer, init, remat.kept.names)

    def named(arrays: Any, inputs: Any) -> tuple[Any, Any]:
        inputs = on_device(inputs)
        if remat.schedule is None and remat.kept != EVERYTHING:
            arrays = checkpoint_name(arrays, carry_name)
        found = step(arrays, inputs)
        if remat.kept.offloaded:
            carry = eqx.combine(arrays, eqx.filter(init, eqx.is_array_like, inverse=True))
            of_carry = eqx.filter_make_jaxpr(lambda carry, inputs: layer(carry, inputs)[0])
            jaxpr = of_carry(carry, inputs)[0].jaxpr
            check_offloaded(jaxpr.outvars, jaxpr, remat.kept.offloaded)
        return found

    if remat.kept == EVERYTHING:
        return named
    return recomputed(named, remat.layer_policy(carry_name), offloads=remat.offloads)


def _replayed_whole(run: Callable, remat: Remat) -> Callable:
    """Checkpoint the whole scan if carries are dropped."""
    if remat.carries is not None:
        return run
    return recomputed(run, remat.kept.policy(), offloads=remat.offloads)


def _checkpoint_segment(run: Callable, remat: Remat, carry_name: str) -> Callable:
    if remat.carries != "host":
        return recomputed(run, None)  # its carry is kept, as all arguments are
    boundary = f"{carry_name} at a segment's start"

    def named_run(carry: Any) -> Any:
        return run(checkpoint_name(carry, boundary))

    return recomputed(named_run, NOTHING.policy(boundary, "host"), offloads=True)
