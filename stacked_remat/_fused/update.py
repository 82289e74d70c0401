"""`fused_update`: an optimizer applied to each layer of a stack as soon as its gradient
exists.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float

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
    if not callable(loss) or not hasattr(optimizer, "update"):
        got = f"{type(loss).__name__} and {type(optimizer).__name__}"
        raise TypeError(
            "fused_update takes a loss function and then an optimizer of Optax; got"
            f" {got}. Write fused_update(loss, optax.adamw(1e-3))."
        )
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(
            f"max_grad_norm must be positive; got {max_grad_norm}. For no clipping"
            " leave it out."
        )
    return FusedUpdate(
        loss, optimizer, trainable, has_aux, max_grad_norm, gradient_dtype
    )


@dataclasses.dataclass(frozen=True, eq=False)
class FusedUpdate:
    """The step of `fused_update`."""

    loss: Callable[..., Any]
    optimizer: Any
    trainable: Any
    has_aux: bool
    max_grad_norm: float | None
    gradient_dtype: DTypeLike | None

    def init(self, model: PyTree) -> FusedState:
        """The optimizer's state for a model.

        For a stack with a trained array on the host, what the state has of matrices is
        there too.

        Raises:
            ValueError: nothing is trained, layers share a trained array, or the
                optimizer needs the gradients of several layers at once.
        """
        trained = Trained.of(model, self.trainable)
        trained.check_optimizer(self.optimizer, self.gradient_dtype)
        return self._first_state(trained)

    def _first_state(self, trained: Trained) -> FusedState:
        stacks = tuple(self._state_of(trained, own) for own in trained.layers)
        return FusedState(stacks, self.optimizer.init(trained.rest))

    def _state_of(self, trained: Trained, own: TrainedLayers) -> PyTree:
        on_host = has_host_arrays(masked(own.stack.stacked, own.mask))

        def init(_: None, layer: PyTree) -> tuple[None, list[PyTree]]:
            leaves = jax.tree.leaves(
                self.optimizer.init(trained.only_layer(own, layer))
            )
            return None, [
                (
                    to_host(leaf)
                    if on_host and moves_to_host(leaf.shape, leaf.dtype)
                    else leaf
                )
                for leaf in leaves
            ]

        _, leaves = scan(init, own.stack.Layers)(None, own.stack.stacked)
        return state_of_layers(
            leaves, self._layer_state(trained, own), own.stack.Layers
        )

    def _layer_state(self, trained: Trained, own: TrainedLayers) -> PyTree:
        return jax.eval_shape(
            self.optimizer.init, trained.only_layer(own, layer_types(own.stack))
        )

    def __call__(
        self, model: PyTree, state: FusedState, /, *args: PyTree, **kwargs: PyTree
    ) -> FusedResult:
        """One step: `(model, state, *args, **kwargs)` to a `FusedResult`."""
        trained = Trained.of(model, self.trainable)
        given, structure = jax.tree.flatten(state)
        like = jax.eval_shape(lambda: self._first_state(trained))
        fits = isinstance(state, FusedState) and len(state.stacks) == len(like.stacks)
        if not fits or [*map(jnp.shape, given)] != [
            leaf.shape for leaf in jax.tree.leaves(like)
        ]:
            raise ValueError(
                "The step takes the model and then the state that its init makes for"
                f" this model; got {describe(state)}. Write state = update.init(model),"
                " and update(model, state, ...)."
            )
        # Equal but for the policies of stacks, which may have changed since the state
        # was made.
        state = jax.tree.unflatten(jax.tree.structure(like), given)
        result = _step(
            self, trained, state, lambda model: self.loss(model, *args, **kwargs)
        )
        return result._replace(
            state=jax.tree.unflatten(structure, jax.tree.leaves(result.state))
        )

    def _scaled(self, gradients: list[PyTree], norm: Any) -> list[PyTree]:
        """The gradients, scaled down where their `norm` is greater than the
        greatest.
        """
        most = self.max_grad_norm
        if most is None:
            return gradients
        return [
            jnp.where(norm < most, leaf, leaf / norm.astype(leaf.dtype) * most)
            for leaf in gradients
        ]

    def _cast(self, gradients: list[PyTree]) -> list[PyTree]:
        dtype = self.gradient_dtype
        return (
            gradients if dtype is None else [leaf.astype(dtype) for leaf in gradients]
        )

    def _updated(
        self, gradients: list[PyTree], state: PyTree, params: PyTree
    ) -> tuple[PyTree, Any]:
        """`params` after an update by their gradients, and the next state."""
        gradients = jax.tree.unflatten(jax.tree.structure(params), gradients)
        updates, state = self.optimizer.update(gradients, state, params)
        return (
            jax.tree.map(
                lambda leaf, step: (leaf + step).astype(leaf.dtype), params, updates
            ),
            state,
        )


def _sum_of_squares(leaves: list[Array]) -> Array:
    def of_one(leaf: Any) -> Any:
        size = jnp.abs(leaf)
        return jnp.sum(
            jnp.square(
                size if jnp.finfo(size.dtype).bits > 32 else size.astype(jnp.float32)
            )
        )

    return sum(map(of_one, leaves), jnp.zeros(()))


@dataclasses.dataclass(eq=False)
class _Layers:
    """The layers of a fold in a step: a follower of the fold, which updates them too.

    `kinds` has the layers of each kind that is trained, with their state. `wanted` says
    which arrays of `(init, args, kwargs)` have cotangents.
    """

    fused: FusedUpdate
    trained: Trained
    stacks: StackedKinds
    kinds: dict[str, tuple[TrainedLayers, PyTree]]
    squares: Any = None
    cotangent: PyTree = None
    sweep_back: SweepBack = dataclasses.field(init=False)
    wanted: Any = dataclasses.field(init=False)

    def begin(self, sweep_back: SweepBack, wanted: Any) -> None:
        self.sweep_back, self.wanted = sweep_back, wanted

    def __call__(self, cotangent: PyTree) -> SweepResult:
        self.cotangent = cotangent
        result = self.sweep(None, updates=self.fused.max_grad_norm is None)
        self.squares = result.state
        return result

    def sweep(self, norm: Any, *, updates: bool) -> SweepResult:
        """Sweep back, and update the layers."""
        before = {
            kind: jax.tree.leaves(state)
            for kind, (_, state) in self.kinds.items()
            if updates
        }
        given = self.stacks._per_kind(lambda kind, _: before.get(kind, []))
        visitor = functools.partial(self._visit, norm, updates)
        result = self.sweep_back(self.cotangent, visitor, jnp.zeros(()), given)
        if updates:
            self.stacks = result.layers
            for kind, (own, state) in self.kinds.items():
                after = _of_kind(result.layer_state, kind)
                self.kinds[kind] = (
                    own,
                    jax.tree.unflatten(jax.tree.structure(state), after),
                )
        return result

    def _visit(
        self, norm: Any, updates: bool, visit: LayerVisit, squares: Any
    ) -> LayerResult:
        fused, trained, kind, found = (
            self.fused,
            self.trained,
            visit.kind or "",
            visit.vjp(),
        )
        result = LayerResult(found.carry)
        if norm is None:  # with a norm it is the second sweep, and these are known
            of_args, of_kwargs = (
                leaves_or_none(_of_kind(mask, kind)) for mask in self.wanted[1:]
            )
            result = LayerResult(
                found.carry,
                args=masked(found.args, of_args),
                kwargs=masked(found.kwargs, of_kwargs),
            )
        if kind not in self.kinds:
            return result
        own = self.kinds[kind][0]
        # Without the barrier XLA holds a layer's internals until the optimizer is done.
        gradients = lax.optimization_barrier(
            jax.tree.leaves(masked(found.layer, own.mask))
        )
        gradients = fused._cast(gradients)
        result = result._replace(state=squares + _sum_of_squares(gradients))
        if not updates:
            return result
        before = jax.tree.unflatten(
            jax.tree.structure(fused._layer_state(trained, own)), visit.layer_state
        )
        params = trained.only_layer(own, visit.layer)
        new, after = fused._updated(fused._scaled(gradients, norm), before, params)
        layer = trained.nodes(new)[own.node]._stacks[kind].stacked
        return result._replace(layer=layer, layer_state=jax.tree.leaves(after))


def _of_kind(tree: PyTree, kind: str) -> PyTree:
    """The part of a tree for all layers that is for those of one kind."""
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
    fused: FusedUpdate, trained: Trained, state: FusedState, of_model: Callable
) -> FusedResult:
    names, stacks, own = (
        trained.names,
        trained.nodes(trained.model),
        trained.nodes(trained.trained),
    )

    def loss(rest: PyTree, weights: Sequence[PyTree]) -> PyTree:
        nodes = {
            i: FollowedStack(eqx.combine(new, stacks[i]), name)
            for (i, name), new in zip(names.items(), weights, strict=True)
        }
        return of_model(trained.with_nodes(eqx.combine(rest, trained.model), nodes))

    inputs = trained.rest, [own[i] for i in names]
    closed, struct, static = eqx.filter_make_jaxpr(loss)(*inputs)
    variables = jax.tree.unflatten(jax.tree.structure(inputs), closed.jaxpr.invars)[1]
    states = [*zip(trained.layers, state.stacks, strict=True)]
    folds = {
        i: _Layers(
            fused,
            trained,
            stacks[i],
            {each[0].kind: each for each in states if each[0].node == i},
        )
        for i in names
    }
    run = followed(
        closed,
        zip(
            names.values(), map(jax.tree.leaves, variables), folds.values(), strict=True
        ),
    )

    def evaluate(*inputs: PyTree) -> PyTree:
        outputs = run(*jax.tree.leaves(inputs))
        returned = eqx.combine(
            jax.tree.unflatten(jax.tree.structure(struct), outputs), static
        )
        _check_scalar(returned, fused.has_aux)
        return returned if fused.has_aux else (returned, None)

    # There are no gradients of weights, for which JAX makes zeros that nothing reads.
    returned, (found, _) = jax.value_and_grad(evaluate, (0, 1), has_aux=True)(*inputs)
    gradients = fused._cast(jax.tree.leaves(found))
    for fold in folds.values():
        if fold.squares is None:  # the value does not depend on it
            fold(None)
    norm = jnp.sqrt(
        sum((fold.squares for fold in folds.values()), _sum_of_squares(gradients))
    )
    if fused.max_grad_norm is not None:
        for fold in folds.values():
            fold.sweep(norm, updates=True)
    new, of_rest = fused._updated(
        fused._scaled(gradients, norm), state.rest, trained.rest
    )
    after = tuple(after for fold in folds.values() for _, after in fold.kinds.values())
    model = trained.with_nodes(
        eqx.combine(new, trained.model), {i: fold.stacks for i, fold in folds.items()}
    )
    value = returned if fused.has_aux else returned[0]
    return FusedResult(model, FusedState(after, of_rest), value, norm)
