"""A model whose weights are scored where they meet data, by probes."""

import dataclasses
from collections.abc import Container, Iterator
from typing import Any, Literal

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
from ._causes import fix_of
from ._interpret import Program
from ._losses import Loss, Objective, check_size, map_examples, tracing_more
from ._position_tables import with_longer_tables
from ._rows import of_body
from ._stacks import call_in_one_equation, is_stack, leaves_with_paths
from ._traced import arrays_of, has_small_range, resized, trace
from ._units import POSITION, Flow, Rows, Units, counted, has_units, of_batch, of_input
from ._values import UnsupportedLeafError
from ._weights import Leaf


@dataclasses.dataclass(frozen=True, eq=False)
class Scoring:
    """What is scored, and for which units.

    Attributes:
        model: of these arrays or their types.
        direction: the arrays of the direction by their paths.
        Batch: the axis of the examples.
        Position: that of the positions, None where scores are of whole examples.
        losses_of: what each loss belongs to: an example; a token, whose example is known by its place; or a
            row, which may depend on other rows of the same example.
        adds_up: whether the scores of a coupled scalar are to add up to its gradient.
    """

    model: Any
    direction: dict[str, Any]
    Batch: Axis
    Position: Axis | None = None
    losses_of: Literal["example", "token", "row"] = "example"
    adds_up: bool = False

    @property
    def units(self) -> Units:
        """What each number of a score is of."""
        growing = self._growing
        return Units(tuple(axis.size for axis in growing), tuple(growing.values()))

    @property
    def _growing(self) -> dict[Axis, int]:
        """The axes that are longer in the second trace, by their factors. A single example needs none."""
        if self.Position is None:
            return {} if self.Batch.size == 1 else {self.Batch: 3}
        return {self.Batch: 1 if self.Batch.size == 1 else 3, self.Position: 5}

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
        notes = Notes(call_in_one_equation)
        closed, other, inputs, rebuild = self._traced(model, per_example_loss, batch, notes)
        arrays = dict(leaves_with_paths(self.model))
        paths, shown = list(arrays), shown_paths(self.model)
        is_scaled, leaves = has_small_range(closed.jaxpr), {}
        for at, path in enumerate(paths):
            if path in self.direction:
                along, probe, Layers = (
                    raw_array(self.direction[path]),
                    probes[path],
                    layers_of(self.model, path),
                )
                pair = _scaled(along, probe) if is_scaled else (along, probe)
                is_shared = is_named(arrays[path]) and Layers not in arrays[path].axes
                name = shown[path] or "the model"
                leaves[at] = Leaf(name, inputs[at], *pair, Layers is not None, is_shared)
        program = Program(closed, other, self.units, notes)
        # The losses are the first result; a penalty beside them passes through no example's rows.
        data = range(len(paths), len(inputs))
        rows = dict(enumerate(_rows_of_inputs(closed, other, self.units, len(paths)))) if other else {}
        found = program.evaluate(inputs, leaves, data, checked=1, rows=rows, adds_up=self.adds_up)
        if other is not None and self.losses_of != "row":
            self._check_apart(closed, other, leaves)
            if self.Position is not None and self.Batch.size > 1:
                alone = dataclasses.replace(self, Position=None)
                alone._check_apart(closed, alone._larger(model, per_example_loss, batch), leaves)
        return rebuild(found)

    def mixing(self, per_example_loss: Loss, batch: Any) -> str:
        """Where the loss of an example may depend on data of others; empty if none does."""
        closed, other, _, _ = self._traced(self.model, per_example_loss, batch, Notes(call_in_one_equation))
        if other is None:
            return ""
        of_model = len(arrays_of(self.model))
        of_data = range(of_model, len(closed.in_avals))
        losses = _flow_of_losses(closed, other, self.units._replace(of_data=True), of_data, of_model)
        return losses.mixed or ("" if losses.rows[0] == ((self.Batch.size, 0),) else "its result")

    def _check_apart(self, closed: Any, other: Any, leaves: dict[int, Leaf]) -> None:
        """Whether a loss depends on its own example alone, from the scored weights on.

        Where scores are of positions too, only whether losses of tokens are in the order of the tokens: that
        positions see each other is no mixing of examples.
        """
        losses = _flow_of_losses(closed, other, self.units, leaves, len(arrays_of(self.model)))
        if not losses.is_followed:
            return
        paths = ", ".join(leaf.path for leaf in leaves.values())
        if self.Position is not None:
            is_known = [counted(dim) for dim in losses.rows[1:]] == [[POSITION]]
            shape = closed.out_avals[0].shape
            if self.losses_of == "token" and shape[1:] == (self.Position.size,) and not is_known:
                raise UnsupportedLeafError(
                    f"After {paths} the losses of tokens change their order along {self.Position.name!r}, or "
                    "it can't be told that they don't. Return them in the order of example_ids: shift the "
                    "targets instead, and weight the losses of tokens without a target by zero."
                )
        elif losses.mixed or losses.rows[0] != ((self.Batch.size, 0),):
            raise UnsupportedLeafError(
                f"The loss of an example may depend on others: after {paths}, {losses.mixed or 'something'} "
                "mixes the rows of examples, changes their order, or can't be followed. "
                f"{fix_of(losses.mixed)}"
            )

    def _traced(self, model: Any, per_example_loss: Loss, batch: Any, notes: Notes) -> Any:
        """The traced loss, the same with more examples or None, its inputs, and its result as a tree."""
        other = self._larger(model, per_example_loss, batch) if self.units.sizes else None
        with noting(notes):
            closed, inputs, rebuild = trace(per_example_loss, model, batch)
        return closed, other, inputs, rebuild

    def _larger(self, model: Any, per_example_loss: Loss, batch: Any) -> Any:
        """The traced loss of a batch with more examples and positions."""
        size, grown = self.Batch.size * self._growing.get(self.Batch, 1), self._grown(batch)
        errors: list[Exception] = []
        positions = 0 if self.Position is None else self.Position.size * self._growing[self.Position]
        with tracing_more(size, positions):
            for larger in self._with_longer_tables(model):
                try:
                    with noting(Notes(call_in_one_equation)):
                        other, _, _ = trace(per_example_loss, larger, grown)
                    break
                except (TypeError, ValueError, RuntimeError) as error:
                    errors.append(error)
            else:
                raise errors[:2][-1]  # with named tables that are long enough
        check_size(other.out_avals[0].shape, size)
        return other

    def _with_longer_tables(self, model: Any) -> Iterator[Any]:
        if self.Position is None:
            return iter([model])
        leaves = jtu.tree_leaves_with_path(self.model, is_leaf=is_named)
        in_stack = [layers_of(self.model, jtu.keystr(path)) is not None for path, _ in leaves]
        return with_longer_tables(model, self.Position, self._growing[self.Position], in_stack.__getitem__)

    def _grown(self, batch: Any) -> Any:
        """The types of a batch with more examples and positions."""
        for axis, growth in self._growing.items():
            size = axis.size * growth

            def grow(array: Any, at: int, size: int = size) -> Any:
                return resized(array, at, size)

            batch = (map_examples if axis is self.Batch else _named_only)(batch, axis, grow, size)
        return batch


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


def _scaled(direction: Any, probe: Any) -> tuple[Any, Any]:
    """A direction with entries up to 1, and a probe whose cotangent is the score along the given one."""
    direction = direction.astype(jnp.float32)
    _, exponent = jnp.frexp(jnp.max(jnp.abs(direction), initial=0.0))
    scale = jnp.ldexp(jnp.ones(()), jnp.clip(exponent, -100, 100))
    return direction / scale, probe * scale


def _flow_of_losses(closed: Any, other: Any, units: Units, followed: Container[int], of_model: int) -> Flow:
    """What is known of the first result of a loss function of which these inputs are followed.

    Data is followed where it has rows of examples.
    """
    flows = []
    for at, rows in enumerate(_rows_of_inputs(closed, other, units, of_model)):
        flows.append(Flow(rows, at in followed and (has_units(rows) or not units.of_data)))
    return of_body(closed, other, flows, units)[0]


def _rows_of_inputs(closed: Any, other: Any, units: Units, of_model: int) -> list[Rows]:
    """The rows of the inputs of a loss function, of which the first ones are the model's."""
    pairs = zip(closed.in_avals, other.in_avals, strict=True)
    found = [of_input(one.shape, larger.shape, units) for one, larger in pairs]
    return [*found[:of_model], *map(of_batch, found[of_model:])]


def _named_only(batch: Any, axis: Axis, fn: Any, size: int) -> Any:
    return jax.tree.map(
        lambda leaf: map_examples(leaf, axis, fn, size) if is_named(leaf) else leaf, batch, is_leaf=is_named
    )


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


def sizes(params: Any, direction: dict[str, Any], model: Any) -> tuple[dict[str, int], dict[str, int]]:
    """How many numbers the arrays hold that are scored, and those that are trained and not scored."""
    found: tuple[dict[str, int], dict[str, int]] = {}, {}
    shown = shown_paths(model)
    for path, leaf in leaves_with_paths(eqx.filter(params, eqx.is_inexact_array)):
        found[path not in direction][shown[path]] = raw_array(leaf).size
    return found
