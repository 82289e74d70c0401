"""`SweepBack`: a reverse sweep over layers, as a function of a cotangent and a visitor."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax

from .._activity import is_differentiable, not_differentiable
from .._static import PyTree
from .._sweep.gradient import LayerPullback, LeafVisit, pick, scatter_leaves, with_part
from .._sweep.kinds import Kind
from .._sweep.primitive import sweep_backward
from .._sweep.reverse import sweep_back
from .._sweep.slots import Arrays, Checkpoints
from .._sweep.store import at_least_one, on_mesh, read, read_layer, write, zeros_like
from .arguments import Caller, signature_error
from .checks import check_carry, describe
from .layer_axis import Join, Leaf, Split, TreeLayout, split_kinds
from .marks import Marked, PerKind, is_array, is_named, raw_array
from .visitor import (
    LayerResult,
    LayerVisit,
    SweepResult,
    SweepTypes,
    Visitor,
    checked_cotangent,
    cotangent_leaves,
)


class SweepBack(eqx.Module):
    """The reverse sweep over layers after their forward sweep; a PyTree, which may be returned from `jit`.

    It holds the layers, the arguments and what the policy keeps.
    """

    _checkpoints: Checkpoints
    _xs: Arrays
    _shared: Arrays
    _types: SweepTypes = eqx.field(static=True)
    _wrap: Callable[[SweepResult], SweepResult] = eqx.field(static=True, default=lambda result: result)

    def __call__(
        self,
        cotangent: PyTree,
        visitor: Visitor | None = None,
        state: PyTree = None,
        layer_state: PyTree = None,
    ) -> SweepResult:
        """Visit every layer once, from the one that ran last to the one that ran first.

        Args:
            cotangent: of what the forward sweep returned, in the same structure, shapes and dtypes.
            visitor: `(visit, state) -> LayerResult`, traced once for each loop and once for its types.
                Without one the result has the gradients of the layers, the initial carry and the arguments,
                as `jax.vjp` of the fold.
            state: the visitor's, any tree of arrays whose shapes and dtypes stay as they are.
            layer_state: a state for each layer, a tree of arrays stacked over the layers' axis as the layers
                are: the visitor sees a slice of it, and what it returns replaces that slice. `per_kind` gives
                each kind of layers one of its own, stacked over the layers of this kind.

        Returns:
            A `SweepResult`. Layers, arguments and states that the visitor returned are updated in place where
            the arguments of the surrounding `jit` are donated.

        Raises:
            ValueError: what is given or returned does not fit; names the path.
            TypeError: the visitor returns something other than a `LayerResult`.

        Cost: that of the policy's backward pass, and the visitor's own work for each layer.
        """
        if visitor is not None and not callable(visitor):
            raise TypeError(
                "A visitor is a function (visit, state) -> LayerResult; got "
                f"{describe(visitor)}. Write sweep_back(cotangent, visitor, state)."
            )
        leaves = jax.tree.leaves(layer_state, is_leaf=is_named)
        if leaves and not any(map(is_array, map(raw_array, leaves))):
            raise ValueError(
                f"layer_state holds no arrays; got {describe(layer_state)}. Stack a state for each layer "
                "(jnp.zeros(Layers.size)), or pass what goes from layer to layer as state."
            )
        if visitor is None and not (state is None and layer_state is None):
            raise ValueError(
                "state and layer_state are for a visitor, and sweep_back was given none. Write "
                "sweep_back(cotangent, visitor, state)."
            )
        cotangents = _cotangents(self._types, cotangent)
        if visitor is None:
            return self._wrap(_gradients(self, *cotangents))
        found = _visited(self, *cotangents, visitor, state, layer_state)
        return self._wrap(jax.tree.map(_without_derivatives, found))

    def wrapping(self, wrap: Callable[[SweepResult], SweepResult]) -> "SweepBack":
        """This, with its results in another form."""
        return dataclasses.replace(self, _wrap=wrap)


def _cotangents(types: SweepTypes, cotangent: PyTree) -> tuple[Arrays, Arrays]:
    given = cotangent if types.has_output and cotangent is not None else (cotangent, None)
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise ValueError(
            "sweep_back of scan_vjp takes a pair of cotangents, of the carry and of the outputs; got "
            f"{describe(cotangent)}."
        )
    (carry_ct, ys_ct), (carry, ys), source = given, types.outputs, "given to sweep_back"
    return (
        cotangent_leaves(carry_ct, carry, types.perturbed.carry, "the carry", source),
        cotangent_leaves(ys_ct, ys, types.perturbed.ys, "the outputs", source),
    )


def _gradients(sweep: SweepBack, carry_ct: Arrays, ys_ct: Arrays) -> SweepResult:
    types, masks = sweep._types, sweep._types.perturbed
    init_ct, xs_ct, shared_ct = sweep_backward(
        types.spec, masks, sweep._checkpoints, sweep._xs, sweep._shared, carry_ct, ys_ct
    )
    of_xs, of_shared = scatter_leaves(xs_ct, masks.xs), scatter_leaves(shared_ct, masks.shared)
    carry = jtu.tree_unflatten(types.carry_tree, scatter_leaves(init_ct, masks.init))
    trees = [kind.stacked(of_xs, of_shared, cotangents=True) for kind in types.kinds]
    (layers, *args), kwargs = types.join(trees)
    return SweepResult(carry, layers, tuple(args), kwargs)


class _Loop(NamedTuple):
    """What a sweep with a visitor carries from layer to layer, or one layer's part of it.

    A list has `None` for what the visitor leaves as it is: new arrays of layers, cotangents of arguments that
    are split, or shared (summed), and the state of layers, a list for each kind.
    """

    layers: list[PyTree]
    split_ct: list[PyTree]
    shared_ct: list[PyTree]
    state: PyTree
    layer_state: list[PyTree]


def _without_derivatives(leaf: Any) -> Any:
    # Second derivatives go through the first carry alone, and a visitor's results depend on others too.
    has_derivative = isinstance(leaf, jax.Array) and is_differentiable(leaf.dtype)
    return not_differentiable(_NO_DERIVATIVES, leaf, ()) if has_derivative else leaf


_NO_DERIVATIVES = (
    "the results of a sweep with a visitor have no derivatives; differentiate those of "
    "sweep_back(cotangent), or use jax.lax.stop_gradient on these"
)


def _visited(
    sweep: SweepBack, carry_ct: Arrays, ys_ct: Arrays, visitor: Visitor, state: PyTree, layer_state: PyTree
) -> SweepResult:
    types = sweep._types
    states, join = _split_layer_state(types, layer_state)
    arrays, static = eqx.partition(state, eqx.is_array_like)

    def visit(leaves: LeafVisit, loop: _Loop) -> tuple[Arrays, _Loop]:
        layout, stacks, shared = states[leaves.kind.number]
        stacks = map(at_least_one, eqx.combine(loop.layer_state[leaves.kind.number], stacks))
        entry = types.visit(leaves, layout.layer(read([*stacks], leaves.row), shared))
        state = eqx.combine(loop.state, static)
        return _new_leaves(types, layout, leaves, entry, state, _called(visitor, entry, state))

    def visit_and_write(leaves: LeafVisit, loop: _Loop) -> tuple[Arrays, _Loop]:
        carry_ct, new = visit(leaves, loop)
        # Without the barrier XLA holds a layer's internals until all is written.
        new, layer_state = lax.optimization_barrier(new), [*loop.layer_state]
        own = layer_state[leaves.kind.number]
        layer_state[leaves.kind.number] = _written(own, leaves.row, new.layer_state)
        return carry_ct, _Loop(
            _written(loop.layers, leaves.row, new.layers),
            _written(loop.split_ct, leaves.row, new.split_ct),
            [old if ct is None else old + ct for old, ct in zip(loop.shared_ct, new.shared_ct, strict=True)],
            new.state,
            layer_state,
        )

    def xs_in(loop: _Loop) -> Arrays:
        return eqx.combine(loop.layers, sweep._xs)

    examples = [_example(sweep, kind.own, carry_ct, ys_ct) for kind in types.kinds]
    stacks = [stacks for _, stacks, _ in states]
    loop = _first_loop(sweep, visit, examples, jax.tree.map(jnp.asarray, arrays), stacks)
    if types.spec.length:
        swept = functools.partial(sweep_back, types.spec, types.perturbed, sweep._checkpoints)
        carry_ct, loop = swept(sweep._shared, carry_ct, ys_ct, visit_and_write, loop, xs_in=xs_in)
    trees = []
    for kind in types.kinds:
        (layers, *_), _ = kind.stacked(xs_in(loop), sweep._shared, cotangents=False)
        (_, *args), kwargs = kind.stacked(loop.split_ct, loop.shared_ct, cotangents=True)
        trees.append(((layers, *args), kwargs))
    (layers, *args), kwargs = types.join(trees)
    of_kinds = zip(states, eqx.combine(loop.layer_state, stacks), strict=True)
    new_states = [layout.stacked(own, shared) for (layout, _, shared), own in of_kinds]
    carry, state = types.carry_cotangent(carry_ct), eqx.combine(loop.state, static)
    return SweepResult(carry, layers, tuple(args), kwargs, state, join(new_states))


def _called(visitor: Visitor, visit: LayerVisit, state: PyTree) -> PyTree:
    try:
        return visitor(visit, state)
    except TypeError:
        problem = signature_error(visitor, "sweep_back", ["the visit", "the state"], (visit, state), {})
        if problem is None:
            raise
        raise TypeError(problem) from None


def _split_layer_state(types: SweepTypes, layer_state: PyTree) -> tuple[list[Split], Join]:
    if isinstance(layer_state, PerKind):
        marked = {name: Marked(value, "per_layer") for name, value in layer_state.values.items()}
        layer_state = PerKind(marked)
    else:
        layer_state = Marked(layer_state, "per_layer")
    caller = Caller("sweep_back", lambda path: f"layer_state{jtu.keystr(path)}")
    return split_kinds(layer_state, types.axis, types.loop.pattern, caller)


def _first_loop(
    sweep: SweepBack,
    visit: Callable[[LeafVisit, _Loop], tuple[Arrays, _Loop]],
    examples: list[LeafVisit],
    state: PyTree,
    state_stacks: list[list[PyTree]],
) -> _Loop:
    """What a sweep carries first: a stack, or zeros, for all that the visitor returns for some kind."""
    nothing = [[None] * len(stacks) for stacks in (sweep._xs, sweep._shared, *state_stacks)]
    loop = _Loop(nothing[0], nothing[0], nothing[1], state, nothing[2:])
    new = [jax.eval_shape(lambda example=example: visit(example, loop)[1]) for example in examples]
    layers = _where_given(sweep._xs, *(found.layers for found in new))
    split_ct = _where_given(sweep._xs, *(found.split_ct for found in new))
    shared_ct = _where_given(sweep._shared, *(found.shared_ct for found in new))
    pairs = zip(state_stacks, new, strict=True)
    stacks = [_where_given([*map(jnp.asarray, own)], found.layer_state) for own, found in pairs]
    layers, stacks = jax.tree.map(on_mesh, (layers, stacks))
    split_ct, shared_ct = jax.tree.map(zeros_like, split_ct), jax.tree.map(jnp.zeros_like, shared_ct)
    return _Loop(layers, split_ct, shared_ct, state, stacks)


def _where_given(stacks: list[PyTree], *entries: list[PyTree]) -> list[PyTree]:
    given = [any(entry is not None for entry in of_stack) for of_stack in zip(*entries, strict=True)]
    return [stack if is_ else None for is_, stack in zip(given, stacks, strict=True)]


def _example(sweep: SweepBack, kind: Kind, carry_ct: Arrays, ys_ct: Arrays) -> LeafVisit:
    """A visit of the first layer of a kind, for its types."""
    types, index = sweep._types, jnp.int32(0)
    perturbed, whole = types.perturbed.of_part(kind.xs, kind.ys), types.spec.unsliced[kind.xs]
    of_kind = pick(scatter_leaves(ys_ct, types.perturbed.ys)[kind.ys], perturbed.ys)
    x = read_layer([*map(at_least_one, sweep._xs[kind.xs])], 0, whole)
    cotangents = carry_ct, read([*map(at_least_one, of_kind)], 0)
    inputs = sweep._shared, sweep._checkpoints.first(), x
    vjp = functools.partial(LayerPullback(kind.layer, perturbed), *inputs, None, cotangents)
    return LeafVisit(index, kind, index, *inputs, cotangents, vjp)


def _written(stacks: list[PyTree], index: Any, entries: list[PyTree]) -> list[PyTree]:
    pairs = zip(stacks, entries, strict=True)
    return [stack if entry is None else write(stack, index, entry) for stack, entry in pairs]


def _new_leaves(
    types: SweepTypes,
    state_layout: TreeLayout,
    leaves: LeafVisit,
    visit: LayerVisit,
    state: PyTree,
    result: PyTree,
) -> tuple[Arrays, _Loop]:
    """The cotangent of a layer's input, and what is to be written, from what the visitor returned."""
    if not isinstance(result, LayerResult):
        raise TypeError(
            f"A visitor returns a LayerResult; got {describe(result)}. Its first field is the cotangent of "
            "the layer's input: return LayerResult(visit.vjp().carry)."
        )
    kind, mask = types.kinds[leaves.kind.number], types.perturbed.carry
    carry_ct = cotangent_leaves(result.carry, types.outputs[0], mask, "the carry", _BY_VISITOR)
    own = _new_parts(result.layer, visit.layer, "layer", kind.layout.leaves, root=2)
    of_state = _new_parts(result.layer_state, visit.layer_state, "layer_state", state_layout.leaves)
    new_state = eqx.filter(_filled(result.state, state, "state"), eqx.is_array_like)
    args, kwargs = _argument_cotangents(visit, result)
    of_split, of_shared = kind.layout.arrays(((eqx.filter(visit.layer, False), *args), kwargs))
    layers, split_ct = ([None] * len(types.perturbed.xs) for _ in range(2))
    shared_ct: list[PyTree] = [None] * len(types.perturbed.shared)
    layers = with_part(layers, kind.own.xs, own + [None] * (len(of_split) - len(own)))
    split_ct = with_part(split_ct, kind.own.xs, of_split)
    for place, cotangent in zip(kind.shared, of_shared, strict=True):
        shared_ct[place] = cotangent
    return carry_ct, _Loop(layers, split_ct, shared_ct, jax.tree.map(jnp.asarray, new_state), of_state)


_BY_VISITOR = "returned by the visitor"


def _new_parts(new: PyTree, before: PyTree, what: str, leaves: Iterable[Leaf], root: int = 0) -> list[PyTree]:
    """A tree's new entries of what is split, None where they stay; refuses changes of what is not."""
    trees, found = (_filled(new, before, what), before), []
    pairs = zip(*(map(raw_array, jtu.tree_leaves(tree, is_leaf=is_named)) for tree in trees), strict=True)
    for leaf, (changed, old) in zip(leaves, pairs, strict=False):  # those of arguments come after the layer's
        both_static = not is_array(changed) and not is_array(old)
        if leaf.kind == "split":
            found.append(None if changed is old else changed)
        elif changed is not old and not (both_static and changed == old):
            of_all = "is shared by all layers"
            of_all = of_all if leaf.kind == "shared" else f"is {old!r}, the same for all layers"
            raise ValueError(
                f"The {what}{jtu.keystr(leaf.path[root:])} {of_all}, so a visitor cannot replace it at one. "
                "Return it unchanged, or None for it (eqx.filter), and keep what is summed over the layers "
                "in the visitor's state."
            )
    return found


def _argument_cotangents(visit: LayerVisit, result: LayerResult) -> tuple[list[PyTree], dict[str, PyTree]]:
    args = (None,) * len(visit.args) if result.args is None else result.args
    kwargs = {**dict.fromkeys(visit.kwargs), **(result.kwargs or {})}
    if not isinstance(args, tuple | list) or len(args) != len(visit.args) or len(kwargs) > len(visit.kwargs):
        raise TypeError(
            f"args of a LayerResult is a tuple of {len(visit.args)} cotangents, one for each further "
            f"argument (None for one without), and kwargs a dict with keys among {sorted(visit.kwargs)}; "
            f"got {describe(args)}, and the keys {sorted(kwargs)}."
        )

    def checked(cotangent: PyTree, argument: Any, name: str) -> PyTree:
        return checked_cotangent(cotangent, eqx.filter(argument, is_array), name, _BY_VISITOR)

    return (
        [checked(ct, arg, f"args[{i}]") for i, (ct, arg) in enumerate(zip(args, visit.args, strict=True))],
        {name: checked(kwargs[name], arg, f"kwargs[{name!r}]") for name, arg in visit.kwargs.items()},
    )


def _filled(new: PyTree, before: PyTree, what: str) -> PyTree:
    """What a visitor returned, with the old leaves where it is None."""
    try:
        filled = eqx.combine(new, before)
    except ValueError:
        filled = new
    check_carry(before, filled, what)
    return filled
