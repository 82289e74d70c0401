"""`SweepBack`: a reverse sweep over layers, as a function of a cotangent and a visitor."""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax

from .._activity import is_differentiable
from .._sweep.api import backward_rule
from .._sweep.derivative_errors import not_differentiable
from .._sweep.gradient import LayerPullback, LeafVisit, scatter_leaves
from .._sweep.slots import Arrays, Checkpoints
from .._sweep.store import read, read_layer, write, zeros_like
from .arguments import Caller
from .checks import check_carry, describe
from .eager import compiled_once
from .layer_axis import Leaf, TreeLayout, split_tree
from .marks import Marked, is_array, is_named, raw_array
from .sweep_types import SweepTypes, checked_cotangent, cotangent_leaves
from .visitor import LayerResult, LayerVisit, SweepResult, Visitor


class SweepBack(eqx.Module):
    """The reverse sweep over layers after their forward sweep; a PyTree, which may be returned from `jit`.

    It holds the layers, the arguments and what the policy keeps.
    """

    _checkpoints: Checkpoints
    _xs: Arrays
    _shared: Arrays
    _constants_of_slices: Arrays
    _types: SweepTypes = eqx.field(static=True)
    _wrap: Callable[[Any], Any] = eqx.field(static=True, default=lambda layers: layers)

    def __call__(
        self, cotangent: Any, visitor: Visitor | None = None, state: Any = None, layer_state: Any = None
    ) -> SweepResult:
        """Visit every layer once, from the one that ran last to the one that ran first.

        Args:
            cotangent: of what the forward sweep returned, in the same structure, shapes and dtypes.
            visitor: `(visit, state) -> LayerResult`, traced once for each loop and once for its types.
                Without one the result has the gradients of the layers, the initial carry and the arguments,
                as `jax.vjp` of the fold.
            state: the visitor's, any tree of arrays whose shapes and dtypes stay as they are.
            layer_state: a state for each layer, a tree of arrays stacked over the layers' axis as the layers
                are: the visitor sees a slice of it, and what it returns replaces that slice.

        Returns:
            A `SweepResult`. Layers, arguments and states that the visitor returned are updated in place where
            the arguments of the surrounding `jit` are donated.

        Raises:
            ValueError: what is given or returned does not fit; names the path.
            TypeError: the visitor returns something other than a `LayerResult`.

        Cost: that of the policy's backward pass, and the visitor's own work for each layer.
        """

        def run(cotangent: Any, rest: tuple[SweepBack, Any, Any]) -> SweepResult:
            sweep, state, layer_state = rest
            cotangents = _cotangents(sweep._types, cotangent)
            if visitor is None:
                return _gradients(sweep, *cotangents)
            found = _visited(sweep, *cotangents, visitor, state, layer_state)
            return jax.tree.map(_without_derivatives, found)

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
            raise ValueError("state and layer_state are for a visitor, and sweep_back was given none.")
        result = compiled_once(run, cotangent, (self, state, layer_state))
        return result._replace(layers=self._wrap(result.layers))

    def wrapping(self, wrap: Callable[[Any], Any]) -> "SweepBack":
        """This, with `wrap` around the layers of its results."""
        return dataclasses.replace(self, _wrap=wrap)


def _cotangents(types: SweepTypes, cotangent: Any) -> tuple[Arrays, Arrays]:
    """The cotangents of the leaves of carry and outputs that have one, zeros for missing ones."""
    given = cotangent if types.has_output else (cotangent, None)
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
    init_ct, xs_ct, shared_ct = backward_rule(types.spec, masks)(
        sweep._checkpoints, sweep._xs, sweep._shared, carry_ct, ys_ct
    )
    of_shared = scatter_leaves(shared_ct, masks.shared)[types.constants :]
    of_xs = scatter_leaves(xs_ct, masks.xs)
    (layers, *args), kwargs = types.layout.stacked(of_xs, of_shared, cotangents=True)
    carry = jtu.tree_unflatten(types.carry_tree, scatter_leaves(init_ct, masks.init))
    return SweepResult(carry, layers, tuple(args), kwargs)


class _Loop(NamedTuple):
    """What a sweep with a visitor carries from layer to layer, or one layer's part of it.

    A list has `None` for what the visitor leaves as it is.

    Attributes:
        layers: for each split array that belongs to the layers: its stack.
        args: for each split array that belongs to an argument: the stack of its cotangents.
        shared: for each shared array: the sum of its cotangents.
        state: the arrays of the visitor's state.
        layer_state: for each of its arrays: its stack.
    """

    layers: list[Any]
    args: list[Any]
    shared: list[Any]
    state: Any
    layer_state: list[Any]


def _without_derivatives(leaf: Any) -> Any:
    # Second derivatives go through the first carry alone, and a visitor's results depend on others too.
    has_derivative = isinstance(leaf, jax.Array) and is_differentiable(leaf.dtype)
    return not_differentiable(leaf) if has_derivative else leaf


def _visited(
    sweep: SweepBack, carry_ct: Arrays, ys_ct: Arrays, visitor: Visitor, state: Any, layer_state: Any
) -> SweepResult:
    types = sweep._types
    caller = Caller("sweep_back", lambda path: f"layer_state{jtu.keystr(path)}")
    state_layout, state_stacks, state_shared = split_tree(
        Marked(layer_state, "per_layer"), types.layout.axis, caller
    )
    arrays, static = eqx.partition(state, eqx.is_array_like)

    def visit(leaves: LeafVisit, loop: _Loop) -> tuple[Arrays, _Loop]:
        part = read(eqx.combine(loop.layer_state, state_stacks), leaves.layer_index)
        entry = types.visit(leaves, sweep._constants_of_slices, state_layout.layer(part, state_shared))
        state = eqx.combine(loop.state, static)
        return _new_leaves(types, state_layout, leaves, entry, state, visitor(entry, state))

    def visit_and_write(leaves: LeafVisit, loop: _Loop) -> tuple[Arrays, _Loop]:
        carry_ct, new = visit(leaves, loop)
        # Without the barrier XLA holds a layer's internals until all is written.
        new = lax.optimization_barrier(new)
        index = leaves.layer_index
        return carry_ct, _Loop(
            write(loop.layers, index, new.layers),
            write(loop.args, index, new.args),
            jax.tree.map(operator.add, loop.shared, new.shared),
            new.state,
            write(loop.layer_state, index, new.layer_state),
        )

    def xs_in(loop: _Loop) -> Arrays:
        return eqx.combine(loop.layers, sweep._xs)

    first_state, shared = jax.tree.map(jnp.asarray, arrays), sweep._shared[types.constants :]
    no_xs, no_shared, no_state = ([None] * len(stacks) for stacks in (sweep._xs, shared, state_stacks))
    loop = _Loop(no_xs, no_xs, no_shared, first_state, no_state)
    if types.spec.length:
        _, new = jax.eval_shape(lambda: visit(_example(sweep, carry_ct, ys_ct), loop))
        loop = _Loop(
            _where_given(new.layers, sweep._xs),
            _where_given(new.args, sweep._xs, zeros_like),
            _where_given(new.shared, shared, jnp.zeros_like),
            first_state,
            _where_given(new.layer_state, state_stacks, jnp.asarray),
        )
        sweep_back = functools.partial(types.spec.sweep_back, types.perturbed, sweep._checkpoints)
        carry_ct, loop = sweep_back(sweep._shared, carry_ct, ys_ct, visit_and_write, loop, xs_in=xs_in)
    (layers, *_), _ = types.layout.stacked(xs_in(loop), shared)
    (_, *args), kwargs = types.layout.stacked(loop.args, loop.shared, cotangents=True)
    last_state = eqx.combine(loop.state, static)
    layer_state = state_layout.stacked(eqx.combine(loop.layer_state, state_stacks), state_shared)
    carry = types.carry_cotangent(carry_ct)
    return SweepResult(carry, layers, tuple(args), kwargs, last_state, layer_state)


def _example(sweep: SweepBack, carry_ct: Arrays, ys_ct: Arrays) -> LeafVisit:
    """A visit of the first layer, for its types."""
    spec = sweep._types.spec
    return LeafVisit(
        jnp.int32(0),
        sweep._shared,
        sweep._checkpoints.first(),
        read_layer(sweep._xs, 0, spec.unsliced),
        spec.unsliced,
        (carry_ct, read(ys_ct, 0)),
        None,
        LayerPullback(spec.layer, sweep._types.perturbed, jax.checkpoint),
    )


def _where_given(
    new: list[Any], stacks: list[Any], first: Callable[[Any], Any] = lambda stack: stack
) -> list[Any]:
    return [None if leaf is None else first(stack) for leaf, stack in zip(new, stacks, strict=True)]


def _new_leaves(
    types: SweepTypes,
    state_layout: TreeLayout,
    leaves: LeafVisit,
    visit: LayerVisit,
    state: Any,
    result: Any,
) -> tuple[Arrays, _Loop]:
    """The cotangent of a layer's input, and what is to be written, from what the visitor returned."""
    if not isinstance(result, LayerResult):
        raise TypeError(
            f"A visitor returns a LayerResult; got {describe(result)}. Its first field is the cotangent of "
            'the layer\'s input: (carry_ct,) = visit.vjp("carry"); return LayerResult(carry_ct).'
        )
    like, mask = types.outputs[0], types.perturbed.carry
    carry_ct = cotangent_leaves(result.carry, like, mask, "the carry", "returned by the visitor")
    layer = _filled(result.layer, visit.layer, "layer")
    args, kwargs = _argument_cotangents(visit, result)
    of_layer = [leaf for leaf in types.layout.leaves if types.part(leaf) == "layer"]
    _check_unsplit([(f"layer{jtu.keystr(leaf.path[2:])}", leaf) for leaf in of_layer], layer, visit.layer)
    new_xs, new_shared = types.layout.arrays(((layer, *args), kwargs))
    inputs = types.inputs(("args", "kwargs"))
    layers = zip(new_xs, types.slices(leaves), types.parts("split"), strict=True)
    new_state = eqx.filter(_filled(result.state, state, "state"), eqx.is_array_like)
    new_layer_state = _filled(result.layer_state, visit.layer_state, "layer_state")
    of_state = [(f"layer_state{jtu.keystr(leaf.path)}", leaf) for leaf in state_layout.leaves]
    _check_unsplit(of_state, new_layer_state, visit.layer_state)
    entries = (state_layout.arrays(tree)[0] for tree in (new_layer_state, visit.layer_state))
    return carry_ct, _Loop(
        [new if part == "layer" and new is not old else None for new, old, part in layers],
        eqx.filter(new_xs, [*inputs.xs]),
        eqx.filter(new_shared, [*inputs.shared[types.constants :]]),
        jax.tree.map(jnp.asarray, new_state),
        [None if new is old else new for new, old in zip(*entries, strict=True)],
    )


def _check_unsplit(leaves: list[tuple[str, Leaf]], new: Any, before: Any) -> None:
    """Refuse changes of what is not split over the layers.

    Raises:
        ValueError: names the leaf.
    """
    pairs = zip(
        *(map(raw_array, jtu.tree_leaves(tree, is_leaf=is_named)) for tree in (new, before)), strict=True
    )
    for (name, leaf), (changed, old) in zip(leaves, pairs, strict=True):
        both_static = not is_array(changed) and not is_array(old)
        if leaf.kind == "split" or changed is old or (both_static and changed == old):
            continue
        what = "is shared by all layers" if leaf.kind == "shared" else f"is {old!r}, the same for all layers"
        raise ValueError(
            f"The {name} {what}, so a visitor cannot replace it at one. Return it unchanged, or None for it "
            "(eqx.filter), and keep what is summed over the layers in the visitor's state."
        )


def _argument_cotangents(visit: LayerVisit, result: LayerResult) -> tuple[list[Any], dict[str, Any]]:
    """The cotangents of the further arguments that a visitor returned, as `checked_cotangent` gives them.

    Raises:
        TypeError: there are more or fewer than arguments.
    """
    args = [None] * len(visit.args) if result.args is None else result.args
    if not isinstance(args, tuple | list) or len(args) != len(visit.args):
        raise TypeError(
            f"args of a LayerResult is a tuple of {len(visit.args)} cotangents, one for each further "
            f"argument (None for one without); got {describe(args)}."
        )
    kwargs = {} if result.kwargs is None else result.kwargs
    if not isinstance(kwargs, dict) or not set(kwargs) <= set(visit.kwargs):
        raise TypeError(
            "kwargs of a LayerResult are cotangents of keyword arguments, in a dict with keys among "
            f"{sorted(visit.kwargs)}; got {kwargs!r}."
        )

    def checked(cotangent: Any, argument: Any, name: str) -> Any:
        return checked_cotangent(cotangent, eqx.filter(argument, is_array), name, "returned by the visitor")

    return (
        [checked(ct, arg, f"args[{i}]") for i, (ct, arg) in enumerate(zip(args, visit.args, strict=True))],
        {name: checked(kwargs.get(name), arg, f"kwargs[{name!r}]") for name, arg in visit.kwargs.items()},
    )


def _filled(new: Any, before: Any, what: str) -> Any:
    """What a visitor returned, with the old leaves where it is None.

    Raises:
        ValueError: it has another structure, axes, shape or dtype; names the path.
    """
    if new is None:
        return before
    try:
        filled = jax.tree.map(
            lambda new, old: old if new is None else new, new, before, is_leaf=lambda node: node is None
        )
    except ValueError:
        filled = new
    check_carry(before, filled, what)
    return filled
