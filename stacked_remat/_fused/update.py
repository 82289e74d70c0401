"""`fused_update`: an optimizer that is applied to each layer within the backward pass.

One step (`_step`):

1. `_followed_loss` traces the loss with a stand-in for each trained stack, and gives
   the fold of each a reverse sweep of ours (`folds.py`).
2. `jax.value_and_grad` differentiates the result. When its backward pass reaches a
   fold, `_StackUpdate` sweeps back over the layers with a visitor, its `_visit`. For
   each layer, last to first, that computes the layer's gradient, applies the optimizer
   to the layer and its slice of the state, and returns both; the sweep writes them over
   the old ones. So at most one layer's gradient exists at a time.
3. What is trained outside of stacks has ordinary gradients, and is updated at the end.

Clipping by the global norm needs the norm before the first update, and the norm needs
all gradients. As no gradient is kept, the sweep runs twice with `max_grad_norm`: in the
backward pass it only adds up squares, and after it, with the norm known, it computes
each layer's gradient again and updates the layer. Without `max_grad_norm` the squares
are added up in the one sweep, since the step returns the norm.

The updated layers leave the backward pass by a `FoldPass`, since a rule for derivatives
can return cotangents only. Everything happens in one trace, that of the step, and a
`FoldPass` lives as long as the call of `_step`.

Two other designs were built and measured:

- A rule that returns new weights and states as the cotangents of these. A stack that
  the value does not depend on would get zeros, JAX's cotangent of what is not used, and
  nothing tells these from new weights. With `max_grad_norm`, a pullback that is called
  twice transposes twice what comes after the folds: 4% more FLOPs, and 3% more memory,
  of a model with two stacks and a head.
- The loss cut at its folds, with a `jax.vjp` for each piece: no rules, and the same
  memory to the byte. But which variables have cotangents, and their sums, which JAX
  knows here, take a fifth more program.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, DTypeLike, Float

from .. import _xla_hints as xla_hints
from .._memory_spaces import has_host_arrays, moves_to_host, to_host
from .._messages import check_loss_and_optimizer
from .._scan.api import scan
from .._scan.checks import describe
from .._scan.marks import PerKind
from .._scan.visitor import LayerResult, LayerVisit, SweepResult
from .._stacked import StackedKinds, layer_types
from .._static import PyTree, with_leaves
from .._sweep.store import axes_beyond
from .folds import FoldPass, FollowedStack, followed, leaves_or_none
from .trained import Trained, TrainedLayers, masked, state_of_layers


class FusedState(NamedTuple):
    """The optimizer's state.

    Attributes:
        stacks: for each stack that is trained, those of a `StackedPattern` among them,
            the state of each of its layers, with the layers in front.
        rest: of everything else that is trained.
    """

    stacks: tuple[PyTree, ...]
    rest: PyTree


class FusedResult(NamedTuple):
    """What a step returns.

    Attributes:
        model: the updated model.
        state: the optimizer's next state.
        value: what the loss function returned for the model before the step.
        grad_norm: the global norm of the gradient, before clipping; within
            `jax.shard_map` of what a device has of it.
    """

    model: PyTree
    state: FusedState
    value: PyTree
    grad_norm: Float[Array, ""]


def fused_update(
    loss: Callable[..., Any],
    optimizer: Any,
    *,
    trainable: Any = eqx.is_inexact_array,
    has_aux: bool = False,
    max_grad_norm: float | None = None,
    gradient_dtype: DTypeLike | None = None,
) -> "FusedUpdate":
    """A training step that updates each layer of a stack within the backward pass.

    ```python
    # loss(model, *args) calls model.blocks.fold(x).
    step = fused_update(loss, optax.adamw(1e-3))
    state = step.init(model)
    run = jax.jit(step, donate_argnums=(0, 1))
    model, state, value, grad_norm = run(model, state, batch)
    ```

    It is the step of `jax.value_and_grad(loss)` and `optimizer.update`, without the
    gradient of a stack: as soon as the gradient of a layer exists, the optimizer is
    applied to that layer, in place where model and state are donated. What is not in a
    stack is updated at the end of the same step.

    The optimizer sees one layer at a time, in a tree like the model in which all else
    is None, so that masks and labels by path work. What a transformation computes of a
    whole array it computes of a layer's array, such as Adafactor's root mean squares.
    Its counts and random numbers exist once for each layer.

    Args:
        loss: returns a scalar. It may call `fold` or `scan` of each stack (a `Stacked`
            or a `StackedPattern`) once, directly or inside of `jax.jit`, and cannot use
            its weights otherwise.
        optimizer: an `optax.GradientTransformation` that updates every layer by its own
            gradient.
        trainable: which arrays are trained: a filter spec, as in `eqx.filter`. A stack
            without trained arrays is folded as it is.
        has_aux: whether `loss` returns a pair, of the scalar and anything else.
        max_grad_norm: gradients with a larger global norm are scaled down to it. Within
            `jax.shard_map` that is, as `optax.tree.norm` there, the norm of what a
            device has. For the norm of all, run the step without `shard_map`, on a mesh
            of Auto or Explicit axes.
        gradient_dtype: what gradients are cast to before they are clipped and given to
            the optimizer.

    Returns:
        A function of the model, the optimizer's state, and the other arguments of
        `loss`, which returns a `FusedResult`. Its `init(model)` makes the state.

    Raises:
        ValueError, TypeError: for options that contradict each other. The step and its
            `init` refuse what they cannot follow, and name it: a loss that does not
            fold a stack exactly once, an optimizer that needs the gradients of several
            layers at once, and policies that `Stacked.fold_vjp` refuses.

    Memory: the policy's, one layer's gradient, and no copy of weights and state where
    these are donated. Compute: that of the two steps; with `max_grad_norm` one more
    backward pass over the stacks.
    """
    return FusedUpdate(
        loss, optimizer, trainable, has_aux, max_grad_norm, gradient_dtype
    )


@dataclasses.dataclass(frozen=True, eq=False)
class FusedUpdate:
    """The step of `fused_update`; the fields are its arguments."""

    loss: Callable[..., Any]
    optimizer: Any
    trainable: Any
    has_aux: bool
    max_grad_norm: float | None
    gradient_dtype: DTypeLike | None

    def __post_init__(self) -> None:
        check_loss_and_optimizer("fused_update", self.loss, self.optimizer)
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ValueError(
                f"max_grad_norm must be positive; got {self.max_grad_norm}. For no"
                " clipping leave it out."
            )

    def init(self, model: PyTree) -> FusedState:
        """The optimizer's state for a model.

        For a stack with a trained array on the host, the matrices in its state are on
        the host too.

        Raises:
            ValueError: nothing is trained, layers share a trained array, or the
                optimizer needs the gradients of several layers at once.
        """
        trained = Trained.of(model, self.trainable)
        trained.check_optimizer(self.optimizer, self.gradient_dtype)
        return self._first_state(trained)

    def _first_state(self, trained: Trained) -> FusedState:
        stacks = [self._state_of(trained, layers) for layers in trained.layers]
        return FusedState(tuple(stacks), self.optimizer.init(trained.rest))

    def _state_of(self, trained: Trained, layers: TrainedLayers) -> PyTree:
        """The states of all layers of a kind: a scan of the optimizer's `init`."""
        stack = layers.stack
        on_host = has_host_arrays(masked(stack.stacked, layers.mask))

        # As `streaming` places weights: matrices on the host, vectors on the device.
        def placed(leaf: Any) -> Any:
            moves = on_host and moves_to_host(leaf.shape, leaf.dtype)
            return to_host(leaf) if moves else leaf

        def init(_: None, layer: PyTree) -> tuple[None, list[PyTree]]:
            state = self.optimizer.init(trained.only_layer(layers, layer))
            leaves = jax.tree.leaves(state)
            return None, [*map(placed, leaves)]

        init_all = scan(init, stack.Layers)
        _, leaves = init_all(None, stack.stacked)
        of_one = self._layer_state(trained, layers)
        return state_of_layers(leaves, of_one, stack.Layers)

    def _layer_state(self, trained: Trained, layers: TrainedLayers) -> PyTree:
        """The types of one layer's state."""
        layer = trained.only_layer(layers, layer_types(layers.stack))
        return jax.eval_shape(self.optimizer.init, layer)

    def __call__(
        self, model: PyTree, state: FusedState, /, *args: PyTree, **kwargs: PyTree
    ) -> FusedResult:
        """One step: `(model, state, *args, **kwargs)` to a `FusedResult`."""
        trained = Trained.of(model, self.trainable)
        # A state of another model would fail late, within a loop over layers.
        like = jax.eval_shape(lambda: self._first_state(trained))
        is_state = isinstance(state, FusedState)
        has_stacks = is_state and len(state.stacks) == len(like.stacks)
        leaves, structure = jax.tree.flatten(state)
        shapes = [*map(jnp.shape, leaves)]
        expected = [leaf.shape for leaf in jax.tree.leaves(like)]
        if not has_stacks or shapes != expected:
            raise ValueError(
                "The step takes the model and then the state that its init makes for"
                f" this model; got {describe(state)}. Write state = update.init(model),"
                " and update(model, state, ...)."
            )
        # States contain trees like the model, so their structure contains each stack's
        # policy, which may have changed since the state was made. The step runs with
        # today's structure, and returns the state in the one that it was given, as a
        # loop over steps needs.
        state = with_leaves(like, leaves)

        def loss(model: PyTree) -> PyTree:
            return self.loss(model, *args, **kwargs)

        result = _step(self, trained, state, loss)
        new_leaves = jax.tree.leaves(result.state)
        return result._replace(state=jax.tree.unflatten(structure, new_leaves))

    def _scaled(self, gradients: list[PyTree], norm: Any) -> list[PyTree]:
        """The gradients, scaled down where the global `norm` is above the limit."""
        limit = self.max_grad_norm
        if limit is None:
            return gradients
        # The expression of optax.clip_by_global_norm, for the same rounding.
        scaled = []
        for leaf in gradients:
            clipped = leaf / norm.astype(leaf.dtype) * limit
            scaled.append(jnp.where(norm < limit, leaf, clipped))
        return scaled

    def _cast(self, gradients: list[PyTree]) -> list[PyTree]:
        dtype = self.gradient_dtype
        if dtype is None:
            return gradients
        return [leaf.astype(dtype) for leaf in gradients]

    def _updated(
        self, gradients: list[PyTree], state: PyTree, params: PyTree
    ) -> tuple[PyTree, Any]:
        """`params` after an update by the leaves of their gradients, and the next
        state.
        """
        updates, state = self.optimizer.update(
            with_leaves(params, gradients), state, params
        )

        def added(leaf: Any, update: Any) -> Any:
            return (leaf + update).astype(leaf.dtype)

        return jax.tree.map(added, params, updates), state


def _sum_of_squares(leaves: list[Array]) -> Array:
    """In float32 at least, whatever the dtype of the gradients."""
    total = jnp.zeros(())
    for leaf in leaves:
        size = jnp.abs(leaf)  # of complex numbers too
        size = size.astype(np.promote_types(size.dtype, np.float32))
        total = total + jnp.sum(jnp.square(size))
    return total


@dataclasses.dataclass(frozen=True, eq=False)
class _StackUpdate:
    """The update of one stack in one step."""

    fused: FusedUpdate
    trained: Trained
    stack: StackedKinds
    # The trained kinds of its layers, by name ("" in a `Stacked`).
    layers: dict[str, TrainedLayers]
    # The optimizer's state for each of these, with the layers in front.
    states: dict[str, PyTree]

    def first_sweep(self, fold: FoldPass) -> SweepResult:
        """Sweep back over the layers, and update them, unless the step clips.

        The state of the result is the sum of the squares of the gradients.
        """
        updates = self.fused.max_grad_norm is None
        return self._sweep(fold, fold.wanted, None, updates)

    def second_sweep(self, fold: FoldPass, norm: Any) -> SweepResult:
        """Sweep back once more, with the global norm known, and update the layers."""
        # The cotangents of the fold's arguments are known, and left out.
        nothing = jax.tree.map(lambda _: False, fold.wanted)
        return self._sweep(fold, nothing, norm, True)

    def _sweep(
        self, fold: FoldPass, wanted: PyTree, norm: Any, updates: bool
    ) -> SweepResult:
        states = self.states if updates else {}

        def state_leaves(kind: str, _: Any) -> list[PyTree]:
            return jax.tree.leaves(states.get(kind))

        before = self.stack._per_kind(state_leaves)
        visitor = functools.partial(self._visit, wanted, norm, updates)
        squares = jnp.zeros(())
        return fold.sweep_back(fold.cotangent, visitor, squares, before)

    def next_states(self, swept: SweepResult) -> list[PyTree]:
        """The optimizer's states after a sweep that updates."""
        states = []
        for kind, state in self.states.items():
            leaves = _of_kind(swept.layer_state, kind)
            states.append(with_leaves(state, leaves))
        return states

    def _visit(
        self, wanted: PyTree, norm: Any, updates: bool, visit: LayerVisit, squares: Any
    ) -> LayerResult:
        """The visitor of one layer; its state is the sum of squares so far.

        `wanted` says which leaves of the arguments `(args, kwargs)` have cotangents.
        """
        fused = self.fused
        trained = self.trained
        kind = visit.kind or ""
        cotangents = visit.vjp()
        args_mask, kwargs_mask = map(leaves_or_none, _of_kind(wanted, kind))
        result = LayerResult(
            cotangents.carry,
            args=masked(cotangents.args, args_mask),
            kwargs=masked(cotangents.kwargs, kwargs_mask),
        )
        # No layer of this kind is trained; the cotangents go on to earlier layers.
        if kind not in self.layers:
            return result
        layers = self.layers[kind]
        gradients = jax.tree.leaves(masked(cotangents.layer, layers.mask))
        gradients = fused._cast(xla_hints.gradients_before_update(gradients))
        result = result._replace(state=squares + _sum_of_squares(gradients))
        if not updates:
            return result
        # The sweep slices the leaves of all layers' states; their structure is that of
        # one layer's state.
        one_state = fused._layer_state(trained, layers)
        state = with_leaves(one_state, visit.layer_state)
        params = trained.only_layer(layers, visit.layer)
        gradients = fused._scaled(gradients, norm)
        params, state = fused._updated(gradients, state, params)
        stacks = trained.nodes(params)[layers.node]
        layer = stacks._stacks[kind].stacked
        return result._replace(layer=layer, layer_state=jax.tree.leaves(state))


def _of_kind(tree: PyTree, kind: str) -> PyTree:
    """A tree with one kind's value in place of each `per_kind`."""
    # Layers of one kind have no name, and nothing for each kind.
    if not kind:
        return tree

    def is_per_kind(node: PyTree) -> bool:
        return isinstance(node, PerKind)

    def of_kind(node: PyTree) -> PyTree:
        return node.values[kind] if is_per_kind(node) else node

    return jax.tree.map(of_kind, tree, is_leaf=is_per_kind)


def _check_scalar(returned: PyTree, has_aux: bool) -> None:
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    if has_aux and not is_pair:
        raise TypeError(
            "With has_aux the loss returns a pair (value, aux); got"
            f" {describe(returned)}. Return both in a tuple, or leave has_aux out."
        )
    value: Any = returned[0] if has_aux else returned
    is_real = False
    if eqx.is_array_like(value):
        is_real = jnp.issubdtype(jnp.result_type(value), jnp.floating)
    if not is_real or jnp.shape(value):
        raise TypeError(
            f"The loss returns a scalar of floating point; got {describe(value)}. Take"
            " its mean, or give has_aux=True where it returns a pair."
        )


def _step(
    fused: FusedUpdate, trained: Trained, state: FusedState, loss_of_model: Callable
) -> FusedResult:
    updates = _stack_updates(fused, trained, state)
    folds = {}
    for name, update in updates.items():
        folds[name] = FoldPass(update.first_sweep)
    evaluate = _followed_loss(fused, trained, loss_of_model, folds)
    # A fold is differentiated only if something of it is, so the weights are among the
    # arguments. Their own gradients are zeros, which XLA removes as unused.
    differentiate = jax.value_and_grad(evaluate, (0, 1), has_aux=True)
    returned, (rest_gradients, _) = differentiate(*_inputs(trained))
    gradients = fused._cast(jax.tree.leaves(rest_gradients))
    # The norm is that of the gradients as the optimizer gets them: after the cast.
    squares = _sum_of_squares(gradients)
    for fold in folds.values():
        if fold.result is None:
            # The gradient is zero, and the optimizer may still change the weights.
            fold.result = fold.sweep(fold)
        squares = squares + fold.result.state
    norm = jnp.sqrt(squares)
    if fused.max_grad_norm is not None:
        _check_norm(trained, norm)
        for name, fold in folds.items():
            fold.result = updates[name].second_sweep(fold, norm)
    gradients = fused._scaled(gradients, norm)
    rest, rest_state = fused._updated(gradients, state.rest, trained.rest)
    stacks = {}
    states = []
    for i, name in trained.names.items():
        result = folds[name].result
        stacks[i] = result.layers
        states += updates[name].next_states(result)
    model = eqx.combine(rest, trained.model)
    return FusedResult(
        model=trained.with_nodes(model, stacks),
        state=FusedState(tuple(states), rest_state),
        value=returned if fused.has_aux else returned[0],
        grad_norm=norm,
    )


def _check_norm(trained: Trained, norm: Array) -> None:
    """Refuse to scale gradients that are the same on all devices of a `jax.shard_map`
    by a norm that is not.
    """
    for path, leaf in jtu.tree_leaves_with_path(trained.trained):
        axes = axes_beyond(norm, jax.typeof(leaf))
        if axes:
            raise ValueError(
                "max_grad_norm within jax.shard_map limits the norm of what each device"
                f" has, which differs over {sorted(axes)}, and model{jtu.keystr(path)}"
                " is the same there. To clip by the norm of all, run the step without"
                " shard_map, on a mesh of Auto or Explicit axes."
            )


def _inputs(trained: Trained) -> tuple[PyTree, list[PyTree]]:
    """What is differentiated: all outside of stacks, and the weights of each stack."""
    nodes = trained.nodes(trained.trained)
    return trained.rest, [nodes[i] for i in trained.names]


def _stack_updates(
    fused: FusedUpdate, trained: Trained, state: FusedState
) -> dict[str, _StackUpdate]:
    """The updates, by the name of their stack, in the order of `state.stacks`, as
    `trained.layers` is.
    """
    stacks = trained.nodes(trained.model)
    updates = {}
    for i, name in trained.names.items():
        updates[name] = _StackUpdate(fused, trained, stacks[i], layers={}, states={})
    for layers, layers_state in zip(trained.layers, state.stacks, strict=True):
        update = updates[trained.names[layers.node]]
        update.layers[layers.kind] = layers
        update.states[layers.kind] = layers_state
    return updates


def _followed_loss(
    fused: FusedUpdate,
    trained: Trained,
    loss_of_model: Callable,
    folds: dict[str, FoldPass],
) -> Callable[..., tuple[PyTree, PyTree]]:
    """The loss with followed folds, a function of `_inputs`: `(value, aux)`."""
    inputs = _inputs(trained)
    stacks = trained.nodes(trained.model)

    def loss(rest: PyTree, weights: Sequence[PyTree]) -> PyTree:
        nodes = {}
        pairs = zip(trained.names.items(), weights, strict=True)
        for (i, name), stack_weights in pairs:
            stack = eqx.combine(stack_weights, stacks[i])
            nodes[i] = FollowedStack(stack, name)
        model = eqx.combine(rest, trained.model)
        return loss_of_model(trained.with_nodes(model, nodes))

    trace = eqx.filter_make_jaxpr(loss)
    closed, output_types, output_static = trace(*inputs)
    # A loss that lacks its `return` has no fold in its program either.
    if not closed.jaxpr.outvars:
        _check_scalar(output_static, fused.has_aux)
    # Which variables of the jaxpr are a stack's weights.
    input_structure = jax.tree.structure(inputs)
    _, variables = jax.tree.unflatten(input_structure, closed.jaxpr.invars)
    weights = map(jax.tree.leaves, variables)
    stacks_to_follow = zip(folds, weights, folds.values(), strict=True)
    run = followed(closed, stacks_to_follow)

    def evaluate(*inputs: PyTree) -> tuple[PyTree, PyTree]:
        outputs = run(*jax.tree.leaves(inputs))
        returned = eqx.combine(with_leaves(output_types, outputs), output_static)
        _check_scalar(returned, fused.has_aux)
        return returned if fused.has_aux else (returned, None)

    return evaluate
