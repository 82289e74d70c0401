"""Gradients, and the dot product of every example's gradient with a direction, in one backward pass."""

from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from haliax import Axis, NamedArray

from .._messages import axes_text
from .._noted import Notes, noting
from .._scan.marks import is_named, raw_array
from .._stacked import Stacked
from ..lora._paths import dotted
from ._interpret import Program
from ._rows import Units
from ._stacks import Traces, is_stack, leaves_with_paths, probed
from ._traced import trace
from ._weights import Leaf

Loss = Callable[[Any, Any], Any]
Reduction = Literal["mean", "sum"]


class GradDots(eqx.Module):
    """What `grad_dot` finds beside the gradients.

    Attributes:
        loss: the reduced loss.
        scores: for each scored array, by its path, `[layers, batch]` in a stack and `[batch]` elsewhere, in
            float32.
        total: their sum, `[batch]`.
        covered: how many numbers of the model each scored array holds.
        uncovered: the same for arrays that are trained and have no direction.
    """

    loss: Any
    scores: dict[str, NamedArray]
    total: NamedArray
    covered: dict[str, int] = eqx.field(static=True)
    uncovered: dict[str, int] = eqx.field(static=True)

    def coverage(self) -> float:
        """The share of the trained numbers whose scores are in `scores`."""
        covered = sum(self.covered.values())
        return covered / max(covered + sum(self.uncovered.values()), 1)


def val_direction(
    model: Any,
    per_example_loss: Loss,
    val_batch: Any,
    *,
    reduction: Reduction = "mean",
    trainable: Any = eqx.is_inexact_array,
) -> Any:
    """The gradient of the reduced loss of a validation batch: a direction for `grad_dot`.

    Args:
        model: any module.
        per_example_loss: as in `grad_dot`.
        val_batch: what it takes.
        reduction: over the examples.
        trainable: as in `grad_dot`.

    Returns:
        A tree like the model, None where nothing is trained.
    """
    check_reduction(reduction)
    params, static = eqx.partition(model, _trained(model, trainable))

    def loss(params: Any) -> Any:
        return reduced(per_example_loss(eqx.combine(params, static), val_batch), reduction)[0]

    return jax.grad(loss)(params)


def grad_dot(
    model: Any,
    per_example_loss: Loss,
    batch: Any,
    *,
    direction: Any,
    reduction: Reduction = "mean",
    trainable: Any = eqx.is_inexact_array,
) -> tuple[Any, GradDots]:
    """The gradients of a loss, and for every example the dot product of its gradient with a direction."""
    check_reduction(reduction)
    params, static = eqx.partition(model, _trained(model, trainable))
    shape = eqx.filter_eval_shape(per_example_loss, model, batch)
    Batch = _batch_axis(shape)
    traces = Traces(Units((), ()) if Batch.size == 1 else Units((Batch.size,), (3,)))
    given = _directions(params, direction)
    probes = {path: _probe(model, path, traces.units) for path in given}

    def loss(params: Any, probes: dict[str, Any]) -> tuple[Any, Any]:
        program = _Probed(eqx.combine(params, static), traces, given, probes)
        losses = program.losses(per_example_loss, batch, Batch)
        value, _ = reduced(losses, reduction)
        return value, None

    (value, _), (gradients, found) = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, probes)
    scale = float(Batch.size) if reduction == "mean" else 1.0
    scores = {
        _shown(model, path): _named_scores(model, path, score * scale, Batch) for path, score in found.items()
    }
    total = sum(
        (hax.sum(score, axis=[a for a in score.axes if a != Batch]) for score in scores.values()),
        hax.zeros(Batch, dtype=jnp.float32),
    )
    sizes = {path: raw_array(leaf).size for path, leaf in leaves_with_paths(params)}
    covered = {_shown(model, path): size for path, size in sizes.items() if path in given}
    uncovered = {_shown(model, path): size for path, size in sizes.items() if path not in given}
    return gradients, GradDots(value, scores, total, covered, uncovered)


class _Probed:
    """A model whose stacks are probed, and the paths of what is scored outside of stacks."""

    def __init__(self, model: Any, traces: Traces, direction: dict[str, Any], probes: dict[str, Any]) -> None:
        self.model, self.traces, self.direction, self.probes = model, traces, direction, probes

    def with_probes(self, probes: dict[str, Any]) -> Any:
        """The model with probed stacks."""

        def replace(path: Any, node: Any) -> Any:
            prefix = jtu.keystr(path)
            own = {p.removeprefix(prefix): x for p, x in self.direction.items() if p.startswith(prefix)}
            if not is_stack(node) or not own:
                return node
            of_stack = {p.removeprefix(prefix): x for p, x in probes.items() if p.startswith(prefix)}
            return probed(node, prefix, self.traces, own, of_stack)

        return jtu.tree_map_with_path(replace, self.model, is_leaf=is_stack)

    def losses(self, per_example_loss: Loss, batch: Any, Batch: Axis) -> Any:
        """What the loss function returns, with deposits."""
        other = None
        if units := self.traces.units.sizes:
            self.traces.begin(is_first=True)
            growth = self.traces.units.growth[0]
            grown = {path: _grown_probe(probe, len(units), growth) for path, probe in self.probes.items()}
            larger = _grown(batch, Batch, growth)
            with noting(Notes()):
                other, _, _ = trace(per_example_loss, self.with_probes(grown), larger)
        self.traces.begin(is_first=False)
        notes = Notes()
        model = self.with_probes(self.probes)
        with noting(notes):
            closed, inputs, rebuild = trace(per_example_loss, model, batch)
        program = Program(closed, other, self.traces.units, notes)
        return rebuild(program.evaluate(inputs, *self._leaves(model, inputs)))

    def _leaves(self, model: Any, inputs: list[Any]) -> tuple[dict[int, Leaf], range]:
        paths = [path for path, _ in leaves_with_paths(model)]
        leaves = {
            at: Leaf(_shown(self.model, path), inputs[at], raw_array(self.direction[path]), self.probes[path])
            for at, path in enumerate(paths)
            if path in self.direction
        }
        return leaves, range(len(paths), len(inputs))


def check_reduction(reduction: str) -> None:
    """Refuse what is no reduction."""
    if reduction not in ("mean", "sum"):
        raise ValueError(f'reduction is "mean" or "sum", over the examples; got {reduction!r}.')


def reduced(losses: Any, reduction: Reduction) -> tuple[Any, Any]:
    """The mean or the sum over the examples, and the losses as an array."""
    array = raw_array(losses).astype(jnp.float32)
    return (jnp.mean(array) if reduction == "mean" else jnp.sum(array)), array


def _trained(model: Any, trainable: Any) -> Any:
    spec = jax.tree.map(trainable, model) if callable(trainable) else trainable
    return jax.tree.map(lambda wanted, leaf: bool(wanted) and eqx.is_inexact_array(leaf), spec, model)


def _batch_axis(losses: Any) -> Axis:
    if is_named(losses):
        if len(losses.axes) != 1:
            raise ValueError(
                f"per_example_loss must return one loss per example; it has the axes "
                f"({axes_text(losses.axes)}). Sum or average over the others."
            )
        return losses.axes[0]
    if getattr(losses, "ndim", None) != 1:
        raise ValueError(
            "per_example_loss must return a NamedArray with the axis of the examples, or a plain array with "
            f"one dimension; got {losses!r}."
        )
    return Axis("batch", losses.shape[0])


def _directions(params: Any, direction: Any) -> dict[str, Any]:
    wanted = dict(leaves_with_paths(params))
    given: dict[str, Any] = {}
    for path, leaf in leaves_with_paths(direction):
        if path not in wanted:
            raise ValueError(
                f"direction{path} has an array, and the model trains none there. Leave it out, or train it "
                "(trainable)."
            )
        like = wanted[path]
        own = leaf.rearrange(like.axes) if is_named(leaf) and is_named(like) else leaf
        if raw_array(own).shape != raw_array(like).shape:
            raise ValueError(
                f"direction{path} has the shape {raw_array(own).shape}, and the model's array "
                f"{raw_array(like).shape}."
            )
        given[path] = own
    if not given:
        raise ValueError("direction has no array: there is nothing to score.")
    return given


def _stack_of(model: Any, path: str) -> Any:
    """The stack that holds a path, None outside of stacks."""
    for at, node in jtu.tree_leaves_with_path(model, is_leaf=is_stack):
        if is_stack(node) and path.startswith(jtu.keystr(at)):
            return node
    return None


def _layers_of(model: Any, path: str) -> Axis | None:
    stack = _stack_of(model, path)
    return stack.Layers if isinstance(stack, Stacked) else None


def _probe(model: Any, path: str, units: Units) -> Any:
    Layers = _layers_of(model, path)
    shape = units.sizes or (1,)
    return jnp.zeros(shape if Layers is None else (Layers.size, *shape), jnp.float32)


def _named_scores(model: Any, path: str, score: Any, Batch: Axis) -> NamedArray:
    Layers = _layers_of(model, path)
    return hax.named(score, (Batch,) if Layers is None else (Layers, Batch))


def _shown(model: Any, path: str) -> str:
    """The path as errors and scores have it."""
    for keys, _ in jtu.tree_leaves_with_path(model, is_leaf=is_named):
        if jtu.keystr(keys) == path:
            return dotted(model, keys)
    raise KeyError(path)


def _grown(batch: Any, Batch: Axis, growth: int) -> Any:
    """The types of a batch with more examples."""

    def grow(leaf: Any) -> Any:
        if is_named(leaf):
            names = [axis.name for axis in leaf.axes]
            if Batch.name not in names:
                return leaf
            axes = [
                axis.resize(axis.size * growth) if axis.name == Batch.name else axis for axis in leaf.axes
            ]
            shape = jax.ShapeDtypeStruct([axis.size for axis in axes], leaf.dtype)
            return NamedArray(shape, tuple(axes))  # pyright: ignore[reportArgumentType]
        if eqx.is_array(leaf) and leaf.ndim and leaf.shape[0] == Batch.size:
            return jax.ShapeDtypeStruct((leaf.shape[0] * growth, *leaf.shape[1:]), leaf.dtype)
        return leaf

    return jax.tree.map(grow, batch, is_leaf=is_named)


def _grown_probe(probe: Any, units: int, growth: int) -> Any:
    before = probe.ndim - units
    shape = (*probe.shape[:before], probe.shape[before] * growth, *probe.shape[before + 1 :])
    return jax.ShapeDtypeStruct(shape, probe.dtype)
