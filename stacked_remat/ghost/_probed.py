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
from ._interpret import Program
from ._losses import Loss, Objective, map_examples
from ._rows import Units
from ._stacks import Traces, is_stack, leaves_with_paths, probed
from ._traced import trace
from ._weights import Leaf


@dataclasses.dataclass(frozen=True, eq=False)
class Scoring:
    """What is scored, and for which units.

    Attributes:
        model: of these arrays or their types.
        direction: the arrays of the direction by their paths.
        Batch: the axis of the examples.
        Position: that of the positions, None where scores are of whole examples.
    """

    model: Any
    direction: dict[str, Any]
    Batch: Axis
    Position: Axis | None = None

    @property
    def units(self) -> Units:
        """What each number of a score is of."""
        growing = self._growing
        return Units(tuple(axis.size for axis in growing), tuple(growing.values()))

    @property
    def _growing(self) -> dict[Axis, int]:
        """The axes that are longer in the second trace, by their factors. A single example needs none."""
        found = {} if self.Batch.size == 1 else {self.Batch: 3}
        return found if self.Position is None else {**found, self.Position: 5}

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of a score, without that of the layers."""
        return (self.Batch,) if self.Position is None else (self.Batch, self.Position)

    def probes(self) -> dict[str, Any]:
        """Zeros for every scored array."""
        shape = tuple(axis.size for axis in self.axes)
        layers = {path: layers_of(self.model, path) for path in self.direction}
        return {
            path: jnp.zeros(shape if Layers is None else (Layers.size, *shape), jnp.float32)
            for path, Layers in layers.items()
        }

    def named(self, scores: dict[str, Any]) -> dict[str, NamedArray]:
        """Scores, in the shapes of the probes, under the paths that users see."""
        found, shown = {}, shown_paths(self.model)
        for path, score in scores.items():
            Layers = layers_of(self.model, path)
            axes = self.axes if Layers is None else (Layers, *self.axes)
            found[shown[path]] = hax.named(score, axes)
        return found

    def losses(self, model: Any, probes: dict[str, Any], per_example_loss: Loss, batch: Any) -> Any:
        """What the loss function returns, with a deposit wherever a scored array meets data."""
        traces, other = Traces(self.units), None
        if self.units.sizes:
            larger, more = self._grown(batch, probes)
            with noting(Notes()):
                other, _, _ = trace(per_example_loss, self._with_probes(model, traces, more), larger)
        traces.is_first, traces.calls = False, 0
        with_probes, notes = self._with_probes(model, traces, probes), Notes()
        with noting(notes):
            closed, inputs, rebuild = trace(per_example_loss, with_probes, batch)
        paths = [path for path, _ in leaves_with_paths(with_probes)]
        shown = shown_paths(self.model)
        leaves = {
            at: Leaf(shown[path] or "the model", inputs[at], raw_array(self.direction[path]), probes[path])
            for at, path in enumerate(paths)
            if path in self.direction
        }
        program = Program(closed, other, self.units, notes)
        # The losses are the first result; a penalty beside them passes through no example's rows.
        return rebuild(program.evaluate(inputs, leaves, range(len(paths), len(inputs)), checked=1))

    def _with_probes(self, model: Any, traces: Traces, probes: dict[str, Any]) -> Any:
        def of_stack(prefix: str, entries: dict[str, Any]) -> dict[str, Any]:
            return {path.removeprefix(prefix): x for path, x in entries.items() if path.startswith(prefix)}

        def replace(path: Any, node: Any) -> Any:
            prefix = jtu.keystr(path)
            own = of_stack(prefix, self.direction)
            if not is_stack(node) or not own:
                return node
            return probed(node, dotted(model, path), traces, own, of_stack(prefix, probes))

        return jtu.tree_map_with_path(replace, model, is_leaf=is_stack)

    def _grown(self, batch: Any, probes: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The types of a batch with more examples and positions, and of its probes."""
        for axis, growth in self._growing.items():
            size = axis.size * growth

            def grow(array: Any, at: int, size: int = size) -> Any:
                return jax.ShapeDtypeStruct((*array.shape[:at], size, *array.shape[at + 1 :]), array.dtype)

            of = map_examples if axis is self.Batch else _named_only
            batch = of(batch, axis, grow, size)
            last = self.axes.index(axis) - len(self.axes)
            probes = {path: grow(probe, probe.ndim + last) for path, probe in probes.items()}
        return batch, probes


def in_one_pass(
    scoring: Scoring, params: Any, static: Any, per_example_loss: Loss, batch: Any, objective: Objective
) -> tuple[tuple[Any, Any], Any, dict[str, Any], None]:
    """The loss and what comes with it, its gradients, and the scores: the cotangents of the probes."""

    def loss(params: Any, probes: dict[str, Any]) -> tuple[Any, Any]:
        model = eqx.combine(params, static)
        return objective.reduced(scoring.losses(model, probes, per_example_loss, batch))

    run = jax.value_and_grad(loss, (0, 1), has_aux=True)
    found, (gradients, scores) = run(params, scoring.probes())
    scale = objective.scale(scoring.Batch.size)
    return found, gradients, {path: score * scale for path, score in scores.items()}, None


def _named_only(batch: Any, axis: Axis, fn: Any, size: int) -> Any:
    return jax.tree.map(
        lambda leaf: map_examples(leaf, axis, fn, size) if is_named(leaf) else leaf, batch, is_leaf=is_named
    )


def layers_of(model: Any, path: str) -> Axis | None:
    """The axis of the layers of the `Stacked` that holds a path, None for other paths."""
    for at, node in jtu.tree_leaves_with_path(model, is_leaf=is_stack):
        if isinstance(node, Stacked) and path.startswith(jtu.keystr(at)):
            return node.Layers
    return None


def shown_paths(model: Any) -> dict[str, str]:
    """For each path the one that users see: dotted, with `*` for the layers of a stack."""
    leaves = jtu.tree_leaves_with_path(model, is_leaf=is_named)
    return {jtu.keystr(keys): dotted(model, keys) for keys, _ in leaves}


def layer_path(model: Any, path: str) -> str | None:
    """The path of the layer that holds an array, as users see it; None outside of stacks."""
    for at, node in jtu.tree_leaves_with_path(model, is_leaf=is_stack):
        prefix = jtu.keystr(at)
        if is_stack(node) and path.startswith(prefix):
            if isinstance(node, Stacked):
                return f"{dotted(model, at)}.*".lstrip(".")
            number = path.removeprefix(f"{prefix}.blocks[").partition("]")[0]
            return f"{dotted(model, at)}.{number}".lstrip(".")
    return None


def sizes(params: Any, direction: dict[str, Any], model: Any) -> tuple[dict[str, int], dict[str, int]]:
    """How many numbers the arrays hold that are scored, and those that are trained and not scored."""
    found: tuple[dict[str, int], dict[str, int]] = {}, {}
    shown = shown_paths(model)
    for path, leaf in leaves_with_paths(eqx.filter(params, eqx.is_inexact_array)):
        found[path not in direction][shown[path]] = raw_array(leaf).size
    return found
