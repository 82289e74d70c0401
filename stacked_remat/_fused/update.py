"""`fused_update`: an optimizer applied to each layer of a stack as soon as its gradient exists."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float

from .._placement import has_host_arrays, moves_to_host, to_host
from .._scan.api import scan
from .._scan.marks import PerKind
from .._scan.pattern import per_kind
from .._scan.visitor import LayerResult, LayerVisit
from .folds import Fold, Place
from .loss_parts import Part, Values, cut_at_folds
from .trained import Trained, layer_structure, leaves_or_none, masked, replaced, state_of_layers


class Optimizer(Protocol):
    """An `optax.GradientTransformation`."""

    def init(self, params: Any, /) -> Any:
        """The state before the first step."""
        ...

    def update(self, updates: Any, state: Any, params: Any = None, /) -> tuple[Any, Any]:
        """From gradients to updates and the next state."""
        ...


class FusedState(NamedTuple):
    """The optimizer's state.

    Attributes:
        stacks: for each stack that is trained, those of a `StackedPattern` among them, the state of each of
            its layers, with the layers in front.
        rest: of everything else that is trained.
    """

    stacks: tuple[Any, ...]
    rest: Any


class FusedResult(NamedTuple):
    """What a step returns.

    Attributes:
        model: the updated model.
        state: the optimizer's next state.
        value: what the loss function returned for the model before the step.
        grad_norm: the global norm of the gradient, before clipping.
    """

    model: Any
    state: FusedState
    value: Any
    grad_norm: Float[Array, ""]


def fused_update(
    loss: Callable[..., Any],
    optimizer: Any,
    *,
    trainable: Any = eqx.is_inexact_array,
    has_aux: bool = False,
    max_grad_norm: float | None = None,
    clip: Literal["global", "layer"] = "global",
    gradient_dtype: DTypeLike | None = None,
) -> "FusedUpdate":
    """A training step that updates each layer of a stack within the backward pass.

    ```python
    step = fused_update(loss, optax.adamw(1e-3))  # loss(model, *args) calls model.blocks.fold(x)
    state = step.init(model)
    run = jax.jit(step, donate_argnums=(0, 1))
    model, state, value, grad_norm = run(model, state, batch)
    ```

    It is the step of `jax.value_and_grad(loss)` and `optimizer.update`, without the gradient of a stack: as
    soon as the gradient of a layer exists, the optimizer is applied to that layer, in place where model and
    state are donated. What is not in a stack is updated at the end of the same step.

    The optimizer sees one layer at a time, in a tree like the model in which all else is None, so that masks
    and labels by path work. What a transformation computes of a whole array it computes of a layer's array:
    Adafactor's rows, columns and root mean squares, for one. Its counts, hyperparameters and random numbers
    exist once for each layer.

    Args:
        loss: returns a scalar. It may call `fold` or `scan` of each stack (a `Stacked` or a
            `StackedPattern`) once, directly or inside of `jax.jit`, and cannot use the weights of a stack
            otherwise.
        optimizer: an `optax.GradientTransformation` that updates every layer by its own gradient.
        trainable: which arrays are trained, a predicate of leaves or a tree of bools like the model. A stack
            without trained arrays is folded as it is.
        has_aux: whether `loss` returns a pair, of the scalar and anything else.
        max_grad_norm: gradients with a larger norm are scaled down to it.
        clip: which norm that is: of all gradients, or of each layer's and of the rest's.
        gradient_dtype: what gradients are cast to before they are clipped and given to the optimizer.

    Returns:
        A function of the model, the optimizer's state, and the other arguments of `loss`, which returns a
        `FusedResult`. Its `init(model)` makes the state.

    Raises:
        ValueError, TypeError: for options that contradict each other. The step and its `init` refuse what
            they cannot follow, and name it: a loss that does not fold a stack exactly once, an optimizer that
            needs the gradients of several layers at once, and policies that `fold_vjp` refuses.

    Memory: the policy's, one layer's gradient, and no copy of weights and state where these are donated.
    Compute: that of the two steps; with clipping by the global norm one more backward pass over the stacks.
    """
    if clip not in ("global", "layer"):
        raise ValueError(f'clip is "global" or "layer"; got {clip!r}.')
    if clip == "layer" and max_grad_norm is None:
        raise ValueError('clip="layer" has no effect without max_grad_norm: give both.')
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(
            f"max_grad_norm must be positive; got {max_grad_norm}. For no clipping leave it out."
        )
    return FusedUpdate(loss, optimizer, trainable, has_aux, max_grad_norm, clip, gradient_dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class FusedUpdate:
    """The step of `fused_update`."""

    loss: Callable[..., Any]
    optimizer: Optimizer
    trainable: Any
    has_aux: bool
    max_grad_norm: float | None
    clip: Literal["global", "layer"]
    gradient_dtype: DTypeLike | None

    def init(self, model: Any) -> FusedState:
        """The optimizer's state for a model.

        For a stack with a trained array on the host, what the state has of matrices is there too.

        Raises:
            ValueError: nothing is trained, layers share a trained array, or the optimizer needs the gradients
                of several layers at once.
        """
        trained = Trained.of(model, self.trainable)
        trained.check_optimizer(self.optimizer, self.gradient_dtype)
        return self._first_state(trained)

    def _first_state(self, trained: Trained) -> FusedState:
        stacks = tuple(self._state_of(trained, number) for number in range(len(trained.stacks)))
        return FusedState(stacks, self.optimizer.init(trained.only_rest()))

    def _state_of(self, trained: Trained, number: int) -> Any:
        def init(layer: Any) -> Any:
            return self.optimizer.init(trained.only_layer(number, layer))

        def leaves(layer: Any) -> list[Any]:
            return jax.tree.leaves(init(masked(layer, trained.layer_mask(number))))

        def leaves_on_host(_: None, layer: Any) -> tuple[None, list[Any]]:
            return None, [
                to_host(leaf) if moves_to_host(leaf.shape, leaf.dtype) else leaf for leaf in leaves(layer)
            ]

        stack = trained.stacks[number]
        of_one = jax.eval_shape(init, trained.layer_types(number))
        if has_host_arrays(masked(stack.stacked, trained.layer_mask(number))):
            _, found = scan(leaves_on_host, stack.Layers)(None, stack.stacked)
        else:
            found = stack.vmap_via(leaves)()
        return state_of_layers(found, of_one, stack.Layers)

    def __call__(self, model: Any, state: FusedState, /, *args: Any, **kwargs: Any) -> FusedResult:
        """One step: `(model, state, *args, **kwargs)` to a `FusedResult`."""
        trained = Trained.of(model, self.trainable)
        given, structure = jax.tree.flatten(state)
        like = jax.eval_shape(lambda: self._first_state(trained))
        if not isinstance(state, FusedState) or _shapes(state) != _shapes(like):
            raise ValueError(
                f"The state is not that of this model, which trains {len(trained.stacks)} stacks and "
                f"{sum(trained.is_of_rest())} other arrays, and optimizer. Make it by its init."
            )
        names = [folded.name for folded in trained.folded]
        parts = cut_at_folds(self.loss, trained.in_loss(), args, kwargs, names)
        arrays = [leaf for leaf in jax.tree.leaves((model, args, kwargs)) if eqx.is_array(leaf)]
        values = Values(parts, arrays, trained.is_of_rest())
        # Equal but for the policies of stacks, which may have changed since the state was made.
        result = _step(self, trained, jax.tree.unflatten(jax.tree.structure(like), given), values)
        return result._replace(state=jax.tree.unflatten(structure, jax.tree.leaves(result.state)))

    def _scaled(self, gradients: list[Any], norm: Any) -> list[Any]:
        """The gradients, scaled down where `norm` is greater than the greatest."""
        most = self.max_grad_norm
        if most is None:
            return gradients
        return [jnp.where(norm < most, leaf, leaf / norm.astype(leaf.dtype) * most) for leaf in gradients]

    def _cast(self, gradients: list[Any]) -> list[Any]:
        """The gradients in `gradient_dtype`."""
        dtype = self.gradient_dtype
        return gradients if dtype is None else [leaf.astype(dtype) for leaf in gradients]

    def _updated(self, gradients: list[Any], state: Any, params: Any) -> tuple[list[Any], Any]:
        """The trained leaves of `params` after an update by their gradients, and the next state."""
        leaves, structure = jax.tree.flatten(params)
        updates, state = self.optimizer.update(jax.tree.unflatten(structure, gradients), state, params)
        steps = jax.tree.leaves(updates)
        return [_added(leaf, step) for leaf, step in zip(leaves, steps, strict=True)], state


def _shapes(state: FusedState) -> list[list[tuple[int, ...]]]:
    return [[*map(jnp.shape, jax.tree.leaves(part))] for part in (*state.stacks, state.rest)]


def _added(leaf: Any, step: Any) -> Any:
    dtype = jnp.promote_types(leaf.dtype, step.dtype)
    return (leaf.astype(dtype) + step.astype(dtype)).astype(leaf.dtype)


def _sum_of_squares(leaves: list[Any]) -> Any:
    def of_one(leaf: Any) -> Any:
        size = jnp.abs(leaf)
        return jnp.sum(jnp.square(size if jnp.finfo(size.dtype).bits > 32 else size.astype(jnp.float32)))

    return sum(map(of_one, leaves), jnp.zeros(()))


_Further: TypeAlias = Literal["args", "kwargs"]


class _Sweep(NamedTuple):
    """The backward pass over the layers of a fold: what sweeps back, and the cotangent to begin with."""

    part: Part
    fold: Fold
    sweep_back: Callable[..., Any]
    cotangent: Any


def _visitor(
    fused: FusedUpdate,
    trained: Trained,
    values: Values,
    part: Part,
    fold: Fold,
    states: dict[str | None, Any],
    norm: Any,
) -> Callable[[LayerVisit, Any], LayerResult]:
    """Adds up the squares of gradients; with states, updates each layer, by `norm` or the layer's own."""
    structures = {kind: layer_structure(state) for kind, state in states.items()}
    numbers = trained.folded[fold.number].stacks
    names: tuple[_Further, ...] = ("args", "kwargs")
    is_active = {
        name: [at is not None and values.is_active(part.inputs[at]) for at in fold.positions(name)]
        for name in names
    }
    given = dict(zip(names, fold.given[2:], strict=True))
    # With a norm it is the second sweep, and these are known.
    wanted: list[_Further] = [name for name in names if any(is_active[name]) and norm is None]

    def visit_layer(visit: LayerVisit, squares: Any) -> LayerResult:
        is_trained = visit.kind in numbers
        of_layer: list[Any] = ["layer"] if is_trained else []
        carry, *others = visit.vjp("carry", *wanted, *of_layer)
        pairs = zip(wanted, others, strict=False)
        cotangents = {
            name: masked(tree, _of_kind(is_active[name], given[name], visit.kind)) for name, tree in pairs
        }
        if not is_trained:
            return LayerResult(carry, **cotangents)
        layer, number = others[-1], numbers[visit.kind]
        mask = trained.layer_mask(number)
        # Without the barrier XLA holds a layer's internals until the optimizer is done.
        gradients = fused._cast(lax.optimization_barrier(jax.tree.leaves(masked(layer, mask))))
        own = _sum_of_squares(gradients)
        result = LayerResult(carry, state=squares + own, **cotangents)
        if visit.kind not in states:
            return result
        gradients = fused._scaled(gradients, jnp.sqrt(own) if norm is None else norm)
        params = trained.only_layer(number, masked(visit.layer, mask))
        before = jax.tree.unflatten(structures[visit.kind], visit.layer_state)
        new, after = fused._updated(gradients, before, params)
        layer = replaced(visit.layer, mask, new)
        return result._replace(layer=layer, layer_state=jax.tree.leaves(after))

    return visit_layer


def _of_kind(mask: list[bool], arguments: Any, kind: str | None) -> list[bool]:
    """The entries of a mask of the arguments of all layers that are for those of one kind."""
    _, structure = jax.tree.flatten(arguments, is_leaf=lambda node: node is None)
    tree = jax.tree.map(
        lambda node: node.values[kind] if kind and isinstance(node, PerKind) else node,
        jax.tree.unflatten(structure, mask),
        is_leaf=lambda node: isinstance(node, PerKind),
    )
    return jax.tree.leaves(tree)


def _step(fused: FusedUpdate, trained: Trained, state: FusedState, values: Values) -> FusedResult:
    sweeps_twice = fused.max_grad_norm is not None and fused.clip == "global"
    pullbacks = values.forward()
    value = values.returned()
    _check_scalar(value, fused.has_aux)
    values.add_cotangents(values.loss.outputs[:1], [jnp.ones(())])
    squares = jnp.zeros(())
    stacks: dict[int, tuple[Any, Any]] = {}
    sweeps: list[_Sweep] = []

    def sweep(of_fold: _Sweep, norm: Any, updates: bool) -> Any:
        part, fold, sweep_back, cotangent = of_fold
        numbers = trained.folded[fold.number].stacks
        before = {kind: state.stacks[number] for kind, number in numbers.items()} if updates else {}
        visitor = _visitor(fused, trained, values, part, fold, before, norm)
        leaves = {kind: jax.tree.leaves(before.get(kind)) for kind in numbers}
        if None in numbers:
            result = sweep_back(cotangent, visitor, squares, leaves[None])
            found: dict[str | None, Any] = {None: (result.layers, result.layer_state)}
        else:
            of_kinds = per_kind({kind: leaves.get(kind, []) for kind in fold.given[0].stacks})
            result = sweep_back(cotangent, visitor, squares, of_kinds)
            after = {**leaves, **result.layer_state.values}
            found = {kind: (result.layers.stacks[kind], after[kind]) for kind in numbers}
        for kind, number in numbers.items():
            layers, after = found[kind]
            stacks[number] = layers, jax.tree.unflatten(jax.tree.structure(before.get(kind)), after)
        return result

    for part, pull_back in zip(values.loss.parts[::-1], pullbacks[::-1], strict=True):
        if part.fold is None:
            pull_back()
            continue
        cotangent = part.fold.cotangent([values.cotangent(var) for var in part.outputs])
        sweeps.append(_Sweep(part, part.fold, pull_back, cotangent))
        result = sweep(sweeps[-1], None, not sweeps_twice)
        squares = result.state
        found: dict[Place, Any] = {"init": result.carry, "args": result.args, "kwargs": result.kwargs}
        for name, tree in found.items():
            positions = part.fold.positions(name) if tree is not None else []
            for at, cotangent in zip(positions, leaves_or_none(tree), strict=tree is not None):
                if at is not None:
                    values.add_cotangents([part.inputs[at]], [cotangent])
    gradients = fused._cast([values.cotangent(var) for var in values.wanted])
    own = _sum_of_squares(gradients)
    norm = jnp.sqrt(squares + own)
    for of_fold in sweeps if sweeps_twice else ():
        sweep(of_fold, norm, True)
    gradients = fused._scaled(gradients, norm if sweeps_twice else jnp.sqrt(own))
    new, of_rest = fused._updated(gradients, state.rest, trained.only_rest())
    layers, states = zip(*(stacks[number] for number in range(len(stacks))), strict=True)
    return FusedResult(trained.updated(layers, new), FusedState(states, of_rest), value, norm)


def _check_scalar(value: Any, has_aux: bool) -> None:
    if has_aux and not (isinstance(value, tuple) and len(value) == 2):
        raise TypeError(f"With has_aux the loss returns a pair; got {type(value).__name__}.")
    leaves = jax.tree.leaves(value[0] if has_aux else value)
    if len(leaves) != 1 or not eqx.is_inexact_array(leaves[0]) or leaves[0].shape:
        found = ", ".join(str(jax.typeof(leaf)) if eqx.is_array(leaf) else repr(leaf) for leaf in leaves)
        raise TypeError(
            f"The loss returns a scalar array of floating point; got {found or None}. Take its mean, or give "
            "has_aux=True where it returns a pair."
        )
