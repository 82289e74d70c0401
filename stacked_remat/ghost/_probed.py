"""A model whose weights are scored where they meet data, by probes."""

import dataclasses
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from haliax import Axis, NamedArray

from .._activity import active_outputs
from .._block_seq import BlockSeq
from .._noted import Notes, noting
from .._scan.marks import is_named, raw_array
from .._stacked import Stacked
from ..lora._paths import dotted
from ._examples import Examples
from ._interpret import Interpreter
from ._losses import Loss, Objective, check_size, errors_of_one_example, leaves_with_paths
from ._traced import Traced, arrays_of, has_small_range, trace
from ._weights import Along, Value, Weight, settled


@dataclasses.dataclass(frozen=True, eq=False)
class Scoring:
    """What is scored.

    Attributes:
        model: of these arrays or their types.
        direction: the arrays of the direction by their paths.
        Batch: the axis of the examples.
    """

    model: Any
    direction: dict[str, Any]
    Batch: Axis

    def probes(self) -> dict[str, Any]:
        """Zeros for every scored array, a number for each example: `[batch]` or `[batch, layers]`."""
        layers = {path: layers_of(self.model, path) for path in self.direction}
        return {
            path: jnp.zeros((self.Batch.size, *([] if Layers is None else [Layers.size])), jnp.float32)
            for path, Layers in layers.items()
        }

    def named(self, scores: dict[str, Any]) -> dict[str, NamedArray]:
        """Scores, `[layers, batch]` or `[batch]`, under the paths that users see."""
        found, shown = {}, shown_paths(self.model)
        for path, score in scores.items():
            Layers = layers_of(self.model, path)
            found[shown[path]] = hax.named(score, (self.Batch,) if Layers is None else (Layers, self.Batch))
        return found

    def values(self, model: Any, probes: dict[str, Any], example: Any, one: Traced) -> list[Value]:
        """The inputs of the traced loss function, those that are scored with their directions and probes."""
        is_scaled, shown = has_small_range(one.closed.jaxpr), shown_paths(self.model)
        found = []
        for path, leaf in leaves_with_paths(model):
            array, along = raw_array(leaf), ()
            if path in self.direction:
                pair = raw_array(self.direction[path]), probes[path]
                pair = _scaled(*pair) if is_scaled else pair
                along = (Along(shown[path] or "the model", *pair, layer_dimension(self.model, path, leaf)),)
            found.append(Value(array, Weight(array, along) if along else None))
        return found + [Value(array, depends=True) for array in arrays_of(example)]


def in_one_pass(
    scoring: Scoring, params: Any, static: Any, per_example_loss: Loss, batch: Any, objective: Objective
) -> tuple[tuple[Any, Any], Any, dict[str, Any]]:
    """The loss and what comes with it, its gradients, and the scores: the cotangents of the probes."""
    examples = Examples.of(batch, scoring.Batch)

    def loss(params: Any, probes: dict[str, Any]) -> tuple[Any, Any]:
        model, notes = eqx.combine(params, static), Notes()
        with noting(notes), errors_of_one_example():
            one = trace(per_example_loss, model, examples.first)
        check_size(objective.parts(one.shapes)[0])
        # What comes beside the losses may be the same for all examples, as the model itself.
        of_loss = len(jax.tree.leaves(one.shapes[0] if objective.has_aux else one.shapes))
        of_model = len(one.closed.consts) + len(arrays_of(model))
        of_batch = len(one.closed.jaxpr.invars) + len(one.closed.consts) - of_model
        is_data = [False] * of_model + [True] * of_batch
        depends = active_outputs(one.closed.jaxpr, is_data, counts=lambda _: True)
        axes = [0 if at < of_loss or own else None for at, own in enumerate(depends)]

        def run(probes: dict[str, Any], example: Any) -> list[Any]:
            values = Interpreter(notes).evaluate(
                one.closed.jaxpr, scoring.values(model, probes, example, one), one.closed.consts
            )
            return [*map(settled, values[:of_loss]), *(value.array for value in values[of_loss:])]

        with noting(Notes()):
            arrays = examples.map(run, probes, axes)
        results = [
            examples.joined(like, array, axis, summed=0 < at < of_loss)
            for at, (like, array, axis) in enumerate(zip(one.leaves, arrays, axes, strict=True))
        ]
        return objective.reduced(one.rebuild(results))

    with examples.alone():
        run = jax.value_and_grad(loss, (0, 1), has_aux=True)
        found, (gradients, scores) = run(params, scoring.probes())
    scale = objective.scale(scoring.Batch.size)
    return found, gradients, {path: score.T * scale for path, score in scores.items()}


def _scaled(direction: Any, probe: Any) -> tuple[Any, Any]:
    """A direction with entries up to 1, and a probe whose cotangent is the score along the given one."""
    direction = direction.astype(jnp.float32)
    _, exponent = jnp.frexp(jnp.max(jnp.abs(direction), initial=0.0))
    scale = jnp.ldexp(jnp.ones(()), jnp.clip(exponent, -100, 100))
    return direction / scale, probe * scale


def is_stack(node: Any) -> bool:
    return isinstance(node, Stacked | BlockSeq)


def is_within(path: str, node: Any) -> bool:
    """Whether a path goes through the node at another."""
    prefix = jtu.keystr(node)
    return path.startswith((f"{prefix}.", f"{prefix}["))


def layers_of(model: Any, path: str) -> Axis | None:
    """The axis of the layers of the `Stacked` that holds a path, None for other paths."""
    for at, node in jtu.tree_leaves_with_path(model, is_leaf=is_stack):
        if isinstance(node, Stacked) and is_within(path, at):
            return node.Layers
    return None


def layer_dimension(model: Any, path: str, leaf: Any) -> int | None:
    """Which dimension of an array of the model holds layers."""
    Layers = layers_of(model, path)
    if Layers is None:
        return None
    return [axis.name for axis in leaf.axes].index(Layers.name) if is_named(leaf) else 0


def shown_paths(model: Any) -> dict[str, str]:
    """For each path the one that users see: dotted, with `*` for the layers of a stack."""
    leaves = jtu.tree_leaves_with_path(model, is_leaf=is_named)
    return {jtu.keystr(keys): dotted(model, keys) for keys, _ in leaves}


def layer_path(model: Any, path: str) -> str | None:
    """The path of the layer that holds an array, as users see it; None outside of stacks."""
    for at, node in jtu.tree_leaves_with_path(model, is_leaf=is_stack):
        prefix = jtu.keystr(at)
        if is_stack(node) and is_within(path, at):
            if isinstance(node, Stacked):
                return f"{dotted(model, at)}.*".lstrip(".")
            number = path.removeprefix(f"{prefix}.blocks[").partition("]")[0]
            return f"{dotted(model, at)}.{number}".lstrip(".")
    return None


def sizes(params: Any, direction: dict[str, Any], model: Any) -> dict[str, dict[str, int]]:
    """How many numbers the arrays hold that are scored, and those that are trained and not scored."""
    found: dict[str, dict[str, int]] = {"covered": {}, "uncovered": {}}
    shown = shown_paths(model)
    for path, leaf in leaves_with_paths(eqx.filter(params, eqx.is_inexact_array)):
        found["covered" if path in direction else "uncovered"][shown[path]] = raw_array(leaf).size
    return found
