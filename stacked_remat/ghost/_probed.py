"""A model whose weights are scored where they meet data, by probes."""

import dataclasses
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from haliax import Axis, NamedArray

from .._noted import Notes, noting
from .._scan.marks import is_named, raw_array
from .._stacked import Stacked
from ..lora._paths import dotted
from ._examples import Examples
from ._interpret import Interpreter
from ._losses import Task, leaves_with_paths
from ._traced import Traced, arrays_of, has_small_range, trace
from ._weights import Along, Value, settled


@dataclasses.dataclass(frozen=True)
class ProbedLeaf:
    """An array of a model that may be scored.

    Attributes:
        shown: its path as users see it: dotted, with `*` for the layers of a stack.
        Layers: the axis of the layers of the `Stacked` that holds it.
        dimension: which dimension of the array holds these.
    """

    shown: str
    Layers: Axis | None
    dimension: int | None


def probed_leaves(model: Any) -> dict[str, ProbedLeaf]:
    """A model's arrays, by their paths as `jax.tree_util.keystr` writes them."""
    found, is_leaf = {}, lambda node: is_named(node) or isinstance(node, Stacked)
    for at, node in jtu.tree_leaves_with_path(model, is_leaf=is_leaf):
        Layers = node.Layers if isinstance(node, Stacked) else None
        for keys, leaf in jtu.tree_leaves_with_path(node, is_leaf=is_named):
            path = (*at, *keys)
            found[jtu.keystr(path)] = ProbedLeaf(dotted(model, path), Layers, _dimension(leaf, Layers))
    return found


def _dimension(leaf: Any, Layers: Axis | None) -> int | None:
    if Layers is None:
        return None
    return [axis.name for axis in leaf.axes].index(Layers.name) if is_named(leaf) else 0


@dataclasses.dataclass(frozen=True, eq=False)
class Scoring:
    """What is scored: arrays of the model and the direction by their paths, and the axis of the examples."""

    task: Task
    leaves: dict[str, ProbedLeaf]
    direction: dict[str, Any]
    Batch: Axis

    def probes(self) -> dict[str, Any]:
        """Zeros for every scored array, a number for each example: `[batch]` or `[batch, layers]`."""
        layers = {path: self.leaves[path].Layers for path in self.direction}
        return {
            path: jnp.zeros((self.Batch.size, *([] if Layers is None else [Layers.size])), jnp.float32)
            for path, Layers in layers.items()
        }

    def named(self, scores: dict[str, Any]) -> dict[str, NamedArray]:
        """Scores, `[layers, batch]` or `[batch]`, under the paths that users see."""
        pairs = [(self.leaves[path], score) for path, score in scores.items()]
        return {
            leaf.shown: hax.named(score, [axis for axis in (leaf.Layers, self.Batch) if axis is not None])
            for leaf, score in pairs
        }

    def values(self, model: Any, probes: dict[str, Any], example: Any, one: Traced) -> list[Value]:
        """The inputs of the traced loss function, those that are scored with their directions and probes."""
        is_scaled = has_small_range(one.closed.jaxpr)
        found = []
        for path, leaf in leaves_with_paths(model):
            array, along = raw_array(leaf), ()
            if path in self.direction:
                pair, own = (raw_array(self.direction[path]), probes[path]), self.leaves[path]
                pair = _scaled(*pair) if is_scaled else pair
                along = (Along(own.shown or "the model", *pair, own.dimension),)
            found.append(Value(array, along))
        return found + [Value(array, depends=True) for array in arrays_of(example)]


def in_one_pass(scoring: Scoring) -> tuple[tuple[Any, Any], Any, dict[str, Any]]:
    """The loss and what comes with it, its gradients, and the scores: the cotangents of the probes."""
    task, objective = scoring.task, scoring.task.objective
    examples = Examples.of(task.batch, scoring.Batch)

    def loss(params: Any, probes: dict[str, Any]) -> tuple[Any, Any]:
        model, notes = eqx.combine(params, task.static), Notes()
        with noting(notes):
            one = trace(task.of_example, model, examples.first)

        def run(probes: dict[str, Any], example: Any) -> list[Any]:
            values = Interpreter(notes).evaluate(
                one.closed.jaxpr, scoring.values(model, probes, example, one), one.closed.consts
            )
            return [settled(values[0]), *(value.array for value in values[1:])]

        with noting(Notes()):
            arrays = examples.map(run, probes)
        results = [*map(examples.joined, one.leaves, arrays)]
        return objective.reduced(one.rebuild(results))

    with examples.alone():
        run = jax.value_and_grad(loss, (0, 1), has_aux=True)
        found, (gradients, scores) = run(task.params, scoring.probes())
    scale = objective.scale(scoring.Batch.size)
    return found, gradients, {path: score.T * scale for path, score in scores.items()}


def _scaled(direction: Any, probe: Any) -> tuple[Any, Any]:
    """A direction with entries up to 1, and a probe whose cotangent is the score along the given one."""
    direction = direction.astype(jnp.float32)
    _, exponent = jnp.frexp(jnp.max(jnp.abs(direction), initial=0.0))
    scale = jnp.ldexp(jnp.ones(()), jnp.clip(exponent, -100, 100))
    return direction / scale, probe * scale
