"""A forward sweep over layers, and their reverse sweep as a function of a cotangent and
a visitor.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax

from .._activity import is_differentiable, not_differentiable
from .._static import PyTree, Static
from .._sweep.gradient import LayerPullback, LayerVisit
from .._sweep.kinds import Kind
from .._sweep.primitive import sweep_forward
from .._sweep.programs import are_known, run
from .._sweep.reverse import sweep_back
from .._sweep.reverse_spec import differentiated
from .._sweep.rules import floats
from .._sweep.slots import Arrays, Checkpoints
from .._sweep.spec import SweepSpec
from .._sweep.store import Index, at_least_one, on_mesh, read, write, zeros_like
from .._sweep.trace import kinds_of, trace_layers
from .arguments import Caller, signature_error
from .checks import check_carry, describe
from .layer_axis import Leaf, TreeLayout, split_kinds
from .layers import Loop
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

    _checkpoints: Checkpoints
    _xs: list[Arrays]
    _shared: list[Arrays]
    _types: SweepTypes = eqx.field(static=True)

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
            visitor: `(visit, state) -> LayerResult`, traced once for each loop and once
                for its types.
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
        arrays, static = eqx.partition(
            (self, cotangent, state, layer_state), eqx.is_array
        )

        def visited(arrays: PyTree) -> tuple[PyTree, Static]:
            sweep, cotangent, state, layer_state = eqx.combine(arrays, static)
            found = _visited(
                sweep, _cotangents(self._types, cotangent), visitor, state, layer_state
            )
            found, rest = eqx.partition(found, eqx.is_array)
            return found, Static(rest)

        found, rest = (
            run(jax.jit(visited), arrays) if are_known(arrays) else visited(arrays)
        )
        found = eqx.combine(jax.tree.map(_without_derivatives, found), rest.value)
        return found._replace(layers=self._types.template._with_blocks(found.layers))


# Of the carry, and of the outputs of each kind
_Cotangents: TypeAlias = tuple[Arrays, list[Arrays]]


def _cotangents(types: SweepTypes, cotangent: PyTree) -> _Cotangents:
    given = (
        cotangent if types.has_output and cotangent is not None else (cotangent, None)
    )
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise ValueError(
            "sweep_back of scan_vjp takes a pair of cotangents, of the carry and of"
            f" the outputs; got {describe(cotangent)}."
        )
    (carry_ct, ys_ct), (carry, ys), source = given, types.outputs, "given to sweep_back"
    masks = types.perturbed
    of_ys = iter(cotangent_leaves(ys_ct, ys, sum(masks.ys, ()), "the outputs", source))
    of_kinds = [[next(of_ys) for _ in range(sum(mask))] for mask in masks.ys]
    return cotangent_leaves(carry_ct, carry, masks.carry, "the carry", source), of_kinds


class _Part(NamedTuple):
    """What a visitor returns for the layers of a kind, or for one: of arguments
    cotangents, summed if shared.

    There is `None` for what it leaves as it is.
    """

    layers: list[PyTree]
    layer_state: list[PyTree]
    split_ct: list[PyTree]
    shared_ct: list[PyTree]

    def with_layer(self, row: Any, new: "_Part") -> "_Part":
        """The same after a visit of the layer at a row."""
        *stacks, sums = (
            zip(*lists, strict=True) for lists in zip(self, new, strict=True)
        )
        return _Part(
            *(
                [
                    old if entry is None else write(old, row, entry)
                    for old, entry in pairs
                ]
                for pairs in stacks
            ),
            shared_ct=[old if ct is None else old + ct for old, ct in sums],
        )


_Loop: TypeAlias = tuple[list[_Part], PyTree]  # of each kind, and the visitor's state


def _without_derivatives(leaf: Any) -> Any:
    # Second derivatives go through the first carry alone, and a visitor's results
    # depend on others too.
    has_derivative = isinstance(leaf, jax.Array) and is_differentiable(leaf.dtype)
    return not_differentiable(_NO_DERIVATIVES, leaf, ()) if has_derivative else leaf


_NO_DERIVATIVES = (
    "the results of a sweep with a visitor have no derivatives; differentiate those of"
    " jax.vjp of the fold, or use jax.lax.stop_gradient on these"
)


def _visited(
    sweep: SweepBack,
    cotangents: _Cotangents,
    visitor: Visitor,
    state: PyTree,
    layer_state: PyTree,
) -> SweepResult:
    types = sweep._types
    marked: Any = Marked(layer_state, "per_layer")
    if isinstance(layer_state, PerKind):
        trees = layer_state.values.items()
        marked = PerKind({name: Marked(tree, "per_layer") for name, tree in trees})
    caller = Caller("sweep_back", lambda path: f"layer_state{jtu.keystr(path)}")
    states, join = split_kinds(marked, types.axis, types.spec.pattern, caller)
    arrays, static = eqx.partition(state, eqx.is_array_like)

    def visit(
        leaves: LayerVisit, own: Kind, row: Index, loop: _Loop
    ) -> tuple[Arrays, tuple[_Part, PyTree]]:
        part, state = loop[0][own.number], eqx.combine(loop[1], static)
        kind, (layout, stacks, shared) = types.kinds[own.number], states[own.number]
        stacks = map(at_least_one, eqx.combine(part.layer_state, stacks))
        entry = types.visit(kind, leaves, layout.layer(read([*stacks], row), shared))
        return _new_leaves(
            types, kind, layout, entry, state, _called(visitor, entry, state)
        )

    def visit_and_write(
        leaves: LayerVisit, own: Kind, row: Index, loop: _Loop
    ) -> tuple[Arrays, _Loop]:
        carry_ct, new = visit(leaves, own, row, loop)
        # Without the barrier XLA holds a layer's internals until all is written.
        (new, state), parts = lax.optimization_barrier(new), [*loop[0]]
        parts[own.number] = parts[own.number].with_layer(row, new)
        return carry_ct, (parts, state)

    def xs_in(loop: _Loop) -> list[Arrays]:
        return eqx.combine([part.layers for part in loop[0]], sweep._xs)

    first, stacks = jax.tree.map(
        jnp.asarray, (arrays, [stacks for _, stacks, _ in states])
    )
    carry_ct, loop = (
        cotangents[0],
        (_first_parts(sweep, visit, cotangents, first, stacks), first),
    )
    if types.spec.length:
        swept = functools.partial(
            sweep_back, types.spec, types.perturbed, sweep._checkpoints
        )
        carry_ct, loop = swept(
            sweep._shared, *cotangents, visit_and_write, loop, xs_in=xs_in
        )
    trees, new_states = [], []
    of_kinds = zip(
        types.kinds, xs_in(loop), sweep._shared, loop[0], states, strict=True
    )
    for kind, xs, shared, part, (layout, *state_arrays) in of_kinds:
        (layers, *_), _ = kind.stacked(xs, shared, cotangents=False)
        (_, *args), kwargs = kind.stacked(
            part.split_ct, part.shared_ct, cotangents=True
        )
        trees.append(((layers, *args), kwargs))
        new_states.append(
            layout.stacked(
                eqx.combine(part.layer_state, state_arrays[0]), state_arrays[1]
            )
        )
    (layers, *args), kwargs = types.join(trees)
    carry, state = types.carry_cotangent(carry_ct), eqx.combine(loop[1], static)
    return SweepResult(carry, layers, tuple(args), kwargs, state, join(new_states))


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
    visit: Callable[
        [LayerVisit, Kind, Index, _Loop], tuple[Arrays, tuple[_Part, PyTree]]
    ],
    cotangents: _Cotangents,
    state: PyTree,
    state_stacks: list[Arrays],
) -> list[_Part]:
    """What a sweep carries first: a stack, or zeros, for all that the visitor returns
    of a kind's layers.
    """
    index, found = jnp.int32(0), []
    every = [*map(_Part, sweep._xs, state_stacks, sweep._xs, sweep._shared)]
    nothing = jax.tree.map(lambda _: None, every)
    for kind, stacks, of_ys in zip(
        sweep._types.spec.kinds, every, cotangents[1], strict=True
    ):
        x, y_ct = (read([*map(at_least_one, own)], 0) for own in (stacks.layers, of_ys))
        inputs, of_layer = (
            (stacks.shared_ct, sweep._checkpoints.first(), x),
            (cotangents[0], y_ct),
        )
        example = LayerPullback(kind, sweep._types.perturbed).visit(
            index, inputs, [], of_layer
        )
        at = example, kind, index, (nothing, state)
        new = jax.eval_shape(lambda at=at: visit(*at)[1][0])
        layers, layer_state, split_ct, shared_ct = jax.tree.map(
            lambda entry, stack: None if entry is None else stack,
            new,
            stacks,
            is_leaf=lambda node: node is None,
        )
        layers, layer_state = jax.tree.map(on_mesh, (layers, layer_state))
        zeros = (
            jax.tree.map(zeros_like, split_ct),
            jax.tree.map(jnp.zeros_like, shared_ct),
        )
        found.append(_Part(layers, layer_state, *zeros))
    return found


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
    (carry, _), mask = types.outputs, types.perturbed.carry
    carry_ct = cotangent_leaves(result.carry, carry, mask, "the carry", _BY_VISITOR)
    own = _new_parts(result.layer, visit.layer, "layer", kind.layout.leaves, root=2)
    of_state = _new_parts(
        result.layer_state, visit.layer_state, "layer_state", state_layout.leaves
    )
    new_state = eqx.filter(_filled(result.state, state, "state"), eqx.is_array_like)
    args, kwargs = _argument_cotangents(visit, result)
    of_split, of_shared = kind.layout.arrays(
        ((eqx.filter(visit.layer, False), *args), kwargs)
    )
    layers, shared_ct = (
        own + [None] * (len(of_split) - len(own)),
        [None] * kind.constants + of_shared,
    )
    new = _Part(layers, of_state, of_split, shared_ct)
    return carry_ct, (new, jax.tree.map(jnp.asarray, new_state))


_BY_VISITOR = "returned by the visitor"


def _new_parts(
    new: PyTree, before: PyTree, what: str, leaves: Iterable[Leaf], root: int = 0
) -> list[PyTree]:
    """A tree's new entries of what is split, None where they stay; refuses changes of
    what is not.
    """
    trees, found = (_filled(new, before, what), before), []
    pairs = zip(
        *(map(raw_array, jtu.tree_leaves(tree, is_leaf=is_named)) for tree in trees),
        strict=True,
    )
    for leaf, (changed, old) in zip(
        leaves, pairs, strict=False
    ):  # those of arguments come after the layer's
        is_shared = leaf.kind == "shared"
        if leaf.kind == "split":
            found.append(None if changed is old else changed)
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
    return found


def _argument_cotangents(
    visit: LayerVisit, result: LayerResult
) -> tuple[list[PyTree], dict[str, PyTree]]:
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
        return checked_cotangent(
            cotangent, eqx.filter(argument, is_array), name, _BY_VISITOR
        )

    return (
        [
            checked(ct, arg, f"args[{i}]")
            for i, (ct, arg) in enumerate(zip(args, visit.args, strict=True))
        ],
        {
            name: checked(kwargs[name], arg, f"kwargs[{name!r}]")
            for name, arg in visit.kwargs.items()
        },
    )


def _filled(new: PyTree, before: PyTree, what: str) -> PyTree:
    """What a visitor returned, with the old leaves where it is None."""
    try:
        filled = eqx.combine(new, before)
    except ValueError:
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
    if remat.carries is None:
        raise ValueError(
            f"{loop.policy!r} is not supported with a visitor. Keep the carry of each"
            ' layer or segment, on the device or on the host (True, "offload",'
            ' "nested", max_carries=k).'
        )
    arrays, static = eqx.partition(init, eqx.is_array_like)
    untraced = [kind.untraced(static, remat.kept.names, whole=False) for kind in kinds]
    traced = trace_layers(untraced, arrays, offloads=remat.offloads)
    xs, shared = [kind.arrays for kind in kinds], [layer.shared for layer in traced]
    of_kinds = kinds_of(traced, [[False] * len(own) for own in xs])
    first = traced[0]
    options: Any = {
        "reverse": loop.reverse,
        "unroll": loop.unroll_of(axis.size),
        "pattern": loop.pattern,
    }
    spec = SweepSpec(of_kinds, remat.swept(), **options)
    of_shared = [
        [False] * layer.constants + [*floats(layer.shared[layer.constants :])]
        for layer in traced
    ]
    of_ys = [floats(kind.output_types) for kind in of_kinds]
    perturbed = spec.perturbed(floats(first.init), [*map(floats, xs)], of_shared, of_ys)
    spec, perturbed, shared = differentiated(spec, perturbed, shared)
    with jax.named_scope(f"scan({axis.name})"):
        carry, ys, checkpoints = sweep_forward(spec, perturbed, first.init, xs, shared)
    carry = jtu.tree_unflatten(first.carry_tree, carry)
    outputs = [
        kind.named(layer.output(own))
        for kind, layer, own in zip(kinds, traced, ys, strict=True)
    ]
    outputs = loop.outputs(outputs)
    types = SweepTypes(
        template,
        loop.call.verb == "scan",
        spec,
        perturbed,
        kinds=tuple(
            KindTypes(
                own,
                len(leaves) - len(kind.shared),
                kind.name,
                kind.layout,
                layer.output_tree,
            )
            for kind, own, layer, leaves in zip(
                kinds, spec.kinds, traced, shared, strict=True
            )
        ),
        axis=axis,
        join=join,
        carry_tree=first.carry_tree,
        carry_static=static,
        outputs=jax.eval_shape(lambda: (carry, eqx.filter(outputs, is_array))),
    )
    y = eqx.combine(carry, static)
    sweep_back = SweepBack(checkpoints, xs, shared, types)
    return (y, outputs) if types.has_output else y, sweep_back
