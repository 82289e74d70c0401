"""`fold_vjp` and `scan_vjp`: a forward sweep, and its reverse sweep with a visitor.

A *sweep* is the loop over layers of `_sweep/`, which works on lists of arrays; users
write *visitors*, which work on trees. `fold_forward`, which `_stacked.py` calls, runs
the forward sweep and returns a `SweepBack` with what the policy keeps. Calling that
runs the reverse sweep, where each layer is visited once, from the last to the first:

1. `_TreeVisitor` makes trees of the arrays that the sweep has of a layer
   (`SweepTypes.visit` in `visitor.py`) and calls the user's visitor.
2. `_new_leaves` takes the `LayerResult` apart again and checks it.
3. `_Part.with_layer` writes what is new into stacks, in place.

The replay reads the layers from the state that the visitor writes to (`xs_in`). A
visitor that updates the weights so costs 0.09 stacks of temporaries; with a replay that
reads the stack of the forward sweep it would cost 1.09.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from haliax import Axis
from jax import lax

from .._activity import is_differentiable, not_differentiable
from .._remat import Remat
from .._static import PyTree, Static
from .._sweep.gradient import LayerPullback, LayerVisit, Perturbed
from .._sweep.kinds import Kind
from .._sweep.primitive import sweep_forward
from .._sweep.programs import are_known, run
from .._sweep.reverse import sweep_back
from .._sweep.reverse_spec import differentiated
from .._sweep.rules import floats
from .._sweep.slots import Arrays, Checkpoints, OfKinds
from .._sweep.spec import SweepSpec
from .._sweep.store import Index, at_least_one, on_mesh, read, write, zeros_like
from .._sweep.trace import TracedLayer, kinds_of, trace_layers
from .arguments import Caller, signature_error
from .checks import check_carry, describe
from .layer_axis import Join, Leaf, Split, TreeLayout, split_kinds
from .layers import Layers, Loop
from .marks import Marked, PerKind, is_array, is_named, raw_array
from .visitor import (
    KindTypes,
    LayerResult,
    SweepResult,
    SweepTypes,
    Visitor,
    checked_cotangent,
    cotangent_leaves,
)


class SweepBack(eqx.Module):
    """The reverse sweep over layers after their forward sweep; a PyTree, which may be
    returned from `jit`.

    It holds the layers, the arguments and what the policy keeps.
    """

    _checkpoints: Checkpoints  # the carries and residuals that the policy keeps
    _xs: OfKinds  # the stacks that are split over the layers, of each kind
    # What layers share, of each kind: first what they close over, then arguments
    _shared: OfKinds
    _types: SweepTypes = eqx.field(static=True)  # how trees are made of the arrays

    def __call__(
        self,
        cotangent: PyTree,
        visitor: Visitor,
        state: PyTree = None,
        layer_state: PyTree = None,
    ) -> SweepResult:
        """Visit every layer once, from the one that ran last to the one that ran first.

        Args:
            cotangent: of what the forward sweep returned, in the same structure, shapes
                and dtypes.
            visitor: `(visit, state) -> LayerResult`, traced once for its types and once
                for each loop over layers; once for each layer if these are unrolled.
            state: the visitor's, any tree of arrays whose shapes and dtypes stay as
                they are.
            layer_state: a state for each layer, a tree of arrays stacked over the
                layers' axis as the layers are: the visitor sees a slice of it, and what
                it returns replaces that slice. `per_kind` gives each kind of layers one
                of its own, stacked over the layers of this kind.

        Returns:
            A `SweepResult`. Layers, arguments and states that the visitor returned are
            updated in place where the arguments of the surrounding `jit` are donated.

        Raises:
            ValueError: what is given or returned does not fit; names the path.
            TypeError: the visitor returns something other than a `LayerResult`.

        Cost: that of the policy's backward pass, and the visitor's own work for each
        layer.
        """
        if not callable(visitor):
            raise TypeError(
                "A visitor is a function (visit, state) -> LayerResult; got "
                f"{describe(visitor)}. Write sweep_back(cotangent, visitor, state)."
            )
        trees = self, cotangent, state, layer_state
        arrays, static = eqx.partition(trees, eqx.is_array)

        def visited(arrays: PyTree) -> tuple[PyTree, Static]:
            sweep, cotangent, state, layer_state = eqx.combine(arrays, static)
            cotangents = _cotangents(self._types, cotangent)
            result = _visited(sweep, cotangents, visitor, state, layer_state)
            result, rest = eqx.partition(result, eqx.is_array)
            return result, Static(rest)

        # Outside of a trace an executable is found by the jaxpr, since a visitor is
        # often a new function at each call, which `jax.jit` would compile again.
        if are_known(arrays):
            result, rest = run(jax.jit(visited), arrays)
        else:
            result, rest = visited(arrays)
        result = eqx.combine(jax.tree.map(_without_derivatives, result), rest.value)
        return result._replace(layers=self._types.template._with_blocks(result.layers))


class _Cotangents(NamedTuple):
    """The cotangents that a reverse sweep begins with, of the leaves that are
    differentiated.
    """

    carry: Arrays  # of the last carry
    ys: OfKinds  # of the outputs of each kind, stacked over its layers


def _cotangents(types: SweepTypes, cotangent: PyTree) -> _Cotangents:
    is_pair = types.has_output and cotangent is not None
    pair = cotangent if is_pair else (cotangent, None)
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ValueError(
            "sweep_back of scan_vjp takes a pair of cotangents, of the carry and of"
            f" the outputs; got {describe(cotangent)}."
        )
    carry_ct, ys_ct = pair
    carry, ys = types.outputs
    masks = types.perturbed
    source = "given to sweep_back"
    # The outputs are one tree, whose leaves are those of the first kind, the second,
    # ...
    leaves = cotangent_leaves(ys_ct, ys, sum(masks.ys, ()), "the outputs", source)
    of_kinds = []
    for mask in masks.ys:
        count = sum(mask)
        of_kinds.append(leaves[:count])
        leaves = leaves[count:]
    of_carry = cotangent_leaves(carry_ct, carry, masks.carry, "the carry", source)
    return _Cotangents(of_carry, of_kinds)


class _Part(NamedTuple):
    """What a visitor returns for one layer, or, stacked, for the layers of a kind.

    An entry is None for what the visitor leaves as it is: no stack is carried for it.
    """

    # The arrays of the layers and, as None, of their split arguments, in the order of
    # the sweep's stacks
    layers: list[PyTree]
    # The split arrays of the layers' state
    layer_state: list[PyTree]
    # The cotangents of split arguments, in the order of the sweep's stacks
    split_ct: list[PyTree]
    # Those of what the layers share, summed over the layers
    shared_ct: list[PyTree]

    def with_layer(self, row: Index, new: "_Part") -> "_Part":
        """The stacks with what is new of the layer at a row, and the sums with its
        cotangents.
        """

        def written(stacks: Sequence[Any], entries: Sequence[Any]) -> list[PyTree]:
            return [
                stack if entry is None else write(stack, row, entry)
                for stack, entry in zip(stacks, entries, strict=True)
            ]

        sums = zip(self.shared_ct, new.shared_ct, strict=True)
        return _Part(
            *map(written, self[:3], new[:3]),
            shared_ct=[total if ct is None else total + ct for total, ct in sums],
        )


class _SweepState(NamedTuple):
    """What a reverse sweep carries from layer to layer for the visitor."""

    parts: list[_Part]  # of each kind: what the layers visited so far have returned
    visitor_state: PyTree  # the arrays of the visitor's own state


def _without_derivatives(leaf: Any) -> Any:
    # Second derivatives go through the first carry alone, and a visitor's results
    # depend on others too.
    has_derivative = isinstance(leaf, jax.Array) and is_differentiable(leaf.dtype)
    if has_derivative:
        return not_differentiable(_NO_DERIVATIVES, leaf, ())
    return leaf


_NO_DERIVATIVES = (
    "the results of a sweep with a visitor have no derivatives; differentiate those of"
    " jax.vjp of the fold, or use jax.lax.stop_gradient on these"
)


@dataclass(frozen=True)
class _TreeVisitor:
    """A user's visitor, as a visitor of lists of arrays that a sweep can call."""

    # How trees are made of the arrays
    types: SweepTypes
    # The user's
    visitor: Visitor
    # What is no array in the visitor's state
    static: PyTree
    # The state of the layers of each kind, split: its layout, its stacks before the
    # sweep, and what all layers share of it
    layer_states: list[Split]

    def visit(
        self, leaves: LayerVisit, kind: Kind, row: Index, loop: _SweepState
    ) -> tuple[Arrays, tuple[_Part, PyTree]]:
        """The cotangent of a layer's input, and what the visitor returns for the layer
        and as its state.
        """
        types_of_kind = self.types.kinds[kind.number]
        layout, stacks, shared = self.layer_states[kind.number]
        # The stacks that the visitor writes are in the loop, the others are as they
        # were
        stacks = eqx.combine(loop.parts[kind.number].layer_state, stacks)
        entries = read([*map(at_least_one, stacks)], row)
        entry = self.types.visit(types_of_kind, leaves, layout.layer(entries, shared))
        state = eqx.combine(loop.visitor_state, self.static)
        result = _called(self.visitor, entry, state)
        return _new_leaves(self.types, types_of_kind, layout, entry, state, result)

    def __call__(
        self, leaves: LayerVisit, kind: Kind, row: Index, loop: _SweepState
    ) -> tuple[Arrays, _SweepState]:
        carry_ct, new = self.visit(leaves, kind, row, loop)
        # Without the barrier XLA holds a layer's internals until all is written.
        new, state = lax.optimization_barrier(new)
        parts = [*loop.parts]
        parts[kind.number] = parts[kind.number].with_layer(row, new)
        return carry_ct, _SweepState(parts, state)


def _visited(
    sweep: SweepBack,
    cotangents: _Cotangents,
    visitor: Visitor,
    state: PyTree,
    layer_state: PyTree,
) -> SweepResult:
    """Run the reverse sweep of `SweepBack.__call__`; the layers are without their
    stack.
    """
    types = sweep._types
    layer_states, join_states = _split_states(types, layer_state)
    arrays, static = eqx.partition(state, eqx.is_array_like)
    on_trees = _TreeVisitor(types, visitor, static, layer_states)

    def xs_in(loop: _SweepState) -> OfKinds:
        return eqx.combine([part.layers for part in loop.parts], sweep._xs)

    # What a loop carries are arrays of JAX, also where the user gave NumPy's or numbers
    stacks = [stacks for _, stacks, _ in layer_states]
    arrays, stacks = jax.tree.map(jnp.asarray, (arrays, stacks))
    parts = _first_parts(sweep, on_trees, cotangents, arrays, stacks)
    carry_ct = cotangents.carry
    loop = _SweepState(parts, arrays)
    # Without layers the cotangent goes through, and the visitor was traced all the
    # same, for the types of what it returns and for its errors.
    if types.spec.length:
        carry_ct, loop = sweep_back(
            types.spec,
            types.perturbed,
            sweep._checkpoints,
            sweep._shared,
            *cotangents,
            on_trees,
            loop,
            xs_in=xs_in,
        )
    new_states = []
    for (layout, stacks, shared), part in zip(layer_states, loop.parts, strict=True):
        stacks = eqx.combine(part.layer_state, stacks)
        new_states.append(layout.stacked(stacks, shared))
    layers, args, kwargs = _joined(sweep, xs_in(loop), loop.parts)
    # Leaves of the carry that are not differentiated have None as their cotangent
    carry = types.carry_cotangent(carry_ct)
    state = eqx.combine(loop.visitor_state, static)
    return SweepResult(carry, layers, args, kwargs, state, join_states(new_states))


def _split_states(types: SweepTypes, layer_state: PyTree) -> tuple[list[Split], Join]:
    """The state of the layers of each kind, split over them; and what joins such."""
    marked: Any = Marked(layer_state, "per_layer")
    if isinstance(layer_state, PerKind):
        trees = layer_state.values.items()
        marked = PerKind({name: Marked(tree, "per_layer") for name, tree in trees})
    caller = Caller("sweep_back", lambda path: f"layer_state{jtu.keystr(path)}")
    return split_kinds(marked, types.axis, types.spec.pattern, caller)


def _joined(
    sweep: SweepBack, xs: OfKinds, parts: Sequence[_Part]
) -> tuple[PyTree, tuple[PyTree, ...], dict[str, PyTree]]:
    """The layers of all kinds, and the cotangents of positional and keyword
    arguments.
    """
    types = sweep._types
    trees = []
    for kind, stacks, shared, part in zip(
        types.kinds, xs, sweep._shared, parts, strict=True
    ):
        # The first argument is the stack: new layers, and no cotangents
        (layers, *_), _ = kind.stacked(stacks, shared, cotangents=False)
        (_, *args), kwargs = kind.stacked(
            part.split_ct, part.shared_ct, cotangents=True
        )
        trees.append(((layers, *args), kwargs))
    (layers, *args), kwargs = types.join(trees)
    return layers, tuple(args), kwargs


def _called(visitor: Visitor, visit: LayerVisit, state: PyTree) -> PyTree:
    try:
        return visitor(visit, state)
    except TypeError:
        problem = signature_error(
            visitor, "sweep_back", ["visit", "state"], (visit, state), {}
        )
        if problem is None:
            raise
        raise TypeError(problem) from None


def _first_parts(
    sweep: SweepBack,
    visitor: _TreeVisitor,
    cotangents: _Cotangents,
    state: PyTree,
    state_stacks: OfKinds,
) -> list[_Part]:
    """What a sweep carries first: a stack, or zeros, for all that the visitor returns
    of a kind's layers.

    What it returns is found by a visit of one layer of each kind, which is traced and
    not run.
    """
    types = sweep._types
    index = jnp.int32(0)
    stacks = [*map(_Part, sweep._xs, state_stacks, sweep._xs, sweep._shared)]
    nothing = jax.tree.map(lambda _: None, stacks)
    first = sweep._checkpoints.first()
    parts = []
    for kind, of_kind, ys_ct in zip(
        types.spec.kinds, stacks, cotangents.ys, strict=True
    ):
        # Shapes and dtypes are all that counts of this visit, so any layer will do
        x = read([*map(at_least_one, of_kind.layers)], 0)
        y_ct = read([*map(at_least_one, ys_ct)], 0)
        pullback = LayerPullback(kind, types.perturbed)
        inputs = of_kind.shared_ct, first, x
        example = pullback.visit(index, inputs, [], (cotangents.carry, y_ct))
        at = example, kind, index, _SweepState(nothing, state)
        new, _ = jax.eval_shape(lambda at=at: visitor.visit(*at)[1])
        # The first stacks are the layers themselves, for those entries that are
        # replaced
        layers, layer_state, split_ct, shared_ct = jax.tree.map(
            lambda entry, stack: None if entry is None else stack,
            new,
            of_kind,
            is_leaf=lambda node: node is None,
        )
        part = _Part(
            *jax.tree.map(on_mesh, (layers, layer_state)),
            split_ct=jax.tree.map(zeros_like, split_ct),
            shared_ct=jax.tree.map(jnp.zeros_like, shared_ct),
        )
        parts.append(part)
    return parts


def _new_leaves(
    types: SweepTypes,
    kind: KindTypes,
    state_layout: TreeLayout,
    visit: LayerVisit,
    state: PyTree,
    result: PyTree,
) -> tuple[Arrays, tuple[_Part, PyTree]]:
    """The cotangent of a layer's input, what is to be written, and the state, by what a
    visitor returned.
    """
    if not isinstance(result, LayerResult):
        raise TypeError(
            f"A visitor returns a LayerResult; got {describe(result)}. Its first field"
            " is the cotangent of the layer's input: return"
            " LayerResult(visit.vjp().carry)."
        )
    (carry, _) = types.outputs
    mask = types.perturbed.carry
    carry_ct = cotangent_leaves(result.carry, carry, mask, "the carry", _BY_VISITOR)
    # Paths into the arguments begin with their group and place, here those of the layer
    leaves = kind.layout.leaves
    layer = _new_parts(result.layer, visit.layer, "layer", leaves, root=2)
    of_state = _new_parts(
        result.layer_state, visit.layer_state, "layer_state", state_layout.leaves
    )
    new_state = eqx.filter(_filled(result.state, state, "state"), eqx.is_array_like)
    args, kwargs = _argument_cotangents(visit, result)
    # The cotangents in the order of all arguments, of which the layer comes first
    no_layer = eqx.filter(visit.layer, False)  # the same structure, with None for all
    of_split, of_shared = kind.layout.arrays(((no_layer, *args), kwargs))
    new = _Part(
        layers=layer + [None] * (len(of_split) - len(layer)),
        layer_state=of_state,
        split_ct=of_split,
        shared_ct=[None] * kind.constants + of_shared,
    )
    return carry_ct, (new, jax.tree.map(jnp.asarray, new_state))


_BY_VISITOR = "returned by the visitor"


def _new_parts(
    new: PyTree, before: PyTree, what: str, leaves: Iterable[Leaf], root: int = 0
) -> list[PyTree]:
    """A tree's new entries of what is split, None where they stay; refuses changes of
    what is not.

    `leaves` are those of the tree, and maybe others after them. Errors name their paths
    from the entry `root` on.
    """
    filled = jtu.tree_leaves(_filled(new, before, what), is_leaf=is_named)
    old_leaves = jtu.tree_leaves(before, is_leaf=is_named)
    parts = []
    for leaf, changed, old in zip(leaves, filled, old_leaves, strict=False):
        # What `eqx.combine` took from the old tree is the same object: it is unchanged
        changed = raw_array(changed)
        old = raw_array(old)
        is_shared = leaf.kind == "shared"
        if leaf.kind == "split":
            parts.append(None if changed is old else changed)
        elif changed is not old and (is_shared or is_array(changed) or changed != old):
            of_all = (
                "is shared by all layers"
                if is_shared
                else f"is {old!r}, the same for all layers"
            )
            raise ValueError(
                f"The {what}{jtu.keystr(leaf.path[root:])} {of_all}, so a visitor"
                " cannot replace it at one. Return it unchanged, or None for it"
                " (eqx.filter), and keep what is summed over the layers in the"
                " visitor's state."
            )
    return parts


def _argument_cotangents(
    visit: LayerVisit, result: LayerResult
) -> tuple[list[PyTree], dict[str, PyTree]]:
    # None for all, or keywords that are left out, are zeros that cost nothing
    args = (None,) * len(visit.args) if result.args is None else result.args
    kwargs = {**dict.fromkeys(visit.kwargs), **(result.kwargs or {})}
    if (
        not isinstance(args, tuple | list)
        or len(args) != len(visit.args)
        or len(kwargs) > len(visit.kwargs)
    ):
        raise TypeError(
            f"args of a LayerResult is a tuple of {len(visit.args)} cotangents, one for"
            " each further argument (None for one without), and kwargs a dict with"
            f" keys among {sorted(visit.kwargs)}; got {describe(args)}, and the keys"
            f" {sorted(kwargs)}."
        )

    def checked(cotangent: PyTree, argument: Any, name: str) -> PyTree:
        arrays = eqx.filter(argument, is_array)
        return checked_cotangent(cotangent, arrays, name, _BY_VISITOR)

    of_args = []
    for i, (cotangent, argument) in enumerate(zip(args, visit.args, strict=True)):
        of_args.append(checked(cotangent, argument, f"args[{i}]"))
    of_kwargs = {}
    for name, argument in visit.kwargs.items():
        of_kwargs[name] = checked(kwargs[name], argument, f"kwargs[{name!r}]")
    return of_args, of_kwargs


def _filled(new: PyTree, before: PyTree, what: str) -> PyTree:
    """What a visitor returned, with the old leaves where it is None."""
    try:
        filled = eqx.combine(new, before)
    except ValueError:
        # Another structure, which the check names
        filled = new
    check_carry(before, filled, what)
    return filled


def fold_forward(
    loop: Loop, init: PyTree, arguments: PyTree, template: PyTree
) -> tuple[PyTree, SweepBack]:
    """The forward sweep of `fold_vjp` and `scan_vjp`; the layers are the first of the
    arguments.

    `template` is the stack without its arrays, for the result of the reverse sweep.
    """
    kinds, join, axis = loop.split(arguments)
    remat = loop.policy.for_layers(axis.size)
    # There would be nothing to sweep back from but the input of the whole stack
    if remat.carries is None:
        raise ValueError(
            f"{loop.policy!r} is not supported with a visitor. Keep the carry of each"
            ' layer or segment, on the device or on the host (True, "offload",'
            ' "nested", max_carries=k).'
        )
    arrays, static = eqx.partition(init, eqx.is_array_like)
    # A visitor is given one layer and may replace it, so no field is a whole stack here
    untraced = [kind.untraced(static, remat.kept.names, whole=False) for kind in kinds]
    traced = trace_layers(untraced, arrays, offloads=remat.offloads)
    first = traced[0]
    xs = [kind.arrays for kind in kinds]
    spec, perturbed, shared = _sweep_of(loop, axis, remat, traced, xs)
    with jax.named_scope(f"scan({axis.name})"):
        carry, ys, checkpoints = sweep_forward(spec, perturbed, first.init, xs, shared)
    carry = jtu.tree_unflatten(first.carry_tree, carry)
    outputs = []
    for kind, layer, of_kind in zip(kinds, traced, ys, strict=True):
        outputs.append(kind.named(layer.output(of_kind)))
    outputs = loop.outputs(outputs)
    types = SweepTypes(
        template,
        loop.call.verb == "scan",
        spec,
        perturbed,
        kinds=tuple(map(_kind_types, kinds, spec.kinds, traced, shared)),
        axis=axis,
        join=join,
        carry_tree=first.carry_tree,
        carry_static=static,
        outputs=jax.eval_shape(lambda: (carry, eqx.filter(outputs, is_array))),
    )
    y = eqx.combine(carry, static)
    sweep_back = SweepBack(checkpoints, xs, shared, types)
    return (y, outputs) if types.has_output else y, sweep_back


def _sweep_of(
    loop: Loop, axis: Axis, remat: Remat, traced: Sequence[TracedLayer], xs: OfKinds
) -> tuple[SweepSpec, Perturbed, OfKinds]:
    """The sweep over these layers, with all differentiated that can be, and what the
    layers of each kind share in it.

    Of what layers share that leaves out what they close over: a visitor has no way to
    return its cotangents.
    """
    of_kinds = kinds_of(traced, [[False] * len(stacks) for stacks in xs])
    spec = SweepSpec(
        of_kinds,
        remat.swept(),
        reverse=loop.reverse,
        unroll=loop.unroll_of(axis.size),
        pattern=loop.pattern,
    )  # with all leaves of carries held, since a visitor may read any
    of_shared = []
    for layer in traced:
        arguments = layer.shared[layer.constants :]
        of_shared.append([False] * layer.constants + [*floats(arguments)])
    of_ys = [floats(kind.output_types) for kind in of_kinds]
    of_init = floats(traced[0].init)
    perturbed = spec.perturbed(of_init, [*map(floats, xs)], of_shared, of_ys)
    return differentiated(spec, perturbed, [layer.shared for layer in traced])


def _kind_types(
    layers: Layers, kind: Kind, traced: TracedLayer, shared: Arrays
) -> KindTypes:
    # Custom rules may close over values too, which `differentiated` puts in front.
    constants = len(shared) - len(layers.shared)
    return KindTypes(kind, constants, layers.name, layers.layout, traced.output_tree)
