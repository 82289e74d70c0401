"""A step on raw arrays, applied to one layer after the other under a checkpoint policy."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import Axis

from .._checkpoint import checkpoint_name, recomputed, saving_internals
from .._placement import has_host_arrays, on_device, platform
from .._remat import Internals, PerLayer, Remat, SaveAll, Swept, checkpoint_of, for_length
from .._schedule import Tree, equal
from .._static import Static
from .._sweep.api import run_layers
from .._sweep.kinds import Pattern
from .._sweep.spec import FirstLayers
from .._sweep.store import at_least_one, empty_stack
from .._sweep.trace import TracedLayer, trace_layers
from .checks import check_carry, check_offloaded, describe
from .layer_axis import TreeLayout
from .marks import is_array
from .stacking import name_stacked, numbers_to_arrays, stack_outputs

Step = Callable[[Any, Any], tuple[Any, Any]]  # (carry, inputs of the layer) -> (carry, output)


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
    kinds: Sequence[Layers], init: Any, remat: Remat, *, whole: bool, **checks: bool
) -> list[TracedLayer]:
    """A layer of each kind on arrays; `whole` layers take a `LayerStack` for each field that is unsliced."""
    arrays, static = eqx.partition(init, eqx.is_array_like)

    def body(kind: Layers) -> Callable[..., Any]:
        def layer(carry: Any, inputs: tuple[Any, Any]) -> tuple[Any, Any]:
            args, kwargs = (kind.layout.arguments if whole else kind.layout.layer)(*inputs)
            return kind.f(carry, *args, **kwargs)

        step = array_step(layer, init, remat)

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
        keys=[(kind.owner, kind.call, kind.layout.key, tree, *leaves, remat) for kind in kinds],
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
        remat: as in `scan`. Program size grows with the number of layers.
        reverse: as in `scan`.

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
            carry, ys = _run_unrolled(layer, carry, [inputs[i] for i in layers], part, _carry_name(axis))
            outputs += ys
    return carry, outputs[:: -1 if reverse else 1]


def _carry_name(axis: Axis) -> str:
    """The checkpoint name of the carries between layers."""
    return f"scan({axis.name}) carry"


def scan_rolled(
    kinds: Sequence[Layers],
    init: Any,
    axis: Axis,
    remat: Remat,
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
    options, remat = None, for_length(remat, axis.size)
    if getattr(jax.config, "jax_disable_jit", False):
        of_one = Pattern((0,) * axis.size, 1) if pattern is None else pattern
        return _unrolled_kinds(kinds, init, axis, SaveAll(), of_one, reverse, what)
    kinds = [kind.as_arrays() for kind in kinds]
    xs = [kind.arrays for kind in kinds]
    # A plain scan would keep what it reads from the host, and read nothing ahead.
    if pattern or stops or (axis.size and (isinstance(remat, Swept) or has_host_arrays(xs))):
        options = sweep_options(remat, axis.size)
    if pattern is not None and options is None:
        return _unrolled_kinds(kinds, init, axis, remat, pattern, reverse, what)
    carry_name = _carry_name(axis)
    if options is None:
        assert not isinstance(remat, Swept)
        is_rolled = unroll is not True and unroll < axis.size
        plain = _LayerCheckpoint(remat, carry_name, is_rolled)
        options = {"schedule": None, "plain": plain}
    offloads = (isinstance(remat, PerLayer) and remat.offloads) or options.get("boundaries") == "host"
    if stops and (offloads or "plain" in options):
        raise ValueError(
            "With until=, a policy can neither offload nor drop what it keeps of the steps that run. Let "
            'remat be False, True or "nested", or use max_carries, first_layers or save_block_internals.'
        )
    checks = {"offloads": offloads, "replays": "plain" not in options}
    arrays, static = eqx.partition(init, eqx.is_array_like)

    def run(carry: Any, xs: Sequence[Sequence[Any]]) -> tuple[Any, list[Any]]:
        of_xs = [dataclasses.replace(kind, arrays=[*own]) for kind, own in zip(kinds, xs, strict=True)]
        traced = trace_kinds(of_xs, eqx.combine(carry, static), remat, whole=True, **checks)
        if isinstance(remat, PerLayer) and remat.offloaded:
            for layer in traced:
                check_offloaded(layer.jaxpr.outvars[: len(layer.init)], layer.jaxpr, remat.offloaded)
        unsliced = [kind.layout.unsliced for kind in kinds]
        fields = {"pattern": pattern, "reverse": reverse, "unroll": unroll, "stops": stops, **options}
        return run_layers(traced, [kind.arrays for kind in of_xs], unsliced, length=axis.size, **fields)

    with jax.named_scope(f"scan({axis.name})"):
        carry, ys = _replayed_whole(run, remat, carry_name)(arrays, xs)
    stacked = [name_stacked(y, kind.layout.axis, what) for y, kind in zip(ys, kinds, strict=True)]
    return eqx.combine(carry, static), stacked


@dataclasses.dataclass(frozen=True)
class _LayerCheckpoint:
    """How the layers of a plain scan are checkpointed."""

    remat: Internals
    carry_name: str
    is_rolled: bool

    def __call__(self, layer: Callable[..., Any]) -> Callable[..., Any]:
        remat = self.remat
        if isinstance(remat, SaveAll):
            return layer

        def named(shared: Any, carry: Any, x: Any) -> Any:
            return layer(shared, checkpoint_name(carry, self.carry_name), x)

        prevent_cse = _reads_carries_on_gpus(remat) or not self.is_rolled
        return jax.checkpoint(named, policy=remat.jax_policy(self.carry_name), prevent_cse=prevent_cse)


def _reads_carries_on_gpus(remat: PerLayer) -> bool:
    """Whether carries come from the host of a GPU, for which see `_sweep.back`."""
    return remat.carries == "offload" and platform() == "cuda"


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


def sweep_options(remat: Remat, length: int) -> dict[str, Any] | None:
    """The fields of a `SweepSpec` that say what a policy means; None for one that only a plain scan obeys."""
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
        case PerLayer(carries="keep" | "offload", internals=(), offloaded=()):
            boundaries = "host" if remat.carries == "offload" else "device"
            return {"schedule": equal(length, length), "boundaries": boundaries}
        case SaveAll() | PerLayer(carries="keep" | "offload"):
            on_host = isinstance(remat, PerLayer) and remat.carries == "offload"
            return {"schedule": None, "first_layers": FirstLayers(length, checkpoint_of(remat), on_host)}
    return None


def _run_unrolled(
    layer: Step, init: Any, inputs: Sequence[Any], remat: Remat, carry_name: str
) -> tuple[Any, list[Any]]:
    """Apply `layer` to each of the inputs, and checkpoint the parts of the policy's schedule."""
    tree: Tree = tuple(range(len(inputs)))
    each = remat.internals if isinstance(remat, Swept) else remat
    if isinstance(remat, Swept) and inputs:
        tree = remat.cut(len(inputs)).tree
        if isinstance(tree, int) or all(isinstance(part, int) for part in tree):
            remat = each = remat.of_one_layer

    def apply(part: Tree, carry: Any) -> tuple[Any, list[Any]]:
        if isinstance(part, int):
            step = _checkpointed(array_step(layer, carry, remat, carry_name), each, carry_name)
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

    return _replayed_whole(functools.partial(apply, tree), remat, carry_name)(init)


def array_step(layer: Step, init: Any, remat: Remat, carry_name: str | None = None) -> Step:
    """The layer on the arrays of the carry, its results checked and its carry named, if there is a name."""
    static = eqx.filter(init, eqx.is_array_like, inverse=True)
    internals = remat.internals if isinstance(remat, Swept) else remat

    def step(arrays: Any, inputs: Any) -> tuple[Any, Any]:
        if carry_name is not None:  # a sweep reads them to the device itself
            inputs = on_device(inputs)
            if isinstance(remat, PerLayer):
                arrays = checkpoint_name(arrays, carry_name)
        with saving_internals(internals.kept_names):
            result = layer(eqx.combine(arrays, static), inputs)
        carry = eqx.combine(arrays, static)  # a state of Equinox that was updated can't be read
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise ValueError(
                "scan and scan_vjp take a function (or a block) that returns a pair (carry, output); it "
                f"returned {describe(result)}. For one that returns only the carry use fold or fold_vjp."
            )
        new_carry, y = result
        check_carry(carry, new_carry)
        if carry_name is not None and isinstance(internals, PerLayer) and internals.offloaded:
            jaxpr = eqx.filter_make_jaxpr(lambda carry, inputs: layer(carry, inputs)[0])(carry, inputs)[
                0
            ].jaxpr
            check_offloaded(jaxpr.outvars, jaxpr, internals.offloaded)
        return eqx.filter(new_carry, eqx.is_array_like), y

    return step


def _checkpointed(step: Step, remat: Internals, carry_name: str) -> Step:
    if isinstance(remat, SaveAll):
        return step
    return recomputed(step, remat.jax_policy(carry_name), offloads=remat.offloads)


def _replayed_whole(run: Callable, remat: Remat, carry_name: str) -> Callable:
    """Checkpoint the whole scan if carries are dropped."""
    if isinstance(remat, PerLayer) and remat.carries == "drop":
        return recomputed(run, remat.jax_policy(carry_name), offloads=remat.offloads)
    return run


def _checkpoint_segment(run: Callable, remat: Remat, carry_name: str) -> Callable:
    if not (isinstance(remat, Swept) and remat.carries == "offload"):
        return recomputed(run, None)  # its carry is kept, as all arguments are
    boundary = f"{carry_name} at a segment's start"

    def named_run(carry: Any) -> Any:
        return run(checkpoint_name(carry, boundary))

    return recomputed(named_run, PerLayer(carries="offload").jax_policy(boundary), offloads=True)
