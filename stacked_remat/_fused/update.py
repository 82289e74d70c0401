"""`fused_update`: an optimizer that is applied to each layer within the backward pass.

One step (`_step`):

1. `_followed_loss` traces the loss with a stand-in for each trained stack and puts a
   follower, a `_Layers`, into the fold of each (`folds.py`).
2. `jax.value_and_grad` differentiates the result. When its reverse pass reaches a fold,
   the follower sweeps back over the layers with a visitor, `_Layers._visit`. For each
   layer, last to first, that computes the layer's gradient, applies the optimizer to
   the layer and its slice of the state, and returns both; the sweep writes them over
   the old ones. So at most one layer's gradient exists at a time.
3. What is trained outside of stacks has ordinary gradients, and is updated at the end.

Clipping by the global norm needs the norm before the first update, and the norm needs
all gradients. As no gradient is kept, the sweep runs twice with `max_grad_norm`: in the
reverse pass it only adds up squares, and after it, with the norm known, it computes
each layer's gradient again and updates the layer. Without `max_grad_norm` the squares
are added up in the one sweep, since the step returns the norm.

The updated layers leave the reverse pass through the follower's fields, since a rule
for derivatives can return cotangents only. Everything happens in one trace, so the
fields hold tracers of the step, and live as long as the call of `_step`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float

from .. import _xla_hints as xla_hints
from .._placement import has_host_arrays, moves_to_host, to_host
from .._scan.api import scan
from .._scan.checks import describe
from .._scan.marks import PerKind
from .._scan.sweep_back import SweepBack
from .._scan.visitor import LayerResult, LayerVisit, SweepResult
from .._stacked import StackedKinds, layer_types
from .._static import PyTree
from .folds import FollowedStack, followed, leaves_or_none
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
        grad_norm: the global norm of the gradient, before clipping.
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
        max_grad_norm: gradients with a larger global norm are scaled down to it.
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
        if not callable(self.loss) or not hasattr(self.optimizer, "update"):
            got = f"{type(self.loss).__name__} and {type(self.optimizer).__name__}"
            raise TypeError(
                "fused_update takes a loss function and then an optimizer of Optax; got"
                f" {got}. Write fused_update(loss, optax.adamw(1e-3))."
            )
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
            return None, [placed(leaf) for leaf in jax.tree.leaves(state)]

        _, leaves = scan(init, stack.Layers)(None, stack.stacked)
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
        leaves, structure = jax.tree.flatten(state)
        like = jax.eval_shape(lambda: self._first_state(trained))
        shapes = [leaf.shape for leaf in jax.tree.leaves(like)]
        fits = isinstance(state, FusedState) and len(state.stacks) == len(like.stacks)
        if not fits or [*map(jnp.shape, leaves)] != shapes:
            raise ValueError(
                "The step takes the model and then the state that its init makes for"
                f" this model; got {describe(state)}. Write state = update.init(model),"
                " and update(model, state, ...)."
            )
        # States contain trees like the model, so their structure contains each stack's
        # policy, which may have changed since the state was made. The step runs with
        # today's structure, and returns the state in the one that it was given, as a
        # loop over steps needs.
        state = jax.tree.unflatten(jax.tree.structure(like), leaves)
        result = _step(
            self, trained, state, lambda model: self.loss(model, *args, **kwargs)
        )
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
        gradients = jax.tree.unflatten(jax.tree.structure(params), gradients)
        updates, state = self.optimizer.update(gradients, state, params)

        def added(leaf: Any, update: Any) -> Any:
            return (leaf + update).astype(leaf.dtype)

        return jax.tree.map(added, params, updates), state


def _sum_of_squares(leaves: list[Array]) -> Array:
    """In float32 at least, whatever the dtype of the gradients."""
    total = jnp.zeros(())
    for leaf in leaves:
        size = jnp.abs(leaf)  # of complex numbers too
        if jnp.finfo(size.dtype).bits <= 32:
            size = size.astype(jnp.float32)
        total = total + jnp.sum(jnp.square(size))
    return total


@dataclasses.dataclass(eq=False)
class _Layers:
    """The follower of one stack's fold in one step: it sweeps back, and updates the
    layers.

    `begin` and `__call__` are called by the fold's rules for reverse mode, `sweep` also
    by `_step`.
    """

    fused: FusedUpdate
    trained: Trained
    # The stack; after the sweep that updates, the one with the updated layers.
    stacks: StackedKinds
    # The trained kinds of its layers, by name ("" in a `Stacked`).
    layers: dict[str, TrainedLayers]
    # The optimizer's state for each of these, with the layers in front; after the sweep
    # that updates, the next state.
    states: dict[str, PyTree]
    # The sum over the layers of the squares of their gradients. None until the reverse
    # pass has reached the fold, which it doesn't if the value does not depend on it.
    squares: Any = None
    # The cotangent of the fold's result, kept for a second sweep; None for zeros.
    cotangent: PyTree = None
    # The stack's reverse sweep, from the fold's forward pass.
    sweep_back: SweepBack = dataclasses.field(init=False)
    # A tree of booleans like `(init, args, kwargs)`: what has a cotangent.
    wanted: Any = dataclasses.field(init=False)

    def begin(self, sweep_back: SweepBack, wanted: Any) -> None:
        self.sweep_back = sweep_back
        self.wanted = wanted

    def __call__(self, cotangent: PyTree) -> SweepResult:
        self.cotangent = cotangent
        result = self.sweep(None, updates=self.fused.max_grad_norm is None)
        self.squares = result.state
        return result

    def sweep(self, norm: Any, *, updates: bool) -> SweepResult:
        """Sweep back over the layers.

        Args:
            norm: the global norm, in the second sweep of a step that clips; else None.
            updates: whether to update the layers and their states.
        """

        def state_leaves(kind: str, _: Any) -> list[PyTree]:
            return jax.tree.leaves(self.states.get(kind)) if updates else []

        before = self.stacks._per_kind(state_leaves)
        visitor = functools.partial(self._visit, norm, updates)
        result = self.sweep_back(self.cotangent, visitor, jnp.zeros(()), before)
        if updates:
            self.stacks = result.layers
            for kind, state in self.states.items():
                leaves = _of_kind(result.layer_state, kind)
                structure = jax.tree.structure(state)
                self.states[kind] = jax.tree.unflatten(structure, leaves)
        return result

    def _visit(
        self, norm: Any, updates: bool, visit: LayerVisit, squares: Any
    ) -> LayerResult:
        """The visitor of one layer; its state is the sum of squares so far."""
        fused = self.fused
        trained = self.trained
        kind = visit.kind or ""
        cotangents = visit.vjp()
        result = LayerResult(cotangents.carry)
        if norm is None:
            # In a second sweep the arguments' cotangents are known, and left out.
            _, *masks = _of_kind(self.wanted, kind)
            args_mask, kwargs_mask = map(leaves_or_none, masks)
            result = result._replace(
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
        structure = jax.tree.structure(fused._layer_state(trained, layers))
        state = jax.tree.unflatten(structure, visit.layer_state)
        params = trained.only_layer(layers, visit.layer)
        params, state = fused._updated(fused._scaled(gradients, norm), state, params)
        layer = trained.nodes(params)[layers.node]._stacks[kind].stacked
        return result._replace(layer=layer, layer_state=jax.tree.leaves(state))


def _of_kind(tree: PyTree, kind: str) -> PyTree:
    """A tree with one kind's value in place of each `per_kind`."""
    return jax.tree.map(
        lambda node: node.values[kind] if kind and isinstance(node, PerKind) else node,
        tree,
        is_leaf=lambda node: isinstance(node, PerKind),
    )


def _check_scalar(returned: PyTree, has_aux: bool) -> None:
    if has_aux and not (isinstance(returned, tuple) and len(returned) == 2):
        raise TypeError(
            "With has_aux the loss returns a pair (value, aux); got"
            f" {describe(returned)}. Return both in a tuple, or leave has_aux out."
        )
    value: Any = returned[0] if has_aux else returned
    is_real = eqx.is_array_like(value) and jnp.issubdtype(
        jnp.result_type(value), jnp.floating
    )
    if not is_real or jnp.shape(value):
        raise TypeError(
            f"The loss returns a scalar of floating point; got {describe(value)}. Take"
            " its mean, or give has_aux=True where it returns a pair."
        )


def _step(
    fused: FusedUpdate, trained: Trained, state: FusedState, loss_of_model: Callable
) -> FusedResult:
    folds = _folds(fused, trained, state)
    nodes = trained.nodes(trained.trained)
    inputs = trained.rest, [nodes[i] for i in folds]
    evaluate = _followed_loss(fused, trained, loss_of_model, folds, inputs)
    # A fold is differentiated only if something of it is, so the weights are among the
    # arguments. Their own gradients are zeros, which XLA removes as unused.
    differentiate = jax.value_and_grad(evaluate, (0, 1), has_aux=True)
    # The followers run within this call: in the forward pass and in the reverse pass.
    returned, (rest_gradients, _) = differentiate(*inputs)
    gradients = fused._cast(jax.tree.leaves(rest_gradients))
    for fold in folds.values():
        if fold.squares is None:
            # The gradient is zero, and the optimizer may still change the weights.
            fold(None)
    # The norm is that of the gradients as the optimizer gets them: after the cast.
    squares = _sum_of_squares(gradients)
    for fold in folds.values():
        squares = squares + fold.squares
    norm = jnp.sqrt(squares)
    if fused.max_grad_norm is not None:
        for fold in folds.values():
            fold.sweep(norm, updates=True)
    gradients = fused._scaled(gradients, norm)
    rest, rest_state = fused._updated(gradients, state.rest, trained.rest)
    stacks = {}
    states = []
    for i, fold in folds.items():
        stacks[i] = fold.stacks
        states += fold.states.values()
    model = trained.with_nodes(eqx.combine(rest, trained.model), stacks)
    value = returned if fused.has_aux else returned[0]
    return FusedResult(model, FusedState(tuple(states), rest_state), value, norm)


def _folds(
    fused: FusedUpdate, trained: Trained, state: FusedState
) -> dict[int, _Layers]:
    """The followers, by the index of their stack; in the order of `state.stacks`, as
    `trained.layers` is.
    """
    stacks = trained.nodes(trained.model)
    folds = {i: _Layers(fused, trained, stacks[i], {}, {}) for i in trained.names}
    for layers, layers_state in zip(trained.layers, state.stacks, strict=True):
        fold = folds[layers.node]
        fold.layers[layers.kind] = layers
        fold.states[layers.kind] = layers_state
    return folds


def _followed_loss(
    fused: FusedUpdate,
    trained: Trained,
    loss_of_model: Callable,
    folds: dict[int, _Layers],
    inputs: tuple[PyTree, list[PyTree]],
) -> Callable[..., tuple[PyTree, PyTree]]:
    """The loss with followed folds: `(rest, weights of each stack) -> (value, aux)`.

    It is traced with `inputs`, and takes others of their types.
    """
    stacks = trained.nodes(trained.model)

    def loss(rest: PyTree, weights: Sequence[PyTree]) -> PyTree:
        nodes = {}
        for i, stack_weights in zip(folds, weights, strict=True):
            stack = eqx.combine(stack_weights, stacks[i])
            nodes[i] = FollowedStack(stack, trained.names[i])
        return loss_of_model(
            trained.with_nodes(eqx.combine(rest, trained.model), nodes)
        )

    closed, output_types, output_static = eqx.filter_make_jaxpr(loss)(*inputs)
    # Which variables of the jaxpr are a stack's weights.
    input_structure = jax.tree.structure(inputs)
    _, variables = jax.tree.unflatten(input_structure, closed.jaxpr.invars)
    variables = map(jax.tree.leaves, variables)
    followers = zip(trained.names.values(), variables, folds.values(), strict=True)
    run = followed(closed, followers)

    def evaluate(*inputs: PyTree) -> tuple[PyTree, PyTree]:
        outputs = run(*jax.tree.leaves(inputs))
        outputs = jax.tree.unflatten(jax.tree.structure(output_types), outputs)
        returned = eqx.combine(outputs, output_static)
        _check_scalar(returned, fused.has_aux)
        return returned if fused.has_aux else (returned, None)

    return evaluate
