"""`SweepBack`: a reverse sweep over layers, as a function of a cotangent and a visitor."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax

from .._messages import axes_text
from .._sweep import gradient
from .._sweep.api import backward_rule
from .._sweep.gradient import Inputs, LayerPullback, Perturbed, scatter_leaves
from .._sweep.slots import Arrays, Carry, Checkpoints
from .._sweep.spec import SweepSpec
from .._sweep.store import read, write, zeros_like
from .checks import check_carry, describe
from .eager import compiled_once
from .layer_axis import SplitTree, TreeLayout, split_tree
from .marks import Marked, is_named
from .visitor import LayerResult, LayerVisit, Part, SweepResult, Visitor


@dataclass(frozen=True, eq=False)
class SweepTypes:
    """Everything about a reverse sweep except its arrays.

    Attributes:
        constants: number of arrays that the layer closes over, which come first among the shared ones.
        carry_tree: structure of the arrays of a carry.
        carry_static: what else is in it.
        outputs: the types of what the forward sweep returned, for cotangents to be compared with.
        own: where fields are unsliced, the sweep of layers that are given slices, for a layer's own gradient.
    """

    spec: SweepSpec
    perturbed: Perturbed
    layout: TreeLayout
    constants: int
    carry_tree: Any
    carry_static: Any
    y_tree: Any
    outputs: Any
    has_output: bool
    own: SweepSpec | None = None

    def carry(self, leaves: Arrays) -> Any:
        return eqx.combine(jtu.tree_unflatten(self.carry_tree, leaves), self.carry_static)

    def carry_cotangent(self, part: Arrays) -> Any:
        return jtu.tree_unflatten(self.carry_tree, scatter_leaves(part, self.perturbed.carry))

    def layer_cotangent(self, carry: Arrays, y: Arrays) -> Any:
        of_carry = self.carry_cotangent(carry)
        if not self.has_output:
            return of_carry
        return of_carry, jtu.tree_unflatten(self.y_tree, scatter_leaves(y, self.perturbed.ys))

    def owners(self, kind: Literal["split", "shared"]) -> list[Part]:
        """Whose the split leaves are, or the shared ones."""
        groups = [path[0].idx for path in self.layout.paths(kind)]
        entries = [path[1] for path in self.layout.paths(kind)]
        return [
            "kwargs" if group else "args" if entry.idx else "layer"
            for group, entry in zip(groups, entries, strict=True)
        ]

    def inputs(self, wrt: tuple[str, ...]) -> Inputs:
        """The leaves that belong to these parts and have a cotangent."""
        masks = self.perturbed

        def owned(mask: tuple[bool, ...], owners: list[Any]) -> tuple[bool, ...]:
            return tuple(is_ and owner in wrt for is_, owner in zip(mask, owners, strict=True))

        shared = owned(masks.shared, [None] * self.constants + self.owners("shared"))
        carry = masks.carry if "carry" in wrt else (False,) * len(masks.carry)
        owners = [*self.owners("split"), None]  # the last one, if there is, is the index
        return Inputs(shared, carry, owned(masks.xs, owners[: len(masks.xs)]))

    def slices(self, leaves: gradient.LayerVisit) -> Arrays:
        """A layer's own part of the split leaves."""
        whole = self.layout.unsliced
        return [
            read(part, leaves.layer_index) if is_ else part
            for part, is_ in zip(leaves.x[: len(whole)], whole, strict=True)
        ]

    def visit(self, leaves: gradient.LayerVisit, own_shared: Arrays | None, layer_state: Any) -> LayerVisit:
        """A visit in trees."""
        slices, shared = self.slices(leaves), leaves.shared[self.constants :]
        (layer, *args), kwargs = self.layout.layer(slices, shared)

        def cotangents(inputs: Inputs, wrt: tuple[str, ...]) -> tuple[Arrays, Carry, Arrays]:
            if self.own is None or own_shared is None or "layer" not in wrt:
                return leaves.vjp(inputs)
            constants = len(own_shared) - len(shared)
            mask = (False,) * constants + inputs.shared[self.constants :]
            pullback = LayerPullback(self.own.layer, self.perturbed, jax.checkpoint)
            own_inputs = Inputs(mask, inputs.carry, inputs.xs[: len(slices)])
            return pullback(own_shared, leaves.carry, slices, None, leaves.cotangents, own_inputs)

        def vjp(wrt: tuple[str, ...]) -> tuple[Any, ...]:
            inputs = self.inputs(wrt)
            of_shared, of_carry, of_x = cotangents(inputs, wrt)
            (layer, *args), kwargs = self.layout.layer(
                scatter_leaves(of_x, inputs.xs[: len(slices)]),
                scatter_leaves(of_shared, inputs.shared[self.constants :]),
                cotangents=True,
            )
            found = {"layer": layer, "args": tuple(args), "kwargs": kwargs}
            if "carry" in wrt:
                found["carry"] = self.carry_cotangent(of_carry)
            return tuple(found[part] for part in wrt)

        return LayerVisit(
            leaves.layer_index,
            layer,
            self.carry(leaves.carry),
            tuple(args),
            kwargs,
            self.layer_cotangent(*leaves.cotangents),
            layer_state,
            vjp,
        )

    def argument_cotangents(
        self, slices: Arrays, shared: Arrays, args: Any, kwargs: Any
    ) -> tuple[list[Any], list[Any]]:
        """The cotangents of arguments that a visitor returned: of split leaves, and of shared ones.

        Raises:
            ValueError: they do not fit the arguments; names the path.
        """
        types = slices, shared
        masks = self.perturbed.xs[: len(slices)], self.perturbed.shared[self.constants :]
        nothing = self.layout.layer(*([None] * len(part) for part in types), cotangents=True)
        (layer, *no_args), no_kwargs = nothing
        given = no_args if args is None else args
        if not isinstance(given, tuple | list) or len(given) != len(no_args):
            raise TypeError(
                f"args of a LayerResult is a tuple of {len(no_args)} cotangents, one for each further "
                f"argument (None for one without); got {describe(args)}."
            )
        if not isinstance(kwargs, dict | None) or not set(kwargs or {}) <= set(no_kwargs):
            raise TypeError(
                "kwargs of a LayerResult are cotangents of keyword arguments, in a dict with keys among "
                f"{sorted(no_kwargs)}; got {kwargs!r}."
            )
        given_args = [no if ct is None else ct for ct, no in zip(given, no_args, strict=True)]
        given_kwargs = {**no_kwargs, **{name: ct for name, ct in (kwargs or {}).items() if ct is not None}}
        try:
            found = self.layout.arrays(((layer, *given_args), given_kwargs))
        except ValueError as error:
            raise ValueError(f"The cotangents of the arguments have another structure: {error}") from None
        for kind, cts, of in zip(("split", "shared"), found, types, strict=True):
            for path, ct, leaf in zip(self.layout.paths(kind), cts, of, strict=True):
                if ct is not None and (jnp.shape(ct), jnp.result_type(ct)) != (leaf.shape, leaf.dtype):
                    raise ValueError(
                        f"The cotangent of the argument at {jtu.keystr(path)} is {describe(ct)}, and the "
                        f"argument {describe(leaf)}. Give it the same shape and dtype."
                    )
        of_slices, of_shared = (
            [ct if is_ else None for ct, is_ in zip(part, mask, strict=True)]
            for part, mask in zip(found, masks, strict=True)
        )
        return of_slices, of_shared


class SweepBack(eqx.Module):
    """The reverse sweep over layers whose forward sweep has been done; a PyTree, which may leave a `jit`.

    It holds the layers, the arguments and what the policy keeps.
    """

    _checkpoints: Checkpoints
    _xs: Arrays
    _shared: Arrays
    _own_shared: Arrays | None
    _info: SweepTypes = eqx.field(static=True)
    _wrap: Callable[[Any], Any] = eqx.field(static=True, default=lambda layers: layers)

    def __call__(
        self, cotangent: Any, visitor: Visitor | None = None, state: Any = None, layer_state: Any = None
    ) -> SweepResult:
        """Visit every layer once, from the one that ran last to the one that ran first.

        Args:
            cotangent: of what the forward sweep returned, in the same structure, shapes and dtypes.
            visitor: `(visit, state) -> LayerResult`, traced once for each loop. Without one the result has
                the gradients of the layers, the initial carry and the arguments, as `jax.vjp` of the fold.
            state: the visitor's, any tree of arrays whose shapes and dtypes stay as they are.
            layer_state: what each layer has of its own, a tree of arrays stacked over the layers' axis as the
                layers are: the visitor sees a slice of it, and what it returns is written in its place.

        Returns:
            A `SweepResult`. Layers, arguments and states that the visitor returned are updated in place where
            the arguments of the surrounding `jit` are donated.

        Raises:
            ValueError: what is given or returned does not fit; names the path.
            TypeError: the visitor returns something else than a `LayerResult`.

        Cost: what the policy says of the backward pass, and the visitor's own work for each layer.
        """

        def run(cotangent: Any, rest: tuple[SweepBack, Any, Any]) -> SweepResult:
            sweep, state, layer_state = rest
            carry_ct, ys_ct = _cotangents(sweep._info, cotangent)
            if visitor is None:
                return _gradients(sweep, carry_ct, ys_ct)
            return _visited(sweep, carry_ct, ys_ct, visitor, state, layer_state)

        if visitor is not None and not callable(visitor):
            raise TypeError(
                "A visitor is a function (visit, state) -> LayerResult; got "
                f"{describe(visitor)}. Write sweep_back(cotangent, visitor, state)."
            )
        if visitor is None and not (state is None and layer_state is None):
            raise ValueError("state and layer_state are for a visitor, and sweep_back was given none.")
        result = compiled_once(run, cotangent, (self, state, layer_state))
        return result._replace(layers=self._wrap(result.layers))

    def wrapping(self, wrap: Callable[[Any], Any]) -> "SweepBack":
        """This, with `wrap` around the layers of its results."""
        return dataclasses.replace(self, _wrap=wrap)


def _cotangents(info: SweepTypes, cotangent: Any) -> tuple[Arrays, Arrays]:
    """The cotangents of the leaves of carry and outputs that have one, zeros for those that are None."""
    given = cotangent if info.has_output else (cotangent, None)
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise ValueError(
            "sweep_back of scan_vjp takes a pair of cotangents, of the carry and of the outputs; got "
            f"{describe(cotangent)}."
        )
    masks = (info.perturbed.carry, info.perturbed.ys)
    names = ("carry", "outputs")
    parts = [
        _cotangent_leaves(part, like, mask, name)
        for part, like, mask, name in zip(given, info.outputs, masks, names, strict=True)
    ]
    return parts[0], parts[1]


def _cotangent_leaves(tree: Any, like: Any, mask: tuple[bool, ...], name: str) -> Arrays:
    for path, leaf in jtu.tree_leaves_with_path(tree):
        if not eqx.is_array_like(leaf):
            raise TypeError(
                f"The cotangent of the {name}{jtu.keystr(path)} is {leaf!r}. Give an array, or None for "
                "zeros."
            )
    arrays = eqx.filter(tree, lambda leaf: getattr(leaf, "dtype", None) != jax.dtypes.float0)
    paths_and_types, treedef = jtu.tree_flatten_with_path(like)
    for part, of in zip(*(jax.tree.leaves(side, is_leaf=is_named) for side in (arrays, like)), strict=False):
        if is_named(part) and is_named(of) and part.axes != of.axes:
            raise ValueError(
                f"The cotangent of the {name} has axes {axes_text(part.axes)}, and the {name} "
                f"{axes_text(of.axes)}. Give it the same axes in the same order."
            )
    try:
        leaves = [None] * len(mask) if tree is None else treedef.flatten_up_to(arrays)
    except ValueError as error:
        raise ValueError(
            f"The cotangent of the {name} has another structure than the {name}: {error}"
        ) from None
    found: Arrays = []
    for leaf, (path, of), is_perturbed in zip(leaves, paths_and_types, mask, strict=True):
        if not is_perturbed:
            continue
        leaf = jnp.zeros(of.shape, of.dtype) if leaf is None else jnp.asarray(leaf)
        if (leaf.shape, leaf.dtype) != (of.shape, of.dtype):
            raise ValueError(
                f"The cotangent of the {name}{jtu.keystr(path)} is {describe(leaf)}, and the {name} "
                f"{describe(of)}. Give it the same shape and dtype."
            )
        found.append(leaf)
    return found


def _gradients(sweep: "SweepBack", carry_ct: Arrays, ys_ct: Arrays) -> SweepResult:
    info = sweep._info
    masks = info.perturbed
    init_ct, xs_ct, shared_ct = backward_rule(info.spec, masks)(
        sweep._checkpoints, sweep._xs, sweep._shared, carry_ct, ys_ct
    )
    of_shared = scatter_leaves(shared_ct, masks.shared)[info.constants :]
    (layers, *args), kwargs = info.layout.stacked(
        scatter_leaves(xs_ct, masks.xs)[: len(info.layout.unsliced)], of_shared, cotangents=True
    )
    carry = jtu.tree_unflatten(info.carry_tree, scatter_leaves(init_ct, masks.init))
    return SweepResult(carry, layers, tuple(args), kwargs)


class _Loop(NamedTuple):
    """What a sweep with a visitor carries from layer to layer, or one layer's part of it.

    `None` in a list stands for what the visitor leaves as it is.

    Attributes:
        xs: one for each split leaf: the stack of a leaf of the layers, or of an argument's cotangents.
        shared: one for each shared leaf: the sum of its cotangents.
        state: the arrays of the visitor's state.
        layer_state: one for each leaf.
    """

    xs: list[Any]
    shared: list[Any]
    state: Any
    layer_state: list[Any]


def _visited(
    sweep: SweepBack, carry_ct: Arrays, ys_ct: Arrays, visitor: Visitor, state: Any, layer_state: Any
) -> SweepResult:
    info = sweep._info
    own = split_tree(
        Marked(layer_state, "per_layer"),
        info.layout.axis,
        name_of=lambda path: f"layer_state{jtu.keystr(path)}",
        what="sweep_back",
    )
    arrays, static = eqx.partition(state, eqx.is_array_like)
    is_layer = [owner == "layer" for owner in info.owners("split")]
    count = len(is_layer)

    def xs_in(loop: _Loop) -> Arrays:
        layers = [
            new if new is not None and is_ else old
            for new, is_, old in zip(loop.xs, is_layer, sweep._xs[:count], strict=True)
        ]
        return [*layers, *sweep._xs[count:]]

    def visit(leaves: gradient.LayerVisit, loop: _Loop) -> tuple[Arrays, _Loop]:
        part = own.rebuild(read(_first_given(loop.layer_state, own.arrays), leaves.layer_index))
        return _call(visitor, sweep, own, leaves, eqx.combine(loop.state, static), part)

    def visit_and_write(leaves: gradient.LayerVisit, loop: _Loop) -> tuple[Arrays, _Loop]:
        carry_ct, new = visit(leaves, loop)
        # Without the barrier XLA holds a layer's internals until all is written.
        new = lax.optimization_barrier(new)
        return carry_ct, _Loop(
            [_written(*pair, leaves.layer_index) for pair in zip(loop.xs, new.xs, strict=True)],
            [None if ct is None else total + ct for total, ct in zip(loop.shared, new.shared, strict=True)],
            new.state,
            [
                _written(*pair, leaves.layer_index)
                for pair in zip(loop.layer_state, new.layer_state, strict=True)
            ],
        )

    loop = _Loop(
        [None] * count,
        [None] * (len(sweep._shared) - info.constants),
        jax.tree.map(jnp.asarray, arrays),
        [None] * len(own.arrays),
    )
    if info.spec.length:
        _, new = jax.eval_shape(lambda: visit(_example(sweep, carry_ct, ys_ct), loop))
        loop = _first_loop(sweep, own, is_layer, loop, new)
        carry_ct, loop = info.spec.sweep_back(
            info.perturbed,
            sweep._checkpoints,
            sweep._shared,
            carry_ct,
            ys_ct,
            visit_and_write,
            loop,
            xs_in=xs_in,
        )
    return _result(sweep, own, carry_ct, loop, xs_in(loop), is_layer, static)


def _example(sweep: SweepBack, carry_ct: Arrays, ys_ct: Arrays) -> gradient.LayerVisit:
    """A visit of the first layer, for its types."""
    spec, shared = sweep._info.spec, sweep._shared
    return gradient.LayerVisit(
        jnp.int32(0),
        shared,
        sweep._checkpoints.first(),
        spec.own(sweep._xs, 0),
        spec.unsliced,
        (carry_ct, read(ys_ct, 0)),
        None,
        LayerPullback(spec.layer, sweep._info.perturbed, jax.checkpoint),
    )


def _first_loop(sweep: SweepBack, own: SplitTree, is_layer: list[bool], loop: _Loop, new: _Loop) -> _Loop:
    """The loop's first carry: what the visitor writes to, as `new` tells."""
    stacks = [
        stack if is_ else zeros_like(stack)
        for stack, is_ in zip(sweep._xs[: len(is_layer)], is_layer, strict=True)
    ]
    shared = [jnp.zeros_like(leaf) for leaf in sweep._shared[sweep._info.constants :]]
    return _Loop(
        _where_given(new.xs, stacks),
        _where_given(new.shared, shared),
        loop.state,
        _where_given(new.layer_state, [jnp.asarray(leaf) for leaf in own.arrays]),
    )


def _call(
    visitor: Visitor,
    sweep: SweepBack,
    own: SplitTree,
    leaves: gradient.LayerVisit,
    state: Any,
    layer_state: Any,
) -> tuple[Arrays, _Loop]:
    """Let the visitor see a layer; returns the cotangent of its input, and what is to be written."""
    info = sweep._info
    slices, shared = info.slices(leaves), leaves.shared[info.constants :]
    visit = info.visit(leaves, sweep._own_shared, layer_state)
    result = visitor(visit, state)
    if not isinstance(result, LayerResult):
        raise TypeError(
            f"A visitor returns a LayerResult; got {describe(result)}. Its first field is the cotangent of "
            'the layer\'s input: (carry_ct,) = visit.vjp("carry"); return LayerResult(carry_ct).'
        )
    carry_ct = _cotangent_leaves(result.carry, info.outputs[0], info.perturbed.carry, "carry")
    layer = _or_before(result.layer, visit.layer, "layer")
    new, new_shared = info.layout.arrays(((layer, *visit.args), visit.kwargs))
    cts, shared_cts = info.argument_cotangents(slices, shared, result.args, result.kwargs)
    xs = [
        ct if owner != "layer" else None if array is old else array
        for owner, array, old, ct in zip(info.owners("split"), new, slices, cts, strict=True)
    ]
    for path, array, old in zip(info.layout.paths("shared"), new_shared, shared, strict=True):
        if array is not old:
            raise ValueError(
                f"The layer{jtu.keystr(path[2:])} is shared by all layers, so a visitor cannot replace it at "
                "one. Leave it as it is, and sum what belongs to it in the visitor's state."
            )
    new_state = eqx.filter(_or_before(result.state, state, "state"), eqx.is_array_like)
    new_layer_state = _or_before(result.layer_state, layer_state, "layer_state")
    entries, before = (own.layout.arrays(tree)[0] for tree in (new_layer_state, layer_state))
    written = [None if entry is old else entry for entry, old in zip(entries, before, strict=True)]
    return carry_ct, _Loop(xs, shared_cts, jax.tree.map(jnp.asarray, new_state), written)


def _or_before(new: Any, before: Any, what: str) -> Any:
    """What a visitor returned, with what was before in the place of None.

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


def _written(stack: Any, entry: Any, layer_index: Any) -> Any:
    return None if entry is None else write(stack, layer_index, entry)


def _first_given(new: list[Any], otherwise: list[Any]) -> list[Any]:
    return [old if leaf is None else leaf for leaf, old in zip(new, otherwise, strict=True)]


def _where_given(new: list[Any], stacks: list[Any]) -> list[Any]:
    return [None if leaf is None else stack for leaf, stack in zip(new, stacks, strict=True)]


def _result(
    sweep: SweepBack,
    own: SplitTree,
    carry_ct: Arrays,
    loop: _Loop,
    xs: Arrays,
    is_layer: list[bool],
    static: Any,
) -> SweepResult:
    info = sweep._info
    (layers, *_), _ = info.layout.stacked(xs[: len(is_layer)], sweep._shared[info.constants :])
    of_args = [None if is_ else leaf for leaf, is_ in zip(loop.xs, is_layer, strict=True)]
    (_, *args), kwargs = info.layout.stacked(of_args, loop.shared, cotangents=True)
    return SweepResult(
        info.carry_cotangent(carry_ct),
        layers,
        tuple(args),
        kwargs,
        eqx.combine(loop.state, static),
        own.layout.stacked(_first_given(loop.layer_state, own.arrays), own.shared),
    )
