"""`fold_vjp` and `scan_vjp`: a forward sweep, and its reverse sweep with a visitor.

A *sweep* is the loop over layers of `_sweep/`, which works on lists of arrays; users
write *visitors*, which work on trees. `forward_for_visitor`, which `_stacked.py` calls,
runs the forward sweep and returns a `SweepBack` with what the policy keeps. Calling
that runs the reverse sweep, where each layer is visited once, from the last to the
first:

1. `_TreeVisitor` makes trees of the arrays that the sweep has of a layer
   (`SweepTypes.visit` in `visitor.py`) and calls the user's visitor.
2. `checked_result` in `returned.py` takes the `LayerResult` apart again and checks it.
3. `Returned.with_layer` writes what is new into stacks, in place.

The forward sweep is a primitive (`primitive.sweep_forward`), so it has derivatives. The
reverse sweep is not: it calls the loops of `reverse.py` in the caller's trace, since a
visitor may close over traced values, and its results get a derivative that raises
(`_without_derivatives`).

The replay reads the layers from the state that the visitor writes to (`xs_in`). A
visitor that updates the weights so costs 0.09 stacks of temporaries; with a replay that
reads the stack of the forward sweep it would cost 1.09.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .. import _xla_hints as xla_hints
from .._activity import is_differentiable, not_differentiable
from .._static import PyTree, Static
from .._sweep import reverse
from .._sweep.gradient import LayerPullback, LeafVisit, Perturbed, pick
from .._sweep.kinds import Kind
from .._sweep.primitive import sweep_forward
from .._sweep.programs import are_known, run
from .._sweep.reverse_spec import differentiated
from .._sweep.rules import floats
from .._sweep.slots import Arrays, Checkpoints, OfKinds
from .._sweep.spec import SweepSpec
from .._sweep.store import (
    at_least_one,
    on_mesh,
    read,
    varying_as,
    zeros_like,
    zeros_of,
)
from .._sweep.trace import TracedLayers
from .arguments import Caller, signature_error
from .checks import describe
from .layer_axis import Join, Split, split_kinds
from .layers import (
    checked_inputs,
    named_outputs,
    split_arguments,
    sweep_spec,
    trace_kinds,
)
from .marks import Marked, PerKind, is_array
from .returned import Returned, checked_result, cotangent_leaves, is_none
from .step import FoldCall
from .visitor import (
    LayerCotangents,
    SweepResult,
    SweepTypes,
    Visitor,
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

        def on_arrays(arrays: PyTree) -> tuple[PyTree, Static]:
            sweep, cotangent, state, layer_state = eqx.combine(arrays, static)
            result = _run_visits(sweep, cotangent, visitor, state, layer_state)
            result, rest = eqx.partition(result, eqx.is_array)
            return result, Static(rest)

        # Outside of a trace an executable is found by the jaxpr, since a visitor is
        # often a new function at each call, which `jax.jit` would compile again.
        if are_known(arrays):
            result, rest = run(jax.jit(on_arrays), arrays)
        else:
            result, rest = on_arrays(arrays)
        result = eqx.combine(jax.tree.map(_without_derivatives, result), rest.value)
        return result._replace(layers=self._types.template._with_blocks(result.layers))

    def zeros(self, kind: str | None = None) -> LayerCotangents:
        """Zeros of the structure, shapes and dtypes of what `visit.vjp()` returns, for
        a visitor that adds to them.

        ```python
        def add(visit, total):
            found = visit.vjp()
            new = jax.tree.map(jnp.add, total, found.layer)
            return LayerResult(found.carry, state=new)


        result = sweep_back(cotangent, add, sweep_back.zeros().layer)
        ```

        Args:
            kind: the name of a kind of layers, of a `StackedPattern`; None for layers
                of one kind.

        Raises:
            ValueError: there is no kind of this name.
        """
        types = self._types
        pattern = types.spec.pattern
        names = (None,) if pattern is None else pattern.names
        if kind not in names:
            expected = "no name, as the layers are of one kind"
            if pattern is not None:
                expected = f"the name of a kind of layers, one of {names}"
            raise ValueError(f"sweep_back.zeros takes {expected}; got {kind!r}.")
        of_kind = types.spec.kinds[names.index(kind)]
        input_types = types.spec.input_types(self._xs, self._shared)[of_kind.number]
        masks = types.perturbed.of_layer(of_kind)
        shared, carry, x = jax.tree.map(zeros_of, [*map(pick, input_types, masks)])
        return types.cotangents(of_kind, (shared, carry, x))


def _cotangents(types: SweepTypes, cotangent: PyTree) -> tuple[Arrays, OfKinds]:
    """The cotangents that a reverse sweep begins with, of the perturbed leaves: of the
    last carry, and of the stacked outputs of each kind.
    """
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
    return of_carry, of_kinds


class _SweepState(NamedTuple):
    """What `_sweep/reverse.py` calls the visitor's state, of a `_TreeVisitor`: what it
    has returned so far, and the state of the user's visitor.
    """

    returned: list[Returned]  # of each kind: for the layers visited so far
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
    # The state of the layers of each kind before the sweep, split over them
    layer_states: list[Split]

    def __call__(
        self, visit: LeafVisit, carried: _SweepState
    ) -> tuple[Arrays, _SweepState]:
        number = visit.pullback.kind.number
        before = carried.returned[number]
        carry_ct, of_layer, state = self.call_user(
            visit, before.layer_state, carried.visitor_state
        )
        of_layer, state = xla_hints.results_before_writes((of_layer, state))
        returned = [*carried.returned]
        returned[number] = before.with_layer(visit.row, of_layer)
        return carry_ct, _SweepState(returned, state)

    def call_user(
        self, visit: LeafVisit, layer_state: Sequence[PyTree], state: PyTree
    ) -> tuple[Arrays, Returned, PyTree]:
        """The cotangent of a layer's input, and what the visitor returns for the layer
        and as its state.

        `layer_state` has the stacks of the layers' state that it writes, None for the
        others.
        """
        kind = visit.pullback.kind
        layout, stacks, shared = self.layer_states[kind.number]
        stacks = eqx.combine(layer_state, stacks)
        entries = read([*map(at_least_one, stacks)], visit.row)
        entry = self.types.visit(visit, layout.layer(entries, shared))
        state = eqx.combine(state, self.static)
        try:
            result = self.visitor(entry, state)
        except TypeError:
            problem = signature_error(
                self.visitor, "sweep_back", ["visit", "state"], (entry, state), {}
            )
            if problem is None:
                raise
            raise TypeError(problem) from None
        return checked_result(self.types, kind, entry, state, layout, result)


def _run_visits(
    sweep: SweepBack,
    cotangent: PyTree,
    visitor: Visitor,
    state: PyTree,
    layer_state: PyTree,
) -> SweepResult:
    """Run the reverse sweep of `SweepBack.__call__`; the layers are without their
    stack.
    """
    types = sweep._types
    carry_ct, ys_ct = _cotangents(types, cotangent)
    layer_states, join_states = _split_states(types, layer_state)
    arrays, static = eqx.partition(state, eqx.is_array_like)
    # What a loop carries are arrays of JAX, also where the user gave NumPy's or numbers
    arrays = jax.tree.map(jnp.asarray, arrays)
    on_trees = _TreeVisitor(types, visitor, static, layer_states)
    carried = _first_carried(sweep, on_trees, arrays)

    def xs_in(carried: _SweepState) -> OfKinds:
        new = [of_kind.layers for of_kind in carried.returned]
        return eqx.combine(new, sweep._xs)

    # Without layers the cotangent goes through, and the visitor was traced all the
    # same, for the types of what it returns and for its errors.
    if types.spec.length:
        carry_ct, carried = reverse.visit_layers(
            types.spec,
            types.perturbed,
            sweep._checkpoints,
            sweep._shared,
            carry_ct,
            ys_ct,
            on_trees,
            carried,
            xs_in=xs_in,
        )
    xs = xs_in(carried)
    layers, args, kwargs = _joined(sweep, xs, carried.returned)
    states = []
    for before, of_kind in zip(layer_states, carried.returned, strict=True):
        stacks = eqx.combine(of_kind.layer_state, before.stacks)
        states.append(before.layout.stacked(stacks, before.shared))
    return SweepResult(
        # Leaves of the carry that are not differentiated have None as their cotangent
        types.init_cotangent(carry_ct),
        layers,
        args,
        kwargs,
        eqx.combine(carried.visitor_state, static),
        join_states(states),
    )


def _joined(
    sweep: SweepBack, xs: OfKinds, returned: Sequence[Returned]
) -> tuple[PyTree, tuple[PyTree, ...], dict[str, PyTree]]:
    """The layers of all kinds, and the cotangents of positional and keyword
    arguments.
    """
    types = sweep._types
    of_kinds = []
    for kind, stacks, shared, of_kind in zip(
        types.spec.kinds, xs, sweep._shared, returned, strict=True
    ):
        layout = types.layouts[kind.number]
        # The first argument is the stack: new layers, and no cotangents
        (layers, *_), _ = layout.stacked(stacks, types.arguments(kind, shared))
        shared_ct = types.arguments(kind, of_kind.shared_ct)
        (_, *args), kwargs = layout.stacked(
            of_kind.split_ct, shared_ct, cotangents=True
        )
        of_kinds.append(((layers, *args), kwargs))
    (layers, *args), kwargs = types.join(of_kinds)
    return layers, tuple(args), kwargs


def _split_states(types: SweepTypes, layer_state: PyTree) -> tuple[list[Split], Join]:
    """The state of the layers of each kind, split over them; and what joins such."""
    marked: Any = Marked(layer_state, "per_layer")
    if isinstance(layer_state, PerKind):
        trees = layer_state.values.items()
        marked = PerKind({name: Marked(tree, "per_layer") for name, tree in trees})
    caller = Caller("sweep_back", lambda path: f"layer_state{jtu.keystr(path)}")
    splits, join = split_kinds(marked, types.axis, types.spec.pattern, caller)
    states = []
    for split in splits:
        states.append(split._replace(stacks=[*map(jnp.asarray, split.stacks)]))
    return states, join


def _first_carried(
    sweep: SweepBack, visitor: _TreeVisitor, state: PyTree
) -> _SweepState:
    """What a sweep carries first.

    Within `jax.shard_map` it is made to vary over the axes over which what the visitor
    returns varies, which may change what that returns.
    """
    kinds = sweep._types.spec.kinds
    stacks = [states.stacks for states in visitor.layer_states]
    while True:
        before = stacks, state
        returned = []
        stacks = []
        for kind, of_kind in zip(kinds, before[0], strict=True):
            first, state = _first_returned(sweep, visitor, kind, of_kind, state)
            returned.append(first)
            stacks.append(eqx.combine(first.layer_state, of_kind))
        after = stacks, state
        if all(map(operator.is_, jax.tree.leaves(before), jax.tree.leaves(after))):
            placed = []
            for of_kind in returned:
                stacks = jax.tree.map(on_mesh, of_kind[:2])
                placed.append(Returned(*stacks, *of_kind[2:]))
            return _SweepState(placed, state)


def _first_returned(
    sweep: SweepBack,
    visitor: _TreeVisitor,
    kind: Kind,
    stacks: Arrays,
    state: PyTree,
) -> tuple[Returned, PyTree]:
    """What a sweep carries first for a kind: a stack, or zeros, for all that the
    visitor returns of its layers; and the visitor's state. `stacks` are those of the
    layers' state.

    What it returns is found by a visit of one layer, which is traced and not run.
    """
    spec = sweep._types.spec
    number = kind.number
    pullback = LayerPullback(kind, sweep._types.perturbed)
    input_types = spec.input_types(sweep._xs, sweep._shared)[number]
    first = jnp.int32(0)  # any layer will do

    def of_one(
        inputs: PyTree, cotangents: PyTree, *states: PyTree
    ) -> tuple[Returned, PyTree]:
        shared, carry, x = map(list, inputs)
        visit = LeafVisit(
            pullback,
            index=first,
            row=first,
            inputs=(shared, carry, x),
            x=x,
            saved=[],
            cotangents=cotangents,
            ahead=(),
            writes_to_host=False,
        )
        _, returned, state = visitor.call_user(visit, *states)
        return returned, state

    new, new_state = jax.eval_shape(
        of_one, input_types, pullback.cotangent_types, stacks, state
    )
    # For every entry that the visitor returned: the stack that it is written to.
    # Cotangents of arguments have the shapes of the stacks `xs`, and are zeros below.
    xs = sweep._xs[number]
    shared = sweep._shared[number]
    layers, layer_state, split_ct, shared_ct = jax.tree.map(
        lambda entry, stack: None if entry is None else stack,
        new,
        Returned(xs, stacks, xs, shared),
        is_leaf=is_none,
    )
    before = Returned(
        layers,
        layer_state,
        split_ct=jax.tree.map(zeros_like, split_ct),
        shared_ct=jax.tree.map(jnp.zeros_like, shared_ct),
    )
    return jax.tree.map(varying_as, (before, state), (new, new_state))


def forward_for_visitor(
    call: FoldCall, init: PyTree, arguments: PyTree, template: PyTree
) -> tuple[PyTree, SweepBack]:
    """The forward sweep of `fold_vjp` and `scan_vjp`, before a reverse sweep with a
    visitor; the layers are the first of the arguments.

    `template` is the stack without its arrays, for the result of the reverse sweep.
    """
    splits, join, axis = split_arguments(call, arguments)
    remat = call.policy.for_layers(axis.size)
    # There would be nothing to sweep back from but the input of the whole stack
    if remat.carries is None:
        raise ValueError(
            f"{call.policy!r} is not supported with a visitor. Keep the carry of each"
            ' layer or segment, on the device or on the host (True, "offload",'
            ' "nested", max_carries=k).'
        )
    traced, static = trace_kinds(call, splits, init, remat)
    arrays = eqx.filter(init, eqx.is_array_like)
    # `held_leaves` stays None, so `for_reverse` is not called: a user's visitor may
    # read any leaf of the carry, also those that no layer changes.
    spec = sweep_spec(call, traced, remat.swept(), axis, init)
    first, xs = checked_inputs(traced, splits, remat)
    spec, perturbed, shared = _differentiated(spec, traced, splits)
    with jax.named_scope(f"scan({axis.name})"):
        carry, ys, checkpoints = sweep_forward(spec, perturbed, first, xs, shared)
    carry = jtu.tree_unflatten(traced.carry_tree, carry)
    stacked = [*map(traced.output, traced.kinds, ys)]
    outputs = named_outputs(call, splits, stacked)
    types = SweepTypes(
        template=template,
        has_output=call.verb == "scan",
        spec=spec,
        perturbed=perturbed,
        layouts=tuple(split.layout for split in splits),
        y_trees=tuple(map(_arrays_tree, stacked)),
        axis=axis,
        join=join,
        carry_tree=traced.carry_tree,
        carry_static=static,
        init_types=tuple(map(jax.typeof, jax.tree.leaves(arrays))),
        outputs=jax.eval_shape(lambda: (carry, eqx.filter(outputs, is_array))),
    )
    y = eqx.combine(carry, static)
    sweep_back = SweepBack(checkpoints, xs, shared, types)
    return (y, outputs) if types.has_output else y, sweep_back


def _arrays_tree(output: PyTree) -> Any:
    """The structure of the arrays of an output."""
    return jax.tree.structure(eqx.filter(output, is_array))


def _differentiated(
    spec: SweepSpec, traced: TracedLayers, splits: Sequence[Split]
) -> tuple[SweepSpec, Perturbed, OfKinds]:
    """The sweep with all differentiated that can be, which leaves these are, and what
    the layers of each kind share in it.

    Of what layers share that leaves out what they close over: a visitor has no way to
    return its cotangents.
    """
    of_xs = []
    of_shared = []
    of_ys = []
    for kind, split, shared in zip(spec.kinds, splits, traced.shared, strict=True):
        closed_over = len(shared) - len(split.shared)
        of_xs.append(floats(split.stacks))
        of_shared.append([False] * closed_over + [*floats(split.shared)])
        of_ys.append(floats(kind.output_types))
    perturbed = spec.perturbed(floats(traced.init), of_xs, of_shared, of_ys)
    return differentiated(spec, perturbed, traced.shared)
